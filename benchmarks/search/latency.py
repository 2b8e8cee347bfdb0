"""How long the default search takes to choose and to learn: ask + tell, trial by trial.

    python benchmarks/search/latency.py [TRIALS]      # 1,000: some three minutes

Two spaces: a table of 29,160 points, played to the end of so many trials, and a declared space of
about 200,000 points whose outcomes are made up on the way. Written to latency.json: medians and
ninth deciles, in ms of wall and of processor time, of the 50 trials before each milestone.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optuna

from sweeper.core.evidence import Evidence, Role
from sweeper.core.space import Axis, Space
from sweeper.replay import read_table
from sweeper.search.frontier import EVIDENCE, FrontierSampler
from sweeper.search.game import Player

HERE = Path(__file__).resolve().parent
MILESTONES = (50, 100, 200, 500, 1000)

LARGE = {
    "quant": (Role.WEIGHTS, ("q3", "q4", "q5", "q6", "q8")),
    "context": (Role.CONTEXT, tuple(8192 * each for each in range(1, 25))),
    "kv": (Role.KV_DTYPE, ("f16", "q8_0", "q5_1", "q4_0")),
    "n_max": (Role.DRAFT_LENGTH, (0, 1, 2, 3, 4, 6, 8)),
    "ubatch": (Role.PREFILL_CHUNK, (128, 256, 512, 1024, 2048)),
    "backend": (Role.BACKEND, ("a", "b", "c")),
    "other": (Role.OTHER, (0, 1, 2, 3)),
}
GIB = 2.0**30


def table_game(trials: int) -> Callable[[], None]:
    """Return one round of ask and tell against the table of 29,160 points."""
    table = read_table(HERE / "tables" / "vllm_mtp_24g.csv.gz")
    player = Player(table, "frontier", 0)
    assert trials <= len(table.codes)

    def once() -> None:
        row = player.ask()
        assert row is not None
        player.tell(row, float(table.decode_tok_s[row]) if table.measured[row] else None)

    return once


def large_game() -> Callable[[], None]:
    """Return one round of ask and tell in the large space; what boots come to is made up."""
    axes = tuple(
        Axis(name=name, values=values, ordered=not isinstance(values[0], str), sets=(name,))
        for name, (_, values) in LARGE.items()
    )
    roles = {name: role for name, (role, _) in LARGE.items()}
    sampler = FrontierSampler(Space(axes=axes), roles=roles, seed=0)
    study = optuna.create_study(directions=["maximize", "maximize"], sampler=sampler)
    chance = np.random.default_rng(0)

    def once() -> None:
        trial = study.ask()
        point: dict[str, Any] = {}
        for axis in axes:
            if axis.ordered:
                point[axis.name] = axis.values[
                    trial.suggest_int(axis.name, 0, len(axis.values) - 1)
                ]
            else:
                point[axis.name] = trial.suggest_categorical(axis.name, axis.values)
        weights = 10.0 + 2.0 * LARGE["quant"][1].index(point["quant"])
        cache = (
            point["context"] / 2**20 * (64.0, 34.0, 24.0, 18.0)[LARGE["kv"][1].index(point["kv"])]
        )
        shown = {
            "weights_bytes": weights * GIB,
            "kv_bytes_per_token": cache * GIB / point["context"],
        }
        lacks = weights + cache + point["ubatch"] / 1024 + (point["n_max"] > 0) - 22.0
        if lacks > 0:
            evidence = Evidence(
                outcome="oom_kv_cache", kind="infeasible", shortfall_bytes=lacks * GIB, **shown
            )
            trial.set_user_attr(EVIDENCE, evidence.as_json())
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            return
        acceptance = tuple(0.8**each for each in range(1, point["n_max"] + 1))
        rate = 900 / weights * (1 + sum(acceptance)) / (1 + 0.04 * point["n_max"])
        rate *= float(np.exp(chance.normal(0, 0.02))) * (1 + 0.1 * (point["backend"] == "b"))
        evidence = Evidence(
            outcome="measured", kind="measured", decode_tok_s=rate, acceptance=acceptance, **shown
        )
        trial.set_user_attr(EVIDENCE, evidence.as_json())
        study.tell(trial, [rate, float(np.log2(point["context"]))])

    return once


def timed(once: Callable[[], None], trials: int) -> dict[str, dict[str, float]]:
    """Return the medians and ninth deciles before each milestone, in ms."""
    walls, cpus = [], []
    found = {}
    for number in range(1, trials + 1):
        wall, cpu = time.perf_counter(), time.process_time()
        once()
        walls.append(1000 * (time.perf_counter() - wall))
        cpus.append(1000 * (time.process_time() - cpu))
        if number in MILESTONES:
            found[str(number)] = {
                "wall_ms": round(float(np.median(walls[-50:])), 1),
                "wall_90_ms": round(float(np.quantile(walls[-50:], 0.9)), 1),
                "cpu_ms": round(float(np.median(cpus[-50:])), 1),
            }
            print(number, found[str(number)], flush=True)
    return found


def main(trials: int) -> None:
    """Play both and write latency.json."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    load = os.getloadavg()[0]
    points = int(np.prod([len(values) for _, values in LARGE.values()]))
    result = {
        "processors": os.cpu_count(),
        "load_before": round(load, 2),
        "29,160 points": timed(table_game(trials), trials),
        f"{points:,} points": timed(large_game(), min(trials, 500)),
    }
    (HERE / "latency.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
