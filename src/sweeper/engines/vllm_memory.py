"""What vLLM takes of a card, component by component, before any boot.

The pool of the KV cache follows from the engine's own rules, which are those of vLLM 0.24 to 0.33;
the rest are rough priors that the first boots replace.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from sweeper.core.architecture import Architecture, Cached
from sweeper.core.memory import Estimate, Size
from sweeper.core.pairs import Pairs, Scalar
from sweeper.engines import ModelFacts, architecture_of

if TYPE_CHECKING:
    from sweeper.engines.vllm import VllmSettings

_GIB: Final = 2**30
_BLOCK_TOKENS: Final = 16
_DEFAULT_BATCHED_TOKENS: Final = 2048
_DEFAULT_SEQUENCES: Final = 256
_LARGEST_CAPTURE: Final = 512
_CONV_BITS: Final = 16
"""Of the convolution's state: it has the type of the model's activations."""


def kv_bits_of(kv_cache_dtype: str | None, facts: Mapping[str, Scalar]) -> float | None:
    """Return the bits of a cached value, None for a type that is not known here.

    `auto` is what the checkpoint asks for, else the 16 bits of the model's own type.
    """
    kind = (kv_cache_dtype or "auto").lower()
    if kind == "auto":
        stated = facts.get("kv_cache_bits")
        return float(stated) if isinstance(stated, int | float) else 16
    if kind in ("bfloat16", "float16", "half"):
        return 16
    if kind.startswith(("fp8", "int8")):
        return 8
    return {"nvfp4": 4.5, "float32": 32}.get(kind)


def drafts_by_itself(settings: VllmSettings) -> bool:
    """Tell whether the model's own next-token layers draft."""
    return settings.speculates and "mtp" in (settings.spec_method or "").lower()


def request_bytes(
    architecture: Architecture,
    tokens: int,
    kv_bits: float,
    *,
    drafts: int = 0,
    own_drafts: bool = False,
    batched_tokens: int = _DEFAULT_BATCHED_TOKENS,
) -> float:
    """Return what one request of this many tokens takes of the KV pool, in bytes.

    The pool is dealt in blocks of 16 tokens. In a hybrid a block must hold a whole recurrent
    state, so it is made as long as that takes, every layer's pages are equally large, and layers
    are put into groups of equal numbers that take blocks of their own: a request takes blocks
    for its tokens in each group that attends, and one for its state, and one more for each token
    drafted, in each of the others. With `own_drafts` next-token layers attend as well.
    """
    attention = architecture.full
    if own_drafts and architecture.draft.layers:
        like = architecture.draft
        attention = Cached(
            layers=attention.layers + like.layers,
            heads=attention.heads + like.heads,
            key_length=attention.key_length,
            value_length=attention.value_length,
        )
    recurrent = architecture.recurrent
    if not recurrent.layers or not attention.layers:
        whole = math.ceil(tokens / _BLOCK_TOKENS) * _BLOCK_TOKENS
        kept = min(whole, architecture.window_tokens + batched_tokens)
        states = recurrent.layers * (1 + drafts) * _state_bytes(architecture, drafts)
        return (
            whole * attention.token_bytes(kv_bits, kv_bits)
            + kept * architecture.window.token_bytes(kv_bits, kv_bits)
            + states
        )
    block, page = hybrid_block(architecture, kv_bits, drafts=drafts)
    fewest, most = sorted((attention.layers, recurrent.layers))
    group = most if most < fewest * 1.5 else fewest
    attending = math.ceil(attention.layers / group) * math.ceil(tokens / block)
    keeping = math.ceil(recurrent.layers / group) * (1 + drafts)
    return float((attending + keeping) * group * page)


def hybrid_block(
    architecture: Architecture, kv_bits: float, *, drafts: int = 0
) -> tuple[int, float]:
    """Return the tokens of a block of a hybrid, and the bytes of a page: a block of one layer."""
    a_token = architecture.full.token_bytes(kv_bits, kv_bits) / architecture.full.layers
    state = _state_bytes(architecture, drafts)
    block = math.ceil(state / (_BLOCK_TOKENS * a_token)) * _BLOCK_TOKENS
    return block, block * a_token


def _state_bytes(architecture: Architecture, drafts: int) -> float:
    return architecture.recurrent.layer_bytes(
        # Where the checkpoint does not say, it has the type of the model's activations.
        state_bits=architecture.state_bits or 16,
        conv_bits=_CONV_BITS,
        more_taps=drafts,
    )


