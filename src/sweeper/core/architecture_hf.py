"""What a Hugging Face `config.json` says of a model's caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

from sweeper.core.architecture import Architecture, Cached, CannotTell, Recurrent
from sweeper.core.pairs import Pairs, Scalar

Kind: TypeAlias = Literal["full", "window", "state", "both", "none"]
"""What a layer keeps: every token, a window, a state, both a cache and a state, nothing."""

_NESTED: Final = ("text_config", "llm_config", "language_config", "thinker_config", "decoder")

_WORDS: Final[Mapping[str, Kind]] = {
    "full_attention": "full", "attention": "full", "global": "full", "global_attention": "full",
    "full": "full", "self_attention": "full", "indexed_attention": "full",
    "sliding_attention": "window", "sliding_window": "window", "local": "window",
    "local_attention": "window", "chunked_attention": "window", "sliding": "window",
    "sliding_window_attention": "window",
    "linear_attention": "state", "mamba": "state", "mamba2": "state", "conv": "state",
    "recurrent": "state", "linear": "state",
    "hybrid": "both",
    "mlp": "none", "moe": "none",
}  # fmt: skip
"""The words of `layer_types` and `layers_block_type`."""

_LETTERS: Final[Mapping[str, Kind]] = {"M": "state", "*": "full", "-": "none", "E": "none"}
"""The letters of `hybrid_override_pattern`."""

_EVERY_NTH_IS_GLOBAL: Final[Mapping[str, int]] = {
    "gemma2": 2, "gemma3": 6, "gemma3n": 5, "gemma4": 6,
    "cohere2": 4, "exaone4": 4, "gpt_oss": 2, "olmo3": 4,
}  # fmt: skip
"""Models whose config may leave the pattern of windows to the code."""

_ALL_SLIDE: Final = ("mistral", "mixtral", "phi3", "phimoe", "starcoder2", "ministral")
_SOME_SLIDE: Final = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
_PURE_STATE: Final = ("mamba", "mamba2", "falcon_mamba")
_LATENT: Final = (
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_linear", "glm4_moe_lite",
    "glm_moe_dsa", "mistral4",
)  # fmt: skip
_UNTOLD: Final = ("longcat_flash", "minicpm3", "deepseek_v4", "rwkv", "rwkv6", "rwkv7")
"""Models whose caches do not follow from their config by any rule below."""

_SIGNS_OF_STATE: Final = ("mamba_", "ssm_", "linear_num_", "linear_attn", "rwkv", "time_mix")
_DRAFT_LAYERS: Final = (
    "num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "mtp_num_layers",
    "num_mtp_modules", "n_mtp_layers",
)  # fmt: skip


class _Config:
    """A config whose inner part for text wins over the outer one."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        merged = dict(config)
        for _ in range(3):  # thinker_config holds a text_config
            inner = next(
                (merged[key] for key in _NESTED if isinstance(merged.get(key), Mapping)), None
            )
            if inner is None:
                break
            outer = {key: value for key, value in merged.items() if key not in _NESTED}
            merged = {**outer, **inner}
        self.values = merged
        self.kind = str(merged.get("model_type") or "").removesuffix("_text")

    def number(self, *names: str) -> int | None:
        for name in names:
            value = self.values.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                return int(value)
        return None

    def numbers(self, name: str) -> list[int] | None:
        value = self.values.get(name)
        if isinstance(value, Sequence) and not isinstance(value, str):
            return [int(each or 0) for each in value if not isinstance(each, Mapping)]
        return None

    def words(self, *names: str) -> list[str] | None:
        for name in names:
            value = self.values.get(name)
            if isinstance(value, Sequence) and not isinstance(value, str) and value:
                return [str(each) for each in value]
        return None

    def text(self, *names: str) -> str | None:
        for name in names:
            value = self.values.get(name)
            if isinstance(value, str) and value:
                return value
        return None

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self.values.get(name)
        return value if isinstance(value, Mapping) else {}

    def needed(self, what: str, *names: str) -> int:
        value = self.number(*names)
        if value is None:
            raise CannotTell(f"does not say {what} ({names[0]})")
        return value


