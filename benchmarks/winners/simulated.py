"""How often the members of final fronts boot, on simulated cards whose memory varies.

    python benchmarks/winners/simulated.py [--studies 100] [--boots 24] [--seed 0] [--out FILE]

Whole studies by the real search and the real confirmation; only a boot is a function. A card, a
model and its drafts are drawn at random, and each boot needs a normal amount of memory about what
the engine's adapter estimates, with a standard deviation of 0.5 to 3 % of the card. README.md says
what is simulated and what the columns mean. Nothing here says anything about hardware.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from sweeper.core.front import hypervolume
from sweeper.core.launch import Phase
from sweeper.core.outcome import (
    Attempt,
    Finding,
    Infeasible,
    InfeasibleName,
    Measured,
    Outcome,
    ProvenContext,
    Timings,
)
from sweeper.core.pairs import Pairs, Point
from sweeper.core.reliability import CERTAIN
from sweeper.core.space import Axis, Space
from sweeper.core.standing import front_among, reliability_of
from sweeper.core.stats import normal_cdf, summarise
from sweeper.core.study import Budget, Confirm, SamplerChoice, Study
from sweeper.core.workload import Workload
from sweeper.engines import EngineOptions, ModelFacts
from sweeper.engines.fake import Fake
from sweeper.job import Job
from sweeper.search.study import Proposal, Search, confirm, sweep

SPREADS = (0.005, 0.01, 0.02, 0.03)
MIB = 2**20
WORKLOAD = Workload(name="simulated", prompt="as if", max_tokens=64, proof_answer_tokens=32)
SPACE = Space(
    axes=(
        Axis(
            name="context",
            values=tuple(256 * round(16 * 2 ** (step / 8)) for step in range(33)),
            ordered=True,
            sets=("context",),
        ),
        Axis(name="kv_type", values=("f16", "q8_0", "q4_0"), ordered=False, sets=("kv_type",)),
        Axis(name="n_max", values=(0, 2, 4, 8), ordered=True, sets=("n_max",)),
        Axis(name="batch", values=(128, 512, 1024, 2048), ordered=True, sets=("batch",)),
    )
)


@dataclass(kw_only=True)
class World:
    """A card and a model: what points need of memory, and how fast they are."""

    seed: int
    spread: float
    chance: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.chance = np.random.default_rng([self.seed, int(self.spread * 1e4)])
        draw = self.chance.uniform
        self.capacity = draw(8_000, 32_000) * MIB
        self.params: dict[str, Any] = {
            "capacity_mib": self.capacity / MIB,
            "weights_mib": draw(0.35, 0.7) * self.capacity / MIB,
            "kv_kib_per_token": 2 ** draw(5.5, 8.0),
            "draft_mib": draw(0.02, 0.08) * self.capacity / MIB,
            "compute_mib": draw(100, 500),
        }
        self.acceptance, self.draft_cost = draw(0.5, 0.85), draw(0.03, 0.15)
        self.dequantise = dict(
            zip(("f16", "q8_0", "q4_0"), (0.0, *draw(0.01, 0.08, 2)), strict=True)
        )
        self.chunk = draw(0.0, 0.03)
        self.job = Job(
            study="simulated",
            engine=Fake(),
            params=self.params,
            options=EngineOptions(python=sys.executable),
            models={None: ModelFacts(name="m", path="", served_name="m", size_bytes=0, sha256="")},
            space=SPACE,
            workload=WORKLOAD,
            hardware=Pairs(hardware="simulated"),
            host=Pairs(cpu="simulated"),
        )

    def need(self, point: Point) -> float:
        """Return the mean need of a point in bytes."""
        footprint = self.job.engine.footprint(self.job.settings(point), self.job.model(point))
        return footprint.total_bytes

    def probability(self, point: Point) -> float:
        """Return how likely one boot of the point works: what only the simulation knows."""
        return normal_cdf((self.capacity - self.need(point)) / (self.spread * self.capacity))

    def speed(self, point: Point) -> float:
        """Return the decode rate of a point in tok/s."""
        n, accepted = int(str(point["n_max"])), self.acceptance
        tokens = (1 - accepted ** (n + 1)) / (1 - accepted)
        step = 1 + self.draft_cost * n + self.dequantise[str(point["kv_type"])]
        step += self.chunk * math.log2(2048 / int(str(point["batch"])))
        return 60 * tokens / step

    def boot(
        self, point: Point, *, number: int, trial: int, confirms: int | None = None,
        brief: bool = False,
    ) -> Attempt:  # fmt: skip
        """Return one boot of a point: measured, or out of memory."""
        needs = self.need(point) + self.chance.normal(0, self.spread * self.capacity)
        settings = self.job.settings(point)
        window = int(str(point["context"]))
        outcome: Outcome
        if needs > self.capacity:
            outcome = Infeasible(
                name=InfeasibleName.OOM_KV_CACHE,
                finding=Finding(
                    phase=Phase.KV,
                    cause="simulated",
                    explanation="simulated",
                    facts=Pairs(shortfall_bytes=int(needs - self.capacity)),
                ),
            )
        else:
            speeds = self.speed(point) * np.exp(self.chance.normal(0, 0.01, 8))
            context = ProvenContext(
                configured_tokens=window, proven_tokens=window, prompt_tokens=window - 32,
                completion_tokens=32, prefill_tok_s=1000.0, decode_tok_s=None,
            )  # fmt: skip
            outcome = Measured(
                decode_tok_s=summarise(speeds.tolist()), ttft_s=summarise([0.1] * 6),
                context=context,
            )  # fmt: skip
        return Attempt(
            study="simulated", number=number, trial=trial, started_at="", point=point,
            outcome=outcome, argv=(), env=Pairs(), memory_limit_bytes=None,
            footprint=self.job.engine.footprint(settings, self.job.model(point)),
            timings=Timings(boot_s=10.0, prove_s=5.0, measure_s=20.0, stop_s=1.0, total_s=36.0),
            engine=Pairs(
                name="fake", simulated=True, used_bytes=needs, capacity_bytes=self.capacity
            ),
            model=Pairs(name="m"), host=self.job.host, workload=Pairs(name="simulated"),
            confirms=confirms, brief=brief,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one study ended with, and what it would have ended with by the rule before."""

    spread: float
    members: tuple[float, ...]
    """The true chance of each member of the final front to boot."""
    before: tuple[float, ...]
    """The same where being measured twice was enough."""
    confirming: int
    confirming_before: int
    checks: int
    lost: float
    """The share of an oracle's hypervolume that is missing."""
    lost_before: float
    flagged: int
    """Members that are said not to be known to work 19 times of 20."""


