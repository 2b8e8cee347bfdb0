"""A study as declared: what is swept, on what, for how long. All of it checked and frozen."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sweeper.core.pairs import Pairs, Point
from sweeper.core.space import Space
from sweeper.core.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """When to stop: after so many boots of the study, or so many minutes of this run."""

    boots: int
    minutes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerChoice:
    """Which sampler proposes points, and after how many random ones it starts to model."""

    name: str
    startup: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """Everything that decides what a study's numbers mean, and how far it goes."""

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

    def identity(self) -> dict[str, Any]:
        """Return what must stay the same for attempts to belong to one study, as flat names.

        Budget, sampler and seed may change between runs; none of them changes a number.
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
        flat.update({f"workload.{k}": value for k, value in self.workload.described().items()})
        return json.loads(json.dumps(flat))  # type: ignore[no-any-return]


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
