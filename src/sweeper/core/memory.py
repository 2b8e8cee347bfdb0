"""Bytes needed against bytes there are, and what a boot that ran out of memory rules out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sweeper.core.pairs import Pairs


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


@dataclass(frozen=True, slots=True)
class MemoryBound:
    """The edge of what fits, as learnt from boots that did not.

    A configuration that asks for at least as much of everything as one that ran out of memory
    would run out too, so it need not be booted.
    """

    failures: tuple[OutOfMemory, ...] = ()

    def with_failure(self, failure: OutOfMemory) -> MemoryBound:
        """Return the bound with one more failure; those it implies are dropped."""
        if self.excluded_by(failure.footprint) is not None:
            return self
        kept = (
            each for each in self.failures if not each.footprint.needs_at_least(failure.footprint)
        )
        return MemoryBound((*kept, failure))

    @classmethod
    def of(cls, failures: Iterable[OutOfMemory]) -> MemoryBound:
        """Return the bound that all these failures draw together."""
        bound = cls()
        for failure in failures:
            bound = bound.with_failure(failure)
        return bound

    def excluded_by(self, footprint: Footprint) -> OutOfMemory | None:
        """Return the failure that shows this footprint cannot fit, if one does."""
        return next(
            (each for each in self.failures if footprint.needs_at_least(each.footprint)), None
        )
