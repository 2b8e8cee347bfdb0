"""What is known of every point of a space, and which one is worth the next boot."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sweeper.core.evidence import Evidence, Prior, Role
from sweeper.core.launch import Phase
from sweeper.search.frontier_memory import INSIDE, OUTSIDE, RUNTIME, MemoryModel
from sweeper.search.frontier_space import CodedSpace, Codes, Floats
from sweeper.search.frontier_speed import Process, Speed, axis_tables, kept, one_thread
from sweeper.search.frontier_support import UNSUPPORTED, Suspicions
from sweeper.search.normal import ndtr

_SCREENED = 1000
_MOST_WORK = (0.8, 4.0)
"""What points that fit are thought to come to before any was booted, between 1 (they work) and -1,
and how many boots that is worth."""
_BY_CHANCE = 0.15
"""How likely a request runs out of memory for reasons that no sum of components knows of."""
_NEGLIGIBLE = 1e-3
"""The share of the front's hypervolume that no longer justifies a risk."""
_CACHED = 60_000
_SAMPLE = 24_000
_WASTED, _WASTED_AT_FIRST = 1.25, 2.0
"""What a boot that fails costs at least, in boots that serve; before any boot has served;"""
_WASTED_SHORT = 0.5
"""and what it costs on top where memory is short."""
_MEASURING_S = 60.0
"""What a served boot costs beyond its boot, where nothing was said about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One finished trial: its point, what it came to, and what it showed.

    `values` are the objectives, all to be maximised; None where the point does not work.
    """

    number: int
    row: Codes
    values: tuple[float, ...] | None
    evidence: Evidence | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The point to boot next, the share of the front it may add, and why it was chosen."""

    row: Codes
    improvement: float
    why: str


@dataclass
class _Features:
    """What the models need of a set of points and that never changes."""

    codes: Codes
    keys: NDArray[np.int64]
    memory: tuple[Floats, Floats | None]
    entries: NDArray[np.int32]

    def at(self, index: NDArray[np.intp]) -> _Features:
        inside, outside = self.memory
        return _Features(
            codes=self.codes[index],
            keys=self.keys[index],
            memory=(inside[index], None if outside is None else outside[index]),
            entries=self.entries[index],
        )


class Feasibility:
    """The probability that a point works: supported, within memory, and not otherwise refused."""

    def __init__(self, space: CodedSpace, prior: Prior, generator: np.random.Generator) -> None:
        """Set up the three models."""
        self.memory = MemoryModel(space, prior)
        self.suspicions = Suspicions(space, generator)
        scales = np.array([*(0.5 for _ in space.axes), 0.7, 0.1, 0.2])
        freedom = np.array([*(0.7 for _ in space.axes), 0.5, 0.7, 0.5])
        # Most of what fits works: one that does not must not condemn what is unlike it.
        self._other = Process(axis_tables(space), scales, freedom, centre=_MOST_WORK, base=0.1)
        self.rows: list[Codes] = []
        self._labels: list[float] = []
        self._refused: dict[int, Codes] = {}
        self._stale = False

    def learn(self, seen: Seen) -> None:
        """Take in a trial, into the model that its ending speaks of."""
        evidence = seen.evidence
        name = "" if evidence is None else evidence.outcome
        phase = _order(evidence)
        works = seen.values is not None
        served = works or (evidence is not None and evidence.kind == "unfit")
        if served:
            self.suspicions.passed(seen.row, Phase.READY.order)
        if name in UNSUPPORTED:
            self.suspicions.refused(seen.row, phase, seen.number)
            self._refused[seen.number] = seen.row
            return
        if evidence is not None:
            memory = name in INSIDE or (
                name in OUTSIDE and (name != RUNTIME or self._short(seen.row))
            )
            if self.memory.informed and (memory or served):
                self.memory.learn(seen.row, evidence, seen.number)
            if memory and not served:
                self.suspicions.passed(seen.row, phase)
                if self.memory.informed:
                    return
        self.rows.append(seen.row)
        self._labels.append(1.0 if works else -1.0)
        self._stale = True

    def _short(self, row: Codes) -> bool:
        """Tell whether a request that ran out of memory did so because the point needs too much.

        There are windows of points that die serving while others that need more do not: what was
        surely thought to fit is one of these, and no reason to doubt what is known of sizes.
        """
        if not self.memory.informed:
            return False
        return bool(1 - self.memory.fits(self.memory.rows(row[None, :]))[0] > _BY_CHANCE)

    @property
    def _other_failures(self) -> bool:
        return min(self._labels, default=1.0) < 0 or bool(self.suspicions.unexplained)

    def _train(self) -> None:
        if not self._stale and not self.suspicions.unexplained:
            return
        self._stale = False
        extra = [self._refused[number] for number in sorted(self.suspicions.unexplained)]
        rows = [*self.rows, *extra]
        labels = [*self._labels, *(-1.0 for _ in extra)]
        keep = kept([-label for label in labels])
        if rows:
            self._other.train(
                np.stack([rows[index] for index in keep]), np.array([labels[i] for i in keep])
            )

    def quick(self, features: _Features) -> Floats:
        """Return a rough probability, fast."""
        result = self.suspicions.quick(features.entries)
        if self.memory.informed:
            result = result * self.memory.probable(features.memory)
        if self._other_failures:
            self._train()
            result = result * ndtr(1.5 * self._other.quick_mean(features.codes))
        return result

    def fitting(self, features: _Features) -> Floats:
        """Return the probability that each point has the memory that it needs."""
        if not self.memory.informed:
            return np.ones(len(features.codes))
        return self.memory.fits(features.memory)

    def probability(self, features: _Features, fits: Floats) -> Floats:
        """Return the probability that each point works, given the one that it fits."""
        result = self.suspicions.supported(features.entries) * fits
        if self._other_failures:
            self._train()
            mean, sd = self._other.predict(features.codes)
            result = result * ndtr(2.0 * mean / np.sqrt(1 + sd**2))
        return result


def _order(evidence: Evidence | None) -> int:
    if evidence is None or evidence.phase is None:
        return 0
    try:
        return Phase(evidence.phase).order
    except ValueError:
        return 0


class Objectives:
    """Beliefs about the objectives, and how much a point is expected to add to the front."""

    rows: list[Codes]

    def learn(self, seen: Seen) -> None:
        """Take in a trial that works."""
        raise NotImplementedError

    def withdraw(self, rows: Iterable[Codes]) -> None:
        """Take note of all points that were measured and may not win: they bar no others."""
        raise NotImplementedError

    def quick(self, codes: Codes) -> Floats:
        """Return a rough and generous expected improvement, fast."""
        raise NotImplementedError

    def improvement(self, codes: Codes, pending: Codes) -> Floats:
        """Return the expected hypervolume improvement, given that the point works."""
        raise NotImplementedError

    def volume(self) -> float:
        """Return the hypervolume of the front so far."""
        raise NotImplementedError

    def words(self, row: Codes) -> str:
        """Return what is expected of a point, for a person."""
        raise NotImplementedError


class EngineObjectives(Objectives):
    """Decode rate in tok/s, and log2 of a context that is read off the point itself."""

    def __init__(self, space: CodedSpace, prior: Prior, context: int) -> None:
        """Set up the model of speed; the context needs none."""
        self.speed = Speed(space, prior)
        self._context = context
        numbers = space.axes[context].numbers
        assert numbers is not None
        self._tokens = np.nan_to_num(numbers, nan=1.0)
        self._log_context = np.log2(np.maximum(self._tokens, 1.0))
        self.rows: list[Codes] = []
        self._reached: list[float] = []
        self._observed: list[float] = []
        self._levels = np.unique(self._log_context[:-1])
        self._typical_sd = 0.3
        self._withdrawn: frozenset[bytes] = frozenset()
        self._front: tuple[Floats, Floats] | None = None

    def learn(self, seen: Seen) -> None:
        """Take in a measured trial."""
        assert seen.values is not None
        evidence = seen.evidence
        rate, shares, proven = seen.values[0], (), None
        if evidence is not None:
            rate = evidence.decode_tok_s or rate
            shares = evidence.acceptance  # type: ignore[assignment]
            proven = evidence.proven_context_tokens
        self.speed.learn(seen.row, rate, shares)
        asked = float(self._log_context[seen.row[self._context]])
        if proven is not None and math.log2(max(proven, 1.0)) < asked - 0.05:
            asked = math.log2(max(proven, 1.0))
            self._levels = np.unique([*self._levels, asked])
        self.rows.append(seen.row)
        self._reached.append(asked)
        self._observed.append(math.log(max(rate, 1e-6)))
        self._front = None

    def withdraw(self, rows: Iterable[Codes]) -> None:
        """Leave these points out of the front."""
        self._withdrawn = _keys(rows)
        self._front = None

    def _strips(self, pending: Codes | None = None) -> tuple[Floats, Floats]:
        """Return the widths of the context strips, and the best rate known to reach each."""
        if self._front is None:
            self._front = self._known_front()
        widths, best = self._front
        if pending is not None and len(pending):
            best = best.copy()
            for row, rate in zip(pending, np.exp(self.speed.mean(pending)), strict=True):
                reach = self._levels <= self._log_context[row[self._context]]
                best[reach] = np.maximum(best[reach], rate)
        return widths, best

    def _known_front(self) -> tuple[Floats, Floats]:
        levels = self._levels
        widths = np.diff(levels, prepend=levels[0] - 1.0)
        best = np.zeros(len(levels))
        if self.rows:
            # What the model makes of each measurement, so that a lucky one does not bar others.
            mean = self.speed.mean(np.stack(self.rows))
            rates = np.exp(0.5 * (mean + np.array(self._observed)))
            reached = np.array(self._reached)
            if self._withdrawn:
                counts = np.array([row.tobytes() not in self._withdrawn for row in self.rows])
                rates, reached = rates[counts], reached[counts]
            for index, level in enumerate(levels):
                there = rates[reached >= level - 1e-9]
                best[index] = there.max(initial=0.0)
            # A rate below half of the best is worth nothing, whatever the context.
            best = np.maximum(best, 0.5 * rates.max(initial=0.0))
        return widths, best

    def quick(self, codes: Codes) -> Floats:
        """Return the improvement by an optimistic rate."""
        tokens, _ = self.speed.acceptance.log_tokens(codes)
        rate = np.exp(self.speed.quick(codes, tokens) + self._typical_sd)
        widths, best = self._strips()
        index = np.searchsorted(
            self._levels, self._log_context[codes[:, self._context]] + 1e-9, side="right"
        )
        # What a rate adds up to each level is linear between the rates to beat.
        knots = np.append(np.unique(best), max(float(rate.max()), float(best.max())) + 1.0)
        steps = np.cumsum(np.maximum(knots[:, None] - best[None, :], 0.0) * widths, axis=1)
        result = np.zeros(len(codes))
        for level in range(len(best)):
            there = np.maximum(index, 1) - 1 == level
            result[there] = np.interp(rate[there], knots, steps[:, level])
        return result

    def improvement(self, codes: Codes, pending: Codes) -> Floats:
        """Return the expected improvement: exact, for a log-normal rate and a known context."""
        mean, sd = self.speed.predict(codes)
        self._typical_sd = float(np.clip(1.5 * np.median(sd), 0.02, 0.5))
        widths, best = self._strips(pending)
        expected = np.exp(mean + 0.5 * sd**2)[:, None]
        with np.errstate(divide="ignore"):
            height = (mean[:, None] - np.log(best)[None, :]) / sd[:, None]
        gains = expected * ndtr(height + sd[:, None]) - best[None, :] * ndtr(height)
        index = np.searchsorted(
            self._levels, self._log_context[codes[:, self._context]] + 1e-9, side="right"
        )
        total = np.cumsum(np.maximum(gains, 0.0) * widths, axis=1)
        result: Floats = total[np.arange(len(codes)), np.maximum(index, 1) - 1]
        return result

    def volume(self) -> float:
        """Return the hypervolume above half the best rate."""
        widths, best = self._strips()
        return float((widths * (best - 0.5 * best.max(initial=0.0))).sum())

    def words(self, row: Codes) -> str:
        """Return the expected rate with its spread, and the context."""
        mean, sd = self.speed.predict(row[None, :])
        low, high = np.exp(mean[0] - 2 * sd[0]), np.exp(mean[0] + 2 * sd[0])
        tokens = int(self._tokens[row[self._context]])
        measured = len(self.rows)
        basis = f"from {measured} measured" if measured else "nothing measured yet"
        return (
            f"{_figure(np.exp(mean[0]))} tok/s expected ({_figure(low)} to {_figure(high)}, "
            f"{basis}) at {tokens:,} tokens of context"
        )


def _keys(rows: Iterable[Codes]) -> frozenset[bytes]:
    return frozenset(row.tobytes() for row in rows)


def _spare(margin: float, sd: float) -> str:
    """Return a number of bytes with its spread, in MiB where GiB would be but hundredths."""
    if max(abs(margin), sd) < 0.1 * 2**30:
        return f"{margin / 2**20:.0f} ± {sd / 2**20:.0f} MiB"
    return f"{margin / 2**30:.2f} ± {sd / 2**30:.2f} GiB"


def _figure(value: float) -> str:
    """Return a number as people write it: of a large one no digits after the point."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 1 else f"{value:.3g}"


