"""What a model's attention caches hold, from the facts its own files state.

Everything a token leaves behind is counted in values, so that any cache type can be put on it.
What the files do not say is not guessed: `CannotTell` says what is missing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from sweeper.core.pairs import Pairs, Scalar

VALUE_BITS: Final[Mapping[str, float]] = MappingProxyType({
    "f32": 32, "float32": 32,
    "f16": 16, "bf16": 16, "float16": 16, "bfloat16": 16, "half": 16,
    "q8_0": 8.5, "q5_1": 6, "q5_0": 5.5, "q4_1": 5, "q4_0": 4.5, "iq4_nl": 4.5,
    "int8": 8, "nvfp4": 4.5,
})  # fmt: skip
"""Bits a cached value takes with the scales of its block: q4_0 is 32 values in 18 bytes."""


class CannotTell(ValueError):  # noqa: N818 - what it says, not that something broke
    """A model of which the files do not say what its caches take; the message names what lacks."""


def value_bits(kind: str) -> float | None:
    """Return the bits of one cached value of this type, None for a type that is not known."""
    name = kind.lower()
    if name.startswith(("fp8", "int8")):
        return 8
    return VALUE_BITS.get(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cached:
    """Attention layers of one kind, and what one token leaves in all of them together.

    `heads` is the sum of the KV heads over the layers; lengths are values a head. Latent
    attention is one head a layer whose key is the latent with its rotary part, without a value.
    `layers` 0 with heads above 0 means that their number was not stated.
    """

    layers: int = 0
    heads: int = 0
    key_length: int = 0
    value_length: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "key_length", "value_length"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")

    def token_bytes(self, key_bits: float, value_bits: float) -> float:
        """Return what one token takes in these layers, in bytes."""
        return self.heads * (self.key_length * key_bits + self.value_length * value_bits) / 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrent:
    """Layers that keep a state of constant size for each sequence instead of a cache.

    Of each layer: `state_values` of the recurrence itself, and a convolution over `conv_taps`
    earlier inputs of `conv_width` values.
    """

    layers: int = 0
    state_values: int = 0
    conv_width: int = 0
    conv_taps: int = 0

    def layer_bytes(
        self, *, state_bits: float = 32, conv_bits: float = 32, more_taps: int = 0
    ) -> float:
        """Return the state of one layer and sequence in bytes; `more_taps` is room for drafts."""
        taps = self.conv_taps + more_taps if self.conv_width else 0
        return (self.state_values * state_bits + self.conv_width * taps * conv_bits) / 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What a model keeps for the tokens it has seen.

    `full` are the layers that keep every token, `window` those that keep the last
    `window_tokens`, `recurrent` those with a constant state. `draft` are next-token layers in the
    same files that draft for the model (MTP), with a cache of their own. `layers` counts the
    model's layers without those, 0 where that was not stated. `state_bits` is the width the
    checkpoint asks for its states, None where it leaves that to the engine.
    """

    layers: int = 0
    full: Cached = field(default_factory=Cached)
    window: Cached = field(default_factory=Cached)
    window_tokens: int = 0
    recurrent: Recurrent = field(default_factory=Recurrent)
    draft: Cached = field(default_factory=Cached)
    state_bits: int | None = None

    def __post_init__(self) -> None:
        if self.window.heads and self.window_tokens < 1:
            raise ValueError("layers with a window need window_tokens")

    def kv_bytes_per_token(self, key_bits: float, value_bits: float | None = None) -> float:
        """Return what one more token takes once every window is full, in bytes."""
        return self.full.token_bytes(key_bits, key_bits if value_bits is None else value_bits)

    def kv_bytes(
        self,
        tokens: float,
        key_bits: float,
        value_bits: float | None = None,
        *,
        window_tokens: float | None = None,
    ) -> float:
        """Return the KV cache of one sequence of this many tokens, in bytes.

        Layers with a window keep no more than it. Engines keep somewhat more than the model
        needs (a batch beside the window, whole blocks): `window_tokens` says how much.
        """
        values = key_bits if value_bits is None else value_bits
        kept = min(tokens, self.window_tokens if window_tokens is None else window_tokens)
        return tokens * self.full.token_bytes(key_bits, values) + kept * self.window.token_bytes(
            key_bits, values
        )

    def state_bytes(self, *, state_bits: float | None = None, conv_bits: float = 32) -> float:
        """Return the recurrent state of one sequence in bytes, however long it is."""
        bits = state_bits if state_bits is not None else (self.state_bits or 32)
        return self.recurrent.layers * self.recurrent.layer_bytes(
            state_bits=bits, conv_bits=conv_bits
        )

    def draft_kv_bytes(
        self, tokens: float, key_bits: float, value_bits: float | None = None
    ) -> float:
        """Return the KV cache of the draft layers of one sequence, in bytes."""
        return tokens * self.draft.token_bytes(
            key_bits, key_bits if value_bits is None else value_bits
        )

    def facts(self) -> Pairs:
        """Return the same as facts by name, from which `from_facts` makes an equal value."""
        stated: dict[str, Scalar] = {"draft_layers": self.draft.layers}
        if self.layers:
            stated["layers"] = self.layers
        if self.layers or self.full.layers or self.window.layers or self.recurrent.layers:
            stated["kv_layers"] = self.full.layers
            stated["window_layers"] = self.window.layers
        stated["kv_heads_global"] = self.full.heads
        stated["kv_heads_window"] = self.window.heads
        stated["key_length"] = self.full.key_length
        stated["value_length"] = self.full.value_length
        if self.window_tokens:
            stated["window_tokens"] = self.window_tokens
        if self.window.heads:
            stated["key_length_window"] = self.window.key_length
            stated["value_length_window"] = self.window.value_length
        if self.recurrent.layers:
            stated["state_layers"] = self.recurrent.layers
            stated["state_values"] = self.recurrent.state_values
            stated["conv_width"] = self.recurrent.conv_width
            stated["conv_taps"] = self.recurrent.conv_taps
        if self.state_bits is not None:
            stated["state_bits"] = self.state_bits
        if self.draft.heads:
            stated["draft_kv_heads"] = self.draft.heads
            stated["draft_key_length"] = self.draft.key_length
            stated["draft_value_length"] = self.draft.value_length
        return Pairs(stated)


