"""What a GGUF's metadata says of a model's caches, by the names and formulas of llama.cpp."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

from sweeper.core.architecture import Architecture, Cached, CannotTell, Recurrent

_Number: TypeAlias = Callable[[str], int | None]
_ByLayer: TypeAlias = Callable[[str], list[int] | None]

_GGUF_GLOBAL_LAST: Final[Mapping[str, int]] = {
    "gemma2": 2, "gemma3": 6, "gemma3n": 5, "gemma-embedding": 6, "cohere2": 4, "exaone4": 4,
    "exaone-moe": 4, "olmo2": 4, "plamo3": 8, "gpt-oss": 2, "afmoe": 4, "mellum": 4,
}  # fmt: skip
"""Architectures whose files may not state the pattern of windows; the engine hard-codes it."""
_GGUF_GLOBAL_FIRST: Final[Mapping[str, int]] = {"cohere2moe": 4, "smallthinker": 4, "laguna": 4}
_GGUF_PURE_STATE: Final = ("mamba", "mamba2")
_GGUF_LINEAR: Final = ("qwen3next", "qwen35", "qwen35moe", "minimax-01")


def from_gguf(metadata: Mapping[str, object]) -> Architecture:
    """Return the architecture that a GGUF's metadata describes; raises CannotTell.

    Takes the names that llama.cpp reads, such as `llama.attention.head_count_kv`, by layer where
    a file states them by layer. A layer without KV heads keeps no cache.
    """
    name = str(metadata.get("general.architecture") or "")

    def number(key: str) -> int | None:
        value = metadata.get(f"{name}.{key}")
        return (
            int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
        )

    def by_layer(key: str) -> list[int] | None:
        value = metadata.get(f"{name}.{key}")
        if isinstance(value, tuple | list):
            return [int(each) for each in value]
        one = number(key)
        return None if one is None else [one] * blocks

    blocks = number("block_count") or 0
    if blocks < 1:
        raise CannotTell("does not say its layers (block_count)")
    if number("wkv.head_size") is not None:
        raise CannotTell(f"is a {name}, whose state is not known here")
    drafts = number("nextn_predict_layers") or 0
    layers = blocks - drafts
    every_head = by_layer("attention.head_count")
    most = max(every_head, default=0) if every_head else 0
    heads = by_layer("attention.head_count_kv")
    if heads is None:
        heads = every_head if name not in _GGUF_PURE_STATE else [0] * blocks
    if heads is None:
        raise CannotTell("does not say its heads (attention.head_count)")
    if len(heads) < blocks:
        raise CannotTell(f"names the KV heads of {len(heads)} layers, and has {blocks}")
    recurrent = _gguf_recurrent(name, number, by_layer, heads, layers)
    keeps = layers - (number("attention.shared_kv_layers") or 0)
    slides = _gguf_slides(metadata, name, number, blocks)
    full: list[int] = []
    window: list[int] = []
    for layer in range(layers):
        if layer >= keeps or (layer in recurrent and name != "falcon-h1") or not heads[layer]:
            continue
        (window if slides[layer] else full).append(layer)
    key, value = number("attention.key_length"), number("attention.value_length")
    width = number("embedding_length")
    usual = width // most if width is not None and most else None
    key, value = key if key is not None else usual, value if value is not None else usual
    if (full or window) and (key is None or value is None):
        raise CannotTell("does not say the length of a key (attention.key_length)")
    key, value = key or 0, value or 0
    if number("attention.key_length_mla") is not None:
        # The values are a part of the latent keys: only those are kept.
        value = 0
        key += number("attention.indexer.key_length") or 0
    average = heads[layers:] or [heads[layer] for layer in full[-1:]] * drafts
    draft_heads = sum(each or max(heads) for each in average[:drafts])
    key_window = number("attention.key_length_swa")
    value_window = number("attention.value_length_swa")
    return Architecture(
        layers=layers,
        full=Cached(
            layers=len(full),
            heads=sum(heads[layer] for layer in full),
            key_length=key,
            value_length=value,
        ),
        window=Cached(
            layers=len(window),
            heads=sum(heads[layer] for layer in window),
            key_length=(key if key_window is None else key_window) if window else 0,
            value_length=(value if value_window is None else value_window) if window else 0,
        ),
        window_tokens=number("attention.sliding_window") or 0,
        recurrent=_gguf_state(name, number, most, len(recurrent)),
        draft=Cached(layers=drafts, heads=draft_heads, key_length=key, value_length=value)
        if drafts
        else Cached(),
    )


def _gguf_recurrent(
    name: str, number: _Number, by_layer: _ByLayer, heads: Sequence[int], layers: int
) -> frozenset[int]:
    """Return the layers that keep a state."""
    stated = by_layer("attention.recurrent_layers")
    if stated is not None:
        return frozenset(layer for layer, flag in enumerate(stated[:layers]) if flag)
    interval = number("full_attention_interval")
    if interval is None and name in _GGUF_LINEAR:
        interval = 8 if name == "minimax-01" else 4
    if interval is not None:
        return frozenset(layer for layer in range(layers) if (layer + 1) % interval)
    if name in _GGUF_PURE_STATE or name == "falcon-h1":
        return frozenset(range(layers))
    keys = ("ssm.inner_size", "ssm.conv_kernel", "shortconv.l_cache", "kda.head_dim")
    if all(number(key) is None for key in keys):
        return frozenset()
    forward = by_layer("feed_forward_length") or [0] * layers
    # In this family a layer that neither attends nor keeps a state is a feed-forward one.
    feeds = name.startswith("nemotron_h")
    found = frozenset(
        layer for layer in range(layers) if not heads[layer] and not (feeds and forward[layer])
    )
    if not found:
        raise CannotTell("has a recurrent state, and does not say which layers keep it")
    return found


def _gguf_slides(
    metadata: Mapping[str, object], name: str, number: _Number, blocks: int
) -> Sequence[bool]:
    if not number("attention.sliding_window"):
        return [False] * blocks
    pattern = metadata.get(f"{name}.attention.sliding_window_pattern")
    if isinstance(pattern, tuple | list):
        stated = [bool(each) for each in pattern]
        return stated + [False] * (blocks - len(stated))
    every = number("attention.sliding_window_pattern")
    if (first := _GGUF_GLOBAL_FIRST.get(name)) is not None:
        return [layer % (every or first) != 0 for layer in range(blocks)]
    every = every or _GGUF_GLOBAL_LAST.get(name)
    # Unknown: counting every layer as global errs on the side of more memory, as the engine does.
    return [bool(every) and (layer + 1) % (every or 1) != 0 for layer in range(blocks)]


def _gguf_state(name: str, number: _Number, heads: int, layers: int) -> Recurrent:
    """Return the states, by the formulas of llama.cpp."""
    if not layers:
        return Recurrent()
    taps = number("ssm.conv_kernel")
    if (taps_of_conv := number("shortconv.l_cache")) is not None:
        width = number("embedding_length")
        if width is None:
            raise CannotTell("does not say its width (embedding_length)")
        return Recurrent(layers=layers, conv_width=width, conv_taps=taps_of_conv - 1)
    if (length := number("kda.head_dim")) is not None:
        return Recurrent(
            layers=layers,
            state_values=length * length * heads,
            conv_width=3 * heads * length,
            conv_taps=(taps or 4) - 1,
        )
    state, inner = number("ssm.state_size"), number("ssm.inner_size")
    if state is None or inner is None or taps is None:
        raise CannotTell(f"is a {name}, and does not say the size of its state (ssm.state_size)")
    groups = number("ssm.group_count") or 0
    return Recurrent(
        layers=layers,
        state_values=state * inner,
        conv_width=inner + 2 * groups * state,
        conv_taps=taps - 1,
    )
