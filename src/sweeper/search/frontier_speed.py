"""How fast a point is: tokens per step from acceptance, and the time of a step, with spread."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sweeper.core.evidence import Prior, Role
from sweeper.core.pairs import text
from sweeper.search.frontier_memory import on_table
from sweeper.search.frontier_space import CodedSpace, Codes, Floats

if TYPE_CHECKING:
    from sklearn.gaussian_process import GaussianProcessRegressor

    from sweeper.search.frontier_kernel import AnovaKernel


@contextmanager
def one_thread() -> Iterator[None]:
    """Let linear algebra run on one thread: several wait longer for each other than they compute.

    The matrices have some hundred rows. Does nothing before there is a process to compute with.
    """
    kernel = sys.modules.get(f"{__package__}.frontier_kernel")
    with nullcontext() if kernel is None else kernel.BLAS.limit(limits=1, user_api="blas"):
        yield


# --- a Gaussian process over codes --------------------------------------------------------------


def variances(tables: Sequence[Floats], amounts: Floats, codes: Codes, base: float) -> Floats:
    """Return the variance of each point under the kernel; no noise: it is the function's own."""
    count = len(tables)
    each = np.stack([table[codes[:, a], codes[:, a]] for a, table in enumerate(tables)], axis=1)
    scaled = each * amounts[:count]
    result: Floats = (
        base
        + (scaled * amounts[:count]).sum(axis=1)
        + 0.5 * amounts[count] ** 2 * (scaled.sum(axis=1) ** 2 - (scaled**2).sum(axis=1))
        + amounts[count + 1] ** 2 * each.prod(axis=1)
    )
    return result


def axis_tables(space: CodedSpace, jump: float = 0.15) -> list[Floats]:
    """Return a kernel table for each axis: equality, or for ordered axes nearness by rank.

    `jump` is the share of an ordered axis that follows no order.
    """
    tables = []
    for axis in space.axes:
        equal = np.eye(axis.size + 1)
        if axis.ordered:
            place = axis.place
            near = np.exp(-((place[:, None] - place[None, :]) ** 2) / (2 * 0.6**2))
            tables.append((1 - jump) * near + jump * equal)
        else:
            tables.append(equal)
    return tables


_REFITS = (3, 5, 7, 10, 14, 19, 25, 32, 40, 50, 62, 76, 92, 110)
TRAINED = 120
"""The most points a process is trained on: beyond it, the best and the latest ones."""


