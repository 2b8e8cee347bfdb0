"""Which values and pairs of values do not go together, learnt from boots that were refused."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from sweeper.core.evidence import Role
from sweeper.search.frontier_space import CodedSpace, Codes, Floats

UNSUPPORTED = frozenset({"unsupported_combination", "model_unsupported_arch", "bad_argument"})
_SINGLE = 0.006
_PAIR = 0.025
_CHAINS = 48
_CARRIED = 200
_COUNTED = 60
"""After so many refusals it is known how often this engine refuses."""
_EFFORT = 400_000
"""Bounds the steps of the chains after each boot; they go on from where they were."""
_LAST = 12
"""The order of the phase from which on nothing is refused any more: the engine is ready."""


class Suspicions:
    """What may be refused: every value, and every pair of values of two axes.

    Each refusal has at least one culprit among the values and pairs of its point that no boot has
    yet carried past the phase of the refusal. Which sets of culprits explain all refusals is
    sampled (Gibbs, with swaps), by prior odds: so few culprits are likelier than many, and a
    refusal that one culprit explains casts no suspicion on others. Nothing is ever certain but
    innocence, so that a point whose worth outweighs the suspicion is booted, which clears its
    pairs or confirms one.
    """

    def __init__(self, space: CodedSpace, generator: np.random.Generator) -> None:
        """Set up one entry for each value and each pair, with its prior."""
        self._generator = generator
        self._axes = space.axes
        self._pairs = list(itertools.combinations(range(len(space.axes)), 2))
        self._offsets: list[int] = []
        priors: list[Floats] = []
        total = 0
        for axis in space.axes:
            self._offsets.append(total)
            single = np.full(axis.size + 1, _SINGLE * (0.5 if axis.ordered else 1.0))
            single[-1] = 0.0
            priors.append(single)
            total += axis.size + 1
        for one, two in self._pairs:
            self._offsets.append(total)
            a, b = space.axes[one], space.axes[two]
            worth = _PAIR * (0.7 if a.ordered else 1.0) * (0.7 if b.ordered else 1.0)
            for axis in (a, b):
                # A window or a share of memory is seldom what a kernel refuses.
                worth *= 0.4 if axis.role in (Role.CONTEXT, Role.MEMORY_FRACTION) else 1.0
            table = np.full((a.size + 1, b.size + 1), worth)
            table[-1, :] = 0.0
            table[:, -1] = 0.0
            priors.append(table.ravel())
            total += table.size
        self._prior = np.concatenate(priors)
        self._passed = np.full(total, -1, dtype=np.int16)
        self._refusals: list[tuple[NDArray[np.int64], int, int]] = []
        self._ids = np.zeros(0, dtype=np.int64)
        self._chains = np.zeros((_CHAINS, 0), dtype=bool)
        self._shape: object = None
        self._guilt = np.zeros(total)
        self._base = self._prior.copy()
        self._stale = False
        self.unexplained: set[int] = set()
        self._expected, self._happened = 0.0, 0

    @property
    def informed(self) -> bool:
        """Whether anything was refused yet."""
        return bool(self._refusals)

    def entries(self, codes: Codes) -> NDArray[np.int32]:
        """Return which entries each point consists of; they never change, so keep them."""
        result = np.empty((len(codes), len(self._offsets)), dtype=np.int32)
        wide = codes.astype(np.int32)
        for column in range(len(self._axes)):
            result[:, column] = self._offsets[column] + wide[:, column]
        for index, (one, two) in enumerate(self._pairs, start=len(self._axes)):
            result[:, index] = (
                self._offsets[index] + wide[:, one] * (self._axes[two].size + 1) + wide[:, two]
            )
        return result

    # --- learning -------------------------------------------------------------------------------

    def _count(self, entries: NDArray[np.int32], refused: bool) -> None:
        """Compare how often boots are refused with how often that was expected."""
        if len(self._refusals) < _COUNTED:
            self._expected += 1.0 - float(self.supported(entries)[0])
            self._happened += refused

    def passed(self, row: Codes, phase: int) -> None:
        """Learn that a boot came as far as this phase without being refused."""
        entries = self.entries(row[None, :])
        self._count(entries, refused=False)
        self._passed[entries[0]] = np.maximum(self._passed[entries[0]], phase)
        self._stale = True

    def refused(self, row: Codes, phase: int, number: int) -> None:
        """Learn that a boot was refused at this phase."""
        entries = self.entries(row[None, :])
        self._count(entries, refused=True)
        self._refusals.append((entries[0].astype(np.int64), phase, number))
        self._stale = True

    # --- predictions ----------------------------------------------------------------------------

    def quick(self, entries: NDArray[np.int32]) -> Floats:
        """Return a rough probability of support: every suspicion taken by itself."""
        self._settle()
        return self._product(entries, 1 - (1 - self._base) * (1 - self._guilt))

    def supported(self, entries: NDArray[np.int32]) -> Floats:
        """Return the probability that each point is not refused."""
        self._settle()
        base = self._product(entries, self._base)
        if not self._refusals:
            return base
        # Which chains hold an entry of each point guilty, one bit for each chain.
        bits = np.zeros(len(self._prior), dtype=np.uint64)
        powers = np.uint64(1) << np.arange(_CHAINS, dtype=np.uint64)
        bits[self._ids] = (self._chains * powers[:, None]).sum(axis=0, dtype=np.uint64)
        guilty = np.bitwise_or.reduce(bits[entries], axis=1)
        counted = np.unpackbits(guilty[:, None].view(np.uint8), axis=1).sum(axis=1)
        clear = _CHAINS - counted.astype(np.float64)
        result: Floats = base * (clear + 0.1) / (_CHAINS + 0.2)
        return result

    @staticmethod
    def _product(entries: NDArray[np.int32], guilt: Floats) -> Floats:
        logs = np.log1p(-np.minimum(guilt, 0.999))
        total = np.zeros(len(entries))
        for column in range(entries.shape[1]):
            total += logs[entries[:, column]]
        return np.exp(total)

    def suspect(self, row: Codes) -> tuple[str, float, list[int]]:
        """Return the worst entry of a point in words, its guilt, and the refusals behind it."""
        self._settle()
        entries = self.entries(row[None, :])[0]
        worst = int(np.argmax(self._guilt[entries]))
        entry = int(entries[worst])
        columns = [worst] if worst < len(self._axes) else self._pairs[worst - len(self._axes)]
        words = " with ".join(
            f"{self._axes[c].name}={self._axes[c].values[row[c]]}"
            for c in columns
            if row[c] < self._axes[c].size
        )
        behind = [number for ids, _, number in self._refusals if entry in ids]
        return words, float(self._guilt[entry]), behind

    # --- inference ------------------------------------------------------------------------------

    def _settle(self) -> None:
        if not self._stale:
            return
        self._stale = False
        # Engines differ in how much they refuse: more refusals than expected make every untried
        # pair less likely to be supported.
        scale = min(max((self._happened + 1.0) / (self._expected + 1.0), 0.5), 3.0)
        prior = np.minimum(self._prior * scale, 0.1)
        self._base = np.where(self._passed >= _LAST, 0.0, prior)
        self.unexplained = set()
        suspects: list[NDArray[np.int64]] = []
        for entries, phase, number in self._refusals:
            left = entries[(self._passed[entries] <= phase) & (self._prior[entries] > 0)]
            if len(left):
                suspects.append(left)
            else:
                self.unexplained.add(number)
        # Refusals long explained say nothing new; sampling need not carry them along.
        suspects = suspects[-_CARRIED:]
        shape = (scale, tuple(len(each) for each in suspects))
        if suspects and shape != self._shape:
            self._shape = shape
            self._sample(self._raised(prior), suspects)

    def _sample(self, prior: Floats, suspects: list[NDArray[np.int64]]) -> None:
        """Let every chain explain all refusals, and walk on from there.

        All chains take each step at once: a guilty entry of a random refusal of theirs is taken
        out and one is drawn, by prior odds, that covers what this left bare.
        """
        ids, flat = np.unique(np.concatenate(suspects), return_inverse=True)
        owner = np.repeat(np.arange(len(suspects)), [len(each) for each in suspects])
        member = np.zeros((len(suspects), len(ids)), dtype=np.float32)
        member[owner, flat] = 1.0
        odds = (prior[ids] / (1 - prior[ids])).astype(np.float32)
        guilty = np.zeros((_CHAINS, len(ids)), dtype=np.float32)
        if len(self._ids):
            place = np.minimum(np.searchsorted(ids, self._ids), len(ids) - 1)
            kept = ids[place] == self._ids
            guilty[:, place[kept]] = self._chains[:, kept]
        every = np.arange(_CHAINS)
        for refusal in self._generator.permutation(len(suspects)):
            bare = guilty @ member[refusal] == 0
            if bare.any():
                chosen = self._drawn(np.tile(odds * member[refusal], (int(bare.sum()), 1)))
                guilty[np.flatnonzero(bare), chosen] = 1.0
        cover = guilty @ member.T
        steps = int(np.clip(_EFFORT / member.size, 4, 24))
        for _ in range(steps):
            at = self._generator.integers(len(suspects), size=_CHAINS)
            old = self._drawn(guilty * member[at])
            guilty[every, old] = 0.0
            cover -= member[:, old].T
            bare = (cover < 0.5).astype(np.float32)
            # What covers all that is bare; without any, the old one stays by its odds alone.
            weight = odds * (bare @ (1 - member) < 0.5) * (1 - guilty)
            free = ~bare.any(axis=1)
            weight[free] = 0.0
            weight[free, old[free]] = 1.0
            new = self._drawn(weight)
            stays = ~free | (self._generator.random(_CHAINS) < odds[old] / (1 + odds[old]))
            guilty[every[stays], new[stays]] = 1.0
            cover[stays] += member[:, new[stays]].T
        self._ids, self._chains = ids, guilty > 0.5
        self._guilt = np.zeros(len(self._prior))
        self._guilt[ids] = self._chains.mean(axis=0)

    def _drawn(self, weight: NDArray[np.float32]) -> NDArray[np.intp]:
        """Draw one column for each row, by weight."""
        sums = np.cumsum(weight, axis=1)
        chance = self._generator.random((len(weight), 1)) * sums[:, -1:]
        drawn: NDArray[np.intp] = np.argmax(sums > chance, axis=1)
        return drawn

    def _raised(self, prior: Floats) -> Floats:
        """Make what stands beside a confirmed pair likelier.

        The next value of an ordered axis, and other values that the same partner may not like
        either; what is cleared is not asked.
        """
        raised = prior.copy()
        for index, (one, two) in enumerate(self._pairs, start=len(self._axes)):
            a, b = self._axes[one], self._axes[two]
            start = self._offsets[index]
            shape = (a.size + 1, b.size + 1)
            block = slice(start, start + shape[0] * shape[1])
            table = self._guilt[block].reshape(shape)
            target = raised[block].reshape(shape)
            for v, w in np.argwhere(table > 0.4):
                self._raise_line(target[:, w], int(v), float(table[v, w]), a.ordered)
                self._raise_line(target[v, :], int(w), float(table[v, w]), b.ordered)
        return raised

    @staticmethod
    def _raise_line(line: Floats, at: int, guilt: float, ordered: bool) -> None:
        factor = np.full(len(line), 3.0 if ordered else 5.0)
        if ordered:
            for near in (at - 1, at + 1):
                if 0 <= near < len(line) - 1:
                    factor[near] = 10.0
        factor[at] = 1.0
        np.minimum(np.maximum(line, line * factor * guilt), 0.15, out=line)