# --- from our own facts -----------------------------------------------------------------------

FACTS: Final[Mapping[str, str]] = MappingProxyType({
    "architecture": "the name its files give it",
    "layers": "layers of the model, without draft layers",
    "kv_layers": "layers that keep every token: fewer than `layers` in a hybrid",
    "kv_heads": "KV heads of one attention layer (1 for latent attention)",
    "kv_heads_global": "instead of kv_heads: their sum over the layers that keep every token",
    "key_length": "values of a key, one head (latent attention: latent + rotary part)",
    "value_length": "values of a value, one head (latent attention: 0)",
    "window_layers": "layers with sliding-window attention",
    "window_tokens": "the window of those, in tokens",
    "kv_heads_window": "sum of the KV heads over the layers with a window",
    "key_length_window": "key_length of the layers with a window, where it differs",
    "value_length_window": "value_length of the layers with a window, where it differs",
    "state_layers": "recurrent layers (Mamba, linear attention)",
    "state_values": "values of the recurrent state, one layer and sequence",
    "conv_width": "values of the convolution's input, one recurrent layer",
    "conv_taps": "earlier inputs that the convolution keeps (its kernel less 1)",
    "state_bits": "bits of a value of the state, where the checkpoint says",
    "draft_layers": "next-token (MTP) layers in the same files; 0 for none",
    "draft_kv_heads": "sum of the KV heads over the draft layers",
    "draft_key_length": "key_length of the draft layers, where it differs",
    "draft_value_length": "value_length of the draft layers, where it differs",
    "kv_bytes_per_token": "instead of heads and lengths: bytes a token, at 16 bits a value",
    "kv_cache_bits": "bits a cached value that the checkpoint itself asks for",
    "heads": "attention heads of one layer",
    "embedding_length": "values of the residual stream",
    "feed_forward_length": "values of the widest hidden layer of a block",
    "vocabulary": "tokens",
    "chat_template": "whether its files have a chat template",
    "trained_context_tokens": "the longest context it was trained for",
    "quantization": "how the weights are quantised, as the checkpoint says",
    "weights_bytes": "all tensors of the files",
    "draft_weights_bytes": "those of the draft layers among them",
    "embedding_bytes": "those of the input embedding among them",
    "output_bytes": "those of the output projection among them",
    "draft_model_bytes": "the file of a separate draft model",
})  # fmt: skip
"""What may be stated of a model, and what it means. Sizes in bytes, contexts in tokens."""

