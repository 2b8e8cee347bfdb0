"""Attempts for tests: true to life, and each one a line to make."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sweeper.core.launch import Phase
from sweeper.core.memory import Footprint
from sweeper.core.outcome import (
    Attempt,
    Broken,
    BrokenName,
    Figures,
    Finding,
    HostFault,
    HostFaultName,
    Infeasible,
    InfeasibleName,
    Measured,
    Outcome,
    ProvenContext,
    Quality,
    Timings,
    Unfit,
    UnfitName,
)
from sweeper.core.pairs import Pairs, Scalar
from sweeper.core.sample import DraftCounters, Purpose, Sample
from sweeper.core.stats import summarise
from sweeper.core.telemetry import Telemetry


def measured_attempt(
    number: int = 1,
    *,
    decode_tok_s: float = 40.0,
    context: int = 32768,
    proven: int | None = None,
    n_max: int = 3,
    cache_type: str = "f16",
    **changes: Any,
) -> Attempt:
    """Return an attempt that was measured, at about `decode_tok_s` with `proven` tokens."""
    speeds = [decode_tok_s * factor for factor in (1.0, 0.98, 1.02, 0.97, 1.01, 1.04, 0.99)]
    filled = proven if proven is not None else context - 16
    drafts = DraftCounters(
        steps=1000, drafted=1000 * n_max, accepted=2100, accepted_per_position=(900, 700, 500)
    )
    telemetry = Telemetry(
        seconds=6.5, gpu_peak_bytes=19 * 2**30, gpu_power_w=151.5, gpu_energy_j=985.0,
        gpu_temperature_c=71.0, steal_share=0.001, throttle_reasons=("power_cap",),
    )  # fmt: skip
    speed, ttft = summarise(speeds), summarise([0.21, 0.22, 0.2, 0.23, 0.21])
    prefill = summarise([1510.0, 1498.0, 1505.0])
    outcome = Measured(
        decode_tok_s=speed,
        ttft_s=ttft,
        prefill_tok_s=prefill,
        context=ProvenContext(
            configured_tokens=context,
            proven_tokens=filled,
            prompt_tokens=filled - 128,
            completion_tokens=128,
            prefill_tok_s=1400.5,
            decode_tok_s=decode_tok_s * 0.8,
            refuses_more=True,
        ),
        drafts=drafts,
        peak_bytes=18 * 2**30,
        figures=(
            Figures(
                workload="short", prompt_length=None, streams=1, decode_tok_s=speed, ttft_s=ttft,
                prefill_tok_s=prefill, itl_s=summarise([0.024, 0.025, 0.026]), itl_p99_s=0.031,
                drafts=drafts, telemetry=telemetry, ended="tight",
            ),
            Figures(
                workload="ladder", prompt_length=8192, streams=1,
                decode_tok_s=summarise([each * 0.9 for each in speeds]), ttft_s=ttft,
                prefill_tok_s=prefill, ended="most",
            ),
        ),
        telemetry=telemetry,
        quality=Quality(reference=1, prefix_tokens=140, prefix_share=0.97, mean_logprob=-2.1),
    )  # fmt: skip
    samples = tuple(
        Sample(
            purpose=Purpose.MEASURE,
            prompt_tokens=512,
            completion_tokens=256,
            ttft_s=0.21,
            decode_s=255 / speed,
            total_s=0.21 + 255 / speed,
            frames=120,
            finish_reason="length",
            text="Es war einmal … 😀",
            server=Pairs(predicted_per_second=speed),
            workload="short",
            run=run,
            seed=run,
            began_s=12.5 + run,
            gaps_s=(0.024, 0.026, 0.025),
        )
        for run, speed in enumerate(speeds)
    )
    return attempt_of(
        outcome,
        number=number,
        point=Pairs(context=context, n_max=n_max, cache_type_k=cache_type),
        **{"samples": samples, **changes},
    )


def oom_attempt(number: int = 2, *, context: int = 262144, **changes: Any) -> Attempt:
    """Return an attempt whose KV cache did not fit, by 1536 MiB."""
    return attempt_of(
        Infeasible(
            name=InfeasibleName.OOM_KV_CACHE,
            finding=Finding(
                phase=Phase.KV,
                cause="ValueError: 9.00 GiB KV cache is needed, 7.50 GiB are available <script>",
                explanation="The KV cache of this context is 1536 MiB larger than what is left.",
                facts=Pairs(shortfall_bytes=1536 * 2**20),
                try_next=Pairs(context=131072),
            ),
        ),
        number=number,
        point=Pairs(context=context, n_max=3, cache_type_k="f16"),
        **changes,
    )


def unsupported_attempt(number: int = 3, **changes: Any) -> Attempt:
    """Return an attempt with a combination that the engine refuses."""
    return attempt_of(
        Infeasible(
            name=InfeasibleName.UNSUPPORTED_COMBINATION,
            finding=Finding(
                phase=Phase.CONFIG,
                cause="quantized V cache requires flash attention",
                explanation="A quantised V cache works with flash attention only.",
            ),
        ),
        number=number,
        **changes,
    )


def unfit_attempt(number: int = 4, **changes: Any) -> Attempt:
    """Return an attempt that served text nobody wants."""
    return attempt_of(
        Unfit(
            name=UnfitName.GARBAGE_OUTPUT,
            finding=Finding(
                phase=Phase.SERVING,
                cause="",
                explanation="The answer repeats one token 64 times.",
            ),
        ),
        number=number,
        **changes,
    )


def broken_attempt(number: int = 5, **changes: Any) -> Attempt:
    """Return an attempt that crashed for no reason of its own."""
    return attempt_of(
        Broken(
            name=BrokenName.ENGINE_CRASH,
            finding=Finding(
                phase=Phase.WARMUP, cause="Segmentation fault", explanation="The engine crashed."
            ),
        ),
        number=number,
        **changes,
    )


def host_fault_attempt(number: int = 6, **changes: Any) -> Attempt:
    """Return an attempt that no point could have survived."""
    return attempt_of(
        HostFault(
            name=HostFaultName.DISK_FULL,
            finding=Finding(
                phase=Phase.WEIGHTS,
                cause="OSError: [Errno 28] No space left on device",
                explanation="The disk is full; free some space and start again.",
            ),
        ),
        number=number,
        **changes,
    )


def attempt_of(
    outcome: Outcome, *, number: int = 1, point: Pairs | None = None, **changes: Any
) -> Attempt:
    """Return an attempt with this outcome; `changes` replace any of its fields."""
    measured = isinstance(outcome, Measured)
    attempt = Attempt(
        study="qwen-mtp",
        number=number,
        trial=number - 1,
        started_at=f"2026-11-29T17:{number % 60:02d}:00+00:00",
        point=point if point is not None else Pairs(context=65536, n_max=2, cache_type_k="q8_0"),
        outcome=outcome,
        argv=("/opt/engine/server", "--port", "8011", "--ctx-size", "32768"),
        env=Pairs(CUDA_VISIBLE_DEVICES="0"),
        memory_limit_bytes=None,
        footprint=Footprint(
            parts=Pairs(weights=16 * 2**30, kv_cache=2 * 2**30), alike=Pairs(speculation="mtp")
        ),
        timings=Timings(
            boot_s=31.5 if measured else None,
            prove_s=22.25 if measured else None,
            measure_s=40.0 if measured else None,
            stop_s=1.5,
            total_s=95.5 if measured else 12.5,
        ),
        engine=Pairs(name="vllm", engine_version="0.33.0"),
        model=Pairs(name="qwen3.6-27b", sha256="a" * 64),
        host=Pairs(gpu="RTX 4090"),
        workload=Pairs(prompt_tokens=512),
    )
    return replace(attempt, **changes)


def fake_engine_facts(**named: Scalar) -> Pairs:
    """Return the facts of the engine whose figures are invented."""
    return Pairs(name="fake", engine_version="1", simulated=True).with_(**named)
