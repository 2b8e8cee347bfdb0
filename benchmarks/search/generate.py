"""Computes the synthetic tables that searches are compared on.

    python benchmarks/search/generate.py [FOLDER]

A table has one row for every configuration of a space. The numbers come from a small model of an
engine and not from an engine; they are for comparing searches, never for claims about hardware.

**Memory.** Weights + KV bytes a token x context (x slots) + draft head + scratch by prefill chunk +
graphs + overhead must stay within the card, or, where the engine plans with a fraction of it, the
planned part within the fraction and the graphs within the rest. Stages come in the order of a real
boot, and what did not fit first names the ending and the shortfall. What was printed up to there is
in the row, and nothing else.

**Speed.** A step reads the weights once and the KV cache up to the depth that is measured, at the
card's bandwidth (decode is bound by memory: Pope et al. 2022, "Efficiently Scaling Transformer
Inference"), plus launch overhead that graphs save, plus work for each drafted token. It yields one
token and the accepted drafts; the chance of acceptance falls with the position (Leviathan et al.
2023). Each configuration has a fixed deviation of 0.4 % that no model can know.

**Refusals.** Pairs of values that an engine's kernels do not have, ordered axes among them; a batch
too small for the drafts of all sequences; and in one table a window of contexts that dies at run
time, while shorter and longer ones live.

`llama16` is like llama.cpp on a 16 GB card, `paged80` like vLLM on an 80 GB one, with speculation
by several methods; `roomy` never runs out of memory; `labels` has random labels and no physics.
"""

from __future__ import annotations

import gzip
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

