"""What llama.cpp takes of memory, component by component, by its own formulas."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from sweeper.core.memory import Estimate, Size
from sweeper.core.pairs import Pairs
from sweeper.engines import ModelFacts, architecture_of

if TYPE_CHECKING:
    from sweeper.engines.llamacpp import LlamaCppSettings

MIB: Final = 2**20
_DEFAULT_BATCH: Final = 2048
_DEFAULT_UBATCH: Final = 512
_UNKNOWN_TYPE_BITS: Final = 16

_ROLLS_BACK: Final = (
    "qwen35", "qwen35moe", "qwen4exp", "nemotron_h", "nemotron_h_moe", "lfm2", "lfm2moe",
    "bailingmoe3", "kimi-k3", "glm5-next",
)  # fmt: skip
"""Recurrent models whose state is kept once more for every drafted token, to go back to."""

_PRINTED: Final[Mapping[str, str]] = MappingProxyType({
    "weights_bytes": "weights+draft_weights",
    "kv_cache_bytes": "kv_cache",
    "rs_bytes": "state",
    "compute_bytes": "compute",
    "output_bytes": "output",
    "draft_weights_bytes": "draft",
    "draft_kv_cache_bytes": "draft_kv",
    "draft_compute_bytes": "draft_compute",
})  # fmt: skip


def micro_batch(settings: LlamaCppSettings) -> int:
    """Return the tokens that are computed at once: never more than a batch has."""
    return min(
        settings.ubatch if settings.ubatch is not None else _DEFAULT_UBATCH,
        settings.batch if settings.batch is not None else _DEFAULT_BATCH,
    )


def drafts_by_itself(settings: LlamaCppSettings) -> bool:
    """Tell whether the model's own next-token layers draft, in a context of their own."""
    return settings.speculates and any("mtp" in kind for kind in settings.spec_kinds)


def cache_parts(settings: LlamaCppSettings, model: ModelFacts) -> dict[str, float]:
    """Return KV cache, recurrent state and the draft context's KV cache in bytes.

    KV: two tensors a layer, heads x length x cells x bits; sliding-window layers hold the
    window plus one micro-batch, rounded up to 256 cells. States are f32, one for each slot, and
    one more for each drafted token where the model can go back. The draft context's cache is f16
    unless it is told otherwise. All 0 where the model's files do not tell.
    """
    architecture = architecture_of(model)
    if architecture is None:
        return {"kv_cache": 0.0, "state": 0.0, "draft_kv": 0.0}
    context = settings.context
    cells = context
    if not settings.swa_full:
        kept = architecture.window_tokens * settings.parallel + micro_batch(settings)
        cells = min(context, math.ceil(kept / 256) * 256)
    copies = settings.parallel
    if drafts_by_itself(settings) and model.facts.get("architecture") in _ROLLS_BACK:
        copies *= 1 + (settings.n_max or 0)
    return {
        "kv_cache": architecture.kv_bytes(
            context,
            _bits(settings, settings.cache_type_k),
            _bits(settings, settings.cache_type_v),
            window_tokens=cells,
        ),
        "state": copies * architecture.state_bytes(state_bits=32),
        "draft_kv": architecture.draft_kv_bytes(
            context,
            _bits(settings, settings.draft_cache_type_k or "f16"),
            _bits(settings, settings.draft_cache_type_v or "f16"),
        )
        if drafts_by_itself(settings)
        else 0.0,
    }


def _bits(settings: LlamaCppSettings, kind: str) -> float:
    bits = settings.cache_bits(kind)
    return _UNKNOWN_TYPE_BITS if bits is None else bits


def compute_bytes(settings: LlamaCppSettings, model: ModelFacts) -> float:
    """Return the compute buffers in bytes: attention scores and activations.

    Scores are micro-batch x context, times the heads in f32 without flash attention, in f16 once
    with it.
    """
    ubatch = micro_batch(settings)
    heads, width, forward = (
        _fact(model, name) for name in ("heads", "embedding_length", "feed_forward_length")
    )
    scores = ubatch * settings.context * (2 if settings.flash_attn != "off" else 2 + 4 * heads)
    return scores + ubatch * 4 * (width * 6 + forward * 3)


def _workspace_bytes(settings: LlamaCppSettings, model: ModelFacts) -> float:
    """Return what a GPU takes while it attends to a quantised cache, in bytes.

    Its kernels for many tokens at once read f16: they unpack one layer's keys and values first.
    """
    architecture = architecture_of(model)
    types = (settings.cache_type_k, settings.cache_type_v)
    packed = min(_bits(settings, kind) for kind in types) < 16
    if architecture is None or not packed or settings.gpu_layers == 0:
        return 0.0
    layers = architecture.full.layers
    return settings.context * architecture.full.token_bytes(16, 16) / layers if layers else 0.0


