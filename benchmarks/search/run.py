"""Plays every sampler against every table and draws what came of it.

    python benchmarks/search/run.py [seeds=20] [budget=150] [sampler=NAME,...] [table=NAME,...]

Results are added to results.json one sampler and table at a time, and those that are there already
with as many seeds and boots are not played again: an interrupted run goes on where it was. Figures
are drawn from results.json, so `seeds=0` only draws.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

from sweeper.replay import SAMPLERS, play, read_table, summary

mpl.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
MARKS = "<!-- results -->", "<!-- end of results -->"
RESULTS = HERE / "results.json"
COLOURS = dict(
    zip(
        SAMPLERS,
        ("#d1495b", "#00798c", "#66a5ad", "#edae49", "#8d96a3", "#b08ea2", "#5c5c5c"),
        strict=True,
    )
)


def main() -> None:
    """Play what is not played yet, then draw."""
    stated = dict(each.split("=", 1) for each in sys.argv[1:])
    seeds, budget = int(stated.get("seeds", 20)), int(stated.get("budget", 150))
    tables = sorted((HERE / "tables").glob("*.csv.gz"))
    if "table" in stated:
        names = stated["table"].split(",")
        tables = [path for path in tables if path.name.removesuffix(".csv.gz") in names]
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for path in tables if seeds else []:
        table = read_table(path)
        for sampler in stated.get("sampler", ",".join(SAMPLERS)).split(","):
            key = f"{table.name}/{sampler}"
            done = results.get(key)
            if done and done["seeds"] >= seeds and done["budget"] >= budget:
                continue
            began = time.perf_counter()
            games = [play(table, sampler, seed=seed, budget=budget) for seed in range(seeds)]
            scores = np.array([game.scores for game in games])
            failed = np.array([np.cumsum([*g.failed, *[False] * budget][:budget]) for g in games])
            quartiles = np.percentile(scores, (25, 50, 75), axis=0)
            results[key] = {
                **summary(table, sampler, games, budget),
                "score_10": round(float(np.median(scores[:, min(9, budget - 1)])), 4),
                "score_20": round(float(np.median(scores[:, min(19, budget - 1)])), 4),
                "score_50": round(float(np.median(scores[:, min(49, budget - 1)])), 4),
                "curve": [[round(float(v), 4) for v in line] for line in quartiles],
                "failures": [float(v) for v in np.median(failed, axis=0)],
            }
            RESULTS.write_text(json.dumps(results, indent=None, sort_keys=True) + "\n")
            shown = {k: v for k, v in results[key].items() if k not in ("curve", "failures")}
            print(f"{time.perf_counter() - began:6.0f} s  {shown}", flush=True)
    draw(results)
    write(results)


def write(results: dict[str, Any]) -> None:
    """Put the medians between the marks in the README."""
    rows = [
        "| table | sampler | boots to 90 / 95 / 99 % | score at 10 / 20 / 50 / 150 "
        "| failed of 30 | failed of 150 | wrong skips |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in sorted({key.partition("/")[0] for key in results}):
        for sampler in SAMPLERS:
            result = results.get(f"{name}/{sampler}")
            if result is None:
                continue
            budget = result["budget"]
            boots = [
                f"{result[f'boots_{share}']:g}"
                if result[f"boots_{share}"] <= budget
                else f">{budget}"
                for share in (90, 95, 99)
            ]
            scores = [result[key] for key in ("score_10", "score_20", "score_50", "score")]
            rows.append(
                f"| {name} | {sampler} | {' / '.join(boots)} "
                f"| {' / '.join(f'{score:.2f}' for score in scores)} "
                f"| {result['infeasible_first_30']:g} | {result['infeasible']:g} "
                f"| {result['wrong_skips']} |"
            )
    readme = HERE / "README.md"
    before, _, rest = readme.read_text().partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    text = "\n".join([MARKS[0], "", *rows, "", MARKS[1]])
    readme.write_text(f"{before}{text}{after}")


def draw(results: dict[str, Any]) -> None:
    """Draw for each table the score and the failed boots, medians with quartiles as bands."""
    for name in sorted({key.partition("/")[0] for key in results}):
        figure, (above, below) = plt.subplots(
            2, 1, figsize=(8, 7), height_ratios=(3, 1.2), sharex=True, layout="constrained"
        )
        for sampler in SAMPLERS:
            result = results.get(f"{name}/{sampler}")
            if result is None:
                continue
            boots = np.arange(1, result["budget"] + 1)
            low, middle, high = result["curve"]
            colour = COLOURS[sampler]
            width = 2.4 if sampler == "frontier" else 1.3
            above.plot(boots, middle, color=colour, lw=width, label=sampler)
            above.fill_between(boots, low, high, color=colour, alpha=0.13, lw=0)
            below.plot(boots, result["failures"], color=colour, lw=width)
        above.set(ylabel="share of the hypervolume", ylim=(0, 1.02), title=name)
        above.grid(alpha=0.3)
        above.legend(loc="lower right", frameon=False)
        below.set(xlabel="boots", ylabel="of these failed", xlim=(1, None), ylim=(0, None))
        below.grid(alpha=0.3)
        figure.savefig(HERE / f"{name}.png", dpi=110)
        plt.close(figure)


if __name__ == "__main__":
    main()
