"""A tiny language model with random weights, to be served in a second on any CPU.

It knows nothing, but an engine cannot tell: it has a vocabulary, a chat template, and a KV cache
large enough to run out of memory with.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_gguf(
    path: Path | str,
    *,
    seed: int = 0,
    context_length: int = 4096,
    vocab_size: int = 512,
    layers: int = 4,
    embedding: int = 64,
    heads: int = 4,
    kv_heads: int = 4,
    head_size: int = 64,
    feed_forward: int = 128,
    period: int = 24,
) -> Path:
    """Write a llama of random float32 weights and return its path.

    The same arguments write the same bytes. As it stands the file has about 2 MB and a token of
    context takes 4 KiB of float16 KV cache (`kv_bytes_per_token`). Any text can be tokenised,
    most pairs of letters to one token. Only printable ASCII is ever generated, never an end of
    text, so a request gets exactly the tokens that it asks for. Greedily generated text mostly
    repeats itself after `period` tokens or somewhat more: there is something for n-gram
    speculation to find, and now and then something for it to get wrong.
    """
    rng = np.random.default_rng(seed)
    tokens, merges = _vocabulary(vocab_size)
    ordinary = len(tokens) - len(SPECIAL)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name(f"tiny random llama, seed {seed}")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_context_length(context_length)
    writer.add_embedding_length(embedding)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(feed_forward)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.NORMAL] * ordinary + [gguf.TokenType.CONTROL] * len(SPECIAL)
    )
    writer.add_token_merges(merges)
    writer.add_bos_token_id(ordinary)
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_pad_token_id(ordinary)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)

    def weights(rows: int, columns: int) -> Floats:
        return rng.standard_normal((rows, columns), dtype=np.float32) / np.float32(columns**0.5)

    def added_to_stream(matrix: Floats) -> Floats:
        # Little, so that the last token mostly decides the next; and never to dimension 0, so
        # that what the embedding put there reaches the output: a bias.
        matrix *= np.float32(0.04)
        matrix[0] = 0.0
        return matrix

    ones = np.ones(embedding, dtype=np.float32)
    embeddings = weights(len(tokens), embedding)
    embeddings[:, 0] = 1.0
    output = weights(len(tokens), embedding) * np.float32(2.0)
    printable = [number for number, token in enumerate(tokens) if _printable(token)]
    for last, following in _cycles(rng.permutation(printable), period):
        output[following] += np.float32(4.0) * embeddings[last]
    output[:, 0] = [0.0 if _printable(token) else -1000.0 for token in tokens]
    writer.add_tensor("token_embd.weight", embeddings)
    writer.add_tensor("output_norm.weight", ones)
    writer.add_tensor("output.weight", output)
    for layer in range(layers):
        block = f"blk.{layer}"
        writer.add_tensor(f"{block}.attn_norm.weight", ones)
        writer.add_tensor(f"{block}.attn_q.weight", weights(heads * head_size, embedding))
        writer.add_tensor(f"{block}.attn_k.weight", weights(kv_heads * head_size, embedding))
        writer.add_tensor(f"{block}.attn_v.weight", weights(kv_heads * head_size, embedding))
        writer.add_tensor(
            f"{block}.attn_output.weight", added_to_stream(weights(embedding, heads * head_size))
        )
        writer.add_tensor(f"{block}.ffn_norm.weight", ones)
        writer.add_tensor(f"{block}.ffn_gate.weight", weights(feed_forward, embedding))
        writer.add_tensor(f"{block}.ffn_up.weight", weights(feed_forward, embedding))
        writer.add_tensor(
            f"{block}.ffn_down.weight", added_to_stream(weights(embedding, feed_forward))
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def kv_bytes_per_token(
    *, layers: int = 4, kv_heads: int = 4, head_size: int = 64, value_bytes: int = 2
) -> int:
    """Return what one token of context takes of the KV cache, keys and values, in bytes."""
    return layers * 2 * kv_heads * head_size * value_bytes


def _cycles(numbers: npt.NDArray[np.int64], period: int) -> list[tuple[int, int]]:
    """Return each number and its successor, in cycles of `period`; some one longer."""
    successors: list[tuple[int, int]] = []
    for cycle in np.array_split(numbers, max(1, len(numbers) // period)):
        successors += zip(cycle.tolist(), np.roll(cycle, -1).tolist(), strict=True)
    return successors


def _vocabulary(size: int) -> tuple[list[str], list[str]]:
    """Return byte-level BPE tokens, special ones last, and the merges that make the longer ones."""
    single = list(_byte_letters().values())
    room = size - len(single) - len(SPECIAL)
    if room < 0:
        raise ValueError(f"a vocabulary needs {len(single) + len(SPECIAL)} tokens, got {size}")
    small = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    pairs = [(first, second) for first in ["Ġ", *small] for second in small][:room]
    longer = [first + second for first, second in pairs]
    filler = [f"Ġunused{index}" for index in range(room - len(pairs))]
    merges = [f"{first} {second}" for first, second in pairs]
    return [*single, *longer, *filler, *SPECIAL], merges


def _byte_letters() -> dict[int, str]:
    """Return the letter that stands for each byte, as GPT-2's tokenizer writes them."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = {byte: chr(byte) for byte in visible}
    letters |= {byte: chr(256 + index) for index, byte in enumerate(hidden)}
    return {byte: letters[byte] for byte in range(256)}


def _printable(token: str) -> bool:
    return token not in SPECIAL and all(
        33 <= ord(letter) < 127 or letter == "Ġ" for letter in token
    )