def output_bytes(settings: LlamaCppSettings, model: ModelFacts) -> int:
    """Return one row of f32 logits for each token that is verified, twice: buffer and sampler."""
    verified = settings.parallel * (1 + (settings.n_max or 0 if settings.speculates else 0))
    return int(verified * _fact(model, "vocabulary") * 4 * 2)


def _fact(model: ModelFacts, name: str) -> float:
    value = model.facts.get(name)
    return value if isinstance(value, int | float) else 0


def estimate(settings: LlamaCppSettings, model: ModelFacts) -> Estimate:
    """Return what these settings need of the device that computes, with the spread of each part.

    What is left to the processor (layers, experts) is taken off the weights. The engine itself
    (context, kernels, libraries) is 0.3 GiB, give or take; the first boots tell.
    """
    total = _fact(model, "weights_bytes") or model.size_bytes
    drafting = drafts_by_itself(settings)
    own_draft = min(_fact(model, "draft_weights_bytes"), total)
    share, sure = _offloaded(settings, model)
    main = (total - own_draft) * share
    # A GPU leaves the input embedding to the processor, unless it is the output as well.
    spare = _fact(model, "embedding_bytes") if _fact(model, "output_bytes") else 0
    caches = cache_parts(settings, model)
    # Caches lie where their layer does: what only leaves weights to the processor, experts or
    # single tensors, leaves the whole cache on the card.
    layers, layers_sure = _layers_offloaded(settings, model)
    kv = caches["kv_cache"] * (layers if settings.kv_offload else 1)
    told = architecture_of(model) is not None
    # A fork's type of which no bits are stated is taken for 16, and is most likely less.
    types = (settings.cache_type_k, settings.cache_type_v)
    known = all(settings.cache_bits(kind) is not None for kind in types)
    compute = compute_bytes(settings, model)
    output = output_bytes(settings, model)
    workspace = _workspace_bytes(settings, model)
    # Builds differ in whether they make room for logits of a whole micro-batch.
    logits = micro_batch(settings) * _fact(model, "vocabulary") * 4
    some = 0.0 if settings.version is None else 0.5 * logits
    buffers = Size(
        mean=compute + some, spread=math.hypot(0.4 * compute + 32 * MIB, max(some, 0.3 * logits))
    )
    parts = {
        "weights": Size(mean=main, spread=main * sure + min(spare / 2, main)),
        "kv_cache": Size(
            # Unknown: what models keep at most, in f16.
            mean=kv,
            spread=kv * (max(0.01, layers_sure - 0.01) if known else 0.4)
            if told
            else settings.context * 50 * 1024,
        ),
        "state": Size(mean=caches["state"], spread=0.05 * caches["state"]),
        "compute": buffers,
        "workspace": Size(mean=workspace, spread=0.6 * workspace),
        "output": Size(mean=output, spread=0.3 * output),
    }
    if drafting:
        parts["draft_weights"] = Size(mean=own_draft, spread=0.02 * own_draft)
        parts["draft_kv"] = Size(mean=caches["draft_kv"], spread=0.05 * caches["draft_kv"])
        parts["draft_compute"] = buffers
    elif settings.speculates and model.draft_path is not None:
        draft = model.draft_size_bytes
        parts["draft"] = Size(mean=draft, spread=0.02 * draft)
        # Of a draft model no more than its size is known: its caches are a tenth of ours or so.
        parts["draft_kv"] = Size(mean=0.1 * kv, spread=0.1 * kv)
        parts["draft_compute"] = Size(mean=0.5 * compute, spread=0.5 * compute)
    parts["overhead"] = Size(mean=300 * MIB, spread=150 * MIB)
    return Estimate.of(parts)


def _layers_offloaded(settings: LlamaCppSettings, model: ModelFacts) -> tuple[float, float]:
    """Return the share of the layers on the device that computes, and how unsure that is."""
    layers = _fact(model, "layers")
    if isinstance(settings.gpu_layers, int) and settings.gpu_layers and layers:
        share = min(settings.gpu_layers / (layers + 1), 1.0)
        return share, 0.01 + 0.05 * (share < 1)
    return 1.0, 0.01


def _offloaded(settings: LlamaCppSettings, model: ModelFacts) -> tuple[float, float]:
    """Return the share of the weights on the device that computes, and how unsure that is."""
    layers = _fact(model, "layers")
    if settings.override_tensor is not None:
        return 1.0, 0.5
    share, sure = _layers_offloaded(settings, model)
    if settings.n_cpu_moe and layers:
        # Nine tenths of a layer with experts are its experts.
        share *= 1 - 0.9 * min(settings.n_cpu_moe / layers, 1.0)
        sure += 0.1
    return share, sure


def shown(evidence: Pairs) -> Pairs:
    """Return the components that a boot printed, by the names of the estimate."""
    return Pairs({name: evidence[key] for key, name in _PRINTED.items() if key in evidence})
