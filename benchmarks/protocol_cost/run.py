"""How many tokens the adaptive protocol generates for the same front as ten full answers a trial.

    python benchmarks/protocol_cost/run.py [--studies 20] [--first-seed 1] [--out results.json]

Simulated studies: configurations in the order of a search, each measured twice from the same truth,
once by ten full answers, once by `Repetition` with what the study knew by then. README.md says what
is simulated and what "the same front" means.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from sweeper.core.front import Entry, pareto_front
from sweeper.core.protocol import Finished, Noise, Repetition, WarmUpStep
from sweeper.core.stats import Summary, summarise
from sweeper.core.workload import Repeats

MAX_TOKENS = 2000
FIXED_RUNS = 10
TRIALS = 60
SAME = 0.01

WEIGHTS_GB = (9.0, 11.0, 13.0, 16.0)
CACHE_BITS = (4.5, 8.5, 16.0)
WINDOWS = (8_192, 16_384, 32_768, 65_536, 131_072, 262_144)
DRAFTS = (0, 1, 2, 3, 4, 6, 8)
BATCHES = (256, 512, 1024, 2048)
MEMORY_GB = 24.0
AXES = (WEIGHTS_GB, CACHE_BITS, WINDOWS, DRAFTS, BATCHES)

Config = tuple[int, ...]
"""The place of each axis' value among its values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What differs between the variants: noise between runs, and how the search proposes."""

    noise: float = 0.01
    short_noisier: float = 1.2
    greed: float = 0.5
    """How often a proposal is a neighbour of the front, rather than drawn at random."""


BASE = "as asked"
VARIANTS = {
    BASE: Setting(),
    "random order": Setting(greed=0.0),
    "greedy search": Setting(greed=0.75),
    "noise 0.3 %": Setting(noise=0.003),
    "noise 2 %": Setting(noise=0.02),
    "short answers 3 times noisier": Setting(short_noisier=3.0),
}


class World:
    """A card, a model and its drafts: what fits, and how fast it is."""

    def __init__(self, chance: np.random.Generator, setting: Setting) -> None:
        self.chance = chance
        self.setting = setting
        self._speeds: dict[Config, float] = {}
        self.bandwidth_gb_s = chance.uniform(500, 1500)
        self.acceptance = chance.uniform(0.5, 0.85)
        self.draft_cost = chance.uniform(0.06, 0.2)
        self.dequantise = chance.uniform(0.0, 0.06, len(CACHE_BITS))
        self.batch = chance.uniform(0.0, 0.02, len(BATCHES))
        self.own = int(chance.integers(2**31))

    def fits(self, config: Config) -> bool:
        """Tell whether weights, cache, draft and buffers fit the card."""
        weights, bits, window, draft, batch = self._values(config)
        cache_gb = window * bits / 16 * 1.2e-4
        return weights + cache_gb + (1.2 if draft else 0.0) + batch * 4e-4 <= MEMORY_GB

    def speed(self, config: Config) -> float:
        """Return the true median decode tokens/s of full answers."""
        if config not in self._speeds:
            self._speeds[config] = self._speed(config)
        return self._speeds[config]

    def _speed(self, config: Config) -> float:
        weights, _, _, draft, _ = self._values(config)
        step = (weights / self.bandwidth_gb_s + 1e-3) * (1 + self.draft_cost * draft)
        tokens = sum(self.acceptance**i for i in range(draft + 1))
        slower = 1 + self.dequantise[config[1]] + self.batch[config[4]]
        # What no formula knows of a configuration: kernels, alignment.
        own = np.random.default_rng([self.own, *config]).normal(0, 0.01)
        return float(tokens / step / slower * np.exp(own))

    @staticmethod
    def _values(config: Config) -> tuple[float, float, int, int, int]:
        weights, bits, window, draft, batch = (
            axis[i] for axis, i in zip(AXES, config, strict=True)
        )
        return float(weights), float(bits), int(window), int(draft), int(batch)


@dataclass(slots=True)
class Server:
    """One boot: a few first requests are slower, short answers a little faster."""

    chance: np.random.Generator
    setting: Setting
    speed: float
    cold: int
    depth: float
    short_faster: float
    runs: int = 0
    tokens: int = 0

    def answer(self, *, short_tokens: int | None) -> float:
        """Return the decode speed of the next request, and count its tokens."""
        self.tokens += MAX_TOKENS if short_tokens is None else short_tokens
        share = 1 - self.depth if self.runs < self.cold else 1.0
        self.runs += 1
        if short_tokens is None:
            return float(self.speed * share * np.exp(self.chance.normal(0, self.setting.noise)))
        noise = self.chance.normal(0, self.setting.noise * self.setting.short_noisier)
        return float(self.speed * share * self.short_faster * np.exp(noise))


