"""Write a mixture-of-experts model of RANDOM weights as GGUF, in Q4_0.

    python benchmarks/card/random_moe.py FILE [layers=24] [experts=128] [kv_heads=8]

What it takes of memory and how fast it runs are those of a qwen3moe of these sizes. What it says is
nonsense, and made to repeat itself: each word mostly calls the next one of a ring of `RING` words,
so that n-gram speculation finds something to guess and now and then guesses wrong. Acceptance is
therefore that of this construction and of no model that anybody uses. A block of one layer is drawn
once and used in all layers, so that 8 GiB are written in seconds.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

EMBEDDING, EXPERT_WIDTH, HEADS, HEAD_SIZE, USED_EXPERTS = 2048, 768, 32, 128, 8
CONTEXT = 262144
_BLOCK, _BLOCK_BYTES = 32, 18
_SCALE = 0.0043
"""Of every block: weights of a standard deviation of 0.02."""
_PAIRS = np.array([16 * high + low for high in range(1, 16) for low in range(1, 16)], np.uint8)
"""Two weights in a byte, each from -7 to 7: with -8 as well the mean would not be 0."""
_TO_STREAM = 0.004
"""What layers add is so much smaller: the last token then mostly decides the next."""
RING = 24
_FIRST_WORD = 257
"""After the letters of all bytes, and the one merge that a tokenizer is refused without."""
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT = (
    "{% for m in messages %}<|im_start|>{{m.role}}\n{{m.content}}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)


def write(
    path: Path, *, layers: int = 24, experts: int = 128, kv_heads: int = 8, vocabulary: int = 151936
) -> None:
    """Write the model; the same arguments write the same weights."""
    random = np.random.default_rng(0)
    four_bits = gguf.GGMLQuantizationType.Q4_0

    def packed(*shape: int, scaled: float = 1.0) -> npt.NDArray[np.uint8]:
        *rows, width = shape
        size = (*rows, width // _BLOCK, _BLOCK_BYTES)
        blocks = _PAIRS[random.integers(0, len(_PAIRS), size, dtype=np.uint8)]
        scale = np.full((*rows, width // _BLOCK, 1), _SCALE * scaled, dtype=np.float16)
        blocks[..., :2] = scale.view(np.uint8)
        return blocks.reshape(*rows, width // _BLOCK * _BLOCK_BYTES)

    writer = gguf.GGUFWriter(str(path), "qwen3moe")
    _describe(writer, layers, experts, kv_heads, vocabulary)
    queries, caches = HEADS * HEAD_SIZE, kv_heads * HEAD_SIZE
    shared: dict[str, Any] = {
        "attn_q": packed(queries, EMBEDDING),
        "attn_k": packed(caches, EMBEDDING),
        "attn_v": packed(caches, EMBEDDING),
        "attn_output": packed(EMBEDDING, queries, scaled=_TO_STREAM),
        "ffn_gate_exps": packed(experts, EXPERT_WIDTH, EMBEDDING),
        "ffn_up_exps": packed(experts, EXPERT_WIDTH, EMBEDDING),
        "ffn_down_exps": packed(experts, EMBEDDING, EXPERT_WIDTH, scaled=_TO_STREAM),
    }
    embeddings = packed(vocabulary, EMBEDDING)
    output = np.zeros_like(embeddings)  # a row of zeros is never the likeliest
    words = random.permutation(np.arange(_FIRST_WORD, vocabulary - len(_SPECIAL)))
    for ring in np.array_split(words, max(1, len(words) // RING)):
        output[np.roll(ring, -1)] = embeddings[ring]
    writer.add_tensor("token_embd.weight", embeddings, raw_dtype=four_bits)
    writer.add_tensor("output.weight", output, raw_dtype=four_bits)
    ones = {size: np.ones(size, np.float32) for size in (EMBEDDING, HEAD_SIZE)}
    writer.add_tensor("output_norm.weight", ones[EMBEDDING])
    for layer in range(layers):
        block = f"blk.{layer}."
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"{block}{name}.weight", ones[EMBEDDING])
        for name in ("attn_q_norm", "attn_k_norm"):
            writer.add_tensor(f"{block}{name}.weight", ones[HEAD_SIZE])
        for name, tensor in shared.items():
            writer.add_tensor(f"{block}{name}.weight", tensor, raw_dtype=four_bits)
        router = random.standard_normal((experts, EMBEDDING), dtype=np.float32)
        writer.add_tensor(f"{block}ffn_gate_inp.weight", router * np.float32(0.02))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(
    writer: gguf.GGUFWriter, layers: int, experts: int, kv_heads: int, vocabulary: int
) -> None:
    writer.add_name(f"random qwen3moe, {layers} layers, {experts} experts")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(EMBEDDING)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(3 * EMBEDDING)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(HEAD_SIZE)
    writer.add_value_length(HEAD_SIZE)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_expert_count(experts)
    writer.add_expert_used_count(USED_EXPERTS)
    writer.add_expert_feed_forward_length(EXPERT_WIDTH)
    letters = _byte_letters()
    words = [f"Ġw{number}" for number in range(vocabulary - _FIRST_WORD - len(_SPECIAL))]
    tokens = [*letters, "Ġa", *words, *_SPECIAL]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.NORMAL] * (len(tokens) - len(_SPECIAL))
        + [gguf.TokenType.CONTROL] * len(_SPECIAL)
    )
    writer.add_token_merges(["Ġ a"])
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(_CHAT)


def _byte_letters() -> list[str]:
    """Return the letter that stands for each byte, in their order, as GPT-2's tokenizer does."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in visible else chr(next(hidden)) for byte in range(256)]


if __name__ == "__main__":
    file, *stated = sys.argv[1:]
    write(Path(file), **{name: int(value) for name, value in (each.split("=") for each in stated)})