class Process:
    """A Gaussian process over codes whose scales adapt to the data, held back by a prior."""

    def __init__(
        self,
        tables: Sequence[Floats],
        scales: Floats,
        freedom: Floats,
        centre: tuple[float, float] = (0.0, 0.0),
        base: float = 1.0,
    ) -> None:
        """Start from these scales; `freedom` is the log-normal spread they may move by.

        `centre` is what values are expected to be on average, and how many values that is worth;
        `base` is the variance of what all points have in common.
        """
        self._centre, self._worth = centre
        self._base = base
        self._tables = tables
        self._start = np.log(scales)
        self._freedom = freedom
        self._theta = self._start.copy()
        self._fitted_at = 0
        self._regressor: GaussianProcessRegressor | None = None
        self._mean = 0.0

    def train(self, codes: Codes, values: Floats) -> None:
        """Condition on values; the scales are fitted anew when there are enough new ones."""
        count = len(values) + self._worth
        if count > 0:
            self._mean = float((values.sum() + self._worth * self._centre) / count)
        if not len(values):
            self._regressor = None
            return
        due = any(self._fitted_at < at <= len(values) for at in _REFITS)
        from sweeper.search.frontier_kernel import conditioned

        regressor = conditioned(
            self._kernel(), codes, values - self._mean, self._optimise if due else None
        )
        if due:
            self._fitted_at = len(values)
            self._theta = regressor.kernel_.theta.copy()
        self._regressor = regressor

    def _kernel(self) -> AnovaKernel:
        # Late: scikit-learn takes longer to import than all the rest of a plan.
        from sweeper.search.frontier_kernel import AnovaKernel

        return AnovaKernel(self._tables, np.exp(self._theta), base=self._base)

    def _optimise(
        self, objective: Callable[..., Any], initial: Floats, bounds: Any
    ) -> tuple[Floats, float]:
        def penalised(theta: Floats) -> tuple[float, Floats]:
            value, gradient = objective(theta, eval_gradient=True)
            pull = (theta - self._start) / self._freedom
            return value + 0.5 * float(pull @ pull), gradient + pull / self._freedom

        from sweeper.search.frontier_kernel import least

        return least(penalised, initial, bounds)

    def likelihoods(self, codes: Codes, columns: Floats) -> Floats:
        """Return the log-likelihood of each column of values, up to a common constant."""
        lower = np.linalg.cholesky(self._kernel()(codes))
        white = np.linalg.solve(lower, columns - columns.mean(axis=0))
        found: Floats = -0.5 * np.square(white).sum(axis=0)
        return found

    @property
    def noise(self) -> float:
        """The standard deviation of one observation around the function."""
        return float(np.exp(self._theta[-1]))

    def quick_mean(self, codes: Codes) -> Floats:
        """Return the means without the effect of the whole point, by table look-up."""
        result = np.full(len(codes), self._mean)
        if self._regressor is None:
            return result
        count = len(self._tables)
        amounts = np.exp(self._theta)
        train = np.asarray(self._regressor.X_train_, dtype=np.int64)
        alpha = self._regressor.alpha_.ravel()
        against = [table[:, train[:, a]] for a, table in enumerate(self._tables)]
        result += self._base * float(alpha.sum())
        columns = [codes[:, a].astype(np.intp) for a in range(count)]
        for a in range(count):
            result += (amounts[a] ** 2 * (against[a] @ alpha))[columns[a]]
        for a in range(count):
            for b in range(a + 1, count):
                scale = amounts[count] ** 2 * amounts[a] * amounts[b]
                table = scale * ((against[a] * alpha) @ against[b].T)
                if float(np.abs(table).max()) > 1e-3:
                    flat = columns[a] * table.shape[1] + columns[b]
                    result += table.ravel()[flat]
        return result

    def mean(self, codes: Codes) -> Floats:
        """Return the means of the function at points."""
        if self._regressor is None:
            return np.full(len(codes), self._mean)
        found: Floats = self._regressor.predict(codes.astype(np.float64)) + self._mean
        return found

    def predict(self, codes: Codes) -> tuple[Floats, Floats]:
        """Return means and standard deviations of the function at points."""
        if self._regressor is None:
            prior = variances(self._tables, np.exp(self._theta), codes, self._base)
            return np.full(len(codes), self._mean), np.sqrt(prior)
        with warnings.catch_warnings():
            # A variance that rounding made negative is set to 0 with a warning.
            warnings.simplefilter("ignore")
            mean, sd = self._regressor.predict(codes.astype(np.float64), return_std=True)
        return mean + self._mean, np.maximum(sd, 1e-6)


# --- tokens per step ----------------------------------------------------------------------------


