"""Ask, attempt, tell: the loop of a study, and what is never booted."""

from __future__ import annotations

import enum
import itertools
import random
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import PartialFixedSampler, RandomSampler
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from sweeper.core.memory import MemoryBound, OutOfMemory
from sweeper.core.objectives import (
    CONTEXT,
    QUALITY,
    SPEED,
    counted_tok_s,
    draft_gain,
    values_of,
)
from sweeper.core.outcome import Attempt, Broken, HostFault, Infeasible, Measured, Unfit, ran_out
from sweeper.core.pairs import Pairs, Point, Scalar
from sweeper.core.reliability import USUAL_SHARE, spread_of
from sweeper.core.space import Space, SpaceError
from sweeper.core.standing import (
    front_among,
    is_contended,
    reliability_of,
    standing,
    unconfirmed,
    unsure,
)
from sweeper.core.study import Confirm, Study
from sweeper.core.typed import FieldError
from sweeper.engines import refusal_of
from sweeper.job import Job
from sweeper.search.facts import evidence_of, prior_of
from sweeper.search.samplers import build_sampler, learns_from_pruned

ATTEMPT = "attempt"
SKIPPED = "skipped"
_FREE_ASKS = 20
"""How often a sampler may propose what is known before a fresh point is drawn for it: it keeps
proposing the same ones, and every refusal lengthens its history."""
_CHECKED_POINTS = 20_000
"""Of a larger space only so many points are looked at for one that is worth a check."""
EVIDENCE = "evidence"
"""The user attribute in which a sampler finds what a boot showed."""
_CALM_BOOTS = 2
"""How many other boots pass before a point is measured again that a busy machine disturbed."""
_DISTURBED = 1.25
"""How much faster than it was seen a disturbed point may well be."""

_METRICS = {SPEED: "decode_tok_s", CONTEXT: "proven_context_tokens", QUALITY: "mean_logprob"}
_WORST = {SPEED: 0.0, CONTEXT: 0.0, QUALITY: -100.0}

