"""FrontierSampler: an Optuna sampler that finds a front of engine configurations in few boots."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from sweeper.core.evidence import Evidence, Prior, Role
from sweeper.core.space import Space
from sweeper.search.frontier_model import FrontierModel, Seen
from sweeper.search.frontier_roles import guessed
from sweeper.search.frontier_space import CodedSpace, Codes, from_space, from_trials

EVIDENCE = "evidence"
"""The user attribute of a trial that holds what its boot printed, as `Evidence.as_json` writes."""
WHY = "frontier:why"
"""The system attribute of a trial that holds why its point was chosen."""


class FrontierSampler(BaseSampler):
    """Proposes the point with the most expected hypervolume per second, by what boots print.

    Usable with any Optuna study. Without a space it learns axes, and which of them depend on
    others, from the trials (the first one is random); without roles it models objectives and
    feasibility by Gaussian processes over all axes and pairs of axes. With the roles of the axes,
    prior knowledge and the evidence of each boot (user attribute `evidence`) it models memory in
    bytes, refused combinations, acceptance and step time, and reads contexts off.

    A trial does not work when a constraint of it is above 0 or its evidence says so; it may be
    told as PRUNED or as COMPLETE. FAIL teaches nothing. No point is proposed twice.
    """

    def __init__(
        self,
        space: Space | None = None,
        *,
        roles: Mapping[str, Role] | None = None,
        prior: Prior | None = None,
        seed: int | None = None,
    ) -> None:
        """Set up a search; nothing is modelled before the first `ask`.

        Args:
            space: the points that may be proposed. An ordered axis must be suggested as an index
                (`suggest_int(name, 0, n - 1)`), any other as a category.
            roles: what each axis does to an engine; axes without one are `Role.OTHER`. An axis of
                role `context` in a study of two maximised objectives makes the second objective
                the logarithm of that axis, which need not be learnt.
            prior: what is known before any boot.
            seed: makes the proposals repeatable.

        Raises:
            ValueError: a role names an axis that the space does not have.
        """
        self._seed = seed if seed is not None else int(np.random.default_rng().integers(2**31))
        self._generator = np.random.default_rng(self._seed)
        self._random = RandomSampler(seed=self._seed)
        self._roles = dict(roles or {})
        self._prior = prior or Prior()
        self._given = None if space is None else from_space(space, self._roles, self._seed)
        self._space: CodedSpace | None = self._given
        self._model: FrontierModel | None = None
        self._shape: object = None
        self._study: int | None = None
        self._known: set[int] = set()
        self._seen: list[Seen] = []
        self._proposed: dict[int, Codes] = {}
        self._ended: dict[int, int | None] = {}
        self._reasons: dict[int, str] = {}
        self._improvement = math.inf
        self._boot_spread_bytes = 0.0
        self._withdrawn: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def over(
        cls, coded: CodedSpace, *, prior: Prior | None = None, seed: int | None = None
    ) -> FrontierSampler:
        """Return a sampler over points given in codes, as the rows of a table are."""
        sampler = cls(prior=prior, seed=seed)
        sampler._given = sampler._space = coded
        return sampler

    # --- what Optuna calls ------------------------------------------------------------------

    def reseed_rng(self) -> None:
        """Draw differently from now on."""
        self._generator = np.random.default_rng()
        self._random.reseed_rng()

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return all axes known: those not active in the chosen point are simply never asked."""
        if self._given is None:
            self._discover(study, trial)
        if self._space is None:
            return {}
        return {
            axis.name: axis.distribution
            for axis in self._space.axes
            if not axis.distribution.single()
        }

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the parameters of the point to try next."""
        if self._space is None:
            return {}
        model = self._learnt(study)
        space = self._space
        taken = {int(key) for row in self._proposed.values() for key in space.keys(row[None, :])}
        pending = []
        for other in study.get_trials(deepcopy=False):
            if other.number == trial.number:
                continue
            if other.number not in self._ended:
                row = self._row(other)
                key = None if row is None else int(space.keys(row[None, :])[0])
                if other.state.is_finished():
                    self._ended[other.number] = key
                elif row is not None:
                    pending.append(row)
            else:
                key = self._ended[other.number]
            if key is not None:
                taken.add(key)
        width = len(space.axes)
        running = np.stack(pending) if pending else np.zeros((0, width), dtype=np.int16)
        choice = model.choose(taken, running)
        if choice is None:
            self._improvement = 0.0
            return {}
        self._improvement = choice.improvement
        self._proposed[trial.number] = choice.row
        self._reasons[trial.number] = choice.why
        storage = study._storage  # noqa: SLF001 - samplers keep their notes there
        storage.set_trial_system_attr(trial._trial_id, WHY, choice.why)  # noqa: SLF001
        params = space.params(choice.row)
        return {name: value for name, value in params.items() if name in search_space}

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Return a random value for an axis that no trial has shown before."""
        return self._random.sample_independent(study, trial, param_name, param_distribution)

    def after_trial(
        self,
        study: Study,  # noqa: ARG002
        trial: FrozenTrial,
        state: TrialState,  # noqa: ARG002 - Optuna's signature
        values: Sequence[float] | None,  # noqa: ARG002
    ) -> None:
        """Forget the proposal: the trial itself has the point now."""
        self._proposed.pop(trial.number, None)

    # --- what a study asks ------------------------------------------------------------------

    def why(self, trial_number: int) -> str:
        """Return in one sentence why the point of a trial was chosen; KeyError if it was not."""
        return self._reasons[trial_number]

    @property
    def remaining_improvement(self) -> float:
        """The improvement expected of the best point of the last ask, as a share of the front.

        Infinite before anything works, 0 when no point is left. A study that sees this stay under
        a share it cares for may stop.
        """
        return self._improvement

    def heed(
        self, *, boot_spread_bytes: float, withdrawn: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Take note of what repeated boots have shown.

        Args:
            boot_spread_bytes: the standard deviation of memory from boot to boot. Points are then
                sought that work 19 times of 20, and an ending says less of where the edge is.
            withdrawn: the Optuna parameters of all points that were measured and may not win, as
                those that work in some boots only. They bar no others from the front.
        """
        self._boot_spread_bytes = boot_spread_bytes
        self._withdrawn = tuple(withdrawn)

    def probability(self, study: Study, params: Sequence[Mapping[str, Any]]) -> list[float]:
        """Return how likely points work, each given by its Optuna parameters."""
        if self._space is None:
            return [1.0 for _ in params]
        model = self._learnt(study)
        rows = [self._space.encode(each) for each in params]
        known = [row for row in rows if row is not None]
        found = iter(model.probability(np.stack(known)).tolist() if known else [])
        return [0.0 if row is None else next(found) for row in rows]

    # --- learning ---------------------------------------------------------------------------

    def _row(self, trial: FrozenTrial) -> Codes | None:
        assert self._space is not None
        proposed = self._proposed.get(trial.number)
        if proposed is not None:
            return proposed
        return self._space.encode(trial.params) if trial.params else None

    def _discover(self, study: Study, trial: FrozenTrial) -> None:
        """Learn the axes from the trials; a new axis, or a new range, makes a new space."""
        seen = [
            (each.params, each.distributions)
            for each in study.get_trials(deepcopy=False)
            if each.number != trial.number and each.params and each.state.is_finished()
        ]
        shape = frozenset(
            (frozenset(params), tuple(sorted((n, repr(d)) for n, d in distributions.items())))
            for params, distributions in seen
        )
        # Which value switches which axis may still change while some axes are conditional.
        conditional = len({names for names, _ in shape}) > 1
        if shape == self._shape and not (conditional and len(seen) < 40):
            return
        self._shape = shape
        self._space = from_trials(seen, self._roles, self._seed)
        self._model = None
        self._proposed.clear()
        self._ended.clear()

    def _learnt(self, study: Study) -> FrontierModel:
        assert self._space is not None
        if self._model is None or self._study != study._study_id:  # noqa: SLF001
            self._study = study._study_id  # noqa: SLF001
            self._known = set()
            self._seen = []
            self._ended.clear()
            self._model = self._built(study, self._space)
        new = [
            self._read(study, trial)
            for trial in study.get_trials(deepcopy=False)
            if trial.state.is_finished() and trial.number not in self._known
        ]
        self._heed(self._model)
        for seen in new:
            if seen is not None:
                self._seen.append(seen)
                self._model.learn(seen)
        if any(new) and any(axis.role is Role.OTHER for axis in self._space.axes):
            self._guess_roles(study)
        return self._model

    def _built(self, study: Study, space: CodedSpace) -> FrontierModel:
        directions = study.directions
        maximised = all(each is StudyDirection.MAXIMIZE for each in directions)
        return FrontierModel(
            space,
            self._prior,
            objectives=len(directions),
            read_context=len(directions) == 2 and maximised,
            generator=self._generator,
        )

    def _guess_roles(self, study: Study) -> None:
        """Start the models anew where the trials have shown what an axis does."""
        assert self._space is not None
        roles = guessed(self._space, self._seen)
        if not roles:
            return
        axes = tuple(
            replace(axis, role=roles.get(axis.name, axis.role)) for axis in self._space.axes
        )
        self._space = replace(self._space, axes=axes)
        self._model = self._built(study, self._space)
        self._heed(self._model)
        for seen in self._seen:
            self._model.learn(seen)

    def _heed(self, model: FrontierModel) -> None:
        assert self._space is not None
        rows = (self._space.encode(each) for each in self._withdrawn)
        model.heed(self._boot_spread_bytes, [row for row in rows if row is not None])

    def _read(self, study: Study, trial: FrozenTrial) -> Seen | None:
        """Return what a finished trial teaches, if it teaches anything."""
        assert self._space is not None
        self._known.add(trial.number)
        if trial.state not in (TrialState.COMPLETE, TrialState.PRUNED) or not trial.params:
            return None
        row = self._space.encode(trial.params)
        if row is None:
            return None
        document = trial.user_attrs.get(EVIDENCE)
        evidence = None if document is None else Evidence.from_json(document)
        violated = any(value > 0 for value in trial.constraints.values())
        refused = violated or (evidence is not None and evidence.kind in ("infeasible", "unfit"))
        if evidence is not None and evidence.kind not in ("measured", "infeasible", "unfit"):
            return None
        values = None
        if not refused:
            if trial.state is TrialState.PRUNED or trial.values is None:
                return None
            values = tuple(
                value if direction is StudyDirection.MAXIMIZE else -value
                for value, direction in zip(trial.values, study.directions, strict=True)
            )
        return Seen(number=trial.number, row=row, values=values, evidence=evidence)