def from_hf_config(config: Mapping[str, Any]) -> Architecture:
    """Return the architecture that a Hugging Face `config.json` describes; raises CannotTell."""
    read = _Config(config)
    if read.values.get("is_encoder_decoder") is True:
        raise CannotTell("has an encoder beside its decoder")
    if read.kind in _UNTOLD:
        raise CannotTell(f"is a {read.kind}, whose caches do not follow from its config")
    layers = read.number("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    if layers is None and (stated := read.words("layers_block_type", "layer_types")):
        layers = len(stated)
    if layers is None or layers < 1:
        raise CannotTell("does not say its layers (num_hidden_layers)")
    kinds = _kinds(read, layers)
    shared = read.number("num_kv_shared_layers") or 0
    owners = layers - shared
    full, window = _attention(read, kinds, owners)
    states = sum(kind in ("state", "both") for kind in kinds)
    return Architecture(
        layers=layers,
        full=full,
        window=window,
        window_tokens=_window_tokens(read) if window.heads else 0,
        recurrent=_recurrent(read, states) if states else Recurrent(),
        draft=_drafts(read, full, window),
        state_bits={"float32": 32, "float16": 16, "bfloat16": 16}.get(
            str(read.values.get("mamba_ssm_dtype") or read.values.get("mamba_ssm_cache_dtype"))
        ),
    )


def _kinds(read: _Config, layers: int) -> list[Kind]:
    kinds = _stated_kinds(read, layers) or _implied_kinds(read, layers)
    if len(kinds) != layers:
        raise CannotTell(f"names the kinds of {len(kinds)} layers, and has {layers}")
    return kinds


def _stated_kinds(read: _Config, layers: int) -> list[Kind] | None:
    """Return the kind of each layer where the config lists them in any of the known ways."""
    if words := read.words("layer_types", "layers_block_type"):
        return [_worded(word) for word in words]
    pattern = read.text("hybrid_override_pattern", "hybrid_layer_pattern")
    if pattern is not None:
        return [_lettered(letter) for letter in pattern.split("/")[0].replace("|", "")]
    if (flags := read.numbers("hybrid_layer_pattern")) is not None:
        return ["window" if flag else "full" for flag in flags]
    if (flags := read.numbers("attn_type_list")) is not None:
        return ["full" if flag else "state" for flag in flags]
    for name in ("attn_layer_indices", "full_attn_idxs"):
        if (attends := read.numbers(name)) is not None:
            return ["full" if layer in attends else "state" for layer in range(layers)]
    if (period := read.number("attn_layer_period")) is not None:
        offset = read.number("attn_layer_offset") or 0
        return ["full" if layer % period == offset else "state" for layer in range(layers)]
    linear = read.mapping("linear_attn_config")
    if isinstance(linear.get("full_attn_layers"), Sequence):
        attends = [int(each) - 1 for each in linear["full_attn_layers"]]  # counted from 1 there
        return ["full" if layer in attends else "state" for layer in range(layers)]
    if words := read.words("block_types", "_block_types"):
        # Repeated as often as needed; what attends there attends to a window.
        known = ["window" if _worded(word) == "full" else _worded(word) for word in words]
        return [known[layer % len(known)] for layer in range(layers)]
    interval = read.number("full_attention_interval")
    if interval is None and read.number("linear_num_value_heads") is not None:
        interval = 4
    if interval is not None:
        return ["full" if (layer + 1) % interval == 0 else "state" for layer in range(layers)]
    return None


def _worded(word: str) -> Kind:
    kind = _WORDS.get(word.lower())
    if kind is None:
        raise CannotTell(f"has layers of the kind {word}, which are not known here")
    return kind


def _lettered(letter: str) -> Kind:
    kind = _LETTERS.get(letter)
    if kind is None:
        raise CannotTell(f"has layers of the kind {letter}, which are not known here")
    return kind


def _implied_kinds(read: _Config, layers: int) -> list[Kind]:
    if read.kind in _PURE_STATE:
        return ["state"] * layers
    if read.kind == "falcon_h1":
        return ["both"] * layers
    signs = [key for key in read.values if key.startswith(_SIGNS_OF_STATE)]
    if signs:
        raise CannotTell(f"has {signs[0]}, and does not say which layers attend")
    if not _slides(read):
        return ["full"] * layers
    every = read.number("sliding_window_pattern", "_sliding_window_pattern")
    spelled = read.text("sliding_window_pattern")
    if spelled is not None:
        return [
            "full" if spelled[layer % len(spelled)] == "G" else "window" for layer in range(layers)
        ]
    every = every if every is not None else _EVERY_NTH_IS_GLOBAL.get(read.kind)
    if read.kind == "llama4":
        every = read.number("no_rope_layer_interval") or 4
    if every is not None:
        kinds: list[Kind] = [
            "full" if every and (layer + 1) % every == 0 else "window" for layer in range(layers)
        ]
        if read.kind.startswith("gemma4"):
            kinds[-1] = "full"
        return kinds
    if read.kind in _SOME_SLIDE:
        first = read.number("max_window_layers")
        first = layers if first is None else first
        return ["window" if layer >= first else "full" for layer in range(layers)]
    if read.kind in _ALL_SLIDE:
        return ["window"] * layers
    raise CannotTell("has a sliding window, and does not say in which layers")


def _slides(read: _Config) -> bool:
    if read.kind in _SOME_SLIDE:
        return read.values.get("use_sliding_window") is True
    return read.values.get("use_sliding_window") is not False and bool(
        read.number("sliding_window", "attention_chunk_size")
    )


def _window_tokens(read: _Config) -> int:
    tokens = read.number(
        "sliding_window", "attention_window_size", "sliding_window_size", "attention_chunk_size"
    )
    if not tokens:
        raise CannotTell("has layers with a window, and does not say how long it is")
    return tokens


def _attention(read: _Config, kinds: list[Kind], owners: int) -> tuple[Cached, Cached]:
    """Return the layers that keep every token, and those that keep a window."""
    full = [i for i, kind in enumerate(kinds[:owners]) if kind in ("full", "both")]
    window = [i for i, kind in enumerate(kinds[:owners]) if kind == "window"]
    if not full and not window:
        return Cached(), Cached()
    if (latent := _latent(read)) is not None:
        if window:
            raise CannotTell("has latent attention with a window")
        return Cached(layers=len(full), heads=len(full), key_length=latent), Cached()
    heads = _heads_of_layers(read, len(kinds))
    key, value = _lengths(read, "", heads)
    window_key, window_value = key, value
    window_heads = heads
    if read.kind.startswith("gemma4"):
        # The layers that keep every token have heads of their own.
        own = _Config(next(iter(read.mapping("per_layer_config").values()), {}))
        key = value = own.number("head_dim") or read.number("global_head_dim") or 512
        each = own.number("num_key_value_heads")
        if each is None and read.values.get("attention_k_eq_v") is True:
            each = read.number("num_global_key_value_heads")
        heads = heads if each is None else [each] * len(kinds)
    elif read.number("swa_num_key_value_heads") is not None:
        window_heads = [read.number("swa_num_key_value_heads") or 0] * len(kinds)
        window_key, window_value = _lengths(read, "swa_", heads)
    return (
        Cached(
            layers=len(full),
            heads=sum(heads[i] for i in full),
            key_length=key,
            value_length=value,
        ),
        Cached(
            layers=len(window),
            heads=sum(window_heads[i] for i in window),
            key_length=window_key if window else 0,
            value_length=window_value if window else 0,
        ),
    )


def _latent(read: _Config) -> int | None:
    """Return the values a token and layer of latent attention keeps, None for other attention."""
    rank = read.number("kv_lora_rank") or read.number("kv_lora_dim")
    if rank is None:
        return None
    if read.kind not in _LATENT and not read.kind.startswith(("deepseek", "kimi")):
        raise CannotTell(
            f"has latent keys, and {read.kind or 'its kind'} is not known to keep them"
        )
    # Sparse attention keeps a key of its own for each token, to choose what to attend to.
    index = read.number("index_head_dim") or 0
    return rank + read.needed("the rotary part of its latent keys", "qk_rope_head_dim") + index


def _heads_of_layers(read: _Config, layers: int) -> list[int]:
    for name in ("num_key_value_heads", "num_kv_heads", "num_key_value_heads_per_layer"):
        several = read.numbers(name)
        if several is not None:
            if len(several) != layers:
                raise CannotTell(f"names the KV heads of {len(several)} layers, and has {layers}")
            return several
    all_heads = read.number("num_attention_heads", "n_head", "n_heads", "num_heads")
    blocks = read.values.get("block_configs")
    if isinstance(blocks, Sequence) and len(blocks) == layers and all_heads is not None:
        return [_heads_of_block(block, all_heads) for block in blocks]
    if read.values.get("multi_query") is True and not read.values.get("new_decoder_architecture"):
        return [1] * layers
    stated = read.number(
        "num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num",
        "num_query_groups",
    )  # fmt: skip
    each = stated if stated is not None else all_heads
    if each is None:
        raise CannotTell("does not say its KV heads (num_key_value_heads)")
    return [each] * layers


def _heads_of_block(block: object, all_heads: int) -> int:
    attention = block.get("attention") if isinstance(block, Mapping) else None
    if not isinstance(attention, Mapping):
        raise CannotTell("has a block that does not describe its attention")
    if attention.get("no_op") or attention.get("replace_with_linear"):
        return 0
    group = attention.get("n_heads_in_group")
    if not isinstance(group, int) or group < 1:
        raise CannotTell("has a block that does not say its KV heads")
    return all_heads // group


def _lengths(read: _Config, prefix: str, heads: list[int]) -> tuple[int, int]:
    key = read.number(
        f"{prefix}head_dim", "head_dim", "attention_head_dim", "kv_channels", "qk_head_dim"
    )
    if key is None:
        width = read.number("hidden_size", "n_embd", "d_model")
        all_heads = read.number("num_attention_heads", "n_head", "n_heads", "num_heads")
        if width is None or not all_heads:
            if not any(heads):
                return 0, 0
            raise CannotTell("does not say the length of a key (head_dim)")
        key = width // all_heads
    value = read.number(f"{prefix}v_head_dim", "v_head_dim")
    return key, key if value is None else value


def _recurrent(read: _Config, layers: int) -> Recurrent:
    number = read.number
    if (value_heads := number("linear_num_value_heads")) is not None:  # gated delta net
        key_heads = read.needed("its linear key heads", "linear_num_key_heads")
        key = read.needed("the length of its linear keys", "linear_key_head_dim")
        value = read.needed("the length of its linear values", "linear_value_head_dim")
        return Recurrent(
            layers=layers,
            state_values=value_heads * key * value,
            conv_width=2 * key_heads * key + value_heads * value,
            conv_taps=read.needed("its convolution", "linear_conv_kernel_dim") - 1,
        )
    linear = _Config(read.mapping("linear_attn_config") or read.values)  # Kimi delta attention
    heads = linear.number("num_heads", "linear_num_heads")
    length = linear.number("head_dim", "linear_head_dim")
    if heads is not None and length is not None and read.kind.startswith("kimi"):
        kernel = linear.number("short_conv_kernel_size", "linear_conv_kernel_dim") or 4
        return Recurrent(
            layers=layers,
            state_values=heads * length * length,
            conv_width=3 * heads * length,
            conv_taps=kernel - 1,
        )
    if (taps := number("conv_L_cache")) is not None:  # short convolutions alone
        width = read.needed("its width", "conv_dim", "hidden_size")
        return Recurrent(layers=layers, conv_width=width, conv_taps=taps - 1)
    if (across := number("lru_width")) is not None:
        kernel = read.needed("its convolution", "conv1d_width")
        return Recurrent(
            layers=layers, state_values=across, conv_width=across, conv_taps=kernel - 1
        )
    if read.values.get("attn_type_list") is not None or read.kind == "minimax":  # lightning
        heads = read.needed("its heads", "num_attention_heads")
        length = _lengths(read, "", [heads])[0]
        return Recurrent(layers=layers, state_values=heads * length * length)
    return _mamba(read, layers)


def _mamba(read: _Config, layers: int) -> Recurrent:
    number = read.number
    state = read.needed(
        "the size of its state", "ssm_state_size", "mamba_d_state", "state_size", "d_state"
    )
    taps = read.needed("its convolution", "conv_kernel", "mamba_d_conv", "d_conv") - 1
    hidden = number("hidden_size", "d_model")
    expand = number("mamba_expand", "expand")
    inner = number("mamba_d_ssm")
    heads = number("mamba_num_heads", "mamba_n_heads", "n_mamba_heads")
    each = number("mamba_head_dim", "mamba_d_head", "mamba_headdim")
    if read.kind == "mamba2":
        heads, each = number("num_heads"), number("head_dim")
    if inner is None and heads is not None and each is not None:
        inner = heads * each
    if inner is None and read.kind in ("mamba", "falcon_mamba"):
        inner = number("intermediate_size", "d_inner")
    if inner is None and hidden is not None and expand is not None:
        inner = hidden * expand
    if inner is None:
        raise CannotTell("does not say the width of its state-space layers")
    # The second generation convolves its state's inputs and outputs too.
    groups = number("n_groups", "mamba_n_groups", "mamba_ngroups") if heads is not None else 0
    if groups is None:
        raise CannotTell("does not say the groups of its state-space layers (n_groups)")
    return Recurrent(
        layers=layers,
        state_values=inner * state,
        conv_width=inner + 2 * groups * state,
        conv_taps=taps,
    )


def _drafts(read: _Config, full: Cached, window: Cached) -> Cached:
    layers = read.number(*_DRAFT_LAYERS) or 0
    pattern = read.words("mtp_layers_block_type") or list(
        read.text("mtp_hybrid_override_pattern") or ""
    )
    if pattern and layers:
        # Each draft layer is such a group of blocks.
        layers *= sum(word in ("*", "attention", "full_attention") for word in pattern)
    like = full if full.heads else window
    if not layers or not like.layers:
        return Cached()
    return Cached(
        layers=layers,
        heads=layers * (like.heads // like.layers),
        key_length=like.key_length,
        value_length=like.value_length,
    )


def hf_facts(config: Mapping[str, Any]) -> Pairs:
    """Return all that a `config.json` tells of memory; what it does not tell is left out."""
    read = _Config(config)
    names = read.words("architectures")
    widest = [
        read.number(name) or 0
        for name in ("intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size")
    ]
    facts: dict[str, Scalar] = {
        "architecture": names[0] if names else read.kind or None,
        "layers": read.number("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
        "embedding_length": read.number("hidden_size", "n_embd", "d_model"),
        "feed_forward_length": max(widest) or None,
        "trained_context_tokens": read.number("max_position_embeddings", "n_positions"),
        "vocabulary": read.number("vocab_size"),
        "heads": read.number("num_attention_heads", "n_head", "n_heads"),
        "quantization": _quantization(config) or _quantization(read.values),
        "kv_cache_bits": _checkpoint_kv_bits(config) or _checkpoint_kv_bits(read.values),
    }
    try:
        facts |= from_hf_config(config).facts()
    except CannotTell:
        facts["layers"] = facts["layers"] or None
    return Pairs({name: value for name, value in facts.items() if value is not None})


def _quantization(config: Mapping[str, Any]) -> str | None:
    stated = config.get("quantization_config")
    if not isinstance(stated, Mapping):
        return None
    algorithm = stated.get("quant_algo") or stated.get("quant_method")
    return str(algorithm).lower() if algorithm else None


def _checkpoint_kv_bits(config: Mapping[str, Any]) -> int | None:
    stated = config.get("quantization_config")
    if not isinstance(stated, Mapping):
        return None
    scheme = stated.get("kv_cache_scheme")
    if isinstance(scheme, Mapping) and isinstance(scheme.get("num_bits"), int):
        return int(scheme["num_bits"])
    return 8 if str(stated.get("kv_cache_quant_algo")).upper().startswith("FP8") else None
