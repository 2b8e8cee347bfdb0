"""Measures the measuring client against a server whose times are stated.

    python benchmarks/client_accuracy/run.py                       a minute; writes results.json
    chrt -f 20 python benchmarks/client_accuracy/run.py            on a machine with other work
    python benchmarks/client_accuracy/run.py --out OTHER.json --rounds 3

The simulated engine is told after how many milliseconds the first token is due and how many lie
between one token and the next, and sends each at its own moment, however late the one before it
was. What the client reports is compared with that. Both processes read the clock of the machine,
so that each delay can be told apart: until the server had the request, until it sent the first
token, and until the client had that.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

import sweeper
from sweeper.bench import Client, RequestFailure
from sweeper.core.sample import Purpose, Sample
from sweeper.core.workload import Load, Workload
from sweeper.engines import EngineOptions, ModelFacts
from sweeper.engines.fake import Fake
from sweeper.server import Registry, Server, free_port, serving

TTFT_S = 0.2
GAP_S = 0.025
PROMPT_TOKENS = 400
ANSWER_TOKENS = 80
LIMITS = {1: 0.01, 8: 0.01, 64: 0.03}
"""Streams at once, and the relative error that is allowed with so many."""


def main() -> int:
    """Measure with every number of streams, write the results, and say whether they hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    parser.add_argument("--rounds", type=int, default=10)
    given = parser.parse_args()
    load = os.getloadavg()[0]
    results = [measured(streams, given.rounds) for streams in LIMITS]
    report = {
        "stated": {
            "ttft_ms": TTFT_S * 1000,
            "gap_ms": GAP_S * 1000,
            "prompt_tokens": PROMPT_TOKENS,
            "answer_tokens": ANSWER_TOKENS,
        },
        "sweeper": sweeper.__version__,
        "python": sys.version.split()[0],
        "processors": os.cpu_count(),
        "load_average_before": round(load, 2),
        "real_time": os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR),
        "results": results,
    }
    given.out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written to {given.out}")
    return 0 if all(each["holds"] for each in results) else 1


def measured(streams: int, rounds: int) -> dict[str, Any]:
    """Return what the client reports of so many streams at once, beside what is so."""
    workload = Workload(
        name="accuracy", prompt_tokens=(PROMPT_TOKENS,), streams=(streams,),
        max_tokens=ANSWER_TOKENS, proof_answer_tokens=1,
    )  # fmt: skip
    fake = Fake()
    settings = fake.settings(
        {
            "context": 4096,
            "prefill_tok_s": PROMPT_TOKENS / TTFT_S,
            "decode_tok_s": 1 / GAP_S,
        }
    )
    model = ModelFacts(name="demo", path="demo", served_name="demo", size_bytes=0, sha256="")
    launch = fake.launch(settings, model, EngineOptions(), free_port())
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with serving(
            launch, log_path=folder / "log", registry=Registry(folder / "started.json"),
            watch=lambda _: None,
        ) as started:  # fmt: skip
            server = started.result
            if not isinstance(server, Server):
                raise SystemExit(f"the simulated engine did not start: {server}")
            zero = time.perf_counter()
            with Client(server.base_url, fake.wire, "demo", workload, began=zero) as client:
                load = Load(prompt_tokens=PROMPT_TOKENS, streams=streams)
                _ask(client, load, run=0, purpose=Purpose.WARMUP)
                psutil.cpu_percent()
                before, began = psutil.cpu_times(), time.perf_counter()
                for run in range(rounds):
                    samples += _ask(client, load, run=run, purpose=Purpose.MEASURE)
                busy = psutil.cpu_percent() / 100
                after, wall_s = psutil.cpu_times(), time.perf_counter() - began
    ttfts = [each.ttft_s for each in samples]
    gaps = [gap for each in samples for gap in each.gaps_s]
    itls = [each.decode_s / (each.completion_tokens - 1) for each in samples]
    errors = {
        "ttft_median": statistics.median(ttfts) / TTFT_S - 1,
        "itl_median": statistics.median(gaps) / GAP_S - 1,
        "itl_mean": statistics.fmean(itls) / GAP_S - 1,
    }
    steal_s = getattr(after, "steal", 0.0) - getattr(before, "steal", 0.0)
    result = {
        "streams": streams,
        "requests": len(samples),
        "gaps": len(gaps),
        "client": {
            "ttft_median_ms": _ms(statistics.median(ttfts)),
            "ttft_p99_ms": _ms(_percentile(ttfts, 0.99)),
            "itl_median_ms": _ms(statistics.median(gaps)),
            "itl_mean_ms": _ms(statistics.fmean(itls)),
            "itl_p99_ms": _ms(_percentile(gaps, 0.99)),
        },
        "server_itl_mean_ms": _ms(
            statistics.fmean(
                _server(each, "predicted_ms") / (_server(each, "predicted_n") - 1) / 1000
                for each in samples
            )
        ),
        "ttft_delays_ms": {
            # On the way, and until the busy server looks at it.
            "request_median": _ms(
                statistics.median(
                    _server(each, "arrived_at_s") - zero - each.began_s for each in samples
                )
            ),
            # The server wakes late.
            "server_median": _ms(
                statistics.median(
                    _server(each, "first_at_s") - _server(each, "arrived_at_s") - TTFT_S
                    for each in samples
                )
            ),
            # On the way back, and until the client has read its clock.
            "client_median": _ms(
                statistics.median(
                    zero + each.began_s + each.ttft_s - _server(each, "first_at_s")
                    for each in samples
                )
            ),
        },
        "relative_error": {name: round(error, 5) for name, error in errors.items()},
        "limit": LIMITS[streams],
        "holds": all(abs(error) <= LIMITS[streams] for error in errors.values()),
        "processors_busy": round(busy, 3),
        "processors_stolen": round(steal_s / wall_s / (os.cpu_count() or 1), 4),
    }
    print(
        f"{streams:>3} streams: "
        + ", ".join(f"{name} {error:+.2%}" for name, error in errors.items())
        + f" (limit {LIMITS[streams]:.0%}; processors {busy:.0%} busy)"
    )
    return result


def _ask(client: Client, load: Load, *, run: int, purpose: Purpose) -> tuple[Sample, ...]:
    asked = client.ask(load, run=run, purpose=purpose, max_tokens=ANSWER_TOKENS)
    if isinstance(asked, RequestFailure):
        raise SystemExit(f"a request failed: {asked}")
    return asked


def _server(sample: Sample, name: str) -> float:
    value = sample.server[name]
    assert isinstance(value, int | float)
    return value


def _percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


if __name__ == "__main__":
    sys.exit(main())
