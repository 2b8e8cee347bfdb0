"""How often the interval covers the true median, and whether what is wrong is doubted.

    python benchmarks/coverage/run.py [--servers 1000] [--seed 1] [--out results.json]

Simulated servers of five kinds are measured by the protocol itself: `Repetition` says what to send
next, and the speeds go through `summarise` and `doubts`, as in a study. README.md says what the
servers do and what counts as right.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from sweeper.core.protocol import Finished, MeasureStep, Repetition, WarmUpStep
from sweeper.core.stats import Doubt
from sweeper.core.workload import Repeats

SHORT_FASTER = 1.05
"""A short answer is faster than a full one: it fills less of the context."""
SHORT_NOISIER = 1.2
SHARE_OF_FULL = 256 / 2000
"""How much of a full answer a short one is, in tokens and in time."""
NOISE = (0.01, 0.03)
WAITED = 0.01
SHAPES = ("normal", "uniform", "laplace", "skewed")

Slowness = Callable[[int, float], float]
"""The share of its speed that a server has in its nth request, so many full answers after start."""


def _none(_run: int, _at: float) -> float:
    return 1.0


@dataclass(slots=True)
class Server:
    """A server whose steady median is `speed`; every request moves its time on."""

    chance: np.random.Generator
    shape: str
    noise: float
    speed: float
    slowness: Slowness = _none
    cold: Callable[[int], float] = lambda _run: 0.0
    runs: int = 0
    at: float = 0.0

    def answer(self, *, short: bool) -> float:
        """Return the decode speed of the next request."""
        share = self.slowness(self.runs, self.at)
        self.runs += 1
        self.at += SHARE_OF_FULL if short else 1.0
        deviation = self._deviation() * self.noise * (SHORT_NOISIER if short else 1.0)
        return self.speed * share * (SHORT_FASTER if short else 1.0) * max(1 + deviation, 0.05)

    def _deviation(self) -> float:
        """Return a draw of median 0 and standard deviation 1."""
        match self.shape:
            case "normal":
                return float(self.chance.normal())
            case "uniform":
                return float(self.chance.uniform(-(3**0.5), 3**0.5))
            case "laplace":
                return float(self.chance.laplace(scale=0.5**0.5))
            case _:  # a long tail of slow runs, without being two kinds of runs
                return float(np.log(2) - self.chance.exponential())


def stationary(chance: np.random.Generator) -> Server:
    """Return a server with noise and nothing else."""
    return Server(
        chance=chance,
        shape=str(chance.choice(SHAPES)),
        noise=chance.uniform(*NOISE),
        speed=float(np.exp(chance.uniform(np.log(5), np.log(500)))),
    )


def warming(chance: np.random.Generator) -> Server:
    """Return one that is 10-40 % slower at first and steady after 2-6 requests."""
    server = stationary(chance)
    depth, length = chance.uniform(0.1, 0.4), int(chance.integers(2, 7))
    form = str(chance.choice(["ramp", "decay", "step"]))

    def slowness(run: int, _at: float) -> float:
        match form:
            case "ramp":
                return 1 - depth * max(1 - run / length, 0)
            case "decay":  # a twentieth is left after so many requests
                return 1 - depth * float(np.exp(-3 * run / length))
            case _:
                return 1 - depth if run < length else 1.0

    server.slowness = slowness
    server.cold = lambda run: 1 - slowness(run, 0.0)
    return server


def drifting(chance: np.random.Generator) -> Server:
    """Return one that loses (or gains) 5-15 % over the time of ten full answers, and goes on."""
    server = stationary(chance)
    total, sign = chance.uniform(0.05, 0.15), 1 if chance.random() < 0.25 else -1

    def slowness(_run: int, at: float) -> float:
        return float((1 + total) ** (sign * at / 10))

    server.slowness = slowness
    return server


def bimodal(chance: np.random.Generator) -> Server:
    """Return one with two speeds 10-40 % apart, each 30-70 % of runs, at random or in blocks."""
    server = stationary(chance)
    apart, slow = chance.uniform(0.1, 0.4), chance.uniform(0.3, 0.7)
    block = 1 if chance.random() < 0.5 else int(chance.integers(2, 5))
    state = {"mode": False, "left": 0}

    def slowness(_run: int, _at: float) -> float:
        if state["left"] == 0:
            state["mode"], state["left"] = bool(chance.random() < slow), block
        state["left"] -= 1
        return 1 - apart if state["mode"] else 1.0

    server.slowness = slowness
    return server


def heavy(chance: np.random.Generator) -> Server:
    """Return one of which 10-20 % of the runs are 1.3-3 times slower."""
    server = stationary(chance)
    share = chance.uniform(0.1, 0.2)

    def slowness(_run: int, _at: float) -> float:
        return 1 / chance.uniform(1.3, 3.0) if chance.random() < share else 1.0

    server.slowness = slowness
    return server


KINDS = {
    "stationary": stationary,
    "warming": warming,
    "drifting": drifting,
    "bimodal": bimodal,
    "heavy-tailed": heavy,
}
RIGHT = {
    "warming": {Doubt.WARMING},
    "drifting": {Doubt.DRIFTING},
    "bimodal": {Doubt.BIMODAL},
    "heavy-tailed": {Doubt.OUTLIERS},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What the protocol made of one server."""

    covers: bool
    doubts: tuple[Doubt, ...]
    ended: Finished
    n: int
    warmups: int
    cold: float
    """How much slower than steady a warming server still was when measuring began, as a share."""