class Acceptance:
    """Expected tokens per step of a point: one long draft shows all shorter ones.

    The chance that a position is accepted, given that all before it were, is logistic in the
    position and in what the draft depends on: weights, KV type, method. A Bayesian linear
    regression on the logits keeps the spread.
    """

    def __init__(self, space: CodedSpace) -> None:
        """Find the axes that decide whether, how and how far the engine drafts."""
        self._space = space
        self._length = next(iter(space.of_role(Role.DRAFT_LENGTH)), None)
        self._method = next(iter(space.of_role(Role.DRAFT_METHOD)), None)
        numbers = None if self._length is None else space.axes[self._length].numbers
        self._lengths = None if numbers is None else np.nan_to_num(numbers).astype(int)
        self.drafts = self._lengths is not None or self._method is not None
        self._columns: list[tuple[int, float]] = [
            *((c, 0.5) for c in space.of_role(Role.WEIGHTS)),
            *((c, 0.3) for c in space.of_role(Role.KV_DTYPE)),
            *((c, 0.8) for c in space.of_role(Role.DRAFT_METHOD)),
            *((c, 0.05) for c in space.of_role(Role.BACKEND, Role.CONTEXT)),
        ]
        self._seen: list[tuple[Codes, tuple[float, ...]]] = []
        self._silent = False
        self._typical = 3
        sizes = [space.axes[c].size + 1 for c, _ in self._columns]
        slopes = [c for c, _ in self._columns if space.axes[c].role in _SLOPED]
        self._sloped = slopes
        sds = [0.7, 0.15]
        for (_, sd), size in zip(self._columns, sizes, strict=True):
            sds += [sd] * size
        for column in slopes:
            sds += [0.06] * (space.axes[column].size + 1)
        self._sd = np.array(sds)
        self._prior_mean = np.zeros(len(sds))
        self._prior_mean[:2] = (1.3, -0.1)
        self._mean = self._prior_mean.copy()
        self._factor = np.diag(self._sd)

    def learn(self, row: Codes, acceptance: tuple[float, ...]) -> None:
        """Take in what one boot showed."""
        if not acceptance and not self._seen and self.lengths(row[None, :])[0]:
            self._silent = True
        if acceptance and self.drafts:
            self._seen.append((row, acceptance))
            self._typical = max(self._typical, len(acceptance)) if self._lengths is None else 3
            self._fit()

    def _design(self, codes: Codes, positions: NDArray[np.int64]) -> Floats:
        rows = np.zeros((len(codes), len(self._sd)))
        rows[:, 0] = 1.0
        rows[:, 1] = positions
        at = 2
        every = np.arange(len(codes))
        for column, _ in self._columns:
            rows[every, at + codes[:, column]] = 1.0
            at += self._space.axes[column].size + 1
        for column in self._sloped:
            rows[every, at + codes[:, column]] = positions
            at += self._space.axes[column].size + 1
        return rows

    def _fit(self) -> None:
        codes, positions, logits = [], [], []
        for row, shares in self._seen[-200:]:
            before = 1.0
            for position, share in enumerate(shares[:16]):
                if before < 0.02:
                    break
                chance = min(max(share / before, 0.005), 0.995)
                codes.append(row)
                positions.append(position)
                logits.append(math.log(chance / (1 - chance)))
                before = share
        if not codes:
            return
        rows = self._design(np.stack(codes), np.array(positions))
        target = np.array(logits) - rows @ self._prior_mean
        precision = rows.T @ rows / 0.08**2 + np.diag(1 / self._sd**2)
        lower = np.linalg.cholesky(precision)
        right = rows.T @ target / 0.08**2
        self._mean = self._prior_mean + np.linalg.solve(lower.T, np.linalg.solve(lower, right))
        self._factor = np.linalg.inv(lower).T

    def lengths(self, codes: Codes) -> NDArray[np.int64]:
        """Return how many tokens each point drafts per step."""
        if self._lengths is not None and self._length is not None:
            count = self._lengths[codes[:, self._length]]
        else:
            count = np.full(len(codes), self._typical if self.drafts else 0)
        if self._method is not None:
            count = count * on_table(self._space, self._method)[codes[:, self._method]].astype(int)
        bounded: NDArray[np.int64] = np.minimum(count, _LONGEST).astype(np.int64)
        return bounded

    def log_tokens(self, codes: Codes) -> tuple[Floats, Floats]:
        """Return mean and spread of the logarithm of the expected tokens per step."""
        if not self.drafts:
            return np.zeros(len(codes)), np.zeros(len(codes))
        columns = [column for column, _ in self._columns]
        key = np.zeros(len(codes), dtype=np.int64)
        for column in columns:
            key = key * (self._space.axes[column].size + 1) + codes[:, column]
        _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
        longest = int(self.lengths(codes).max(initial=0))
        table, spread = self._table(codes[first], longest)
        count = self.lengths(codes)
        if self._silent and not self._seen:
            # The engine does not say what it accepts: the rates themselves must teach it, and a
            # doubt that all points share says nothing of which is better.
            return table[inverse, count], np.zeros(len(codes))
        return table[inverse, count], spread[inverse, count]

    def _table(self, codes: Codes, longest: int) -> tuple[Floats, Floats]:
        draws = self._mean[:, None] + self._factor @ _DRAWS[: len(self._mean)]
        tokens = np.ones((len(codes), longest + 1, _DRAWS.shape[1]))
        alive = np.ones((len(codes), _DRAWS.shape[1]))
        for position in range(longest):
            design = self._design(codes, np.full(len(codes), min(position, 16)))
            alive = alive / (1 + np.exp(-(design @ draws)))
            tokens[:, position + 1] = tokens[:, position] + alive
        logs = np.log(tokens)
        return logs.mean(axis=2), logs.std(axis=2)


