"""What must be equal for two measurements to be compared, and what of it is not."""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sweeper.core.outcome import Attempt, Measured
from sweeper.core.pairs import Pairs, Scalar, text
from sweeper.core.space import Axis


class Scope(enum.StrEnum):
    """Between which attempts a comparison is made."""

    STUDY = "study"
    """Of one study: engine, model and machine are the same, but for what the point sets."""
    LEADERBOARD = "leaderboard"
    """Across studies: engines and models are what is compared, on one machine and workload."""


class Group(enum.StrEnum):
    """What a fact is of."""

    MEASUREMENT = "measurement"
    ENGINE = "engine"
    MODEL = "model"
    DEVICE = "device"
    GPU = "gpu"
    CPU = "cpu"
    LIMIT = "limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A fact that counts: its name, its title for people, and where an attempt keeps it.

    `absent` is what it means that an attempt has no such fact.
    """

    name: str
    title: str
    group: Group
    kept_in: str
    key: str
    absent: str = "unknown"


def _facts(
    group: Group, kept_in: str, *entries: tuple[str, str, str], absent: str = "unknown"
) -> tuple[Fact, ...]:
    return tuple(
        Fact(name=name, title=title, group=group, kept_in=kept_in, key=key, absent=absent)
        for name, title, key in entries
    )


FACTS: tuple[Fact, ...] = (
    *_facts(
        Group.MEASUREMENT, "workload",
        ("schema", "schema of the measurement", "schema"),
        ("workload_digest", "workload digest", "digest"),
    ),
    *_facts(
        Group.MEASUREMENT, "engine",
        ("simulated", "simulated engine", "simulated"),
    ),
    *_facts(
        Group.MEASUREMENT, "engine",
        ("attached_to", "server of somebody else", "attached_to"),
        absent="none",
    ),
    *_facts(
        Group.ENGINE, "engine",
        ("engine", "engine", "name"),
        ("engine_version", "engine version", "engine_version"),
        ("engine_build", "engine build", "engine_build"),
    ),
    *_facts(
        Group.MODEL, "model",
        ("model", "model", "name"),
        ("model_sha256", "SHA-256 of the model", "sha256"),
    ),
    # Where the engine computed is found out, not kept: see `_device`.
    *_facts(Group.DEVICE, "", ("device", "computing on", "")),
    *_facts(
        Group.GPU, "host",
        ("gpu", "GPU", "gpu"),
        ("gpu_count", "number of GPUs", "gpu_count"),
        ("gpu_memory_bytes", "GPU memory", "gpu_memory_bytes"),
        ("gpu_driver", "GPU driver", "gpu_driver"),
        ("gpu_power_limit_w", "GPU power limit in watts", "gpu_power_limit_w"),
        ("gpu_clocks_policy", "GPU clocks policy", "gpu_clocks_policy"),
        ("gpu_mig", "GPU partitioning (MIG)", "gpu_mig"),
        ("gpu_ecc", "GPU memory error correction", "gpu_ecc"),
    ),
    *_facts(
        Group.CPU, "host",
        ("cpu", "processor", "cpu"),
        ("cpu_count", "number of processors", "cpu_count"),
        ("cpu_governor", "processor clocks governor", "cpu_governor"),
        ("memory_bytes", "memory of the host", "memory_bytes"),
    ),
    *_facts(
        Group.CPU, "host",
        ("cgroup_cpus", "limit of processors", "cgroup_cpus"),
        absent="none",
    ),
    *_facts(
        Group.LIMIT, "host",
        ("memory_limit_bytes", "memory limit", "memory_limit_bytes"),
        ("cgroup_memory_bytes", "memory limit of the container", "cgroup_memory_bytes"),
        absent="none",
    ),
)  # fmt: skip
"""Every fact that makes measurements comparable, in the order in which differences are told."""

_COUNTING = {
    Scope.STUDY: frozenset(Group),
    Scope.LEADERBOARD: frozenset(Group) - {Group.ENGINE, Group.MODEL},
}


def facts_of(attempt: Attempt) -> Pairs:
    """Return the facts of an attempt by name, those that are not known left out.

    Of the facts of the machine only those of the device that the engine computed on, `gpu` or
    `cpu`: the processor of a host says little of a measurement on its cards.
    """
    device = _device(attempt)
    kept = {
        "engine": attempt.engine,
        "model": attempt.model,
        "host": attempt.host,
        "workload": attempt.workload,
    }
    unused = Group.CPU if device is Group.GPU else Group.GPU
    found: dict[str, Scalar] = {"device": device.value}
    for fact in FACTS:
        if fact.kept_in and fact.group is not unused:
            value = kept[fact.kept_in].get(fact.key)
            if value is not None:
                found[fact.name] = value
    return Pairs(found)


def incomparable(
    one: Attempt,
    other: Attempt,
    *,
    scope: Scope,
    axes: Sequence[Axis] = (),
    allowed: Collection[str] = (),
) -> tuple[str, ...]:
    """Return, in words, each fact that keeps two attempts from being compared; none if they may be.

    A fact that is known of one attempt only is a difference: that it is equal cannot be shown.
    `axes` are the study's: where one that chooses the model has another value in the two points,
    their models may differ. `allowed` names facts in which they may differ because a person asked
    for it. Raises ValueError for a name in `allowed` that is no fact's.
    """
    names = {fact.name for fact in FACTS}
    if unknown := sorted(set(allowed) - names):
        raise ValueError(
            f"{', '.join(unknown)}: no such fact; there are {', '.join(sorted(names))}"
        )
    groups = _COUNTING[scope]
    if _points_choose_models(one, other, axes):
        groups -= {Group.MODEL}
    ones, others = facts_of(one), facts_of(other)
    if ones["device"] != others["device"]:
        # Of two different devices every further fact differs as well.
        groups -= {Group.GPU, Group.CPU}
    return tuple(
        f"{fact.title} {_said(fact, ones.get(fact.name), others.get(fact.name))}"
        for fact in FACTS
        if fact.group in groups
        and fact.name not in allowed
        and _different(ones.get(fact.name), others.get(fact.name))
    )


def _device(attempt: Attempt) -> Group:
    """Return where the engine computed: on the host's cards, unless it was seen to use none."""
    if attempt.host.get("gpu") is None:
        return Group.CPU
    if isinstance(attempt.outcome, Measured):
        loads = (figures.telemetry for figures in attempt.outcome.figures)
        watched = [each for each in (attempt.outcome.telemetry, *loads) if each is not None]
        if watched and not any(each.saw_gpu for each in watched):
            return Group.CPU
    return Group.GPU


def _points_choose_models(one: Attempt, other: Attempt, axes: Sequence[Axis]) -> bool:
    return any(
        _different(one.point.get(axis.name), other.point.get(axis.name))
        for axis in axes
        if any(setting.startswith("model.") for setting in axis.sets)
    )


def _different(one: Scalar, other: Scalar) -> bool:
    # As in Pairs, where 1 and True are two values and what is no number equals itself.
    return Pairs(value=one) != Pairs(value=other)


def _said(fact: Fact, one: Scalar, other: Scalar) -> str:
    """Return two different values side by side, each as short as still tells them apart."""
    values = [fact.absent if value is None else _short(value) for value in (one, other)]
    if values[0] == values[1]:
        values = [fact.absent if value is None else text(value) for value in (one, other)]
    return " against ".join(values)


def _short(value: Scalar) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 2**20:
        return f"{value / 2**30:,.1f} GiB" if value >= 2**30 else f"{value / 2**20:,.0f} MiB"
    said = text(value)
    is_checksum = len(said) == 64 and set(said) <= set("0123456789abcdef")
    return said[:12] if is_checksum else said