def measured(server: Server, repeats: Repeats) -> Result:
    """Measure a server to the end, as a study does."""
    repetition = Repetition(repeats)
    warm: list[float] = []
    timed: list[float] = []
    while not isinstance(step := repetition.next(warm, timed), Finished):
        match step:
            case WarmUpStep(short=short):
                warm.append(server.answer(short=short))
            case MeasureStep(short=short):
                timed.append(server.answer(short=short))
    found = repetition.summary(timed, repetition.doubts(warm, timed), warmup=warm)
    return Result(
        covers=found.low <= server.speed <= found.high,
        doubts=found.doubts,
        ended=step,
        n=len(timed),
        warmups=len(warm),
        cold=server.cold(len(warm)),
    )


def right(kind: str, result: Result) -> bool:
    """Tell whether the right doubt is there; or that none is due, as the warm-up was waited for.

    It was where the server was within 1 % of its steady speed when measuring began.
    """
    waited = kind == "warming" and result.cold <= WAITED
    return waited or bool(RIGHT[kind].intersection(result.doubts))


def run(servers: int, seed: int, repeats: Repeats) -> dict[str, dict[str, object]]:
    """Return the figures of every kind."""
    figures: dict[str, dict[str, object]] = {}
    for number, (kind, build) in enumerate(KINDS.items()):
        results = [
            measured(build(np.random.default_rng([seed, number, i])), repeats)
            for i in range(servers)
        ]
        doubts = Counter(doubt.value for each in results for doubt in each.doubts)
        figures[kind] = {
            "servers": servers,
            "covered": sum(each.covers for each in results) / servers,
            "right": (
                None if kind == "stationary"
                else sum(right(kind, each) for each in results) / servers
            ),
            "waited_for": (
                None
                if kind != "warming"
                else sum(each.cold <= WAITED for each in results) / servers
            ),
            "any_doubt": sum(bool(each.doubts) for each in results) / servers,
            "doubts": {name: count / servers for name, count in sorted(doubts.items())},
            "ended": {
                name: count / servers
                for name, count in sorted(Counter(each.ended.value for each in results).items())
            },
            "mean_measured": float(np.mean([each.n for each in results])),
            "mean_warmups": float(np.mean([each.warmups for each in results])),
        }  # fmt: skip
    return figures


def main() -> None:
    """Run all kinds, print the figures and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--servers", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    options = parser.parse_args()
    repeats = Repeats()
    began = time.perf_counter()
    figures = run(options.servers, options.seed, repeats)
    took_s = time.perf_counter() - began
    for kind, each in figures.items():
        print(kind, json.dumps(each))
    print(f"{took_s:.0f} s")
    data = {"seed": options.seed, "repeats": asdict(repeats), "kinds": figures}
    options.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