optuna.logging.set_verbosity(optuna.logging.WARNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A point to boot now, under the number that the search knows it by."""

    trial: int
    point: Point
    why: str = ""
    """Why this point, in words."""


class Stop(enum.Enum):
    """Why a study ended."""

    BOOTS = "the budget of boots is spent"
    MINUTES = "the time is up"
    GPU_HOURS = "the hours of the cards are spent"
    CONVERGED = "no point left promises to improve the front noticeably"
    EXHAUSTED = "no point is left that could work"
    HOST_FAULT = "nothing can work on this host"
    INCOMPARABLE = "the conditions have changed since the study began"
    INTERRUPTED = "interrupted"


class Search:
    """The memory of one study: every trial, in a file that outlives us, and its lessons."""

    def __init__(
        self,
        study: Study,
        job: Job,
        storage: Path | None,
        attempts: Iterable[Attempt],
        *,
        earlier: Iterable[Attempt] = (),
    ) -> None:
        """Open the study's storage (None: in memory, for looking ahead) and take in the facts.

        `earlier` are attempts of other studies of the same model on the same machine: what they
        printed is known beforehand, and their front is booted first where this space has it.
        Raises SamplerError where the study's sampler cannot be had.
        """
        self._study = study
        self._job = job
        self._booted: dict[Point, list[Attempt]] = {}
        self._again: list[Attempt] = []
        self._bound = MemoryBound()
        self._queue: list[Point] = []
        self._later: list[tuple[int, Point]] = []
        self._open: dict[int, tuple[Trial, Point]] = {}
        self._checking: dict[Point, str] = {}
        self._checked = 0
        self._wrong: list[str] = []
        self._idle_asks = 0
        self._spent_s = 0.0
        self._storage = None if storage is None else RDBStorage(f"sqlite:///{storage}")
        self._optuna = optuna.create_study(
            study_name=study.name,
            storage=self._storage,
            directions=["maximize"] * len(study.objectives),
            load_if_exists=True,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            self._optuna.set_metric_names([_METRICS[each] for each in study.objectives])
        known = list(attempts)
        before = list(earlier)
        self._before = before
        for each in known:
            self._learn(each)
        self._reconcile(known)
        prior = prior_of(
            study.space,
            job,
            device_memory_bytes=_device_memory(study, job),
            on_a_processor=study.device_memory_bytes is None and "gpu" not in job.host,
            earlier=before,
        )
        # The generator's state is not stored; a resumed run must not repeat the first draws.
        self._optuna.sampler = build_sampler(
            study.sampler,
            study.seed + len(self._optuna.get_trials(deepcopy=False)),
            job,
            prior,
        )
        self._heed()
        self._random = random.Random(f"{study.seed}:{len(known)}")  # noqa: S311 - not for secrets
        self._queue += [point for point in study.enqueue if point not in self._queue]
        self._guesses = set(study.enqueue)
        self._inherited = {
            point: each.study
            for each in front_among(before)
            if (point := _point_here(study.space, each.point)) is not None
        }
        self._queue += [each for each in self._inherited if each not in self._queue]

    def close(self) -> None:
        """Let go of the storage's file."""
        if self._storage is not None:
            self._storage.remove_session()
            self._storage.engine.dispose()

    @property
    def boots(self) -> int:
        """The number of boots so far that the budget counts: host faults cost none."""
        return sum(
            not isinstance(each.outcome, HostFault)
            for several in self._booted.values()
            for each in several
        )

    @property
    def bound(self) -> MemoryBound:
        """What the boots that ran out of memory rule out."""
        return self._bound

    def refusal(self, point: Point) -> str | None:
        """Return why a point is not booted: a rule, its settings or model, known, beyond memory."""
        rule = self._study.space.refused_by(point)
        if rule is not None:
            return f"rule: {rule.reason}"
        if self._settled(point):
            return f"booted already, attempt {self._booted[point][-1].number}"
        if any(point == proposed for _, proposed in self._open.values()):
            return "proposed already, and not ended yet"
        try:
            settings = self._job.settings(point)
        except FieldError as error:
            return f"settings: {error}"
        model = self._job.model(point)
        if (why := refusal_of(self._job.engine, settings, model)) is not None:
            return f"model: {why}"
        if not self._bound.failures or point in self._checking:
            return None
        failure = self._bound.excluded_by(self._job.engine.footprint(settings, model))
        if failure is not None:
            return f"memory: needs at least as much of everything as attempt {failure.attempt}"
        return None

    def ask(self) -> Proposal | None:
        """Return the next point to boot, one never booted that may fit; None if none is left.

        Now and then, by the sampler's `check_share`, one that is predicted not to fit by the least:
        whether the prediction is right can be seen in no other way.
        """
        if (chosen := self._queued(self.boots)) is not None:
            return self._take(chosen, self._why_queued(chosen))
        if (check := self._to_check()) is not None:
            return self._take(check, f"to check a prediction: {self._checking[check]}")
        if self._study.sampler.name != "grid":
            for _ in range(_FREE_ASKS):
                trial = self._optuna.ask()
                point = self._suggest(trial)
                reason = self.refusal(point)
                if reason is None:
                    self._open[trial.number] = trial, point
                    return Proposal(trial=trial.number, point=point, why=self._why(trial))
                self._tell_skipped(trial, point, reason)
        fresh, why = self._fresh(), "nothing else is left that the sampler would propose"
        if self._study.sampler.name == "grid":
            why = "the next of the grid"
        if fresh is None:
            fresh, why = self._queued(None), "again, on a quieter machine"
        return None if fresh is None else self._take(fresh, why)

    @property
    def converged(self) -> bool:
        """Whether the sampler expects too little of every point left, several times in a row."""
        return (
            self._study.sampler.stop_share is not None
            and self._idle_asks >= self._study.sampler.stop_asks
        )

    @property
    def spent_s(self) -> float:
        """The seconds that all attempts of the study have taken, confirmations included."""
        return self._spent_s

    @property
    def checks(self) -> tuple[int, tuple[str, ...]]:
        """How many points were booted that were predicted not to fit, and in words which did."""
        return self._checked, tuple(self._wrong)

    def skips(self) -> Iterator[tuple[Point, str]]:
        """Yield every point of the space that was never booted, with the reason."""
        for values in self._study.space.declared():
            point = Pairs(values)
            if point in self._booted:
                continue
            yield point, self.refusal(point) or "the study ended before its turn"

    def _why_queued(self, point: Point) -> str:
        known = self._booted.get(point)
        if known:
            again = isinstance(known[-1].outcome, Measured)
            return (
                "again, on a quieter machine"
                if again
                else "again, it failed by no fault of its own"
            )
        if point in self._inherited:
            return f"on the front of the earlier study {self._inherited[point]}"
        return "a guess of the study" if point in self._guesses else "it was under way before"

    def _why(self, trial: Trial) -> str:
        """Return what the sampler says of its proposal; note how much it expects of it."""
        sampler = self._optuna.sampler
        remaining = getattr(sampler, "remaining_improvement", None)
        share = self._study.sampler.stop_share
        if isinstance(remaining, float) and share is not None:
            self._idle_asks = self._idle_asks + 1 if remaining < share else 0
        why = getattr(sampler, "why", None)
        if not callable(why):
            return f"proposed by {self._study.sampler.name}"
        try:
            return str(why(trial.number))
        except KeyError:
            return "drawn at random"

    def _to_check(self) -> Point | None:
        """Return the point that is predicted not to fit by the least, when one is due."""
        share = self._study.sampler.check_share
        if not self._bound.failures or share * self.boots < self._checked + 1:
            return None
        refused = []
        for point in itertools.islice(self._study.space.points(), _CHECKED_POINTS):
            if point in self._booted or not (why := self.refusal(point) or "").startswith(
                "memory:"
            ):
                continue
            footprint = self._job.engine.footprint(
                self._job.settings(point), self._job.model(point)
            )
            refused.append((footprint.total_bytes, str(point), point, why))
        if not refused:
            return None
        _, _, chosen, why = min(refused)
        self._checking[chosen] = why
        self._checked += 1
        return chosen

    def _queued(self, boots: int | None) -> Point | None:
        """Take the next point that waits to be booted, of those that are due after so many boots.

        None for `boots` takes any: nothing else is left to do meanwhile.
        """
        for due, point in list(self._later):
            if boots is None or boots >= due:
                self._later.remove((due, point))
                self._queue.append(point)
        while self._queue:
            point = self._queue.pop(0)
            if self.refusal(point) is None:
                return point
        return None

    def booting(self, proposal: Proposal, attempt: int) -> None:
        """Record, before it happens, which attempt serves the proposal."""
        trial, _ = self._open[proposal.trial]
        trial.set_user_attr(ATTEMPT, attempt)

    def tell(self, attempt: Attempt) -> None:
        """Record what an attempt came to, and learn from it."""
        self._learn(attempt)
        self._heed()
        if self._may_retry(attempt.point):
            self._queue.insert(0, attempt.point)
        elif self._worth_repeating(attempt):
            # A disturbed measurement is repeated when the disturbance may be over.
            self._later.append((self.boots + _CALM_BOOTS, attempt.point))
        trial, _ = self._open.pop(attempt.trial)
        self._tell(trial, attempt)

    # --- learning ---------------------------------------------------------------------------

    def _learn(self, attempt: Attempt) -> None:
        self._spent_s += attempt.timings.total_s
        if attempt.confirms is not None:
            # Measured again after the search, which knows the point already. Where it then ran
            # out of memory this is the edge: what needs noticeably more need not be booted.
            self._again.append(attempt)
            if ran_out(attempt.outcome):
                self._bound = self._bound.with_failure(
                    OutOfMemory(attempt=attempt.number, footprint=attempt.footprint)
                )
            return
        self._booted.setdefault(attempt.point, []).append(attempt)
        if isinstance(attempt.outcome, Measured) and attempt.point in self._checking:
            # The prediction was wrong: what rests on the same failure may be booted after all.
            self._wrong.append(
                f"attempt {attempt.number} works, though {self._checking[attempt.point]}"
            )
            self._bound = self._bound.without(
                self._job.engine.footprint(
                    self._job.settings(attempt.point), self._job.model(attempt.point)
                )
            )
        match attempt.outcome:
            case Infeasible(name=name, finding=finding) if name.is_memory:
                shortfall = finding.facts.get("shortfall_bytes")
                self._bound = self._bound.with_failure(
                    OutOfMemory(
                        attempt=attempt.number,
                        footprint=attempt.footprint,
                        shortfall_bytes=shortfall if isinstance(shortfall, int) else None,
                    )
                )
            case _:
                pass

    def _heed(self) -> None:
        """Bring the bound and the sampler up to what repeated boots have shown."""
        attempts = [*(each for several in self._booted.values() for each in several), *self._again]
        spread = spread_of([*self._before, *attempts])
        if spread is None:
            capacity = _device_memory(self._study, self._job)
            spread = 0.0 if capacity is None else USUAL_SHARE * capacity
        if spread != self._bound.spread_bytes:
            self._bound = self._bound.with_spread(spread)
        heed = getattr(self._optuna.sampler, "heed", None)
        if callable(heed):
            heed(
                boot_spread_bytes=spread,
                withdrawn=[
                    self._encode(point)
                    for point, found in reliability_of(attempts).items()
                    if not found.may_win
                ],
            )

    def _settled(self, point: Point) -> bool:
        """Tell whether enough is known of a point never to boot it again."""
        known = self._booted.get(point, [])
        if any(isinstance(each.outcome, Measured | Infeasible | Unfit) for each in known):
            return not any(point == later for _, later in self._later)
        broken = sum(isinstance(each.outcome, Broken) for each in known)
        return broken > self._study.retries

    def _worth_repeating(self, attempt: Attempt) -> bool:
        """Tell whether a disturbed measurement might reach the front on a quiet machine."""
        outcome = attempt.outcome
        if not is_contended(attempt) or not isinstance(outcome, Measured):
            return False
        known = self._booted[attempt.point]
        if sum(is_contended(each) for each in known) > self._study.retries:
            return False
        everyone = [each for several in self._booted.values() for each in several]
        hoped = outcome.decode_tok_s.high / draft_gain(outcome) * _DISTURBED
        return not any(
            isinstance(each.outcome, Measured)
            and each.point != attempt.point
            and counted_tok_s(each.outcome) >= hoped
            and each.outcome.context.window_tokens >= outcome.context.window_tokens
            for each in standing(everyone)
        )

    def _may_retry(self, point: Point) -> bool:
        known = self._booted.get(point, [])
        return bool(known) and isinstance(known[-1].outcome, Broken) and not self._settled(point)

    # --- Optuna -----------------------------------------------------------------------------

    def _reconcile(self, attempts: list[Attempt]) -> None:
        """Bring the storage in line with the attempts on disk, which are the facts.

        A killed run leaves a trial running: its attempt may be whole on disk and untold, or it
        never came to an end and its point is asked for again.
        """
        by_number = {each.number: each for each in attempts if each.confirms is None}
        told = set()
        for frozen in self._optuna.get_trials(deepcopy=False):
            number = frozen.user_attrs.get(ATTEMPT)
            if frozen.state is not TrialState.RUNNING:
                if isinstance(number, int):
                    told.add(number)
                continue
            trial = Trial(self._optuna, frozen._trial_id)  # noqa: SLF001 - to tell a stored one
            attempt = by_number.get(number) if isinstance(number, int) else None
            if attempt is not None:
                self._tell(trial, attempt)
                told.add(attempt.number)
            else:
                self._optuna.tell(trial, state=TrialState.FAIL)
                self._ask_again(frozen)
        for attempt in attempts:
            if attempt.confirms is not None:
                continue
            if attempt.number not in told:
                self._add(attempt)
            if self._may_retry(attempt.point) and attempt.point not in self._queue:
                self._queue.append(attempt.point)

    def _ask_again(self, frozen: FrozenTrial) -> None:
        point = self._decode(frozen.params)
        if point is not None and not self._settled(point) and point not in self._queue:
            self._queue.append(point)

    def _take(self, point: Point, why: str = "") -> Proposal:
        """Return a trial of the storage that stands for a point chosen by us.

        The queue is ours and not Optuna's `enqueue_trial`, whose entries `ask` would hand out
        before any point chosen here.
        """
        usual = self._optuna.sampler
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            self._optuna.sampler = PartialFixedSampler(self._encode(point), RandomSampler())
        try:
            trial = self._optuna.ask()
            suggested = self._suggest(trial)
        finally:
            self._optuna.sampler = usual
        assert suggested == point
        self._open[trial.number] = trial, point
        return Proposal(trial=trial.number, point=point, why=why)

    def _suggest(self, trial: Trial) -> Point:
        values: dict[str, Scalar] = {}
        for axis in self._study.space.axes:
            if not axis.active(values):
                continue
            if axis.ordered:
                # An index, since Optuna has no ordinal: it keeps the order, and the list of
                # values may be of any spacing.
                values[axis.name] = axis.values[
                    trial.suggest_int(axis.name, 0, len(axis.values) - 1)
                ]
            else:
                values[axis.name] = trial.suggest_categorical(axis.name, axis.values)
        return Pairs(values)

    def _encode(self, point: Point) -> dict[str, Scalar]:
        return {
            axis.name: axis.values.index(point[axis.name]) if axis.ordered else point[axis.name]
            for axis in self._study.space.axes
            if axis.name in point
        }

    def _decode(self, params: Mapping[str, Scalar]) -> Point | None:
        values: dict[str, Scalar] = {}
        for axis in self._study.space.axes:
            if not axis.active(values):
                continue
            if axis.name not in params:
                return None  # killed before every axis had its value
            raw = params[axis.name]
            values[axis.name] = axis.values[int(raw)] if axis.ordered else raw  # type: ignore[arg-type]
        return Pairs(values)

    def _tell_skipped(self, trial: Trial, point: Point, reason: str) -> None:
        trial.set_user_attr(SKIPPED, reason)
        if learns_from_pruned(self._study.sampler):
            # A free refusal told as a result would bloat the history and push the sampler away
            # from the boundary that it should explore.
            self._optuna.tell(trial, state=TrialState.FAIL)
            return
        known = self._booted.get(point, [])
        if known and isinstance(known[-1].outcome, Measured):
            # A sampler that breeds from results must not take a good point for a bad one.
            trial.set_user_attr(ATTEMPT, known[-1].number)
            self._tell(trial, known[-1])
        else:
            self._tell_infeasible(trial, 1.0)

    def _tell(self, trial: Trial, attempt: Attempt) -> None:
        trial.set_user_attr(EVIDENCE, evidence_of(attempt, self._job).as_json())
        match attempt.outcome:
            case Measured() as measured:
                trial.set_constraint("works", -1.0)
                self._optuna.tell(trial, list(values_of(measured, self._study.objectives)))
            case Infeasible(finding=finding) | Unfit(finding=finding):
                shortfall = finding.facts.get("shortfall_bytes")
                gib = shortfall / 2**30 if isinstance(shortfall, int) and shortfall > 0 else 1.0
                self._tell_infeasible(trial, gib)
            case Broken() | HostFault():
                self._optuna.tell(trial, state=TrialState.FAIL)

    def _tell_infeasible(self, trial: Trial, violation: float) -> None:
        trial.set_constraint("works", violation)
        if learns_from_pruned(self._study.sampler):
            self._optuna.tell(trial, state=TrialState.PRUNED)
        else:
            self._optuna.tell(trial, [_WORST[each] for each in self._study.objectives])

    def _add(self, attempt: Attempt) -> None:
        """Tell an attempt that the storage has never heard of, as when its file was lost."""
        proposal = self._take(attempt.point)
        self.booting(proposal, attempt.number)
        trial, _ = self._open.pop(proposal.trial)
        self._tell(trial, attempt)

    def _fresh(self) -> Point | None:
        """Return a point that nothing speaks against: the next of a grid, else a random one."""
        # Reservoir sampling: spaces may be too large to hold, and order must not decide.
        chosen: Point | None = None
        seen = 0
        for point in self._study.space.points():
            if self.refusal(point) is None:
                if self._study.sampler.name == "grid":
                    return point
                seen += 1
                if self._random.randrange(seen) == 0:
                    chosen = point
        return chosen


def _device_memory(study: Study, job: Job) -> float | None:
    """Return the memory that an engine can take, as far as the study or this machine says."""
    if study.memory_limit_bytes is not None:
        return float(study.memory_limit_bytes)
    if study.device_memory_bytes is not None:
        return float(study.device_memory_bytes)
    of_card = job.host.get("gpu_memory_bytes")
    if isinstance(of_card, int):
        return float(of_card)
    # Without a card the engine computes where it runs.
    of_host = (job.host.get(name) for name in ("memory_bytes", "cgroup_memory_bytes"))
    return min((float(each) for each in of_host if isinstance(each, int)), default=None)


def _point_here(space: Space, point: Point) -> Point | None:
    """Return a point of another study as one of this space, None where it is none."""
    values = {axis.name: point[axis.name] for axis in space.axes if axis.name in point}
    try:
        return space.checked(values, "earlier")
    except SpaceError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a run of a study ended: why, and after how many boots of this run.

    `differences` are the conditions that have changed, in words.
    """

    why: Stop
    boots: int
    fault: HostFault | None = None
    differences: tuple[str, ...] = ()


def sweep(
    study: Study,
    search: Search,
    *,
    boot: Callable[[Proposal, int], Attempt],
    next_number: Callable[[], int],
    recorded: Callable[[Attempt], None],
    comparable: Callable[[Attempt], tuple[str, ...]] = lambda _attempt: (),
    cards: int = 1,
) -> Ended:
    """Ask, boot, record, tell until the budget, the space or the host gives out.

    `boot` makes the attempt, `recorded` stores it; only what is stored is told, so a kill at any
    moment loses at most the trial that is running. `comparable` names the conditions in which an
    attempt differs from those before it; any of them ends the study. `cards` is how many the engine
    has, for the budget of hours. A KeyboardInterrupt passes
    through.
    """
    began = time.monotonic()
    for boots in itertools.count():
        if search.boots >= study.budget.boots:
            return Ended(why=Stop.BOOTS, boots=boots)
        minutes = study.budget.minutes
        if minutes is not None and time.monotonic() - began >= minutes * 60:
            return Ended(why=Stop.MINUTES, boots=boots)
        hours = study.budget.gpu_hours
        if hours is not None and search.spent_s * cards / 3600 >= hours:
            return Ended(why=Stop.GPU_HOURS, boots=boots)
        proposal = search.ask()
        if proposal is None:
            return Ended(why=Stop.EXHAUSTED, boots=boots)
        if search.converged:
            return Ended(why=Stop.CONVERGED, boots=boots)
        number = next_number()
        search.booting(proposal, number)
        attempt = boot(proposal, number)
        recorded(attempt)
        search.tell(attempt)
        if isinstance(attempt.outcome, HostFault):
            return Ended(why=Stop.HOST_FAULT, boots=boots + 1, fault=attempt.outcome)
        if changes := comparable(attempt):
            return Ended(why=Stop.INCOMPARABLE, boots=boots + 1, differences=changes)
    raise AssertionError("the count of boots has no end")


def confirm(
    choice: Confirm,
    attempts: Callable[[], Sequence[Attempt]],
    *,
    boot: Callable[[Attempt, bool, int, int], Attempt],
) -> None:
    """Boot the members of the front again, until each is known to hold or the boots are spent.

    First every member is measured again, in interleaved order; what takes the place of one that
    does not hold is measured again as well. Then members with little memory left are booted once
    more, the quickest to boot first, until it is known whether they work 19 times of 20.

    `attempts` returns all attempts by now. `boot` makes and stores another one: of this attempt,
    only to see whether it works or in full, the how manieth of how many.
    """
    left, checks = choice.boots, choice.checks
    while choice.rounds > 0:
        members = unconfirmed(attempts())
        if members and left > 0:
            # Not in the order of the search, and every other round backwards: what changes with
            # time on this machine must not fall on the same members each time.
            order = [
                each
                for round_ in range(choice.rounds)
                for each in (members if round_ % 2 == 0 else members[::-1])
            ][:left]
            for count, each in enumerate(order, start=1):
                done = boot(each, False, count, len(order))
                left -= 1
                if isinstance(done.outcome, HostFault):
                    return
            continue
        member = unsure(attempts()) if checks > 0 else None
        if member is None:
            return
        done = boot(member, True, choice.checks - checks + 1, choice.checks)
        checks -= 1
        if isinstance(done.outcome, HostFault):
            return