_SLOPED = (Role.WEIGHTS, Role.DRAFT_METHOD)
_DRAWS = np.random.default_rng(1).standard_normal((512, 24))
"""Fixed draws for the spread of nonlinear predictions, so that these do not flicker."""


# --- step time ----------------------------------------------------------------------------------

_SCALE = {
    # How much the logarithm of the step time moves along an axis, before anything is measured.
    Role.WEIGHTS: 0.25,
    Role.KV_DTYPE: 0.06,
    Role.CONTEXT: 0.02,
    Role.DRAFT_LENGTH: 0.12,
    Role.DRAFT_METHOD: 0.2,
    Role.GRAPHS: 0.3,
    Role.MEMORY_FRACTION: 0.005,
    Role.PREFILL_CHUNK: 0.015,
    Role.SEQUENCES: 0.05,
    Role.PARALLEL: 0.08,
    Role.BACKEND: 0.15,
    Role.OTHER: 0.15,
}


_COSTS = np.array([0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.13, 0.2, 0.35, 0.6, 1.0])
"""What verifying one drafted token may cost, as a share of a step without drafts: next to nothing
where a step waits for the weights to be read, all of it where it waits for the arithmetic."""
_LONGEST = 64
_COST_TRENDS = -np.log1p(_COSTS[:, None] * np.arange(_LONGEST + 1)[None, :])


