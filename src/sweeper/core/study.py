"""A study as declared: what is swept, on what, for how long. All of it checked and frozen."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from sweeper.core.objectives import OBJECTIVES
from sweeper.core.pairs import Pairs, Point
from sweeper.core.quality import Guard
from sweeper.core.space import Space
from sweeper.core.workload import Repeats, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """When to stop: after so many boots of the study, minutes of this run, or hours of its cards.

    `gpu_hours` counts the time of all attempts of the study times the number of cards.
    """

    boots: int
    minutes: float | None = None
    gpu_hours: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerChoice:
    """Which sampler proposes points, and how.

    `startup` is after how many random points it starts to model, where it needs any. `target` is
    the class of a sampler of somebody else's, made with `arguments` (`name` is then `target`).
    `check_share` is the share of boots that go to points predicted not to fit, to check the
    prediction. The study stops by itself when the sampler expects less than `stop_share` of the
    front's hypervolume of its best point, `stop_asks` times in a row; None: never.
    """

    name: str
    startup: int = 8
    target: str | None = None
    arguments: Pairs = Pairs()
    check_share: float = 0.0
    stop_share: float | None = None
    stop_asks: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirm:
    """How the front is measured again after the search: `rounds` fresh boots of each member.

    At most `boots` boots in all; 0 rounds: not at all. Members with little memory left are then
    booted again, at most `checks` times in all, to see whether they work every time.
    """

    rounds: int = 1
    boots: int = 8
    checks: int = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """Everything that decides what a study's numbers mean, and how far it goes.

    `also` are further workloads, measured on the same boots; the search compares by `workload`.
    `reference` are values of axes: the first attempt measured at them is what the others' answers
    are compared with. `proof_boots` is how often an engine that died in the proof of its context is
    booted again to find how much it holds. `mix_conditions` lets attempts be compared that were
    made under other conditions (another driver, another version of the engine).
    `device_memory_bytes` is what an engine can take of the card, for judging what fits before any
    boot; with `unified_memory` the processor takes its share of the same. `objectives` are the
    first two or all of OBJECTIVES, each to be maximised. `warm_start` names earlier studies that
    the search may learn from; True: all beside it of the same model on the same machine.
    `memory_left_bytes` is what a configuration must leave of memory to win: None as much as makes
    it boot 19 times of 20, a number so many bytes beside that, 0 nothing at all.
    """

    name: str
    description: str
    seed: int
    space: Space
    enqueue: tuple[Point, ...]
    budget: Budget
    sampler: SamplerChoice
    retries: int
    engine_name: str
    engine_params: Mapping[str, Any]
    engine_env: Pairs
    engine_prefix: tuple[str, ...]
    engine_extra_args: tuple[str, ...]
    model_name: str
    hardware_name: str
    memory_limit_bytes: int | None
    workload: Workload
    also: tuple[Workload, ...] = ()
    guard: Guard = field(default_factory=Guard)
    reference: Pairs = Pairs()
    confirm: Confirm = Confirm()
    proof_boots: int = 1
    mix_conditions: bool = False
    device_memory_bytes: int | None = None
    unified_memory: bool = False
    objectives: tuple[str, ...] = OBJECTIVES[:2]
    warm_start: bool | tuple[str, ...] = True
    memory_left_bytes: int | None = None

    def identity(self) -> dict[str, Any]:
        """Return what must stay the same for attempts to belong to one study, as flat names.

        Budget, sampler, seed and the stated memory of the card may change between runs; none of
        them changes a number.
        """
        space = self.space.described()
        flat: dict[str, Any] = {
            "engine.name": self.engine_name,
            "engine.prefix": list(self.engine_prefix),
            "engine.extra_args": list(self.engine_extra_args),
            "model.name": self.model_name,
            "hardware.name": self.hardware_name,
            "hardware.memory_limit_bytes": self.memory_limit_bytes,
            "rules": space["rules"],
            **{f"guard.{name}": value for name, value in asdict(self.guard).items()},
            "guard.reference": dict(self.reference),
            "objectives": list(self.objectives),
        }
        axes = space["axes"]
        assert isinstance(axes, dict)
        flat.update({f"space.{name}": axis for name, axis in axes.items()})
        flat.update({f"engine.params.{name}": value for name, value in self.engine_params.items()})
        # Values of the environment may be secret: their digest tells a change as well.
        flat.update(
            {
                f"engine.env.{name}": hashlib.sha256(str(value).encode()).hexdigest()[:16]
                for name, value in self.engine_env.items()
            }
        )
        flat.update(_flat("workload", self.workload.described()))
        for index, workload in enumerate(self.also):
            flat.update(_flat(f"also.{index}", workload.described()))
        return json.loads(json.dumps(flat))  # type: ignore[no-any-return]


def _flat(prefix: str, described: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested data under one dotted name for each value."""
    flat: dict[str, Any] = {}
    for name, value in described.items():
        key = f"{prefix}.{name}"
        flat.update(_flat(key, value) if isinstance(value, Mapping) else {key: value})
    return flat


def workload_of(identity: Mapping[str, Any]) -> Workload:
    """Return the compared workload of a stored identity; raises ValueError or TypeError."""
    nested: dict[str, Any] = {}
    for key, value in identity.items():
        first, *middle = key.split(".")
        if first != "workload" or not middle:
            continue
        place = nested
        for each in middle[:-1]:
            place = place.setdefault(each, {})
        place[middle[-1]] = tuple(value) if isinstance(value, list) else value
    for name in ("request", "chat_template"):
        nested[name] = Pairs(nested.get(name, {}))
    return Workload(**{**nested, "repeats": Repeats(**nested.get("repeats", {}))})


def differences(stored: Mapping[str, Any], declared: Mapping[str, Any]) -> tuple[str, ...]:
    """Return, in words, every entry in which two identities differ."""
    lines = []
    for key in sorted({*stored, *declared}):
        if key not in stored:
            lines.append(f"{key} is new: {_short(declared[key])}")
        elif key not in declared:
            lines.append(f"{key} is gone; it was {_short(stored[key])}")
        elif _canonical(stored[key]) != _canonical(declared[key]):
            lines.append(f"{key} was {_short(stored[key])} and is now {_short(declared[key])}")
    return tuple(lines)


def _canonical(value: object) -> str:
    # As text, so that 1, 1.0 and true stay three different values, as they do in points.
    return json.dumps(value, sort_keys=True)


def _short(value: object) -> str:
    if isinstance(value, dict) and "values" in value:
        value = value["values"]
    said = json.dumps(value)
    return said if len(said) <= 100 else said[:97] + "..."