def volume(world: World, points: Sequence[Point], *, reference: tuple[float, float]) -> float:
    """Return the true hypervolume of those points that work 19 times of 20."""
    return hypervolume(
        (
            (world.speed(point), math.log2(int(str(point["context"]))))
            for point in points
            if world.probability(point) >= CERTAIN
        ),
        reference,
    )


def confirmed(
    world: World, searched: Sequence[Attempt], choice: Confirm, *, blind: bool
) -> list[Attempt]:
    """Return the attempts of a search and those that confirm its front.

    Where it is `blind`, no boot says what it left of memory: that is the rule that was there
    before, by which a member is measured once more and only falls if that boot fails.
    """
    attempts = [_without_memory(each) for each in searched] if blind else list(searched)

    def again(member: Attempt, brief: bool, _count: int, _of: int) -> Attempt:
        done = world.boot(
            member.point, number=len(attempts) + 1, trial=member.trial, confirms=member.number,
            brief=brief,
        )  # fmt: skip
        attempts.append(_without_memory(done) if blind else done)
        return attempts[-1]

    confirm(choice, lambda: attempts, boot=again)
    return attempts


def _without_memory(attempt: Attempt) -> Attempt:
    return replace(attempt, engine=Pairs(name="fake", simulated=True))


def study(world: World, boots: int) -> Result:
    """Run one study to its end and compare its front with what only the simulation knows."""
    declared = Study(
        name="simulated", description="", seed=world.seed, space=SPACE, enqueue=(),
        budget=Budget(boots=boots), sampler=SamplerChoice(name="frontier", check_share=0.05),
        retries=1, engine_name="fake", engine_params=world.params, engine_env=Pairs(),
        engine_prefix=(), engine_extra_args=(), model_name="m", hardware_name="simulated",
        memory_limit_bytes=None, workload=WORKLOAD, confirm=Confirm(),
        device_memory_bytes=int(world.capacity),
    )  # fmt: skip
    attempts: list[Attempt] = []
    search = Search(declared, world.job, None, [])

    def boot(proposal: Proposal, number: int) -> Attempt:
        return world.boot(proposal.point, number=number, trial=proposal.trial)

    sweep(
        declared, search, boot=boot, next_number=lambda: len(attempts) + 1,
        recorded=attempts.append,
    )  # fmt: skip
    search.close()
    searched = list(attempts)
    attempts = confirmed(world, searched, declared.confirm, blind=False)
    before = confirmed(world, searched, declared.confirm, blind=True)
    holds = reliability_of(attempts)
    members = [each.point for each in front_among(attempts)]
    members_before = [each.point for each in front_among(before)]
    measured = [each.point for each in searched if isinstance(each.outcome, Measured)]
    reference = (0.0, math.log2(min(SPACE.axes[0].values)) - 1)  # type: ignore[type-var,operator]
    best = volume(world, measured, reference=reference)
    extra = [each for each in attempts if each.confirms is not None]
    return Result(
        spread=world.spread,
        members=tuple(world.probability(point) for point in members),
        before=tuple(world.probability(point) for point in members_before),
        confirming=sum(not each.brief for each in extra),
        confirming_before=len(before) - len(searched),
        checks=sum(each.brief for each in extra),
        lost=1 - volume(world, members, reference=reference) / best if best else 0.0,
        lost_before=1 - volume(world, members_before, reference=reference) / best if best else 0.0,
        flagged=sum(holds[point].hold.value == "unsure" for point in members),
    )


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """Return what these studies show together."""
    members = [p for each in results for p in each.members]
    before = [p for each in results for p in each.before]
    extra = [each.confirming + each.checks - each.confirming_before for each in results]

    def share(chances: Sequence[float]) -> float | None:
        return round(statistics.fmean(chances), 4) if chances else None

    def spread_of(values: Sequence[float]) -> list[float]:
        return [round(float(np.quantile(values, q)), 4) for q in (0.1, 0.5, 0.9)]

    return {
        "studies": len(results),
        "members": len(members),
        "boot_share": share(members),
        "boot_share_before": share(before),
        "members_below_19_of_20": round(
            sum(p < CERTAIN for p in members) / max(len(members), 1), 4
        ),
        "members_below_19_of_20_before": round(
            sum(p < CERTAIN for p in before) / max(len(before), 1), 4
        ),
        "checks": spread_of([each.checks for each in results]),
        "extra_boots": spread_of(extra),
        "hypervolume_lost": spread_of([each.lost for each in results]),
        "hypervolume_lost_mean": round(statistics.fmean(each.lost for each in results), 4),
        "hypervolume_lost_before": spread_of([each.lost_before for each in results]),
        "flagged_members": sum(each.flagged for each in results),
        "empty_fronts": sum(not each.members for each in results),
    }


def main() -> None:
    """Run the studies and print what they show."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--studies", type=int, default=100)
    parser.add_argument("--boots", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0, help="of the first study")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    began = time.monotonic()
    results = []
    for index in range(asked.studies):
        world = World(seed=asked.seed + index, spread=SPREADS[index % len(SPREADS)])
        results.append(study(world, asked.boots))
        left = (time.monotonic() - began) / (index + 1) * (asked.studies - index - 1)
        print(
            f"\rstudy {index + 1} of {asked.studies}, {left:.0f} s left   ", end="", file=sys.stderr
        )
    print(file=sys.stderr)
    found = {
        "what": "simulated studies; no hardware, no engine",
        "boots_of_the_search": asked.boots,
        "first_seed": asked.seed,
        "all": summary(results),
        **{
            f"spread {spread:.1%}": summary([each for each in results if each.spread == spread])
            for spread in SPREADS
            if any(each.spread == spread for each in results)
        },
    }
    print(json.dumps(found, indent=2))
    if asked.out is not None:
        asked.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