class Speed:
    """The logarithm of the decode rate of points, in tokens per second, with spread."""

    def __init__(self, space: CodedSpace, prior: Prior) -> None:
        """Set up the process from what is known to matter."""
        self._space = space
        self.acceptance = Acceptance(space)
        scales = np.array([*(_SCALE[axis.role] for axis in space.axes), 0.6, 0.01, 0.012])
        freedom = np.array([*(0.8 for _ in space.axes), 0.6, 0.7, 0.5])
        self._process = Process(axis_tables(space), scales, freedom)
        self._bytes: list[tuple[int, Floats]] = []
        known = dict(prior.weights_bytes)
        for column in space.of_role(Role.WEIGHTS):
            sizes = [known.get(text(value)) for value in space.axes[column].values]
            if all(size is not None and size > 0 for size in sizes):
                # A step reads all weights once: memory-bound decode (Pope et al. 2022).
                logs = np.log(np.array(sizes, dtype=float))
                self._bytes.append((column, np.append(0.2 * (logs - logs.mean()), 0.0)))
        length = next(iter(space.of_role(Role.DRAFT_LENGTH)), None)
        self._length = length
        self._codes: list[Codes] = []
        self._values: list[float] = []
        self._shown: list[float | None] = []
        self._stale = True
        self._cost_prior = np.exp(-2.0 * np.log(_COSTS / prior.draft_cost) ** 2)
        self._weigh(self._cost_prior, np.zeros(1, dtype=np.int64))

    def learn(self, row: Codes, decode_tok_s: float, acceptance: tuple[float, ...]) -> None:
        """Take in a measured rate and, where a draft was made, what was accepted."""
        self.acceptance.learn(row, acceptance)
        self._codes.append(row)
        self._values.append(math.log(max(decode_tok_s, 1e-6)))
        self._shown.append(math.log(1 + sum(acceptance)) if acceptance else None)
        self._stale = True

    def _weigh(self, weights: Floats, seen: NDArray[np.int64]) -> None:
        """Believe in each cost of a drafted token by its weight, having seen these lengths.

        Near a length that was measured it makes no difference what a token costs, so the doubt
        about that only counts for the way from there.
        """
        weights = weights / weights.sum()
        self._cost_trend = weights @ _COST_TRENDS
        known = np.unique(np.minimum(seen, _LONGEST))
        every = np.log1p(np.arange(_LONGEST + 1))
        near = known[np.argmin(np.abs(every[:, None] - np.log1p(known)[None, :]), axis=1)]
        away = _COST_TRENDS - _COST_TRENDS[:, near]
        self._cost_variance = weights @ np.square(away - weights @ away)

    def _trend_of_sizes(self, codes: Codes) -> Floats:
        trend = np.zeros(len(codes))
        for column, table in self._bytes:
            trend -= table[codes[:, column]]
        return trend

    def _trend(self, codes: Codes) -> Floats:
        return self._trend_of_sizes(codes) + self._cost_trend[self.acceptance.lengths(codes)]

    def _train(self) -> None:
        if not self._stale:
            return
        self._stale = False
        if not self._codes:
            self._process.train(np.zeros((0, len(self._space.axes)), np.int16), np.zeros(0))
            return
        keep = kept(self._values)
        codes = np.stack([self._codes[index] for index in keep])
        expected, _ = self.acceptance.log_tokens(codes)
        shown = np.array(
            [
                expected[at] if self._shown[index] is None else self._shown[index]
                for at, index in enumerate(keep)
            ],
            dtype=float,
        )
        values = np.array([self._values[index] for index in keep])
        lengths = self.acceptance.lengths(codes)
        if lengths.any():
            without = values - shown - self._trend_of_sizes(codes)
            said = self._process.likelihoods(codes, without[:, None] - _COST_TRENDS.T[lengths])
            self._weigh(self._cost_prior * np.exp(said - said.max()), lengths)
        self._process.train(codes, values - shown - self._trend(codes))

    def quick(self, codes: Codes, tokens: Floats) -> Floats:
        """Return means alone, fast; `tokens` are the logarithms of the tokens per step."""
        self._train()
        return self._process.quick_mean(codes) + tokens + self._trend(codes)

    def mean(self, codes: Codes) -> Floats:
        """Return means of the logarithm of the rate."""
        self._train()
        tokens, _ = self.acceptance.log_tokens(codes)
        return self._process.mean(codes) + tokens + self._trend(codes)

    def predict(self, codes: Codes) -> tuple[Floats, Floats]:
        """Return means and standard deviations of the logarithm of the rate."""
        self._train()
        mean, sd = self._process.predict(codes)
        tokens, spread = self.acceptance.log_tokens(codes)
        cost = self._cost_variance[self.acceptance.lengths(codes)]
        return mean + tokens + self._trend(codes), np.sqrt(sd**2 + spread**2 + cost)


def kept(values: Sequence[float]) -> list[int]:
    """Return which observations to train on: all, or the best and the latest of too many."""
    if len(values) <= TRAINED:
        return list(range(len(values)))
    best = np.argsort(values)[::-1][: TRAINED // 2].tolist()
    late = [index for index in range(len(values) - 1, -1, -1) if index not in set(best)]
    return sorted([*best, *late[: TRAINED - len(best)]])
