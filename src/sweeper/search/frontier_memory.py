"""What a point needs of memory against what there is, in bytes with spread, learnt boot by boot.

The margin of a point is a linear form: the budget, less weights, KV cache times context, draft
head, scratch, graphs and overhead. Each coefficient is a belief with a mean and a spread; what a
boot prints of one component, how much it lacked, how large its KV pool became, and that it served
at all, each correct the belief (a Kalman filter; for "it fitted" and "it did not", which are only
signs, the assumed-density step of Minka 2001, "A family of algorithms for approximate Bayesian
inference"). There are two margins, for a memory fraction has two sides: what is planned inside the
budget, and what must find room in the rest of the device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sweeper.core.evidence import COMPONENTS, Evidence, Prior, Role
from sweeper.core.pairs import Scalar, text
from sweeper.search.frontier_space import CodedSpace, Codes, Floats
from sweeper.search.normal import log_ndtr, ndtr

GIB = float(2**30)
_RELIABLE = 1.645
"""How many standard deviations from boot to boot a point leaves that works 19 times of 20."""
_SIGN_SD = 0.05
_EQUAL_SD = 0.05
_TRUST = 5.0
"""The logarithm of the odds that the model of memory knows more than a coin."""
_DISCREPANCY = 0.05
"""GiB by which a linear form may be wrong however much it has seen."""

INSIDE = frozenset({"oom_weights", "oom_draft_head", "oom_kv_cache"})
RUNTIME = "oom_runtime"
OUTSIDE = frozenset({"oom_activation_profiling", "oom_cudagraph_capture", "oom_compute", RUNTIME})
"""Endings beyond the planned budget, where a memory fraction plans; else they are inside it."""

_OFF = frozenset({"none", "off", "no", "null", "false", "0", "", "disabled", "eager"})


class LinearBelief:
    """A Gaussian over the coefficients of linear forms, updated one observation at a time."""

    def __init__(self, mean: Floats, sd: Floats, sign_sd: float = _SIGN_SD) -> None:
        """Start from independent coefficients; `sign_sd` blurs where a sign changes."""
        self.sign_sd = sign_sd
        self.mean = mean.astype(np.float64)
        self.cov = np.diag(np.square(sd.astype(np.float64)))

    def predict(self, row: Floats) -> tuple[float, float]:
        """Return mean and variance of one form."""
        return float(row @ self.mean), float(row @ self.cov @ row)

    def predict_all(self, rows: Floats) -> tuple[Floats, Floats]:
        """Return means and variances, one for each row."""
        return rows @ self.mean, np.einsum("ij,ij->i", rows @ self.cov, rows)

    def observe(self, row: Floats, value: float, sd: float) -> None:
        """Learn that the form has this value, give or take `sd`."""
        gain = self.cov @ row
        variance = float(row @ gain) + sd * sd
        self.mean = self.mean + gain * ((value - float(row @ self.mean)) / variance)
        self.cov = self.cov - np.outer(gain, gain) / variance

    def observe_sign(self, row: Floats, above: bool, than: float = 0.0) -> None:
        """Learn only on which side of `than` the form lies."""
        sign = 1.0 if above else -1.0
        gain = self.cov @ row
        sd = math.sqrt(float(row @ gain) + self.sign_sd**2)
        z = sign * (float(row @ self.mean) - than) / sd
        # phi(z) / Phi(z), through logarithms: far on the wrong side both vanish.
        ratio = math.exp(-0.5 * z * z - 0.5 * math.log(2 * math.pi) - float(log_ndtr(z)))
        self.mean = self.mean + gain * (sign * ratio / sd)
        self.cov = self.cov - np.outer(gain, gain) * (ratio * (ratio + z) / sd**2)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Feature:
    """A product of one table per axis, in the block of a component, with its prior."""

    block: str
    tables: tuple[tuple[int, Floats], ...]
    mean: float
    sd: float


def _variances(x: Floats, spread: Floats, start: Floats) -> Floats:
    """Return variances of independent coefficients by which rows of `x` are as unsure as said.

    Maximum likelihood of variance components by multiplicative updates (Fevotte et al. 2009,
    "Nonnegative matrix factorization with the Itakura-Saito divergence"): what matters is by which
    factor a spread is missed, so that a huge one does not set those of all others.
    """
    squares = x * x
    wanted = np.maximum(spread, 1e-3 * float(spread.max(initial=1e-9))) ** 2
    found = start.copy()
    for _ in range(40):
        implied = np.maximum(squares @ found, 1e-18)
        down = squares.T @ (1 / implied)
        up = squares.T @ (wanted / implied**2)
        found = found * np.sqrt(np.divide(up, down, out=np.ones_like(up), where=down > 0))
    return found


class _Form:
    """The features of one margin, and the belief to start from."""

    def __init__(self, features: list[_Feature], unit: float) -> None:
        self.features = features
        self.blocks = np.array([each.block for each in features])
        self._unit = unit
        # What nobody said anything of is as large as usual, unless the device itself is small.
        scale = np.where(np.isin(self.blocks, _OF_THEIR_OWN_SIZE), 1.0, unit)
        self._mean = np.array([each.mean for each in features]) * scale
        self._sd = np.array([each.sd for each in features]) * scale

    def belief(self) -> LinearBelief:
        """Return the belief before anything was seen."""
        return LinearBelief(self._mean, self._sd, _SIGN_SD * self._unit)

    def fit(self, codes: Codes, parts: list[dict[str, tuple[float, float]]]) -> None:
        """Start from what these points are thought to need, with as much doubt as that has.

        `parts` are mean and spread in GiB of each component of each point. The coefficients of a
        component follow by least squares, and so do their spreads; these are never much smaller
        than is usual, for examples tell only of what whoever made them knew of.
        """
        rows = -self.rows(codes)
        for block in COMPONENTS:
            told = [index for index, each in enumerate(parts) if block in each]
            columns = np.flatnonzero(self.blocks == block)
            if not told or not len(columns):
                continue
            x = rows[told][:, columns]
            mean = np.array([parts[index][block][0] for index in told])
            spread = np.array([parts[index][block][1] for index in told])
            usual = np.maximum(self._sd[columns], 1e-6 * self._unit)
            noise = 0.01 * mean + 0.002 * self._unit
            weighted = x / noise[:, None]
            precision = weighted.T @ weighted + np.diag(1 / usual**2)
            self._mean[columns] = np.linalg.solve(precision, weighted.T @ (mean / noise))
            least = (_LEAST_DOUBT * usual) ** 2
            self._sd[columns] = np.sqrt(np.maximum(_variances(x, spread, usual**2), least))

    def rows(self, codes: Codes) -> Floats:
        """Return the features of points, each with the sign it has in the margin."""
        result = np.empty((len(codes), len(self.features)))
        for index, feature in enumerate(self.features):
            column = np.full(len(codes), 1.0 if feature.block in ("budget", "rest") else -1.0)
            for axis, table in feature.tables:
                column *= table[codes[:, axis]]
            result[:, index] = column
        return result

    def only(self, row: Floats, *blocks: str) -> Floats:
        """Return a row without the features of other blocks."""
        return np.where(np.isin(self.blocks, blocks), row, 0.0)


_OF_THEIR_OWN_SIZE = ("budget", "rest", "weights", "kv", "slots")
"""Blocks whose sizes follow from the device and from the model, not from what is usual."""
_LEAST_DOUBT = 0.25
_SMALL_GIB = 8.0
"""A device below which all that is merely usual is thought to be smaller too:"""
_SMALLEST = 0.15
"""by this at most. What is no sum of components does not shrink with the device."""
_ALWAYS = ("budget", "overhead")
_EVERYTHING = (*_ALWAYS, "weights", "kv", "slots", "compute", "draft", "graphs")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """One way to read a shortfall: which components had been counted when memory ran out.

    `counts` is None for the reading that takes every shortfall as a lower bound only.
    """

    planned: float
    staged: float
    counts: dict[str, tuple[str, ...]] | None


_READINGS = (
    # Engines that plan a budget have profiled everything else before they size the KV cache;
    # the others allocate one thing after the other. `planned` and `staged` are the odds for each.
    _Reading(
        planned=0.70,
        staged=0.12,
        counts={
            "weights": ("weights",),
            "kv": ("weights", "kv", "slots", "compute", "draft", "graphs"),
            "compute": ("weights", "kv", "slots", "compute", "draft"),
            "draft": ("weights", "kv", "slots", "compute", "draft"),
        },
    ),
    _Reading(
        planned=0.05,
        staged=0.60,
        counts={
            "weights": ("weights",),
            "kv": ("weights", "kv", "slots"),
            "compute": ("weights", "kv", "slots", "compute"),
            "draft": ("weights", "kv", "slots", "compute", "draft"),
        },
    ),
    _Reading(
        planned=0.10,
        staged=0.10,
        counts={
            "weights": ("weights", "draft"),
            "kv": ("weights", "draft", "kv", "slots"),
            "compute": ("weights", "draft", "kv", "slots", "compute"),
            "draft": ("weights", "draft"),
        },
    ),
    _Reading(
        planned=0.10,
        staged=0.08,
        counts={
            "weights": ("weights",),
            "kv": ("weights", "kv", "slots", "compute"),
            "compute": ("weights", "compute"),
            "draft": ("weights", "kv", "slots", "compute", "draft"),
        },
    ),
    _Reading(planned=0.05, staged=0.10, counts=None),
)
_PHASE_GROUP = {
    "oom_weights": "weights",
    "oom_kv_cache": "kv",
    "oom_draft_head": "draft",
}


class MemoryModel:
    """The two margins of every point of a space."""

    def __init__(self, space: CodedSpace, prior: Prior) -> None:
        """Set up the components from the roles of the axes and from what is known."""
        self._space = space
        self._two_sided = bool(space.of_role(Role.MEMORY_FRACTION))
        self._context = _first(space.of_role(Role.CONTEXT))
        self._tokens = None if self._context is None else space.axes[self._context].numbers
        # Without a role there is nothing to say a priori: the general classifier has the word.
        self.informed = bool(space.of_role(Role.WEIGHTS, Role.CONTEXT, Role.MEMORY_FRACTION))
        builder = _Builder(space, prior)
        self._unit = min(max(builder.capacity / _SMALL_GIB, _SMALLEST), 1.0)
        self._inside = _Form(builder.inside(), self._unit)
        self._outside = _Form(builder.outside(), self._unit) if self._two_sided else None
        self._begin_with(prior)
        self._beliefs = [self._inside.belief() for _ in _READINGS]
        self._odds = np.log(
            [each.planned if self._two_sided else each.staged for each in _READINGS]
        )
        self._beyond = None if self._outside is None else self._outside.belief()
        self._surprises: list[float] = []
        self._boot_spread = 0.0
        self._fitted, self._tried, self._evidence = 0, 0, 0.0
        self.rests_on: list[int] = []

    def heed_spread(self, spread_bytes: float) -> None:
        """Take note of how much memory differs from boot to boot, one standard deviation.

        A point is to work 19 times of 20, so its margin must be above 1.64 of these; and whether a
        boot fitted says that much less of where the edge is.
        """
        self._boot_spread = spread_bytes / GIB
        for belief in (*self._beliefs, *([] if self._beyond is None else [self._beyond])):
            belief.sign_sd = math.hypot(_SIGN_SD * self._unit, self._boot_spread)

    def _begin_with(self, prior: Prior) -> None:
        axes = self._space.axes
        codes, parts = [], []
        for need in prior.needs:
            point = dict(need.point)
            texts = [[text(value) for value in axis.values] for axis in axes]
            if any(
                axis.name in point and point[axis.name] not in known
                for axis, known in zip(axes, texts, strict=True)
            ):
                continue  # of another space
            codes.append(
                [
                    known.index(point[axis.name]) if axis.name in point else axis.size
                    for axis, known in zip(axes, texts, strict=True)
                ]
            )
            parts.append({block: (mean / GIB, sd / GIB) for block, mean, sd in need.parts})
        if codes:
            self._inside.fit(np.array(codes, dtype=np.int16), parts)

    # --- predictions ----------------------------------------------------------------------------

    def rows(self, codes: Codes) -> tuple[Floats, Floats | None]:
        """Return what `probable` and `fits` need of points; it never changes, so keep it."""
        outside = None if self._outside is None else self._outside.rows(codes)
        return self._inside.rows(codes), outside

    def probable(self, rows: tuple[Floats, Floats | None]) -> Floats:
        """Return a quick probability of fitting: exact means, one spread for all."""
        inside, outside = rows
        sd = math.sqrt(self._spread() ** 2 + (0.3 * self._unit) ** 2)
        least = _RELIABLE * self._boot_spread
        result: Floats = ndtr((inside @ self._best.mean - least) / sd)
        if outside is not None and self._beyond is not None:
            result = result * ndtr((outside @ self._beyond.mean - least) / sd)
        return self._trusted(result)

    def fits(self, rows: tuple[Floats, Floats | None]) -> Floats:
        """Return the probability that each point fits, on both sides of the budget."""
        inside, outside = rows
        shares = np.exp(self._odds - self._odds.max())
        shares /= shares.sum()
        likely = shares > 0.03
        result = np.zeros(len(inside))
        for share, belief in zip(
            shares[likely], itertools.compress(self._beliefs, likely), strict=True
        ):
            result += share / shares[likely].sum() * self._above_zero(belief, inside)
        if outside is not None and self._beyond is not None:
            result = result * self._above_zero(self._beyond, outside)
        return self._trusted(result)

    def _trusted(self, probability: Floats) -> Floats:
        doubt = 1 / (1 + math.exp(min(_TRUST + self._evidence, 30.0)))
        coin = (self._fitted + 1.0) / (self._tried + 2.0)
        return (1 - doubt) * probability + doubt * coin

    def _compare(self, codes: Codes, fitted: bool) -> None:
        """Compare what was predicted for a boot with what the plain share of successes says.

        Where the model predicts worse than a coin of the right bias, as it does where memory is
        not what decides, the coin takes over.
        """
        said = min(max(float(self.fits(self.rows(codes))[0]), 0.02), 0.98)
        coin = (self._fitted + 1.0) / (self._tried + 2.0)
        self._fitted += fitted
        self._tried += 1
        self._evidence = 0.97 * self._evidence + (
            math.log(said if fitted else 1 - said) - math.log(coin if fitted else 1 - coin)
        )

    def _above_zero(self, belief: LinearBelief, rows: Floats) -> Floats:
        mean, variance = belief.predict_all(rows)
        mean = mean - _RELIABLE * self._boot_spread
        sd = np.sqrt(np.maximum(variance, 0) + self._spread() ** 2)
        # A small share for the model's being wrong in a way that it does not know of.
        result: Floats = 0.96 * ndtr(mean / sd) + 0.04 * ndtr(mean / (2 * sd + 0.5 * self._unit))
        return result

    @property
    def _best(self) -> LinearBelief:
        return self._beliefs[int(np.argmax(self._odds))]

    def margin_bytes(self, codes: Codes) -> tuple[Floats, Floats]:
        """Return mean and standard deviation of the margin inside the budget, in bytes."""
        mean, variance = self._best.predict_all(self._inside.rows(codes))
        return mean * GIB, np.sqrt(np.maximum(variance, 0) + self._spread() ** 2) * GIB

    def _spread(self) -> float:
        """How far off the predictions were, beyond what they claimed."""
        recent = self._surprises[-30:]
        if len(recent) < 4:
            return 2 * _DISCREPANCY * self._unit
        return _DISCREPANCY * self._unit * min(max(math.sqrt(sum(recent) / len(recent)), 1.0), 4.0)

    # --- learning -------------------------------------------------------------------------------

    def learn(self, row: Codes, evidence: Evidence, number: int) -> None:
        """Correct the beliefs by what one boot of a point showed."""
        codes = row[None, :]
        inside = self._inside.rows(codes)[0]
        name = evidence.outcome
        served = evidence.kind in ("measured", "unfit")
        if served or name in INSIDE or name in OUTSIDE:
            self._compare(codes, fitted=served)
        self._learn_components(inside, codes, evidence)
        tokens = None
        if self._tokens is not None and self._context is not None:
            tokens = float(self._tokens[row[self._context]])
        pool = self._pool_gib(inside, evidence, tokens)
        if name in INSIDE or (name in OUTSIDE and self._outside is None):
            self.rests_on.append(number)
            group = _PHASE_GROUP.get(name, "compute")
            missing = evidence.shortfall_bytes
            if pool is not None and pool < 0:
                self._learn_margin(inside, group, pool)
            elif missing and not evidence.shortfall_at_least:
                self._learn_margin(inside, group, -missing / GIB)
            else:
                self._learn_side(inside, group, above=False, than=-(missing or 0.0) / GIB)
        elif served or name in OUTSIDE:
            if pool is not None:
                self._learn_margin(inside, "kv", pool)
            if served or pool is None:
                group = "all" if served else "kv"
                self._learn_side(inside, group, above=True)
        if self._outside is not None and (served or name in OUTSIDE):
            self._learn_outside(self._outside.rows(codes)[0], evidence, served)

    def _learn_components(self, inside: Floats, codes: Codes, evidence: Evidence) -> None:
        form = self._inside
        told: list[tuple[Floats, float, float]] = []
        for block, size in (
            ("weights", evidence.weights_bytes),
            ("draft", evidence.draft_bytes),
            ("compute", evidence.compute_bytes),
        ):
            part = form.only(inside, block)
            if size is not None and part.any():
                told.append((-part, size / GIB, 0.02 * self._unit + 0.01 * size / GIB))
        per_token = evidence.kv_bytes_per_token
        if per_token and self._context is not None and self._tokens is not None:
            tokens = float(self._tokens[codes[0, self._context]])
            if tokens > 0:
                part = -form.only(inside, "kv") * (2**20 / tokens)
                if part.any():
                    told.append((part, per_token / 1024, 0.01 * per_token / 1024))
        for belief in self._beliefs:
            for row, value, sd in told:
                belief.observe(row, value, sd)

    def _pool_gib(self, inside: Floats, evidence: Evidence, tokens: float | None) -> float | None:
        """Return the margin that the size of the KV pool tells, if it tells one."""
        if tokens is None or not tokens > 0:
            return None
        told = evidence.estimated_context_tokens or evidence.kv_pool_tokens
        if not told or abs(told / tokens - 1) < 0.01:
            # A pool as large as the window was made for it: it tells nothing of what there is.
            return None
        per_token = evidence.kv_bytes_per_token
        if per_token is None:
            per_token = -float(self._inside.only(inside, "kv") @ self._best.mean)
            per_token *= GIB / tokens
        if not per_token > 0:
            return None
        return (told - tokens) * per_token / GIB

    def _learn_margin(self, inside: Floats, group: str, margin: float) -> None:
        """Learn how much was left or missing, under each reading of what was counted."""
        sd = math.hypot(_EQUAL_SD * self._unit + 0.01 * abs(margin), self._boot_spread)
        everything = self._inside.only(inside, *_EVERYTHING)
        best = int(np.argmax(self._odds))
        for index, (reading, belief) in enumerate(zip(_READINGS, self._beliefs, strict=True)):
            if reading.counts is None:
                # As likely as not anywhere within some GiB.
                self._odds[index] += math.log(0.25)
                belief.observe_sign(everything, margin > 0, than=min(margin, 0.0))
                continue
            row = self._inside.only(inside, *_ALWAYS, *reading.counts[group])
            mean, variance = belief.predict(row)
            variance += sd**2 + self._spread() ** 2
            square = (margin - mean) ** 2 / variance
            # Heavier tails than a Gaussian's: one oddity must not settle the question.
            self._odds[index] += -2.0 * math.log1p(square / 3.0) - 0.5 * math.log(variance)
            if index == best:
                self._surprises.append(min(square, 16.0))
            belief.observe(row, margin, sd)
        self._normalise()

    def _learn_side(self, inside: Floats, group: str, above: bool, than: float = 0.0) -> None:
        """Learn only whether it fitted, under each reading of what was counted."""
        everything = self._inside.only(inside, *_EVERYTHING)
        for index, (reading, belief) in enumerate(zip(_READINGS, self._beliefs, strict=True)):
            row = everything
            if above and group != "all" and reading.counts is not None:
                row = self._inside.only(inside, *_ALWAYS, *reading.counts[group])
            mean, variance = belief.predict(row)
            sign = 1.0 if above else -1.0
            height = sign * (mean - than) / math.sqrt(variance + self._spread() ** 2)
            self._odds[index] += max(float(log_ndtr(height)), -4.0)
            belief.observe_sign(row, above, than)
        self._normalise()

    def _normalise(self) -> None:
        self._odds -= self._odds.max()
        # None is ever out of the game: engines differ more than these few readings.
        np.maximum(self._odds, -12.0, out=self._odds)

    def _learn_outside(self, outside: Floats, evidence: Evidence, served: bool) -> None:
        assert self._outside is not None
        assert self._beyond is not None
        if evidence.graph_bytes is not None:
            size = evidence.graph_bytes / GIB
            part = -self._outside.only(outside, "graphs")
            if part.any():
                self._beyond.observe(part, size, 0.03 * self._unit + 0.03 * size)
        missing = evidence.shortfall_bytes
        if not served and missing and not evidence.shortfall_at_least:
            self._beyond.observe(outside, -missing / GIB, _EQUAL_SD * self._unit)
        else:
            self._beyond.observe_sign(outside, served, than=0.0)


class _Builder:
    """Makes the features of the margins from roles and prior knowledge. Sizes in GiB."""

    def __init__(self, space: CodedSpace, prior: Prior) -> None:
        self.space = space
        self.weights = dict(prior.weights_bytes)
        self.kv = dict(prior.kv_bytes_per_token)
        known = [size / GIB for size in self.weights.values()]
        if prior.capacity_bytes is not None:
            self.capacity, self.capacity_sd = prior.capacity_bytes / GIB, 0.02
            self.capacity_sd *= self.capacity
        elif known:
            self.capacity = 1.4 * float(np.mean(known))
            self.capacity_sd = 0.4 * self.capacity
        else:
            self.capacity, self.capacity_sd = 24.0, 16.0
        self.typical = float(np.mean(known)) if known else 0.6 * self.capacity
        self.kv_typical = float(np.mean(list(self.kv.values()))) / 1024 if self.kv else 64.0

    def graph_sd(self, value: Scalar) -> float:
        """Return how unsure the size of graphs is: many captured sizes may take gigabytes."""
        return 0.1 if is_off(value) else max(0.5, 0.05 * self.capacity)

    def one_hot(
        self,
        column: int,
        block: str,
        mean: Callable[[Scalar], float] | float,
        sd: Callable[[Scalar], float] | float,
        times: tuple[tuple[int, Floats], ...] = (),
    ) -> list[_Feature]:
        """Return one coefficient for each value of an axis, times tables of other axes."""
        axis = self.space.axes[column]
        features = []
        for index, value in enumerate(axis.values):
            table = np.zeros(axis.size + 1)
            table[index] = 1.0
            features.append(
                _Feature(
                    block=block,
                    tables=((column, table), *times),
                    mean=mean(value) if callable(mean) else mean,
                    sd=sd(value) if callable(sd) else sd,
                )
            )
        return features

    def numbers(self, column: int, scale: float = 1.0, less: float = 0.0) -> Floats | None:
        """Return the values of an axis as a table of numbers; inactive counts 0."""
        found = self.space.axes[column].numbers
        return None if found is None else np.nan_to_num((found - less) / scale)

    def linear(self, column: int) -> Floats:
        """Return the values scaled to at most 1, by number or else by rank."""
        numbers = self.numbers(column)
        if numbers is None:
            return np.append(np.linspace(0, 1, self.space.axes[column].size), 0.0)
        return numbers / max(float(np.abs(numbers).max()), 1e-9)

    def fraction(self, column: int) -> Floats | None:
        """Return a memory fraction as shares of the device, if that is what it is."""
        numbers = self.numbers(column)
        if numbers is None:
            return None
        top = float(numbers.max())
        share = numbers if top <= 1.5 else numbers / 100
        if float(share[:-1].min()) <= 0 or float(share.max()) > 1.5:
            return None
        share[-1] = 0.9
        return share

    def drafts(self) -> list[tuple[tuple[int, Floats], ...]]:
        """Return the tables whose product is 1 where a draft is made."""
        tables: list[tuple[int, Floats]] = []
        for column in self.space.of_role(Role.DRAFT_LENGTH):
            numbers = self.numbers(column)
            if numbers is not None:
                tables.append((column, (numbers > 0).astype(float)))
        tables += [
            (column, on_table(self.space, column))
            for column in self.space.of_role(Role.DRAFT_METHOD)
        ]
        return [tuple(tables)] if tables else []

    def inside(self) -> list[_Feature]:
        """Return the features of the margin inside the budget."""
        space = self.space
        features: list[_Feature] = []
        fraction = _first(space.of_role(Role.MEMORY_FRACTION))
        share = None if fraction is None else self.fraction(fraction)
        budget = () if fraction is None or share is None else ((fraction, share),)
        features.append(
            _Feature(block="budget", tables=budget, mean=self.capacity, sd=self.capacity_sd)
        )
        if fraction is not None:
            features += self.one_hot(fraction, "overhead", 0.0, 0.1 if share is not None else 3.0)
        features.append(_Feature(block="overhead", tables=(), mean=0.6, sd=0.5))
        columns = space.of_role(Role.WEIGHTS)
        for column in columns:
            features += self.one_hot(
                column,
                "weights",
                lambda value: (
                    self.weights.get(text(value), self.typical * GIB) / GIB / len(columns)
                ),
                lambda value: (
                    (
                        0.03 * self.weights[text(value)] / GIB
                        if text(value) in self.weights
                        else (0.15 if self.weights else 0.35) * self.typical
                    )
                    / len(columns)
                ),
            )
        if not columns:
            features.append(
                _Feature(block="weights", tables=(), mean=self.typical, sd=0.3 * self.typical)
            )
        features += self._kv()
        features += self._draft()
        features += self._compute()
        for column in space.of_role(Role.GRAPHS):
            features += self.one_hot(column, "graphs", _graph_gib, self.graph_sd)
        informed = bool(space.of_role(Role.CONTEXT)) and bool(columns)
        for column in space.of_role(Role.OTHER):
            features += self.one_hot(column, "overhead", 0.0, 0.3 if informed else 2.0)
            if not informed and space.axes[column].ordered:
                features.append(
                    _Feature(
                        block="overhead",
                        tables=((column, self.linear(column)),),
                        mean=0.5,
                        sd=4.0,
                    )
                )
        return features

    def _kv(self) -> list[_Feature]:
        space = self.space
        column = _first(space.of_role(Role.CONTEXT))
        if column is None:
            return self._kv_without_context()
        # KiB a token times tokens in units of 2**20 is GiB.
        tokens = self.numbers(column, 2**20)
        if tokens is None:
            return self.one_hot(column, "kv", 1.0, 2.0)
        features: list[_Feature] = []
        kinds = space.of_role(Role.KV_DTYPE)
        for kind in kinds:
            known = self.kv if any(text(v) in self.kv for v in space.axes[kind].values) else {}
            features += self.one_hot(
                kind,
                "kv",
                lambda value, known=known: (  # type: ignore[misc]
                    known.get(text(value), self.kv_typical * 1024) / 1024 / len(kinds)
                ),
                lambda value, known=known: (
                    (  # type: ignore[misc]
                        (0.05 * known[text(value)] / 1024)
                        if text(value) in known
                        else (0.4 if self.kv else 0.8) * self.kv_typical
                    )
                    / len(kinds)
                ),
                times=((column, tokens),),
            )
        if not kinds:
            features.append(
                _Feature(
                    block="kv",
                    tables=((column, tokens),),
                    mean=self.kv_typical,
                    sd=(0.1 if self.kv else 0.8) * self.kv_typical,
                )
            )
        features.append(_Feature(block="overhead", tables=((column, tokens),), mean=0.0, sd=2.0))
        features += self._kv_of_drafts(column, tokens, kinds)
        for role, mean, sd in ((Role.PARALLEL, 0.2, 0.4), (Role.SEQUENCES, 0.0, 0.01)):
            for several in space.of_role(role):
                count = self.numbers(several, 1.0, 1.0)
                if count is None:
                    continue
                for sizes in self._kv_sizes(kinds):
                    features.append(
                        _Feature(
                            block="slots",
                            tables=((column, tokens), (several, count), sizes),
                            mean=mean,
                            sd=sd,
                        )
                    )
        return features

    def _kv_sizes(self, kinds: list[int]) -> list[tuple[int, Floats]]:
        """Return, for the first KV axis, the KiB a token of each value as known beforehand."""
        return [
            (
                kind,
                np.append(
                    [
                        self.kv.get(text(value), self.kv_typical * 1024) / 1024
                        for value in self.space.axes[kind].values
                    ],
                    0.0,
                ),
            )
            for kind in kinds[:1]
        ]

    def _kv_of_drafts(self, column: int, tokens: Floats, kinds: list[int]) -> list[_Feature]:
        """Return a small share of the KV cache on top, for layers that only drafts use."""
        features: list[_Feature] = []
        for sizes in self._kv_sizes(kinds):
            for method in self.space.of_role(Role.DRAFT_METHOD):
                features += [
                    each
                    for each in self.one_hot(
                        method,
                        "kv",
                        0.0,
                        lambda value: 0.0 if is_off(value) else 0.05,
                        times=((column, tokens), sizes),
                    )
                    if each.sd > 0
                ]
            if not features:
                features += [
                    _Feature(block="kv", tables=(*on, (column, tokens), sizes), mean=0.01, sd=0.03)
                    for on in self.drafts()
                ]
        return features

    def _kv_without_context(self) -> list[_Feature]:
        return [
            feature
            for kind in self.space.of_role(Role.KV_DTYPE)
            for feature in self.one_hot(kind, "kv", 1.0, 1.5)
        ]

    def _draft(self) -> list[_Feature]:
        space = self.space
        features: list[_Feature] = []
        for on in self.drafts():
            features.append(_Feature(block="draft", tables=on, mean=0.7, sd=0.6))
            for column in space.of_role(Role.DRAFT_LENGTH):
                numbers = self.numbers(column)
                if numbers is not None:
                    features.append(
                        _Feature(
                            block="draft",
                            tables=((column, numbers), *(t for t in on if t[0] != column)),
                            mean=0.05,
                            sd=0.1,
                        )
                    )
            context = _first(space.of_role(Role.CONTEXT))
            tokens = None if context is None else self.numbers(context, 2**20)
            if context is not None and tokens is not None:
                features.append(
                    _Feature(block="draft", tables=(*on, (context, tokens)), mean=2.0, sd=3.0)
                )
            for column in space.of_role(Role.WEIGHTS):
                features += self.one_hot(column, "draft", 0.0, 0.6, times=on)
            for column in space.of_role(Role.DRAFT_METHOD):
                rest = tuple(table for table in on if table[0] != column)
                features += [
                    each
                    for each in self.one_hot(
                        column, "draft", 0.0, lambda v: 0.0 if is_off(v) else 0.6, times=rest
                    )
                    if each.sd > 0
                ]
        return features

    def _compute(self) -> list[_Feature]:
        space = self.space
        features = [_Feature(block="compute", tables=(), mean=0.3, sd=0.25)]
        context = _first(space.of_role(Role.CONTEXT))
        tokens = None if context is None else self.numbers(context, 2**16)
        for chunk in space.of_role(Role.PREFILL_CHUNK):
            size = self.numbers(chunk, 1024)
            if size is None:
                size = self.linear(chunk)
            features.append(_Feature(block="compute", tables=((chunk, size),), mean=0.2, sd=0.3))
            features += self.one_hot(chunk, "compute", 0.0, 0.1)
            for backend in space.of_role(Role.BACKEND):
                features += self.one_hot(backend, "compute", 0.0, 0.1, times=((chunk, size),))
                if context is not None and tokens is not None:
                    features += self.one_hot(
                        backend, "compute", 0.1, 0.3, times=((chunk, size), (context, tokens))
                    )
        for column in space.of_role(Role.BACKEND):
            features += self.one_hot(column, "compute", 0.0, 0.2)
        for column in space.of_role(Role.SEQUENCES, Role.PARALLEL):
            features += self.one_hot(column, "compute", 0.0, 0.15)
            features.append(
                _Feature(block="compute", tables=((column, self.linear(column)),), mean=0.1, sd=0.5)
            )
        return features

    def outside(self) -> list[_Feature]:
        """Return the features of the margin in the rest of the device."""
        space = self.space
        features: list[_Feature] = [_Feature(block="overhead", tables=(), mean=0.2, sd=0.5)]
        for column in space.of_role(Role.MEMORY_FRACTION):
            share = self.fraction(column)
            if share is not None:
                features.append(
                    _Feature(
                        block="rest",
                        tables=((column, 1.0 - share),),
                        mean=self.capacity,
                        sd=0.3 * self.capacity,
                    )
                )
            features += self.one_hot(column, "overhead", 0.0, 0.3 if share is not None else 1.5)
        for column in space.of_role(Role.GRAPHS):
            features += self.one_hot(column, "graphs", _graph_gib, self.graph_sd)
            for length in space.of_role(Role.DRAFT_LENGTH):
                features += self.one_hot(
                    column, "overhead", 0.0, 0.2, times=((length, self.linear(length)),)
                )
        for column in space.of_role(Role.PREFILL_CHUNK, Role.SEQUENCES, Role.PARALLEL):
            features.append(
                _Feature(
                    block="overhead", tables=((column, self.linear(column)),), mean=0.1, sd=0.4
                )
            )
        for column in space.of_role(Role.WEIGHTS, Role.BACKEND, Role.DRAFT_METHOD, Role.OTHER):
            features += self.one_hot(column, "overhead", 0.0, 0.15)
        for column in space.of_role(Role.DRAFT_LENGTH):
            features.append(
                _Feature(
                    block="overhead", tables=((column, self.linear(column)),), mean=0.05, sd=0.2
                )
            )
        return features


def is_off(value: Scalar) -> bool:
    """Tell whether a value says that there is none of the thing."""
    return value is None or value is False or text(value).lower() in _OFF


def on_table(space: CodedSpace, column: int) -> Floats:
    """Return 1 for the values of an axis that switch it on, 0 for off and inactive."""
    return np.array([*(0.0 if is_off(v) else 1.0 for v in space.axes[column].values), 0.0])


def _graph_gib(value: Scalar) -> float:
    return 0.0 if is_off(value) else 0.3


def _first(columns: list[int]) -> int | None:
    return columns[0] if columns else None
