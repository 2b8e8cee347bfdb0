"""Bytes needed against bytes there are, and what a boot that ran out of memory rules out.

A `Footprint` orders configurations and never errs about that order; an `Estimate` says how much
one needs, and how sure that is. `MemoryModel` corrects estimates by what boots showed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sweeper.core.pairs import Pairs
from sweeper.core.stats import normal_cdf


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What a configuration asks of memory, component by component, in bytes.

    The parts (weights, kv_cache, compute, ...) are estimates that grow with the true need, so
    they also order configurations. `alike` holds what must be equal before two configurations
    may be compared at all, such as the kind of speculation.
    """

    parts: Pairs
    alike: Pairs = Pairs()

    def __post_init__(self) -> None:
        for name, size in self.parts.items():
            # `not size >= 0` and not `size < 0`: NaN is neither, and orders nothing.
            if isinstance(size, bool) or not isinstance(size, int | float) or not size >= 0:
                raise ValueError(f"{name} must be a size in bytes, got {size!r}")

    def bytes_of(self, name: str) -> float:
        """Return the size of one part, 0 for a part that is not there."""
        size = self.parts.get(name, 0)
        assert isinstance(size, int | float)
        return size

    @property
    def total_bytes(self) -> float:
        """The sum of all parts."""
        return sum(self.bytes_of(name) for name in self.parts)

    def needs_at_least(self, other: Footprint) -> bool:
        """Tell whether this asks for no less than `other` in every single part.

        Reflexive and transitive. False where the two are not alike: nothing is known then.
        """
        if self.alike != other.alike:
            return False
        return all(
            self.bytes_of(name) >= other.bytes_of(name) for name in {*self.parts, *other.parts}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """A boot that ran out of memory: the attempt it was, and what it had asked for."""

    attempt: int
    footprint: Footprint
    shortfall_bytes: float | None = None


_APART: Final = 2.0
"""By how many standard deviations from boot to boot a need must be larger to be larger for sure.

A point that boots 19 times of 20 leaves 1.6 deviations. It runs out, one time in a thousand, when
it needs 3.1 more than usual; what needs 2 more than it then boots one time of three at most."""


@dataclass(frozen=True, slots=True)
class MemoryBound:
    """The edge of what fits, as learnt from boots that did not.

    A configuration that asks for at least as much of everything as one that ran out of memory
    would run out too, so it need not be booted. What a boot needs differs from boot to boot by
    `spread_bytes`, one standard deviation: a failure that may have been bad luck excludes only what
    needs noticeably more in all, or what a second failure excludes as well.
    """

    failures: tuple[OutOfMemory, ...] = ()
    spread_bytes: float = 0.0

    def with_failure(self, failure: OutOfMemory) -> MemoryBound:
        """Return the bound with one more failure; those it implies are dropped."""
        if any(self._surely(each, failure.footprint) for each in self.failures):
            return self
        kept = (each for each in self.failures if not self._surely(failure, each.footprint))
        return MemoryBound((*kept, failure), self.spread_bytes)

    def without(self, footprint: Footprint) -> MemoryBound:
        """Return the bound without the failures that a footprint contradicts, since it fits.

        One that needs no more than the spread beyond a failure contradicts nothing: near the edge
        some boots work and some do not.
        """
        return MemoryBound(
            tuple(
                each
                for each in self.failures
                if not (
                    footprint.needs_at_least(each.footprint)
                    and footprint.total_bytes - each.footprint.total_bytes
                    >= _APART * self.spread_bytes
                )
            ),
            self.spread_bytes,
        )

    def with_spread(self, spread_bytes: float) -> MemoryBound:
        """Return the bound under another spread from boot to boot."""
        return MemoryBound.of(self.failures, spread_bytes=spread_bytes)

    @classmethod
    def of(cls, failures: Iterable[OutOfMemory], *, spread_bytes: float = 0.0) -> MemoryBound:
        """Return the bound that all these failures draw together."""
        bound = cls(spread_bytes=spread_bytes)
        for failure in failures:
            bound = bound.with_failure(failure)
        return bound

    def excluded_by(self, footprint: Footprint) -> OutOfMemory | None:
        """Return the failure that shows this footprint cannot fit, if one does."""
        below = [each for each in self.failures if footprint.needs_at_least(each.footprint)]
        sure = next((each for each in below if self._surely(each, footprint)), None)
        # Bad luck twice, where each is one in twenty at most, is no luck any more.
        return sure if sure is not None or len(below) < 2 else below[0]

    def _surely(self, failure: OutOfMemory, footprint: Footprint) -> bool:
        """Tell whether this failure alone shows that the footprint cannot fit."""
        if not footprint.needs_at_least(failure.footprint):
            return False
        beyond = _APART * self.spread_bytes
        lacked = failure.shortfall_bytes
        if lacked is not None and lacked >= beyond:
            return True
        return footprint.total_bytes - failure.footprint.total_bytes >= beyond


# --- how much, and how sure -------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A number of bytes that is not known exactly: its mean and its standard deviation."""

    mean: float
    spread: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean) and self.mean >= 0):
            raise ValueError(f"a size must not be negative, got {self.mean!r}")
        if not (math.isfinite(self.spread) and self.spread >= 0):
            raise ValueError(f"a spread must not be negative, got {self.spread!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a configuration needs of memory, component by component, each with its spread.

    Components are independent unless a boot that showed only their sum tied them together:
    `shared` is twice the sum of their covariances, in bytes squared.
    """

    parts: tuple[tuple[str, Size], ...]
    shared: float = 0.0

    def __post_init__(self) -> None:
        names = [name for name, _ in self.parts]
        if len(names) != len(set(names)):
            raise ValueError(f"a component is named twice: {names}")

    @classmethod
    def of(cls, parts: Mapping[str, Size]) -> Estimate:
        """Return the estimate of these components, in their order."""
        return cls(parts=tuple(parts.items()))

    def part(self, name: str) -> Size:
        """Return one component; a size of 0 for one that is not there."""
        return next((size for each, size in self.parts if each == name), Size(mean=0))

    @property
    def mean(self) -> float:
        """What all components together need, in bytes."""
        return sum(size.mean for _, size in self.parts)

    @property
    def spread(self) -> float:
        """The standard deviation of that, in bytes."""
        variance = sum(size.spread**2 for _, size in self.parts) + self.shared
        return math.sqrt(max(variance, 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess:
    """By how much a need is above what there is, in bytes; negative where there is room."""

    mean: float
    spread: float

    @property
    def fits(self) -> float:
        """The probability that it fits, from 0 to 1."""
        if self.spread == 0:
            return 1.0 if self.mean <= 0 else 0.0
        return normal_cdf(-self.mean / self.spread)


def excess(estimate: Estimate, capacity: float, capacity_spread: float = 0.0) -> Excess:
    """Return by how much this need is above a capacity in bytes, with the spread of both."""
    return Excess(
        mean=estimate.mean - capacity, spread=math.hypot(estimate.spread, capacity_spread)
    )


RELATIVE_SPREADS: Final[Mapping[str, float]] = {
    "weights": 0.03, "kv_cache": 0.1, "draft": 0.1, "output": 0.3,
}  # fmt: skip
_OTHERWISE: Final = 0.5


def estimate_of(footprint: Footprint) -> Estimate:
    """Return a footprint's parts as an estimate, for an engine that knows no better one."""
    return Estimate.of(
        {
            name: Size(
                mean=footprint.bytes_of(name),
                spread=footprint.bytes_of(name) * RELATIVE_SPREADS.get(name, _OTHERWISE),
            )
            for name in footprint.parts
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Boot:
    """What one boot showed of memory.

    `estimate` is what was thought of it before any boot. `shown` are the components it printed,
    in bytes, as far as it came; a name such as `weights+draft` is the sum of two. `fitted` tells
    whether the sum was within the capacity; None says nothing about the sum. After a failure
    `shortfall` is what the engine said to lack at least, or, if `exact`, in all: with it the sum
    itself is known.
    """

    estimate: Estimate
    shown: Pairs = Pairs()
    capacity: float | None = None
    fitted: bool | None = None
    shortfall: float | None = None
    exact: bool = False


_OWN_SHARE: Final = 0.2
"""The share of a component's spread that is each configuration's own, and is never learnt."""
_PRINTED_TO: Final = 3 * 2**20
"""How finely engines print sizes: vLLM to 0.01 GiB, which is off by 3 MiB on average."""


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """What boots have shown of the error of estimates, component by component.

    An estimate is thought to be off by the same number of its own spreads in every configuration
    (`off`, standard normal before any boot), but for a fifth that is each configuration's own.
    What a boot prints of a component corrects that component; a sum that fitted bounds all of
    them from above, one that did not from below, one whose shortfall is known fixes it.
    """

    names: tuple[str, ...] = ()
    off: tuple[float, ...] = ()
    covariance: tuple[tuple[float, ...], ...] = ()

    @classmethod
    def of(cls, boots: Iterable[Boot]) -> MemoryModel:
        """Return what these boots show together, in their order."""
        model = cls()
        for boot in boots:
            model = model.learned(boot)
        return model

    def corrected(self, estimate: Estimate) -> Estimate:
        """Return the estimate as it is after the boots seen; its spread is never larger."""
        model = self._with(name for name, _ in estimate.parts)
        at = {name: index for index, name in enumerate(model.names)}
        parts: dict[str, Size] = {}
        known = math.sqrt(1 - _OWN_SHARE**2)
        for name, size in estimate.parts:
            index = at[name]
            variance = known**2 * model.covariance[index][index] + _OWN_SHARE**2
            parts[name] = Size(
                mean=max(size.mean + known * size.spread * model.off[index], 0.0),
                spread=size.spread * math.sqrt(max(variance, 0.0)),
            )
        spreads = [(at[name], known * size.spread) for name, size in estimate.parts]
        shared = sum(
            one * other * model.covariance[i][j]
            for i, one in spreads
            for j, other in spreads
            if i != j
        )
        return Estimate(parts=tuple(parts.items()), shared=shared)

    def learned(self, boot: Boot) -> MemoryModel:
        """Return the model after one more boot."""
        model = self._with(name for name, _ in boot.estimate.parts)
        known = math.sqrt(1 - _OWN_SHARE**2)
        sizes = dict(boot.estimate.parts)
        at = {name: index for index, name in enumerate(model.names)}
        rest = 0.0  # what is certain of this boot's sum
        for shown, value in boot.shown.items():
            together = [name for name in shown.split("+") if name in sizes]
            if not together or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            weights = [0.0] * len(model.names)
            noise = float(_PRINTED_TO**2)
            thought = 0.0
            for name in together:
                size = sizes.pop(name)
                weights[at[name]] = known * size.spread
                noise += (_OWN_SHARE * size.spread) ** 2
                thought += size.mean
            rest += value
            model = _told(model, weights, value - thought, noise)
        weights = [0.0] * len(model.names)
        own = 0.0
        for name, size in sizes.items():
            rest += size.mean
            weights[at[name]] = known * size.spread
            own += (_OWN_SHARE * size.spread) ** 2
        if boot.capacity is None or boot.fitted is None:
            return model
        if boot.fitted:
            return _bounded(model, weights, own, boot.capacity - rest, above=True)
        edge = boot.capacity + (boot.shortfall or 0.0) - rest
        if boot.exact and boot.shortfall is not None:
            return _told(model, weights, edge, own + _PRINTED_TO**2)
        return _bounded(model, weights, own, edge, above=False)

    def _with(self, names: Iterable[str]) -> MemoryModel:
        """Return the model with these components in it, each as nothing is known of it yet."""
        new = [name for name in dict.fromkeys(names) if name not in self.names]
        if not new:
            return self
        size = len(self.names) + len(new)
        padded = [[*row, *([0.0] * len(new))] for row in self.covariance]
        padded += [
            [1.0 if column == index else 0.0 for column in range(size)]
            for index in range(len(self.names), size)
        ]
        return MemoryModel(
            (*self.names, *new), (*self.off, *([0.0] * len(new))), tuple(map(tuple, padded))
        )


def _told(model: MemoryModel, weights: Sequence[float], value: float, noise: float) -> MemoryModel:
    """Return the model after seeing that the weighted sum of `off` is about this value."""
    mean, variance, along = _seen_along(model, weights)
    if variance <= 0:
        return model
    gain = variance / (variance + noise)
    return _moved(model, along, variance, (value - mean) * gain, 1 - gain)


def _bounded(
    model: MemoryModel, weights: Sequence[float], noise: float, edge: float, *, above: bool
) -> MemoryModel:
    """Return the model after seeing that the sum is below (above) an edge, and no more.

    What is left of a normal distribution is taken as a normal one of the same moments.
    """
    mean, variance, along = _seen_along(model, weights)
    if variance <= 0:
        return model
    scale = math.sqrt(variance + noise)
    side = 1.0 if above else -1.0
    reach = side * (edge - mean) / scale
    hazard = _hazard(reach)
    left = max(1 - reach * hazard - hazard**2, 1e-6)
    share = variance / (variance + noise)
    return _moved(model, along, variance, -side * scale * hazard * share, 1 - share * (1 - left))


def _seen_along(model: MemoryModel, weights: Sequence[float]) -> tuple[float, float, list[float]]:
    """Return mean and variance of the weighted sum of `off`, and its covariance with each."""
    mean = sum(weight * off for weight, off in zip(weights, model.off, strict=True))
    along = [
        sum(cell * weight for cell, weight in zip(row, weights, strict=True))
        for row in model.covariance
    ]
    variance = sum(weight * each for weight, each in zip(weights, along, strict=True))
    return mean, variance, along


def _moved(
    model: MemoryModel, along: Sequence[float], variance: float, shift: float, left: float
) -> MemoryModel:
    """Return the model after the sum's mean moved and its variance fell to this share."""
    off = tuple(each + step * shift / variance for each, step in zip(model.off, along, strict=True))
    fall = (1 - left) / variance
    covariance = tuple(
        tuple(cell - fall * one * other for cell, other in zip(row, along, strict=True))
        for row, one in zip(model.covariance, along, strict=True)
    )
    return MemoryModel(model.names, off, covariance)


def _hazard(reach: float) -> float:
    """Return the density at `reach` over the probability below it: how far the rest lies off."""
    if reach < -6:
        return -reach - 1 / reach  # where both are too small to divide
    return math.exp(-(reach**2) / 2) / math.sqrt(2 * math.pi) / normal_cdf(reach)
