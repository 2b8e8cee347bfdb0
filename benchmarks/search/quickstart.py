"""The quickstart study on the real engine, searched by two samplers, several times over.

    python benchmarks/search/quickstart.py [REPEATS] [BOOTS]      # 5 and 10: about half an hour

Each run is a study of its own in a temporary folder: llama.cpp on the CPU under the quickstart's
memory limit, without the study's guesses, so that the sampler alone chooses, and with three short
answers a boot instead of six to eight. Samplers take turns. Written to quickstart.json: boots that
ended infeasible, the hypervolume of each run's front above the reference point that all runs share,
the fronts, and every boot. Speeds are those of this machine.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from sweeper.core.front import hypervolume
from sweeper.core.outcome import Attempt, Infeasible, Measured, name
from sweeper.core.standing import front_among
from sweeper.record.attempts import Attempts

HERE = Path(__file__).resolve().parent
SAMPLERS = ("frontier", "tpe")


def run(folder: Path, sampler: str, seed: int, boots: int) -> list[Attempt]:
    """Run one study and return its attempts; raises CalledProcessError where it fails."""
    name = f"quickstart-{sampler}-{seed}"
    subprocess.run(  # noqa: S603 - our own program
        [
            sys.executable, "-m", "sweeper", "+study=quickstart", f"name={name}", f"seed={seed}",
            f"sampler.name={sampler}", f"studies_dir={folder}", "tracking=off", "enqueue=[]",
            "confirm.rounds=0", "budget.minutes=null", f"budget.boots={boots}", "warm_start=false",
            "sampler.stop_share=null", "workload.max_tokens=64",
            "workload.repeats={least: 3, most: 3, warmup_min: 1, warmup_max: 1, interval: null, "
            "racing: false}",
        ],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ,
    )  # fmt: skip
    return Attempts(folder / name / "attempts").all()


def main(repeats: int, boots: int) -> None:
    """Run everything and write quickstart.json."""
    runs: dict[str, list[list[Attempt]]] = {each: [] for each in SAMPLERS}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(repeats):
            # In turns and in changing order, so that a busy minute falls on both.
            for sampler in SAMPLERS if repeat % 2 == 0 else SAMPLERS[::-1]:
                attempts = run(Path(folder), sampler, 100 + repeat, boots)
                runs[sampler].append(attempts)
                bad = sum(isinstance(each.outcome, Infeasible) for each in attempts)
                print(f"{sampler}, repeat {repeat + 1}: {bad} of {len(attempts)} infeasible")
            # After each repeat, so that a run that is stopped leaves its figures.
            _write(runs, boots)


def _write(runs: dict[str, list[list[Attempt]]], boots: int) -> None:
    measured = [
        each.outcome
        for several in runs.values()
        for attempts in several
        for each in attempts
        if isinstance(each.outcome, Measured)
    ]
    reference = (
        0.5 * max(each.decode_tok_s.median for each in measured),
        math.log2(min(each.context.window_tokens for each in measured)) - 1,
    )
    repeats = min(len(several) for several in runs.values())
    result: dict[str, Any] = {"repeats": repeats, "boots": boots, "reference": reference}
    for sampler, several in runs.items():
        fronts = [
            [
                (each.outcome.decode_tok_s.median, each.outcome.context.window_tokens)
                for each in front_among(attempts)
                if isinstance(each.outcome, Measured)
            ]
            for attempts in several
        ]
        volumes = [
            hypervolume([(speed, math.log2(tokens)) for speed, tokens in front], reference)
            for front in fronts
        ]
        infeasible = [
            sum(isinstance(each.outcome, Infeasible) for each in attempts) for attempts in several
        ]
        result[sampler] = {
            "infeasible": infeasible,
            "infeasible_median": statistics.median(infeasible),
            "hypervolume": volumes,
            "hypervolume_median": statistics.median(volumes),
            "fronts": fronts,
            "boots": [[_boot(each) for each in attempts] for attempts in several],
        }
    (HERE / "quickstart.json").write_text(json.dumps(result, indent=1) + "\n")


def _boot(attempt: Attempt) -> dict[str, Any]:
    """What one boot was and gave: all that another reading of the runs needs."""
    outcome = attempt.outcome
    if isinstance(outcome, Measured):
        gave = {
            "decode_tok_s": outcome.decode_tok_s.median,
            "context_tokens": outcome.context.window_tokens,
        }
    else:
        gave = {"ending": name(outcome)}
    return {"point": dict(attempt.point), **gave}


if __name__ == "__main__":
    main(*(int(each) for each in (sys.argv[1:] + ["5", "10"][len(sys.argv) - 1 :])))