class PlainObjectives(Objectives):
    """Any number of objectives, each a process of its own. The context may still be read off.

    Two objectives: exact expected hypervolume improvement for independent Gaussians. One: expected
    improvement. More: expected improvement of a randomly weighted augmented Chebyshev sum (Knowles
    2006, "ParEGO").
    """

    def __init__(self, space: CodedSpace, count: int, generator: np.random.Generator) -> None:
        """Set up a process for each objective."""
        self._count = count
        self._generator = generator
        amounts = np.array([*(0.45 for _ in space.axes), 0.5, 0.05, 0.05])
        freedom = np.array([*(1.0 for _ in space.axes), 0.6, 0.7, 1.0])
        tables = axis_tables(space, jump=0.1)
        self._processes = [Process(tables, amounts, freedom) for _ in range(count)]
        self.rows: list[Codes] = []
        self._values: list[tuple[float, ...]] = []
        self._withdrawn: frozenset[bytes] = frozenset()
        self._stale = True
        self._centre = np.zeros(count)
        self._scale = np.ones(count)
        self._typical_sd = np.ones(count)

    def learn(self, seen: Seen) -> None:
        """Take in a trial that works."""
        assert seen.values is not None
        self.rows.append(seen.row)
        self._values.append(seen.values)
        self._stale = True

    def withdraw(self, rows: Iterable[Codes]) -> None:
        """Leave these points out of the front."""
        self._withdrawn = _keys(rows)

    def _train(self) -> None:
        if not self._stale:
            return
        self._stale = False
        if not self.rows:
            return
        values = np.array(self._values)
        self._centre = values.mean(axis=0)
        spread = values.std(axis=0)
        self._scale = np.where(spread > 1e-12, spread, 1.0)
        scaled = (values - self._centre) / self._scale
        keep = kept(scaled.sum(axis=1).tolist())
        codes = np.stack([self.rows[index] for index in keep])
        for index, process in enumerate(self._processes):
            process.train(codes, scaled[keep, index])

    def _scaled_front(self) -> Floats:
        if not self._values:
            return np.zeros((0, self._count))
        values = [
            value
            for row, value in zip(self.rows, self._values, strict=True)
            if row.tobytes() not in self._withdrawn
        ]
        if not values:
            return np.zeros((0, self._count))
        return (np.array(values) - self._centre) / self._scale

    def _reference(self, front: Floats) -> Floats:
        if not len(front):
            return np.full(self._count, -2.0)
        worst: Floats = front.min(axis=0) - 0.1
        return worst

    def quick(self, codes: Codes) -> Floats:
        """Return the improvement by optimistic values."""
        self._train()
        means = [
            p.quick_mean(codes) + s for p, s in zip(self._processes, self._typical_sd, strict=True)
        ]
        return self._expected(means, [np.full(len(codes), 1e-3) for _ in means], None, codes)

    def improvement(self, codes: Codes, pending: Codes) -> Floats:
        """Return the expected improvement."""
        self._train()
        both = [process.predict(codes) for process in self._processes]
        self._typical_sd = np.array([float(np.median(sd)) for _, sd in both])
        return self._expected([m for m, _ in both], [s for _, s in both], pending, codes)

    def _expected(
        self, means: list[Floats], sds: list[Floats], pending: Codes | None, codes: Codes
    ) -> Floats:
        front = self._scaled_front()
        if pending is not None and len(pending):
            believed = np.stack([p.predict(pending)[0] for p in self._processes], axis=1)
            front = np.concatenate([front, believed])
        reference = self._reference(front)
        if self._count == 1:
            best = front[:, 0].max(initial=float(reference[0]))
            return _above(means[0], sds[0], best)
        if self._count > 2:
            weights = self._generator.dirichlet(np.ones(self._count))

            def joined(values: Floats) -> Floats:
                weighted = weights * (values - reference)
                result: Floats = weighted.min(axis=1) + 0.05 * weighted.sum(axis=1)
                return result

            best = joined(front).max(initial=0.0) if len(front) else 0.0
            middle = joined(np.stack(means, axis=1))
            return _above(
                middle, np.sqrt(sum((w * s) ** 2 for w, s in zip(weights, sds, strict=True))), best
            )
        edges = (
            np.unique(np.concatenate([[reference[1]], front[:, 1]]))
            if len(front)
            else reference[1:]
        )
        edges = edges[edges >= reference[1]]
        if len(edges) > 40:
            edges = edges[np.unique(np.linspace(0, len(edges) - 1, 40).astype(int))]
        total = np.zeros(len(codes))
        above = [_above(means[1], sds[1], float(edge)) for edge in edges]
        for index, edge in enumerate(edges):
            last = index + 1 == len(edges)
            there = front[front[:, 1] > edge + 1e-12] if len(front) else front
            best = there[:, 0].max(initial=float(reference[0]))
            width = above[index] - (0.0 if last else above[index + 1])
            total += _above(means[0], sds[0], float(best)) * np.maximum(width, 0.0)
        return total

    def volume(self) -> float:
        """Return the hypervolume, in the scale of the objectives seen so far."""
        self._train()
        front = self._scaled_front()
        if not len(front):
            return 0.0
        reference = self._reference(front)
        if self._count == 2:
            total, height = 0.0, float(reference[1])
            for x, y in sorted(map(tuple, front.tolist()), reverse=True):
                if y > height:
                    total += (x - float(reference[0])) * (y - height)
                    height = y
            return total
        result: float = float(np.prod(front.max(axis=0) - reference))
        return result

    def words(self, row: Codes) -> str:
        """Return the expected objectives with their spread."""
        self._train()
        parts = []
        for index, process in enumerate(self._processes):
            mean, sd = process.predict(row[None, :])
            scale, centre = float(self._scale[index]), float(self._centre[index])
            parts.append(f"{_figure(mean[0] * scale + centre)} ± {_figure(sd[0] * scale)}")
        return f"expected {', '.join(parts)} from {len(self.rows)} measured"