def searched(world: World, trials: int) -> list[Config]:
    """Return different configurations that fit, in the order of a search.

    A quarter at random, then at the setting's greed a neighbour of a member of the true front by
    then, with one or two axes changed, else one at random.
    """
    chance = world.chance
    found: list[Config] = []
    for _ in range(100_000):
        if len(found) == trials:
            break
        proposal: list[int] = [int(chance.integers(len(axis))) for axis in AXES]
        if len(found) >= trials // 4 and chance.random() < world.setting.greed:
            front = pareto_front([_entry(each, world.speed(each)) for each in found])
            changed = chance.choice(len(AXES), size=int(chance.integers(1, 3)), replace=False)
            base = front[int(chance.integers(len(front)))].label
            proposal = [proposal[i] if i in changed else value for i, value in enumerate(base)]
        config = tuple(proposal)
        if config not in found and world.fits(config):
            found.append(config)
    return found


def _entry(config: Config, speed: float) -> Entry[Config]:
    return Entry(label=config, objectives=(speed, float(WINDOWS[config[2]])))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What one configuration came to by one protocol."""

    config: Config
    summary: Summary
    tokens: int
    ended: Finished
    speeds: tuple[float, ...]


def _boot(world: World, config: Config, seed: Sequence[int]) -> Server:
    chance = np.random.default_rng([*seed, *config])
    return Server(
        chance=chance,
        setting=world.setting,
        speed=world.speed(config),
        cold=int(chance.integers(0, 4)),
        depth=chance.uniform(0.1, 0.4),
        short_faster=chance.uniform(0.95, 1.05),
    )


def fixed(world: World, config: Config, seed: Sequence[int]) -> Trial:
    """Measure by ten full answers of a warm server; the warm-up is not even counted."""
    server = _boot(world, config, seed)
    server.cold = 0
    speeds = tuple(server.answer(short_tokens=None) for _ in range(FIXED_RUNS))
    return Trial(
        config=config, summary=summarise(speeds), tokens=server.tokens, ended=Finished.MOST,
        speeds=speeds,
    )  # fmt: skip


def adaptive(
    world: World, config: Config, seed: Sequence[int], repeats: Repeats, before: Sequence[Trial]
) -> Trial:
    """Measure as a study does, with the front and the noise that it knows by then."""
    members = set(front_of(before))
    bar = max(
        (
            each.summary.low
            for each in before
            if each.config in members and each.config[2] >= config[2]
        ),
        default=0.0,
    )
    return _repeated(world, config, seed, repeats, before, bar)


def _repeated(
    world: World,
    config: Config,
    seed: Sequence[int],
    repeats: Repeats,
    before: Sequence[Trial],
    bar: float | None,
) -> Trial:
    noise = Noise.pooled([each.speeds for each in before])
    repetition = Repetition(repeats, noise=noise, bar=bar, max_tokens=MAX_TOKENS)
    server = _boot(world, config, seed)
    warm: list[float] = []
    timed: list[float] = []
    while not isinstance(step := repetition.next(warm, timed), Finished):
        speed = server.answer(short_tokens=repeats.warmup_tokens if step.short else None)
        (warm if isinstance(step, WarmUpStep) else timed).append(speed)
    return Trial(
        config=config,
        summary=repetition.summary(timed, repetition.doubts(warm, timed), warmup=warm),
        tokens=server.tokens,
        ended=step,
        speeds=tuple(timed),
    )


def front_of(trials: Sequence[Trial]) -> list[Config]:
    """Return the configurations on the front by the measured medians."""
    entries = [_entry(each.config, each.summary.median) for each in trials]
    return [entry.label for entry in pareto_front(entries)]


def shortfall(world: World, ours: Sequence[Config], theirs: Sequence[Config]) -> float:
    """Return the most that our front gives away, by the truth, beside any member of theirs.

    For each of theirs: how much slower our fastest member of at least its window truly is.
    """
    worst = 0.0
    for other in theirs:
        best = max((world.speed(each) for each in ours if each[2] >= other[2]), default=0.0)
        worst = max(worst, 1 - best / world.speed(other))
    return worst


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """One study by both protocols, in tokens of answers and shares of speed."""

    tokens: int
    confirmation_tokens: int
    fixed_tokens: int
    front: int
    fixed_front: int
    same_members: bool
    loss: float
    gain: float
    loss_to_truth: float
    fixed_loss_to_truth: float
    ended: dict[str, int]
    tokens_by_ending: dict[str, int]
    raced_on_front: int
    doubted: int
    covered: int
    believed: int


def study(seed: int, setting: Setting, repeats: Repeats) -> Study:
    """Run one study by both protocols."""
    world = World(np.random.default_rng(seed), setting)
    order = searched(world, TRIALS)
    by_ten = [fixed(world, config, (seed, 1)) for config in order]
    ours: list[Trial] = []
    for config in order:
        ours.append(adaptive(world, config, (seed, 2), repeats, ours))
    front, fixed_front = front_of(ours), front_of(by_ten)
    again = [_repeated(world, config, (seed, 3), repeats, ours, None) for config in front]
    truth = [
        entry.label for entry in pareto_front([_entry(each, world.speed(each)) for each in order])
    ]
    believed = [each for each in ours if each.ended is not Finished.RACED]
    spent: Counter[str] = Counter()
    for each in ours:
        spent[each.ended.value] += each.tokens
    return Study(
        tokens=sum(each.tokens for each in ours),
        confirmation_tokens=sum(each.tokens for each in again),
        fixed_tokens=sum(each.tokens for each in by_ten),
        front=len(front),
        fixed_front=len(fixed_front),
        same_members=set(front) == set(fixed_front),
        loss=shortfall(world, front, fixed_front),
        gain=shortfall(world, fixed_front, front),
        loss_to_truth=shortfall(world, front, truth),
        fixed_loss_to_truth=shortfall(world, fixed_front, truth),
        ended=dict(Counter(each.ended.value for each in ours)),
        tokens_by_ending=dict(spent),
        raced_on_front=sum(each.ended is Finished.RACED for each in ours if each.config in front),
        doubted=sum(bool(each.summary.doubts) for each in believed),
        covered=sum(
            each.summary.low <= world.speed(each.config) <= each.summary.high for each in believed
        ),
        believed=len(believed),
    )


def total(studies: Sequence[Study]) -> dict[str, object]:
    """Return what several studies come to."""
    fixed_tokens = sum(each.fixed_tokens for each in studies)
    believed = sum(each.believed for each in studies)
    ended: Counter[str] = Counter()
    spent: Counter[str] = Counter()
    for each in studies:
        ended.update(each.ended)
        spent.update(each.tokens_by_ending)
    return {
        "studies": len(studies),
        "ratio": sum(each.tokens for each in studies) / fixed_tokens,
        "ratio_worst": max(each.tokens / each.fixed_tokens for each in studies),
        "ratio_with_confirmation": sum(each.tokens + each.confirmation_tokens for each in studies)
        / fixed_tokens,
        "same_front": sum(max(each.loss, each.gain) <= SAME for each in studies),
        "same_members": sum(each.same_members for each in studies),
        "worst_loss": max(each.loss for each in studies),
        "worst_gain": max(each.gain for each in studies),
        "worst_loss_to_truth": max(each.loss_to_truth for each in studies),
        "worst_fixed_loss_to_truth": max(each.fixed_loss_to_truth for each in studies),
        "front": sum(each.front for each in studies) / len(studies),
        "trials_by_ending": {name: n / len(studies) for name, n in sorted(ended.items())},
        "tokens_by_ending": {name: n / fixed_tokens for name, n in sorted(spent.items())},
        "raced_on_front": sum(each.raced_on_front for each in studies),
        "doubted": sum(each.doubted for each in studies) / believed,
        "covered": sum(each.covered for each in studies) / believed,
    }


def main() -> None:
    """Run the studies of every variant, print what they come to and write everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--studies", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    options = parser.parse_args()
    repeats = Repeats()
    began = time.perf_counter()
    data: dict[str, object] = {"trials": TRIALS, "repeats": asdict(repeats)}
    for name, setting in VARIANTS.items():
        count = options.studies if name == BASE else math.ceil(options.studies / 2)
        seeds = range(options.first_seed, options.first_seed + count)
        studies = [study(seed, setting, repeats) for seed in seeds]
        found = total(studies)
        print(name, json.dumps(found))
        data[name] = {
            "setting": asdict(setting),
            "total": found,
            "studies": [asdict(each) for each in studies] if name == BASE else [],
        }
    print(f"{time.perf_counter() - began:.0f} s")
    options.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
