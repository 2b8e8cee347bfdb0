"""A tiny language model with random weights as a Hugging Face folder, for engines that read those.

The sibling of `tests.tiny_gguf`, with the same vocabulary and the same habits. Nothing here needs
an engine or its libraries: the tokenizer is plain JSON, the weights are one safetensors file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tests.tiny_gguf import CHAT_TEMPLATE, SPECIAL, Floats, _cycles, _printable, _vocabulary

_PAD, _, _END = SPECIAL


def write_tiny_hf(
    folder: Path | str,
    *,
    seed: int = 0,
    context_length: int = 4096,
    vocab_size: int = 512,
    layers: int = 2,
    embedding: int = 64,
    heads: int = 4,
    kv_heads: int = 4,
    head_size: int = 64,
    feed_forward: int = 128,
    period: int = 24,
) -> Path:
    """Write a llama of random float32 weights and return its folder, made if missing.

    The same arguments write the same bytes. As it stands the folder has about 1 MB and a token of
    context takes 2 KiB of KV cache in a 16-bit type. Any text can be tokenised. Only printable
    ASCII is ever generated, never an end of text; greedily generated text mostly repeats itself
    after `period` tokens, so that n-gram speculation finds something, and something wrong too.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokens, merges = _vocabulary(vocab_size)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": embedding,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "vocab_size": len(tokens),
        "max_position_embeddings": context_length,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": tokens.index(_PAD),
        "eos_token_id": tokens.index(_END),
        "pad_token_id": tokens.index(_PAD),
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "bos_token": _PAD,
        "eos_token": _END,
        "pad_token": _PAD,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    for name, content in (
        ("config.json", config),
        ("generation_config.json", {"eos_token_id": config["eos_token_id"]}),
        ("tokenizer_config.json", tokenizer_config),
        ("tokenizer.json", _tokenizer(tokens, merges)),
    ):
        (folder / name).write_text(json.dumps(content, indent=1), encoding="utf-8")

    rng = np.random.default_rng(seed)

    def weights(rows: int, columns: int) -> Floats:
        return rng.standard_normal((rows, columns), dtype=np.float32) / np.float32(columns**0.5)

    def added_to_stream(matrix: Floats) -> Floats:
        # As in tiny_gguf: the last token mostly decides the next, and dimension 0 is a bias.
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
    tensors = {
        "model.embed_tokens.weight": embeddings,
        "model.norm.weight": ones,
        "lm_head.weight": output,
    }
    for layer in range(layers):
        block = f"model.layers.{layer}"
        tensors |= {
            f"{block}.input_layernorm.weight": ones,
            f"{block}.self_attn.q_proj.weight": weights(heads * head_size, embedding),
            f"{block}.self_attn.k_proj.weight": weights(kv_heads * head_size, embedding),
            f"{block}.self_attn.v_proj.weight": weights(kv_heads * head_size, embedding),
            f"{block}.self_attn.o_proj.weight": added_to_stream(
                weights(embedding, heads * head_size)
            ),
            f"{block}.post_attention_layernorm.weight": ones,
            f"{block}.mlp.gate_proj.weight": weights(feed_forward, embedding),
            f"{block}.mlp.up_proj.weight": weights(feed_forward, embedding),
            f"{block}.mlp.down_proj.weight": added_to_stream(weights(embedding, feed_forward)),
        }
    _write_safetensors(folder / "model.safetensors", tensors)
    return folder


def _tokenizer(tokens: list[str], merges: list[str]) -> dict[str, Any]:
    """Return a `tokenizer.json`: byte-level BPE, as GPT-2's, with the special tokens apart."""
    byte_level = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True,
    }  # fmt: skip
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": tokens.index(token),
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for token in SPECIAL
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": merges,
        },
    }


def _write_safetensors(path: Path, tensors: dict[str, Floats]) -> None:
    """Write float32 tensors: the length of a JSON header, the header, the data in its order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, end]}
    written = json.dumps(header).encode()
    written += b" " * (-len(written) % 8)
    with path.open("wb") as file:
        file.write(len(written).to_bytes(8, "little"))
        file.write(written)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor, dtype="<f4").tobytes())
