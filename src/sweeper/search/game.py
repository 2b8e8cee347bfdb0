"""A sampler that plays against a table: Optuna on one side, rows of the table on the other."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    IntDistribution,
)
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import (
    BaseSampler,
    NSGAIISampler,
    QMCSampler,
    RandomSampler,
    TPESampler,
)
from optuna.trial import Trial, TrialState

from sweeper.search.frontier import EVIDENCE, FrontierSampler
from sweeper.search.frontier_space import CodedAxis, from_points

if TYPE_CHECKING:
    from sweeper.replay import Table

_FREE_ASKS = 100
_REFUSED = 0.01
"""A point thought less likely to work than this, and never booted, counts as refused."""

optuna.logging.set_verbosity(optuna.logging.WARNING)


class Player:
    """One search over the rows of a table. A row that was booted before costs nothing again."""

    def __init__(self, table: Table, sampler: str, seed: int) -> None:
        """Set up the study; the sampler's name was checked before."""
        self._table = table
        self._name = sampler
        self._known: dict[int, float | None] = {}
        self._generator = np.random.default_rng([seed, 11])
        axes = []
        for column, axis in enumerate(table.axes):
            distribution: BaseDistribution = (
                IntDistribution(0, len(axis.values) - 1)
                if axis.ordered
                else CategoricalDistribution(axis.values)
            )
            axes.append(
                CodedAxis(
                    name=axis.name,
                    role=axis.role,
                    ordered=axis.ordered,
                    values=axis.values,
                    distribution=distribution,
                    by_index=axis.ordered,
                    conditional=bool((table.codes[:, column] == len(axis.values)).any()),
                )
            )
        self._coded = from_points(tuple(axes), table.codes)
        keys = self._coded.keys(table.codes)
        self._rows = {int(key): row for row, key in enumerate(keys)}
        # Axes that may be blank come last: what the others are decides whether they are there.
        self._order = sorted(range(len(axes)), key=lambda column: axes[column].conditional)
        self._frontier: FrontierSampler | None = None
        self._study = optuna.create_study(directions=["maximize", "maximize"])
        self._study.sampler = self._sampler(sampler, seed)
        self._trial: Trial | None = None
        self._grid = self._generator.permutation(len(table.codes)).tolist()

    def _sampler(self, name: str, seed: int) -> BaseSampler:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            match name:
                case "frontier":
                    self._frontier = FrontierSampler.over(
                        self._coded, prior=self._table.prior, seed=seed
                    )
                    return self._frontier
                case "tpe":
                    return TPESampler(seed=seed, multivariate=True, group=True)
                case "tpe_default":
                    return TPESampler(seed=seed)
                case "nsga2":
                    return NSGAIISampler(seed=seed, population_size=16)
                case "qmc":
                    return QMCSampler(seed=seed, warn_independent_sampling=False)
                case "random" | "grid":
                    return RandomSampler(seed=seed)
        raise ValueError(f"there is no sampler called {name}")

    def ask(self) -> int | None:
        """Return the next row to boot, one never booted before; None if there is none."""
        if len(self._known) == len(self._table.codes):
            return None
        if self._name == "grid":
            # A grid in a fixed random order: in the order of the axes it would say nothing.
            return int(self._grid.pop())
        for _ in range(_FREE_ASKS):
            trial = self._study.ask()
            row = self._suggest(trial)
            if row is not None and row not in self._known:
                self._trial = trial
                return row
            self._repeat(trial, row)
        fresh = [row for row in range(len(self._table.codes)) if row not in self._known]
        row = int(self._generator.choice(fresh))
        self._study.enqueue_trial(self._coded.params(self._table.codes[row]))
        self._trial = self._study.ask()
        self._suggest(self._trial)
        return row

    def tell(self, row: int, decode_tok_s: float | None) -> None:
        """Tell what a boot of the row came to: its rate, or None if it does not work."""
        self._known[row] = decode_tok_s
        trial, self._trial = self._trial, None
        if trial is not None:
            self._tell(trial, row)

    def wrong_skips(self, missed: list[int]) -> int:
        """Return how many of these rows the search would not boot, whatever the budget."""
        if self._frontier is None or not missed:
            return 0
        params = [self._coded.params(self._table.codes[row]) for row in missed]
        return sum(p < _REFUSED for p in self._frontier.probability(self._study, params))

    def _suggest(self, trial: Trial) -> int | None:
        codes = np.empty(len(self._order), dtype=np.int16)
        settled: list[int] = []
        for column in self._order:
            axis = self._coded.axes[column]
            if axis.conditional and not self._active(codes, settled, column):
                codes[column] = axis.size
            elif axis.ordered:
                codes[column] = trial.suggest_int(axis.name, 0, axis.size - 1)
            else:
                codes[column] = axis.code(trial.suggest_categorical(axis.name, axis.values))
            settled.append(column)
        return self._rows.get(int(self._coded.keys(codes[None, :])[0]))

    def _active(self, codes: np.ndarray, settled: list[int], column: int) -> bool:
        table = self._table.codes
        same = np.ones(len(table), dtype=bool)
        for other in settled:
            same &= table[:, other] == codes[other]
        return bool((table[same, column] < self._coded.axes[column].size).any())

    def _repeat(self, trial: Trial, row: int | None) -> None:
        """Tell a proposal that costs nothing: a row known already, or one that is not there."""
        if row is None or self._name.startswith(("tpe", "frontier")):
            self._study.tell(trial, state=TrialState.FAIL)
        else:
            self._tell(trial, row)

    def _tell(self, trial: Trial, row: int) -> None:
        evidence = self._table.evidence[row]
        decode_tok_s = self._known[row]
        if self._frontier is not None:
            # Rates are seen with noise, those that the engine reports of itself too.
            seen = replace(evidence, decode_tok_s=decode_tok_s)
            trial.set_user_attr(EVIDENCE, seen.as_json())
        if decode_tok_s is not None:
            trial.set_constraint("works", -1.0)
            context = math.log2(float(self._table.context[row]))
            self._study.tell(trial, [decode_tok_s, context])
            return
        if evidence.kind == "broken":
            self._study.tell(trial, state=TrialState.FAIL)
            return
        missing = (evidence.shortfall_bytes or 0.0) / 2**30
        trial.set_constraint("works", missing if missing > 0 else 1.0)
        if self._name.startswith(("tpe", "frontier")):
            self._study.tell(trial, state=TrialState.PRUNED)
        else:
            self._study.tell(trial, [0.0, 0.0])