TEXT_FACTS: Final = ("architecture", "quantization")
TRUTH_FACTS: Final = ("chat_template",)

ELSEWHERE: Final[Mapping[str, str]] = MappingProxyType({
    "num_hidden_layers": "layers", "num_key_value_heads": "kv_heads", "head_dim": "key_length",
    "v_head_dim": "value_length", "hidden_size": "embedding_length", "vocab_size": "vocabulary",
    "intermediate_size": "feed_forward_length", "sliding_window": "window_tokens",
    "num_attention_heads": "heads", "max_position_embeddings": "trained_context_tokens",
    "num_nextn_predict_layers": "draft_layers", "mtp_num_hidden_layers": "draft_layers",
})  # fmt: skip
"""What a `config.json` calls some of these."""


def from_facts(facts: Mapping[str, Scalar]) -> Architecture:
    """Return the architecture that these facts describe; raises CannotTell.

    `kv_heads` counts for every attention layer where the sums are not stated; `kv_layers` are by
    default all layers that have neither a window nor a state. Lengths of windowed and draft
    layers are by default those of the others.
    """

    def number(name: str) -> int | None:
        value = facts.get(name)
        return (
            int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
        )

    def or_0(name: str) -> int:
        return number(name) or 0

    layers, state_layers, window_layers = (
        or_0("layers"), or_0("state_layers"), or_0("window_layers"),
    )  # fmt: skip
    kv_layers = number("kv_layers")
    each = number("kv_heads")
    if kv_layers is None and layers:
        kv_layers = layers - window_layers - state_layers
        if kv_layers < 0:
            raise CannotTell(f"has {layers} layers, fewer than those with a window or a state")
    heads = number("kv_heads_global")
    key, value = number("key_length"), number("value_length")
    if heads is None and each is None and (a_token := number("kv_bytes_per_token")) is not None:
        # Two bytes a value, half of them keys.
        heads, key, value = 1, a_token // 4, a_token // 2 - a_token // 4
    if heads is None and each is not None and kv_layers is not None:
        heads = each * kv_layers
    if heads is None:
        raise CannotTell("does not say kv_heads_global, nor kv_heads and layers")
    if each is not None and kv_layers is not None and heads != each * kv_layers:
        raise CannotTell(
            f"has kv_heads_global {heads}, which is not kv_heads {each} x kv_layers {kv_layers}"
        )
    window_heads = number("kv_heads_window")
    if window_heads is None:
        window_heads = (each or 0) * window_layers
        if window_layers and each is None:
            raise CannotTell("has window_layers, and says neither kv_heads_window nor kv_heads")
    if window_heads and not number("window_tokens"):
        raise CannotTell("has layers with a window, and does not say window_tokens")
    attends = heads or window_heads
    if attends and (key is None or value is None):
        raise CannotTell("does not say key_length and value_length")
    if state_layers and not (or_0("state_values") or or_0("conv_width")):
        raise CannotTell("has state_layers, and says neither state_values nor conv_width")
    draft_layers = or_0("draft_layers")
    draft_heads = number("draft_kv_heads")
    if draft_heads is None:
        # A draft layer is a layer of the model with full attention.
        an_average = each if each is not None else (heads // kv_layers if kv_layers else 0)
        draft_heads = an_average * draft_layers
        if draft_layers and not draft_heads:
            raise CannotTell("has draft_layers, and does not say draft_kv_heads")

    def length(name: str, usual: int | None) -> int:
        stated = number(name)
        return stated if stated is not None else usual or 0

    return Architecture(
        layers=layers,
        full=Cached(
            layers=kv_layers or 0, heads=heads, key_length=key or 0, value_length=value or 0
        ),
        window=Cached(
            layers=window_layers,
            heads=window_heads,
            key_length=length("key_length_window", key) if window_heads else 0,
            value_length=length("value_length_window", value) if window_heads else 0,
        ),
        window_tokens=or_0("window_tokens"),
        recurrent=Recurrent(
            layers=state_layers,
            state_values=or_0("state_values") if state_layers else 0,
            conv_width=or_0("conv_width") if state_layers else 0,
            conv_taps=or_0("conv_taps") if state_layers else 0,
        ),
        draft=Cached(
            layers=draft_layers,
            heads=draft_heads,
            key_length=length("draft_key_length", key) if draft_heads else 0,
            value_length=length("draft_value_length", value) if draft_heads else 0,
        ),
        state_bits=number("state_bits"),
    )


# --- weights --------------------------------------------------------------------------------------

_EMBEDDINGS: Final = (
    "token_embd.weight", "per_layer_token_embd.weight", "embed_tokens.weight", "wte.weight",
    "word_embeddings.weight", "backbone.embeddings.weight", "embed_tokens_per_layer.weight",
)  # fmt: skip
_OUTPUTS: Final = ("output.weight", "lm_head.weight", "embed_out.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The tensors of a model by what they are for, in bytes.

    `draft_bytes` are those of next-token layers; what they share with the model is the model's.
    `tensors_in_draft` counts them: 0 where the files have none, whatever a config says.
    """

    total_bytes: int
    draft_bytes: int
    embedding_bytes: int
    output_bytes: int
    tensors_in_draft: int

    @property
    def main_bytes(self) -> int:
        """All tensors but those of the draft layers."""
        return self.total_bytes - self.draft_bytes

    def facts(self) -> Pairs:
        """Return the sizes as facts by name."""
        return Pairs(
            weights_bytes=self.total_bytes,
            draft_weights_bytes=self.draft_bytes,
            embedding_bytes=self.embedding_bytes,
            output_bytes=self.output_bytes,
        )


def weights_of(tensors: Iterable[tuple[str, int]], layers: int | None = None) -> Weights:
    """Return the split of tensors given by name and size in bytes.

    A tensor is a draft layer's if its name says so (`mtp.`, `nextn`), or if it belongs to a layer
    past the last of the model's `layers`.
    """
    total = draft = embedding = output = count = 0
    for name, size in tensors:
        total += size
        if _drafting(name, layers):
            draft += size
            count += 1
        elif name.endswith(_EMBEDDINGS):
            embedding += size
        elif name in _OUTPUTS or (name.endswith(".lm_head.weight")):
            output += size
    return Weights(
        total_bytes=total,
        draft_bytes=draft,
        embedding_bytes=embedding,
        output_bytes=output,
        tensors_in_draft=count,
    )


def _drafting(name: str, layers: int | None) -> bool:
    parts = name.split(".")
    if "nextn" in parts or any(part == "mtp" or part.startswith("mtp_") for part in parts):
        return True
    if layers is None or any(part.startswith(("vis", "audio", "encoder")) for part in parts):
        return False
    for before, part in itertools.pairwise(parts):
        if before in ("blk", "layers", "h") and part.isdigit():
            return int(part) >= layers
    return False
