"""Record a table from a real engine: every point of a small space, booted and measured.

    python benchmarks/search/record.py [FOLDER]      # about 20 minutes

The engine is the llama.cpp server of the xllamacpp wheel on the CPU, under a limit on its address
space; the model is a llama of a few million RANDOM weights. What fits, what is refused, what
speculation costs and yields are real; the speeds are those of this machine and of no model that
anybody uses. Each point is booted once, in random order, so that a slow quarter of an hour does not
fall on one corner of the space. Points that are done are kept in FOLDER and not booted again.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from sweeper.conf import load
from sweeper.core.evidence import Role
from sweeper.core.pairs import text
from sweeper.core.space import Space
from sweeper.orchestrate import prepare
from sweeper.places import conf_dirs
from sweeper.record.attempts import Attempts
from sweeper.search.facts import evidence_of, prior_of, roles_of
from sweeper.server import Registry
from sweeper.trial import attempt

ROOT = Path(__file__).resolve().parents[2]
TABLES = Path(__file__).resolve().parent / "tables"
NAME = "llamacpp_cpu_recorded"
GIB, MIB = 2**30, 2**20
STUDY = """# @package _global_
defaults:
  - override /engine: llamacpp
  - override /tracking: "off"
name: recorded
model: {{name: random_llama, path: {model}}}
hardware: {{name: cpu, memory_limit: 190MiB}}
engine:
  boot_timeout_s: 60
  env: {{GOMP_SPINCOUNT: "10000"}}
  params: {{threads: 1, threads_http: 2, spec_type: ngram-simple, ngram_size: 4, repack: false}}
space:
  context: [512, 768, 1024, 2048, 4096]
  n_max: [0, 4, 8, 16]
  kv_type: {{choices: [f16, q8_0, q4_0], sets: [cache_type_k, cache_type_v]}}
  flash_attn: ["on", "off"]
  ubatch: [128, 512, 2048]
workload:
  max_tokens: 128
  repeats: {{least: 3, most: 3, warmup_min: 1, warmup_max: 1, interval: null, racing: false}}
proof: {{boots: 0}}
"""


def main(folder: Path) -> None:
    """Boot what is not booted yet, then write the table."""
    sys.path.insert(0, str(ROOT))
    from tests.tiny_gguf import write_tiny_gguf

    folder.mkdir(parents=True, exist_ok=True)
    model = folder / "random.gguf"
    if not model.exists():
        write_tiny_gguf(
            model, context_length=4096, vocab_size=2048, layers=4, embedding=128, heads=8,
            kv_heads=8, head_size=64, feed_forward=512,
        )  # fmt: skip
    studies = folder / "conf" / "study"
    studies.mkdir(parents=True, exist_ok=True)
    (studies / "recorded.yaml").write_text(STUDY.format(model=model))
    loaded = load(["+study=recorded"], conf_dirs(cwd=folder))
    job = prepare(loaded)
    store = Attempts(folder / "attempts")
    done = {each.point for each in store.all()}
    points = list(Space(axes=loaded.study.space.axes).points())
    waiting = [point for point in points if point not in done]
    random.Random(0).shuffle(waiting)  # noqa: S311 - an order, not a secret
    began = time.monotonic()
    for count, point in enumerate(waiting):
        number = store.next_number()
        made = attempt(
            job, point, number=number, trial=number, folder=store.begin(number),
            registry=Registry(folder / "started.json"), watch=lambda _progress: None,
        )  # fmt: skip
        store.commit(made)
        gone = time.monotonic() - began
        left = gone / (count + 1) * (len(waiting) - count - 1)
        print(f"{count + 1}/{len(waiting)}, {left / 60:.0f} min left: {point}", file=sys.stderr)
    _write(store, loaded.study.space, job)


COLUMNS = (
    "outcome", "phase", "shortfall_gib", "weights_gib", "kv_bytes_per_token", "draft_gib",
    "compute_gib", "graph_gib", "kv_pool_tokens", "estimated_max_model_len", "decode_tok_s",
    "acceptance", "step_ms", "boot_s",
)  # fmt: skip
"""Of a table, after its axes."""


def _write(store: Attempts, space: Space, job: Any) -> None:
    axes = [axis.name for axis in space.axes]
    rows = []
    for each in store.all():
        seen = evidence_of(each, job)
        sizes = {
            "shortfall_gib": seen.shortfall_bytes, "weights_gib": seen.weights_bytes,
            "draft_gib": seen.draft_bytes, "compute_gib": seen.compute_bytes,
            "graph_gib": seen.graph_bytes,
        }  # fmt: skip
        row: dict[str, Any] = {name: text(each.point[name]) for name in axes}
        row |= {"outcome": seen.outcome, "phase": seen.phase or "ready"}
        row |= {key: round(size / GIB, 6) for key, size in sizes.items() if size is not None}
        row |= {
            "kv_bytes_per_token": seen.kv_bytes_per_token and round(seen.kv_bytes_per_token, 1),
            "decode_tok_s": seen.decode_tok_s and round(seen.decode_tok_s, 3),
            "acceptance": " ".join(f"{share:.4f}" for share in seen.acceptance),
            "step_ms": seen.step_s and round(seen.step_s * 1000, 4),
            "boot_s": round(seen.boot_s or each.timings.total_s, 2),
        }
        rows.append({key: "" if value is None else value for key, value in row.items()})
    sidecar = sidecar_of(space, job, device_memory_bytes=190 * MIB)
    write_table(NAME, [*axes, *COLUMNS], rows, sidecar, "record.py on a real engine")
    measured = sum(row["outcome"] == "measured" for row in rows)
    print(json.dumps({"rows": len(rows), "measured": measured}))


def sidecar_of(space: Space, job: Any, *, device_memory_bytes: float) -> dict[str, Any]:
    """Return the axes of a table and what is known of them before any boot, as data."""
    roles = roles_of(space, job.engine)
    prior = prior_of(space, job, device_memory_bytes=device_memory_bytes)
    return {
        "axes": {
            axis.name: {
                **({} if roles[axis.name] is Role.OTHER else {"role": roles[axis.name].value}),
                "ordered": axis.ordered,
                "values": list(axis.values),
            }
            for axis in space.axes
        },
        "known": {
            "capacity_gib": round((prior.capacity_bytes or 0) / GIB, 4),
            "kv_kib_per_token": {
                value: round(size / 1024, 3) for value, size in prior.kv_bytes_per_token
            },
        },
    }


def write_table(
    name: str, columns: list[str], rows: list[dict[str, Any]], sidecar: dict[str, Any], by: str,
    folder: Path = TABLES,
) -> None:  # fmt: skip
    """Write rows as a table, in the order of their axes, and the sidecar beside it."""
    rows = sorted(rows, key=lambda row: [str(row[axis]) for axis in sidecar["axes"]])
    folder.mkdir(exist_ok=True)
    said = io.StringIO()
    writer = csv.DictWriter(said, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    # No time in the archive, so that the same rows make the same file.
    with (
        (folder / f"{name}.csv.gz").open("wb") as raw,
        gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="") as file,
    ):
        file.write(said.getvalue().encode())
    head = f"# recorded by {by} with random weights\n"
    (folder / f"{name}.space.yaml").write_text(head + yaml.safe_dump(sidecar, sort_keys=False))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "studies" / "recorded")