def _above(mean: Floats, sd: Floats, than: float) -> Floats:
    """Return E[max(x - than, 0)] for Gaussian x (Jones et al. 1998)."""
    height = (mean - than) / sd
    density = np.exp(-0.5 * height**2) / math.sqrt(2 * math.pi)
    result: Floats = np.maximum(sd * (height * ndtr(height) + density), 0.0)
    return result


class FrontierModel:
    """All beliefs about one space, and the choice of the next point."""

    def __init__(
        self,
        space: CodedSpace,
        prior: Prior,
        *,
        objectives: int,
        read_context: bool,
        generator: np.random.Generator,
    ) -> None:
        """Set up the models. `read_context`: objective two is the context axis itself."""
        self.space = space
        self._generator = generator
        self.feasibility = Feasibility(space, prior, generator)
        context = space.of_role(Role.CONTEXT)
        if read_context and context and space.axes[context[0]].numbers is not None:
            self.objectives: Objectives = EngineObjectives(space, prior, context[0])
        else:
            self.objectives = PlainObjectives(space, objectives, generator)
        self._served_s: list[float] = []
        self._failed_s: list[float] = []
        self._cache: _Features | None = None

    def learn(self, seen: Seen) -> None:
        """Take in a finished trial."""
        self.feasibility.learn(seen)
        if seen.values is not None:
            self.objectives.learn(seen)
        evidence = seen.evidence
        if evidence is not None:
            served = seen.values is not None
            spent = evidence.total_s
            if spent is None and evidence.boot_s is not None:
                spent = evidence.boot_s + (_MEASURING_S if served else 0.0)
            if spent is not None:
                (self._served_s if served else self._failed_s).append(spent)

    def heed(self, boot_spread_bytes: float, withdrawn: Iterable[Codes]) -> None:
        """Take note of how memory differs from boot to boot, and of points that may not win."""
        self.feasibility.memory.heed_spread(boot_spread_bytes)
        self.objectives.withdraw(withdrawn)

    def _features(self, codes: Codes) -> _Features:
        return _Features(
            codes=codes,
            keys=self.space.keys(codes),
            memory=self.feasibility.memory.rows(codes),
            entries=self.feasibility.suspicions.entries(codes),
        )

    def _candidates(self) -> _Features:
        points = self.space.points
        if len(points) <= _CACHED:
            if self._cache is None:
                self._cache = self._features(points)
            return self._cache
        drawn = points[self._generator.integers(len(points), size=_SAMPLE)]
        return self._features(np.concatenate([drawn, self._neighbours()]))

    def _neighbours(self) -> Codes:
        """Return the points one axis away from the best ones so far, by every other value."""
        rows = self._best_rows()
        if not len(rows):
            return self.space.points[:0]
        near = []
        for column, axis in enumerate(self.space.axes):
            for code in range(axis.size):
                changed = rows[rows[:, column] < axis.size].copy()
                changed[:, column] = code
                near.append(changed)
        return self.space.settle(np.concatenate(near))[:6000]

    def _best_rows(self) -> Codes:
        rows = self.objectives.rows
        if not rows:
            return self.space.points[:0]
        codes = np.stack(rows)
        gains = self.objectives.quick(codes)
        order = np.argsort(gains)[::-1][:40]
        return codes[order]

    def probability(self, codes: Codes) -> Floats:
        """Return the probability that each point works."""
        features = self._features(codes)
        return self.feasibility.probability(features, self.feasibility.fitting(features))

    @one_thread()
    def choose(self, taken: set[int], pending: Codes) -> Choice | None:
        """Return the point with the most expected improvement per second; None if none is left.

        `taken` are the keys of points asked for before, `pending` those that still run: what they
        are expected to reach counts as reached.
        """
        features = self._candidates()
        fresh = ~np.isin(features.keys, np.fromiter(taken, dtype=np.int64, count=len(taken)))
        if not fresh.any():
            return None
        index = np.flatnonzero(fresh)
        if len(index) > _SCREENED:
            likely = self.feasibility.quick(features)
            rough = self.objectives.quick(features.codes) * likely
            rough = np.where(fresh, rough, -1.0)
            top = np.argpartition(rough, -_SCREENED)[-_SCREENED:]
            other = self._generator.choice(index, size=100)
            index = np.unique(np.concatenate([top[fresh[top]], other]))
        screened = features.at(index)
        fits = self.feasibility.fitting(screened)
        works = self.feasibility.probability(screened, fits)
        gain = self.objectives.improvement(screened.codes, pending)
        worth = gain * works
        cost = self._cost(works, fits)
        # Ties are many before anything is measured; chance and not the order of axes decides.
        chance = 1 + 1e-6 * self._generator.random(len(worth))
        volume = self.objectives.volume()
        share = float(worth.max()) / volume if volume > 0 else math.inf
        # With next to nothing left to gain, a boot that likely fails is not worth its long shot.
        caution = works**3 if share < _NEGLIGIBLE else 1.0
        best = int(np.argmax((worth * caution + 1e-12 * works) / cost * chance))
        row = screened.codes[best]
        return Choice(row=row, improvement=share, why=self._why(row, float(works[best])))

    def _cost(self, works: Floats, fits: Floats) -> Floats:
        served = float(np.mean(self._served_s)) if self._served_s else 1.0
        failed = float(np.mean(self._failed_s)) if self._failed_s and self._served_s else served
        # Failing early is cheap in seconds, but a boot is also what budgets are counted in, and one
        # that fails teaches nothing of speed: least of all where nothing is known of it yet. For
        # lack of memory it also teaches less than a refusal, which holds for whole parts of the
        # space.
        wasted = max(failed, (_WASTED if self._served_s else _WASTED_AT_FIRST) * served)
        return works * served + (1 - works) * wasted + _WASTED_SHORT * served * (1 - fits)

    def _why(self, row: Codes, works: float) -> str:
        words = [self.objectives.words(row), f"{works:.0%} likely to work"]
        memory = self.feasibility.memory
        if memory.informed:
            margin, sd = memory.margin_bytes(row[None, :])
            ended = len(memory.rests_on)
            words.append(
                f"memory to spare {_spare(float(margin[0]), float(sd[0]))}"
                + (f" after {ended} endings for lack of it" if ended else "")
            )
        if self.feasibility.suspicions.informed:
            what, guilt, behind = self.feasibility.suspicions.suspect(row)
            if guilt > 0.03:
                trials = ", ".join(str(each) for each in behind) or "none yet"
                words.append(f"{what} is {guilt:.0%} likely not supported (trials {trials})")
        return "; ".join(words)