Row = dict[str, Any]
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a table is made: its axes, what is known beforehand, and one boot of a point."""

    name: str
    axes: dict[str, dict[str, Any]]
    known: dict[str, Any]
    boot: Callable[[Row, np.random.Generator], Row]
    skip: Callable[[Row], bool] = field(default=lambda _: False)
    blank: Callable[[Row], tuple[str, ...]] = field(default=lambda _: ())

    def write(self, folder: Path) -> None:
        """Compute every row and write the table with its sidecar."""
        generator = np.random.default_rng(20261129)
        names = list(self.axes)
        rows: list[Row] = []
        seen: set[tuple[Any, ...]] = set()
        for values in itertools.product(*(self.axes[name]["values"] for name in names)):
            point: Row = dict(zip(names, values, strict=True))
            if self.skip(point):
                continue
            for name in self.blank(point):
                point[name] = None
            key = tuple(point.values())
            if key in seen:
                continue
            seen.add(key)
            rows.append({**point, **self.boot(point, generator)})
        frame = pd.DataFrame(rows, columns=[*names, *_COLUMNS])
        for name in names:
            # Whole numbers stay whole where a blank would make them floats.
            frame[name] = ["" if row[name] is None else str(row[name]) for row in rows]
        for column in ("kv_pool_tokens", "estimated_max_model_len"):
            frame[column] = frame[column].astype("Int64")
        # No time in the header of the archive: the same table has the same bytes.
        with (
            (folder / f"{self.name}.csv.gz").open("wb") as raw,
            gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as packed,
        ):
            packed.write(frame.to_csv(index=False).encode())
        document = {"axes": self.axes, "known": self.known}
        (folder / f"{self.name}.space.yaml").write_text(
            "# synthetic: see generate.py\n"
            + yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=100)
        )


_COLUMNS = (
    "outcome phase shortfall_gib weights_gib kv_bytes_per_token draft_gib compute_gib graph_gib "
    "kv_pool_tokens estimated_max_model_len decode_tok_s acceptance step_ms boot_s"
).split()


def _axis(role: str | None, ordered: bool, values: list[Any]) -> dict[str, Any]:
    return {"role": role, "ordered": ordered, "values": values}


def _refused(phase: str, boot_s: float) -> Row:
    return {"outcome": "unsupported_combination", "phase": phase, "boot_s": boot_s}


def _shares(first: float, decay: float, count: int) -> list[float]:
    shares, alive = [], 1.0
    for position in range(count):
        alive *= max(first - decay * position, 0.05)
        shares.append(round(alive, 4))
    return shares


def _speed(step_s: float, shares: list[float], generator: np.random.Generator) -> Row:
    step_s *= float(np.exp(generator.normal(0, 0.004)))
    return {
        "outcome": "measured",
        "phase": "ready",
        "decode_tok_s": round((1 + sum(shares)) / step_s, 2),
        "acceptance": " ".join(f"{share:.4f}" for share in shares),
        "step_ms": round(step_s * 1000, 3),
    }


# --- llama.cpp-like, 16 GB ------------------------------------------------------------------------

_LLAMA_WEIGHTS = {"q3km": 7.35, "q4ks": 8.57, "q5km": 10.51, "q6k": 12.12, "iq2m": 5.36}
_LLAMA_SPEED = {"q3km": 0.84, "q4ks": 1.0, "q5km": 0.93, "q6k": 0.97, "iq2m": 0.70}
_LLAMA_KV = {"f16": 160.0, "q8_0": 85.0, "q5_0": 55.0, "q4_0": 45.0}


def _llama(point: Row, generator: np.random.Generator) -> Row:
    quant, kv, drafts = point["model_file"], point["ctk"], point["draft_max"]
    context, slots, chunk = point["n_ctx"], point["np"], point["batch"]
    flash = point["fa"] == "fa"
    gib: Row = {
        "weights_gib": round(_LLAMA_WEIGHTS[quant] * 1.013, 2),
        "kv_bytes_per_token": _LLAMA_KV[kv] * 1024,
    }
    if kv != "f16" and not flash:
        return {**_refused("context", 6.0), "weights_gib": gib["weights_gib"]}
    if drafts >= 8 and slots == 4:
        return _refused("args", 2.0)
    capacity = 15.6 - 0.55
    boot = 5 + gib["weights_gib"] / 1.8
    budget = capacity - gib["weights_gib"]
    if budget < 0:
        return {
            "outcome": "oom_weights",
            "phase": "weights",
            "shortfall_gib": round(-budget, 2),
            "boot_s": 4.0,
        }
    budget -= gib["kv_bytes_per_token"] * context * (1 + 0.5 * (slots - 1)) / GIB
    if budget < 0:
        return {
            **gib,
            "outcome": "oom_kv_cache",
            "phase": "kv",
            "shortfall_gib": round(-budget, 2),
            "boot_s": round(boot * 0.8, 1),
        }
    compute = 0.18 + chunk / 1024 * 0.35 + 0.06 * slots
    compute += 0.0 if flash else chunk / 1024 * context / 65536 * 0.4
    gib["compute_gib"] = round(compute, 3)
    budget -= compute
    if budget < 0:
        return {
            **gib,
            "outcome": "oom_compute",
            "phase": "compute",
            "shortfall_gib": round(-budget, 2),
            "boot_s": round(boot * 0.9, 1),
        }
    head = 0.0 if not drafts else 0.62 + 0.02 * drafts + context * 6 * 1024 / GIB
    budget -= head
    if budget < 0:
        return {
            **gib,
            "outcome": "oom_draft_head",
            "phase": "draft",
            "shortfall_gib": round(-budget, 2),
            "boot_s": round(boot, 1),
        }
    gib["draft_gib"] = round(head, 3)
    first = {"f16": 0.82, "q8_0": 0.815, "q5_0": 0.79, "q4_0": 0.75}[kv]
    first -= {"iq2m": 0.06, "q3km": 0.02}.get(quant, 0.0)
    shares = _shares(first, 0.035, drafts)
    step = gib["weights_gib"] / (420 * _LLAMA_SPEED[quant])
    step += 8192 * gib["kv_bytes_per_token"] / GIB / 330 * (1.0 if flash else 1.5)
    step += 0.0009 + 0.0011 * drafts + 0.0006 * (slots - 1)
    return {**gib, **_speed(step, shares, generator), "boot_s": round(boot + 1.5, 1)}


LLAMA16 = Recipe(
    name="llama16",
    axes={
        "model_file": _axis("weights", False, list(_LLAMA_WEIGHTS)),
        "ctk": _axis("kv_dtype", False, list(_LLAMA_KV)),
        "n_ctx": _axis("context", True, [6144, 12288, 24576, 40960, 57344, 81920, 114688, 163840]),
        "draft_max": _axis("draft_length", True, [0, 1, 2, 3, 4, 6, 8]),
        "np": _axis("parallel", True, [1, 2, 4]),
        "batch": _axis("prefill_chunk", True, [256, 512, 2048, 4096]),
        "fa": _axis("backend", False, ["fa", "plain"]),
    },
    known={
        "capacity_gib": 15.6,
        "weights_gib": _LLAMA_WEIGHTS,
        "kv_kib_per_token": _LLAMA_KV,
    },
    boot=_llama,
)

# --- vLLM-like, 80 GB -----------------------------------------------------------------------------

_PAGED_WEIGHTS = {"fp8-dyn": 67.0, "w4a16": 36.5, "nvfp4": 39.8}
_PAGED_KV = {"auto": 320.0, "fp8": 160.0}
_GRAPHS = {"none": 0.0, "decode-16": 0.45, "full-32": 1.1, "full-256": 5.2}


def _paged(point: Row, generator: np.random.Generator) -> Row:
    checkpoint, cache, method = point["checkpoint"], point["cache"], point["spec"]
    drafts = point["k"] or 0
    graphs, share, context = point["capture"], point["mem"], point["max_len"]
    batch, sequences, kernel = point["batched"], point["seqs"], point["kernel"]
    refused = (
        (kernel == "tri" and cache == "fp8")
        or (kernel == "flash" and checkpoint == "nvfp4")
        or (method == "eagle" and graphs == "full-256")
        or (drafts == 5 and graphs == "full-32")
        or batch < sequences * (1 + drafts) * 4
    )
    if refused:
        return _refused("config", 11.0)
    capacity = 79.3
    budget = share * capacity - 1.4
    size = _PAGED_WEIGHTS[checkpoint] * 1.008
    head = {"off": 0.0, "ngram": 0.0, "mtp": 1.9, "eagle": 2.6}[method]
    compute = 0.5 + batch / 1024 * 0.21 + sequences / 64 * 0.3
    gib: Row = {"weights_gib": round(size, 2), "compute_gib": round(compute, 2)}
    if budget < size + compute + head:
        return {
            **gib,
            "outcome": "oom_weights" if budget < size else "oom_activation_profiling",
            "phase": "weights" if budget < size else "profiling",
            "shortfall_gib": round(size + compute + head - budget, 2),
            "boot_s": 60.0,
        }
    per_token = _PAGED_KV[cache] * 1024 * (1.06 if method == "mtp" else 1.0)
    gib["kv_bytes_per_token"] = per_token
    room = budget - size - compute - head
    pool = int(room * GIB / per_token / 16) * 16
    if pool < context:
        return {
            **gib,
            "outcome": "oom_kv_cache",
            "phase": "kv",
            "shortfall_gib": round((context - pool) * per_token / GIB, 2),
            "estimated_max_model_len": pool,
            "boot_s": 70.0,
        }
    outside = (1 - share) * capacity + 1.2
    graph = _GRAPHS[graphs] * (1 + 0.05 * drafts)
    if graph > outside:
        return {
            **gib,
            "outcome": "oom_cudagraph_capture",
            "phase": "capture",
            "shortfall_gib": round(graph - outside, 2),
            "boot_s": 110.0,
        }
    gib |= {"graph_gib": round(graph, 2), "draft_gib": head, "kv_pool_tokens": pool}
    if 49152 <= context <= 98304 and batch == 16384 and share >= 0.94:
        return {**gib, "outcome": "oom_runtime", "phase": "serving", "boot_s": 150.0}
    first = {"off": 0.0, "ngram": 0.45, "mtp": 0.86, "eagle": 0.81}[method]
    first -= 0.02 * (cache == "fp8")
    shares = _shares(first, {"ngram": 0.02, "mtp": 0.06, "eagle": 0.025}.get(method, 0.0), drafts)
    step = size / ({"fp8-dyn": 2300, "w4a16": 1750, "nvfp4": 2150}[checkpoint])
    step += 8192 * per_token / GIB / 1800 * {"flash": 1.0, "tri": 1.1}[kernel]
    wide = 1 + drafts > 4 and graphs == "decode-16"
    step += 0.011 if graphs == "none" or wide else 0.0015
    step += drafts * {"ngram": 0.0001, "mtp": 0.0016, "eagle": 0.0011}.get(method, 0.0)
    step *= 1.03 if sequences >= 64 else 1.0
    return {**gib, **_speed(step, shares, generator), "boot_s": round(120 + 8 * graph, 1)}


PAGED80 = Recipe(
    name="paged80",
    axes={
        "checkpoint": _axis("weights", False, list(_PAGED_WEIGHTS)),
        "cache": _axis("kv_dtype", False, list(_PAGED_KV)),
        "max_len": _axis(
            "context", True, [4096, 16384, 32768, 49152, 65536, 98304, 131072, 196608]
        ),
        "spec": _axis("draft_method", False, ["off", "ngram", "mtp", "eagle"]),
        "k": _axis("draft_length", True, [1, 3, 5]),
        "capture": _axis("graphs", False, list(_GRAPHS)),
        "mem": _axis("memory_fraction", True, [0.90, 0.94, 0.97]),
        "batched": _axis("prefill_chunk", True, [1024, 4096, 16384]),
        "seqs": _axis("sequences", True, [16, 64]),
        "kernel": _axis("backend", False, ["flash", "tri"]),
    },
    known={
        "capacity_gib": 79.3,
        "weights_gib": _PAGED_WEIGHTS,
        "kv_kib_per_token": _PAGED_KV,
    },
    boot=_paged,
    # A slice, so that the table stays small.
    skip=lambda point: point["kernel"] == "tri" and point["seqs"] == 64,
    blank=lambda p: ("k",) if p["spec"] == "off" else (),
)

# --- memory never binds ---------------------------------------------------------------------------


def _roomy(point: Row, generator: np.random.Generator) -> Row:
    weights, kernel, drafts = point["file"], point["attn"], point["spec_tokens"]
    if kernel == "c" and point["kv"] == "q4":
        return _refused("config", 4.0)
    if drafts == 4 and point["threads"] == 2:
        return _refused("config", 4.0)
    size = {"small": 0.8, "medium": 1.7, "large": 2.9}[weights]
    step = size / {"small": 200, "medium": 290, "large": 270}[weights] + 0.001
    step += {"a": 0.0, "b": 0.0009, "c": -0.0003}[kernel]
    step *= {1: 1.5, 2: 1.12, 4: 1.0, 8: 0.97, 16: 1.2}[point["threads"]]
    step *= {"f16": 1.0, "q8": 0.97, "q4": 1.04}[point["kv"]] * (1 + 0.012 * point["level"])
    # Longer windows are slower here, so that the front has more than one point.
    step *= 1 + 0.08 * np.log2(point["window"] / 2048)
    step += 0.0007 * drafts
    gib: Row = {"weights_gib": size, "kv_bytes_per_token": 24576.0, "compute_gib": 0.2}
    return {**gib, **_speed(step, _shares(0.7, 0.05, drafts), generator), "boot_s": 12.0}


ROOMY = Recipe(
    name="roomy",
    axes={
        "file": _axis("weights", False, ["small", "medium", "large"]),
        "kv": _axis("kv_dtype", False, ["f16", "q8", "q4"]),
        "window": _axis("context", True, [2048, 4096, 8192, 16384, 32768]),
        "spec_tokens": _axis("draft_length", True, [0, 1, 2, 3, 4]),
        "attn": _axis("backend", False, ["a", "b", "c"]),
        "threads": _axis(None, True, [1, 2, 4, 8, 16]),
        "level": _axis("other", True, [0, 1, 2, 3]),
    },
    known={"capacity_gib": 64.0, "weights_gib": {"small": 0.8, "medium": 1.7, "large": 2.9}},
    boot=_roomy,
)


def _labels(_: Row, generator: np.random.Generator) -> Row:
    outcome = generator.choice(
        ["measured", "oom_kv_cache", "unsupported_combination", "oom_compute"],
        p=[0.5, 0.2, 0.2, 0.1],
    )
    if outcome != "measured":
        phase = {"oom_kv_cache": "kv", "oom_compute": "compute"}.get(str(outcome), "config")
        return {"outcome": outcome, "phase": phase, "boot_s": 20.0}
    rate = float(np.exp(generator.normal(4.5, 0.35)))
    return {"outcome": "measured", "phase": "ready", "decode_tok_s": round(rate, 2), "boot_s": 30.0}


LABELS = Recipe(
    name="labels",
    axes={
        "weights": _axis("weights", False, ["a", "b", "c", "d"]),
        "kv": _axis("kv_dtype", False, ["p", "q", "r"]),
        "context": _axis("context", True, [4096, 8192, 16384, 32768, 65536, 131072]),
        "drafts": _axis("draft_length", True, [0, 1, 2, 3, 4]),
        "graphs": _axis("graphs", False, ["eager", "some", "all"]),
        "chunk": _axis("prefill_chunk", True, [512, 1024, 2048, 4096]),
    },
    known={},
    boot=_labels,
)

RECIPES = (LLAMA16, PAGED80, ROOMY, LABELS)


def main() -> None:
    """Write all tables into a folder."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "tables"
    folder.mkdir(parents=True, exist_ok=True)
    for recipe in RECIPES:
        recipe.write(folder)
        print(f"{folder / recipe.name}.csv.gz")


if __name__ == "__main__":
    main()