def estimate(settings: VllmSettings, model: ModelFacts) -> Estimate:
    """Return what these settings need, so that one request of the whole window can be served."""

    def fact(name: str, default: float = 0) -> float:
        value = model.facts.get(name)
        known = isinstance(value, int | float) and not isinstance(value, bool)
        return float(value) if known and value is not None else default

    parts: dict[str, Size] = {}
    total = fact("weights_bytes") or model.size_bytes
    own_draft = fact("draft_weights_bytes")
    main = max(total - own_draft, 0)
    parts["weights"] = Size(mean=main, spread=0.03 * main)
    own = drafts_by_itself(settings)
    drafts = (settings.n_max or 0) if settings.speculates else 0
    if own:
        # Draft layers share embedding and output with the model, or bring copies of them.
        shared = fact("embedding_bytes") + fact("output_bytes")
        parts["draft_weights"] = Size(mean=own_draft, spread=0.05 * own_draft + 0.25 * shared)
    elif settings.speculates and model.draft_size_bytes:
        size = model.draft_size_bytes
        parts["draft_weights"] = Size(mean=size, spread=0.05 * size)
    parts["kv_cache"] = _kv_cache(settings, model, drafts, own_drafts=own)
    tokens = settings.max_num_batched_tokens or _DEFAULT_BATCHED_TOKENS
    row = 2 * (fact("embedding_length") * 6 + fact("feed_forward_length") * 3)
    sampled = (settings.max_num_seqs or _DEFAULT_SEQUENCES) * (1 + drafts)
    compute = tokens * row + sampled * fact("vocabulary") * 4
    parts["compute"] = Size(mean=compute, spread=0.6 * compute + 0.1 * _GIB)
    graphs = _graphs(settings, drafts) * 60 * fact("layers", 40) * fact("embedding_length", 4096)
    parts["graphs"] = Size(mean=graphs, spread=graphs)
    parts["overhead"] = Size(mean=0.7 * _GIB, spread=0.4 * _GIB)
    return Estimate.of(parts)


def _kv_cache(settings: VllmSettings, model: ModelFacts, drafts: int, *, own_drafts: bool) -> Size:
    window = settings.max_model_len
    if window is None:
        trained = model.facts.get("trained_context_tokens")
        window = trained if isinstance(trained, int) else 0
    if isinstance(window, str):
        return Size(mean=0)  # as long as fits
    bits = kv_bits_of(settings.kv_cache_dtype, model.facts)
    sure = 0.02 if bits is not None else 0.5
    stated = model.facts.get("kv_bytes_per_token")
    if isinstance(stated, int | float):
        mean = window * float(stated) * (bits or 16) / 16
        return Size(mean=mean, spread=max(sure, 0.05) * mean)
    architecture = architecture_of(model)
    if architecture is None:
        return Size(mean=0, spread=window * 100 * 1024 / 2)  # what models keep, at most
    mean = request_bytes(
        architecture,
        window,
        bits or 16,
        drafts=drafts,
        own_drafts=own_drafts,
        batched_tokens=settings.max_num_batched_tokens or _DEFAULT_BATCHED_TOKENS,
    )
    return Size(mean=mean, spread=sure * mean)


def _graphs(settings: VllmSettings, drafts: int) -> int:
    """Return how many graphs are captured, by the engine's own list where none is given."""
    if settings.largest_capture == 0:
        return 0
    sizes = len(settings.capture_sizes)
    if not sizes:
        sequences = settings.max_num_seqs or _DEFAULT_SEQUENCES
        largest = settings.max_cudagraph_capture_size or min(
            sequences * (1 + drafts) * 2, _LARGEST_CAPTURE
        )
        usual = (1, 2, 4, *range(8, 256, 8), *range(256, _LARGEST_CAPTURE + 1, 16))
        sizes = sum(each <= largest for each in usual)
    return sizes * (2 if settings.cudagraph_mode in (None, "FULL_AND_PIECEWISE") else 1)


def shown(settings: VllmSettings, evidence: Pairs) -> Pairs:
    """Return the components that a boot printed, by the names of the estimate.

    The engine fills the card with its pool: what is shown of a request is the pool over the number
    of requests of a whole window that it says to hold. In a hybrid the pool's tokens are no
    measure of that: they count the blocks of one group of layers only.
    """

    def number(name: str) -> float | None:
        value = evidence.get(name)
        known = isinstance(value, int | float) and not isinstance(value, bool)
        return float(value) if known and value is not None else None

    pool, tokens, window = number("kv_cache_bytes"), number("kv_pool_tokens"), None
    if isinstance(settings.max_model_len, int):
        window = settings.max_model_len
    requests = number("max_concurrency")
    if requests is None and tokens and window:
        requests = tokens / window
    found: dict[str, float | None] = {
        "weights+draft_weights": number("weights_bytes"),
        "compute": number("activation_peak_bytes"),
        "graphs": number("graph_pool_bytes"),
        "kv_cache": pool / requests if pool and requests else None,
    }
    return Pairs({name: value for name, value in found.items() if value is not None})
