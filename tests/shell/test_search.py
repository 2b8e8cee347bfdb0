"""The search on a boot that is a function: no process, the same loop."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.trial import TrialState
from tests.examples import attempt_of, broken_attempt, host_fault_attempt, measured_attempt
from tests.shell.conftest import SHORT, fake_job

from sweeper.conf import SAMPLERS as NAMED
from sweeper.core.launch import Phase
from sweeper.core.outcome import (
    Attempt,
    Finding,
    Infeasible,
    InfeasibleName,
    Measured,
    Outcome,
    Unfit,
    UnfitName,
)
from sweeper.core.pairs import Pairs, Point
from sweeper.core.space import Axis, Condition, Rule, Space
from sweeper.core.standing import front_among
from sweeper.core.study import Budget, Confirm, SamplerChoice, Study
from sweeper.engines.fake_server import MIB
from sweeper.search.facts import prior_of
from sweeper.search.samplers import SamplerError
from sweeper.search.study import Ended, Proposal, Search, Stop, confirm, sweep
from sweeper.trial import Job

CONTEXT = Axis(name="context", values=(1024, 2048, 8192), ordered=True, sets=("context",))
SAMPLERS = tuple(each for each in NAMED if each not in ("gp", "target"))
"""Those that need nothing that is not installed with sweeper."""

KV_TYPE = Axis(name="kv_type", values=("f16", "q4_0"), ordered=False, sets=("kv_type",))
N_MAX = Axis(name="n_max", values=(0, 4), ordered=True, sets=("n_max",))
BATCH = Axis(name="batch", values=(128, 512), ordered=True, sets=("batch",))
SPACE = Space(axes=(CONTEXT, KV_TYPE, N_MAX, BATCH))


def study_of(space: Space = SPACE, **changes: Any) -> Study:
    name = changes.pop("sampler", "tpe")
    choice = {
        each.name: changes.pop(each.name)
        for each in dataclass_fields(SamplerChoice)
        if each.name in changes and each.name != "name"
    }
    sampler = SamplerChoice(name=name, **{"startup": 4, **choice})
    budget = Budget(
        boots=changes.pop("boots", 1000),
        minutes=changes.pop("minutes", None),
        gpu_hours=changes.pop("gpu_hours", None),
    )
    fields: dict[str, Any] = {
        "name": "shell",
        "description": "",
        "seed": 1,
        "enqueue": (),
        "retries": 1,
        "engine_name": "fake",
        "engine_params": {},
        "engine_env": Pairs(),
        "engine_prefix": (),
        "engine_extra_args": (),
        "model_name": "demo",
        "hardware_name": "invented",
        "memory_limit_bytes": None,
        "workload": SHORT,
        **changes,
    }
    return Study(space=space, sampler=sampler, budget=budget, **fields)


def ran_out(shortfall_bytes: int) -> Infeasible:
    return Infeasible(
        name=InfeasibleName.OOM_KV_CACHE,
        finding=Finding(
            phase=Phase.KV,
            cause="cannot allocate",
            explanation="It does not fit.",
            facts=Pairs(shortfall_bytes=shortfall_bytes),
        ),
    )


def measured(decode_tok_s: float, context: int) -> Measured:
    outcome = measured_attempt(decode_tok_s=decode_tok_s, context=context, proven=context).outcome
    assert isinstance(outcome, Measured)
    return outcome


BROKEN = broken_attempt().outcome
HOST_FAULT = host_fault_attempt().outcome
GARBAGE = Unfit(
    name=UnfitName.GARBAGE_OUTPUT,
    finding=Finding(phase=Phase.SERVING, cause="!!!", explanation="One token repeated."),
)

Judge = Callable[[Point, float], Outcome]


def judge(capacity_mib: float) -> Judge:
    """Return a machine: what asks for more than it has fails, drafts help, long windows cost."""

    def of(point: Point, total_bytes: float) -> Outcome:
        beyond = total_bytes - capacity_mib * MIB
        if beyond > 0:
            return ran_out(int(beyond))
        context, n_max = point["context"], point.get("n_max", 0)
        assert isinstance(context, int)
        assert isinstance(n_max, int)
        return measured(50.0 + 5.0 * n_max - context / 1024, context)

    return of


@dataclass(kw_only=True)
class Machine:
    """Boots by a function, and keeps what a study's folder would keep."""

    job: Job
    judge: Judge
    attempts: list[Attempt] = field(default_factory=list)
    boots: list[Point] = field(default_factory=list)
    stop_before_record: int | None = None

    def boot(self, proposal: Proposal, number: int) -> Attempt:
        self.boots.append(proposal.point)
        if number == self.stop_before_record:
            raise KeyboardInterrupt
        footprint = self.job.engine.footprint(
            self.job.settings(proposal.point), self.job.model(proposal.point)
        )
        return attempt_of(
            self.judge(proposal.point, footprint.total_bytes),
            number=number,
            trial=proposal.trial,
            point=proposal.point,
            footprint=footprint,
            study="shell",
        )

    def next_number(self) -> int:
        return len(self.attempts) + 1

    def run(self, study: Study, search: Search | None = None) -> Ended:
        return sweep(
            study,
            search if search is not None else Search(study, self.job, None, self.attempts),
            boot=self.boot,
            next_number=self.next_number,
            recorded=self.attempts.append,
        )


def machine(
    space: Space = SPACE, *, capacity_mib: float = 1e6, does: Judge | None = None
) -> Machine:
    return Machine(
        job=fake_job(space=space), judge=does if does is not None else judge(capacity_mib)
    )


def points(attempts: Sequence[Attempt]) -> list[Point]:
    return [each.point for each in attempts]


def stored(path: Path) -> list[optuna.trial.FrozenTrial]:
    storage = f"sqlite:///{path}"
    return optuna.load_study(study_name="shell", storage=storage).get_trials()


# ---- What is never booted ----------------------------------------------------------------------


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_boots_each_point_once_until_none_is_left(sampler: str) -> None:
    study, here = study_of(sampler=sampler), machine()
    ended = here.run(study)
    assert (ended.why, ended.boots) == (Stop.EXHAUSTED, 24)
    assert set(here.boots) == set(SPACE.points())
    assert len(here.boots) == len(set(here.boots))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_what_needs_as_much_of_everything_as_a_failure_is_never_booted(sampler: str) -> None:
    too_much = Pairs(context=8192, kv_type="f16", n_max=0, batch=128)
    study = study_of(sampler=sampler, enqueue=(too_much,))
    here = machine(capacity_mib=700)
    search = Search(study, here.job, None, ())
    assert here.run(study, search).why is Stop.EXHAUSTED
    failures: list[Attempt] = []
    for each in here.attempts:
        for failure in failures:
            assert not each.footprint.needs_at_least(failure.footprint), (each, failure)
        if isinstance(each.outcome, Infeasible):
            failures.append(each)
    assert failures
    works = {point for point in SPACE.points() if fits(here.job, point, 700)}
    assert {a.point for a in here.attempts if isinstance(a.outcome, Measured)} == works
    out = [point for point in SPACE.points() if point not in here.boots]
    assert out
    assert all((search.refusal(point) or "").startswith("memory: ") for point in out)


def fits(job: Job, point: Point, capacity_mib: float) -> bool:
    footprint = job.engine.footprint(job.settings(point), job.model(point))
    return footprint.total_bytes <= capacity_mib * MIB


def test_an_unsupported_point_rules_out_nothing_but_itself() -> None:
    unsupported = Infeasible(
        name=InfeasibleName.UNSUPPORTED_COMBINATION,
        finding=Finding(phase=Phase.CONFIG, cause="no", explanation="It is not supported."),
    )
    here = machine(does=lambda *_: unsupported)
    ended = here.run(study_of(boots=10))
    assert (ended.why, len(set(here.boots))) == (Stop.BOOTS, 10)


def test_what_a_rule_forbids_is_never_booted() -> None:
    rule = Rule(
        reason="long windows take a quantised cache",
        forbid=(
            Condition(axis="context", op="ge", operand=2048),
            Condition(axis="kv_type", op="in", operand=("f16",)),
        ),
    )
    space = Space(axes=SPACE.axes, rules=(rule,))
    here = machine(space)
    assert here.run(study_of(space)).why is Stop.EXHAUSTED
    assert set(here.boots) == set(space.points())
    assert not any(rule.forbids(point) for point in here.boots)


def test_settings_that_the_engine_refuses_are_never_booted() -> None:
    axis = Axis(name="context", values=(0, 1024), ordered=True, sets=("context",))
    space = Space(axes=(axis,))
    here, study = machine(space), study_of(space)
    search = Search(study, here.job, None, ())
    assert (search.refusal(Pairs(context=0)) or "").startswith("settings: context:")
    assert here.run(study, search).why is Stop.EXHAUSTED
    assert here.boots == [Pairs(context=1024)]


def test_a_point_that_is_being_booted_is_not_proposed_again() -> None:
    space = Space(axes=(BATCH, N_MAX))
    search = Search(study_of(space), fake_job(space=space), None, ())
    proposals = [search.ask() for _ in range(4)]
    assert {each.point for each in proposals if each is not None} == set(space.points())
    assert search.ask() is None


def test_an_unfit_point_is_not_booted_again() -> None:
    space = Space(axes=(BATCH,))
    here = machine(space, does=lambda *_: GARBAGE)
    assert (here.run(study_of(space)).why, len(here.boots)) == (Stop.EXHAUSTED, 2)


# ---- When it ends ------------------------------------------------------------------------------


def test_the_budget_of_boots_counts_all_runs_together() -> None:
    here = machine()
    assert here.run(study_of(boots=5)) == Ended(why=Stop.BOOTS, boots=5)
    assert here.run(study_of(boots=8)) == Ended(why=Stop.BOOTS, boots=3)
    assert here.run(study_of(boots=8)) == Ended(why=Stop.BOOTS, boots=0)
    assert len(set(here.boots)) == 8


def test_the_budget_of_minutes_lets_the_running_boot_end() -> None:
    here = machine()
    ended = here.run(study_of(minutes=1e-9))
    assert ended.why is Stop.MINUTES
    assert ended.boots == len(here.attempts) <= 1


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_a_broken_point_is_retried_at_once_and_then_left(retries: int) -> None:
    here = machine(does=lambda *_: BROKEN)
    here.run(study_of(retries=retries, boots=3 * (retries + 1)))
    assert [len(list(same)) for _, same in itertools.groupby(here.boots)] == [retries + 1] * 3


def test_a_retry_that_works_ends_the_retries() -> None:
    seen: set[Point] = set()

    def breaks_once(point: Point, _: float) -> Outcome:
        if point in seen:
            return measured(50.0, 1024)
        seen.add(point)
        return BROKEN

    space = Space(axes=(BATCH,))
    here = machine(space, does=breaks_once)
    assert here.run(study_of(space, retries=3)).why is Stop.EXHAUSTED
    assert [here.boots.count(point) for point in space.points()] == [2, 2]


def test_a_host_fault_stops_and_costs_no_boot() -> None:
    here = machine(does=lambda *_: HOST_FAULT)
    study = study_of()
    search = Search(study, here.job, None, ())
    ended = here.run(study, search)
    assert (ended.why, ended.boots, ended.fault) == (Stop.HOST_FAULT, 1, HOST_FAULT)
    assert search.boots == 0


def test_a_point_that_met_a_host_fault_is_booted_when_the_host_is_mended(tmp_path: Path) -> None:
    space = Space(axes=(BATCH,))
    study, path = study_of(space), tmp_path / "study.db"
    here = machine(space, does=lambda *_: HOST_FAULT)
    here.run(study, Search(study, here.job, path, ()))
    here.judge = lambda *_: measured(50.0, 1024)
    ended = here.run(study, Search(study, here.job, path, here.attempts))
    assert (ended.why, ended.boots) == (Stop.EXHAUSTED, 2)
    assert set(here.boots) == set(space.points())


# ---- What comes first --------------------------------------------------------------------------

FIRST = (
    Pairs(context=8192, kv_type="f16", n_max=4, batch=512),
    Pairs(context=1024, kv_type="q4_0", n_max=0, batch=128),
    Pairs(context=2048, kv_type="q4_0", n_max=4, batch=512),
)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_enqueued_points_are_booted_first_and_in_order(sampler: str) -> None:
    here = machine()
    here.run(study_of(enqueue=FIRST, boots=5, sampler=sampler))
    assert tuple(here.boots[:3]) == FIRST


def test_an_enqueued_point_that_is_known_not_to_fit_is_passed_over() -> None:
    larger = Pairs(context=8192, kv_type="f16", n_max=4, batch=512)
    smaller = Pairs(context=2048, kv_type="f16", n_max=4, batch=128)
    here = machine(does=lambda *_: ran_out(MIB))
    here.run(study_of(enqueue=(smaller, larger, FIRST[1]), boots=2))
    assert here.boots == [smaller, FIRST[1]]


def test_an_axis_under_a_condition_exists_only_where_it_holds() -> None:
    drafts = Condition(axis="n_max", op="gt", operand=0)
    space = Space(axes=(replace(BATCH, when=(drafts,)), N_MAX))
    for sampler in SAMPLERS:
        here = machine(space, does=lambda *_: measured(50.0, 1024))
        assert here.run(study_of(space, sampler=sampler)).why is Stop.EXHAUSTED
        assert set(here.boots) == set(space.points())
        assert Pairs(n_max=0) in here.boots
        assert len(here.boots) == 3


# ---- Going on ----------------------------------------------------------------------------------


TOLD = ("tpe", "nsga2")
"""A sampler that reads a constraint without values, and one that does not."""


@pytest.mark.parametrize("sampler", TOLD)
def test_going_on_neither_loses_nor_repeats(tmp_path: Path, sampler: str) -> None:
    here, path = machine(capacity_mib=700), tmp_path / "study.db"
    for boots in (2, 3, 6):
        study = study_of(boots=boots, sampler=sampler)
        search = Search(study, here.job, path, here.attempts)
        here.run(study, search)
        assert search.boots == len(here.attempts) == boots
    assert len(set(here.boots)) == 6
    told = {
        each.user_attrs["attempt"]: each for each in stored(path) if "attempt" in each.user_attrs
    }
    assert set(told) == set(range(1, 7))
    assert {each.state for each in told.values()} <= {TrialState.COMPLETE, TrialState.PRUNED}
    # The bound is learnt from the attempts, not from the storage.
    study = study_of(sampler=sampler)
    assert Search(study, here.job, path, here.attempts).bound == search.bound


def test_an_attempt_on_disk_that_was_never_told_is_told(tmp_path: Path) -> None:
    here, study, path = machine(), study_of(), tmp_path / "study.db"
    search = Search(study, here.job, path, ())
    proposal = search.ask()
    assert proposal is not None
    search.booting(proposal, 1)
    here.attempts.append(here.boot(proposal, 1))  # and here the run was killed
    assert [each.state for each in stored(path)] == [TrialState.RUNNING]
    again = Search(study, here.job, path, here.attempts)
    [trial] = stored(path)
    assert trial.state is TrialState.COMPLETE
    assert isinstance(here.attempts[0].outcome, Measured)
    assert trial.values[0] == here.attempts[0].outcome.decode_tok_s.median
    following = again.ask()
    assert following is not None
    assert following.point != proposal.point


def test_a_trial_whose_attempt_never_ended_is_asked_again_first(tmp_path: Path) -> None:
    here, path = machine(), tmp_path / "study.db"
    study = study_of(enqueue=FIRST)
    for _ in range(2):  # two kills in a row lose it no more than one does
        search = Search(study, here.job, path, ())
        proposal = search.ask()
        assert proposal is not None
        assert proposal.point == FIRST[0]
        search.booting(proposal, 1)
    here.run(study_of(enqueue=FIRST, boots=3), Search(study, here.job, path, ()))
    assert tuple(here.boots) == FIRST
    running = [each for each in stored(path) if each.state is TrialState.RUNNING]
    assert running == []


def test_ctrl_c_keeps_what_is_recorded_and_repeats_what_is_not(tmp_path: Path) -> None:
    here, study, path = machine(), study_of(boots=6), tmp_path / "study.db"
    here.stop_before_record = 4
    with pytest.raises(KeyboardInterrupt):
        here.run(study, Search(study, here.job, path, ()))
    assert len(here.attempts) == 3
    here.stop_before_record = None
    here.run(study, Search(study, here.job, path, here.attempts))
    assert here.boots[3] == here.boots[4], "the interrupted point comes first"
    assert len(set(points(here.attempts))) == len(here.attempts) == 6


def test_a_broken_point_is_retried_after_going_on(tmp_path: Path) -> None:
    here, path = machine(does=lambda *_: BROKEN), tmp_path / "study.db"
    for boots in (1, 2):
        study = study_of(boots=boots)
        here.run(study, Search(study, here.job, path, here.attempts))
    assert here.boots[0] == here.boots[1]


@pytest.mark.parametrize("sampler", TOLD)
def test_a_lost_storage_is_rebuilt_from_the_attempts(tmp_path: Path, sampler: str) -> None:
    here, path = machine(capacity_mib=700), tmp_path / "study.db"
    study = study_of(boots=6, sampler=sampler)
    here.run(study, Search(study, here.job, path, ()))
    before = {each.user_attrs.get("attempt"): each for each in stored(path)}
    path.unlink()
    Search(study, here.job, path, here.attempts)
    after = {each.user_attrs.get("attempt"): each for each in stored(path)}
    assert set(after) == set(range(1, 7))
    for number, trial in after.items():
        assert trial.state is before[number].state
        assert trial.params == before[number].params
        assert trial.values == before[number].values
    study = study_of(boots=7, sampler=sampler)
    here.run(study, Search(study, here.job, path, here.attempts))
    assert len(set(here.boots)) == 7


def test_two_studies_with_the_same_seed_boot_the_same_points() -> None:
    one, other = machine(capacity_mib=700), machine(capacity_mib=700)
    one.run(study_of(boots=12))
    other.run(study_of(boots=12))
    assert one.boots == other.boots


# ---- What Optuna makes of it -------------------------------------------------------------------

TABLE_SPACE = Space(axes=(CONTEXT, N_MAX))


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), sampler=st.sampled_from(SAMPLERS), share=st.floats(0.1, 1.0))
def test_optunas_best_trials_are_our_front(seed: int, sampler: str, share: float) -> None:
    luck = random.Random(seed)
    table: dict[Point, Outcome] = {
        point: measured(float(luck.randint(1, 5)), 1024 * luck.randint(1, 5))
        if luck.random() < share
        else luck.choice([GARBAGE, ran_out(MIB), BROKEN])
        for point in TABLE_SPACE.points()
    }
    here = machine(TABLE_SPACE, does=lambda point, _: table[point])
    study = study_of(TABLE_SPACE, sampler=sampler, seed=seed)
    search = Search(study, here.job, None, ())
    here.run(study, search)
    best = {trial.user_attrs["attempt"] for trial in search._optuna.best_trials}
    assert best == {each.number for each in front_among(here.attempts)}


# ---- What a search says and when it ends by itself ----------------------------------------------


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_proposal_says_why(sampler: str) -> None:
    here = machine(capacity_mib=700)
    study = study_of(sampler=sampler, boots=6, enqueue=(next(iter(SPACE.points())),))
    search = Search(study, here.job, None, ())
    said = []
    while (proposal := search.ask()) is not None and len(said) < 6:
        said.append(proposal.why)
        search.booting(proposal, len(said))
        search.tell(here.boot(proposal, len(said)))
    assert said[0] == "a guess of the study"
    assert all(said)


def test_a_sampler_of_somebody_elses_is_made_by_its_class() -> None:
    here = machine(capacity_mib=2000)
    target = "optuna.samplers.BruteForceSampler"
    study = study_of(sampler="target", target=target, arguments=Pairs(seed=3), boots=5)
    assert here.run(study).why is Stop.BOOTS
    assert len(set(here.boots)) == 5


@pytest.mark.parametrize(
    ("target", "arguments", "words"),
    [
        ("nothing", {}, "is no class: write MODULE.CLASS"),
        ("no.such.module.Sampler", {}, "there is no module no.such.module"),
        ("optuna.samplers.nothing", {}, "is not an optuna.samplers.BaseSampler"),
        ("optuna.samplers.TPESampler", {"nonsense": 1}, "cannot be made with"),
    ],
)
def test_a_sampler_that_cannot_be_made_says_why(
    target: str, arguments: dict[str, Any], words: str
) -> None:
    study = study_of(sampler="target", target=target, arguments=Pairs(arguments))
    with pytest.raises(SamplerError, match=words):
        Search(study, machine().job, None, ())


def test_a_grid_is_walked_in_order() -> None:
    here = machine(does=lambda *_: measured(50.0, 1024))
    here.run(study_of(sampler="grid", boots=5))
    assert here.boots == list(itertools.islice(SPACE.points(), 5))


def test_a_share_of_the_boots_checks_what_is_predicted_not_to_fit() -> None:
    here = machine(capacity_mib=560)
    search_of = study_of(sampler="frontier", check_share=0.2)
    search = Search(search_of, here.job, None, ())
    here.run(search_of, search)
    checked, wrong = search.checks
    assert checked >= 1
    assert wrong == ()  # the machine keeps to the footprints, so no prediction is wrong


def test_a_wrong_prediction_is_said_and_what_rests_on_it_is_booted_after_all() -> None:
    # Memory runs out once where it should not have: the first boot that asks for least.
    first = next(iter(SPACE.points()))
    here = machine(does=lambda point, _: ran_out(MIB) if point == first else measured(50.0, 1024))
    study = study_of(sampler="grid", check_share=0.5, enqueue=(first,))
    search = Search(study, here.job, None, ())
    assert here.run(study, search).why is Stop.EXHAUSTED
    _, wrong = search.checks
    assert len(wrong) == 1
    assert "works, though memory:" in wrong[0]
    assert set(here.boots) == set(SPACE.points())


def test_every_point_that_was_not_booted_has_a_reason() -> None:
    here = machine(capacity_mib=700)
    study = study_of(boots=6)
    search = Search(study, here.job, None, ())
    here.run(study, search)
    skipped = dict(search.skips())
    assert set(skipped) | set(here.boots) == set(SPACE.points())
    assert set(skipped) & set(here.boots) == set()
    assert all(skipped.values())


def test_a_study_ends_by_itself_when_nothing_promises_much() -> None:
    here = machine(does=lambda *_: measured(50.0, 1024))
    ended = here.run(study_of(sampler="frontier", stop_share=0.9, stop_asks=2))
    assert ended.why is Stop.CONVERGED
    assert len(here.boots) < len(set(SPACE.points()))


def test_the_hours_of_the_cards_end_a_study() -> None:
    here = machine(does=lambda *_: measured(50.0, 1024))
    ended = here.run(study_of(gpu_hours=1e-9))
    assert ended.why is Stop.GPU_HOURS
    assert len(here.boots) <= 1


def test_the_front_of_an_earlier_study_is_booted_first_where_this_space_has_it() -> None:
    first = machine(capacity_mib=2000)
    first.run(study_of())
    best = front_among(first.attempts)
    again = machine(capacity_mib=2000)
    study = study_of(boots=len(best))
    search = Search(study, again.job, None, (), earlier=first.attempts)
    again.run(study, search)
    assert set(again.boots) == {each.point for each in best}
    other = Space(axes=(CONTEXT,))
    elsewhere = Search(study_of(other), machine(other).job, None, (), earlier=first.attempts)
    assert elsewhere.ask() is not None


def test_what_an_earlier_study_printed_is_where_the_next_search_begins() -> None:
    here = machine()
    here.run(study_of(boots=3))
    # The engine printed twice the weights that its files speak of.
    stated = here.job.engine.footprint(
        here.job.settings(here.attempts[0].point), here.job.model(here.attempts[0].point)
    ).parts["weights"]
    told = [
        replace(each, engine=each.engine.with_(weights_bytes=2 * stated)) for each in here.attempts
    ]

    def weights(earlier: Sequence[Attempt]) -> list[float]:
        prior = prior_of(SPACE, here.job, device_memory_bytes=None, earlier=earlier)
        return [
            mean / stated
            for need in prior.needs
            for part, mean, _ in need.parts
            if part == "weights"
        ]

    assert set(weights(())) == {1.0}
    assert all(1.5 < each <= 2.1 for each in weights(told))


# ---- After the search --------------------------------------------------------------------------


def leaving(attempt: Attempt, left_mib: float) -> Attempt:
    """Return a measured attempt whose engine says what it left of a card of 1000 MiB."""
    used = (1000 - left_mib) * MIB
    return replace(attempt, engine=Pairs(name="fake", used_bytes=used, capacity_bytes=1000 * MIB))


def confirming(
    members: Sequence[Attempt], left_mib: Callable[[int], float], **choice: int
) -> list[Attempt]:
    """Return all attempts after the front was confirmed; `left_mib` is what each boot leaves."""
    attempts = list(members)

    def boot(member: Attempt, brief: bool, _count: int, _of: int) -> Attempt:
        number = len(attempts) + 1
        left = left_mib(number)
        done = replace(member, number=number, confirms=member.number, brief=brief)
        if left < 0:
            done = replace(done, outcome=ran_out(int(-left * MIB)))
        attempts.append(leaving(done, left))
        return attempts[-1]

    confirm(Confirm(**choice), lambda: attempts, boot=boot)
    return attempts


def test_members_with_room_are_measured_once_more_and_no_further() -> None:
    members = [
        leaving(measured_attempt(n, context=2**n, decode_tok_s=90 - n), 300) for n in (13, 14)
    ]
    done = confirming(members, lambda _number: 300.0)
    assert [each.confirms for each in done[2:]] == [13, 14]
    assert not any(each.brief for each in done)


def test_a_member_with_little_room_is_booted_until_it_is_known_to_hold() -> None:
    member = leaving(measured_attempt(1), 2.0)
    done = confirming([member], lambda number: 2.0 + 0.01 * (number % 3))
    assert [each.brief for each in done] == [False, False, True][: len(done)]
    assert [each.number for each in front_among(done)] == [2]


def test_boots_that_differ_as_much_as_is_left_end_with_the_checks() -> None:
    member = leaving(measured_attempt(1), 2.0)
    done = confirming([member], lambda number: 2.0 if number % 2 else 9.0, checks=2)
    assert sum(each.brief for each in done) <= 2


def test_one_that_runs_out_gives_its_place_to_the_next_which_is_measured_again_too() -> None:
    first = leaving(measured_attempt(1, decode_tok_s=90), 3.0)
    second = leaving(measured_attempt(2, decode_tok_s=60, n_max=4), 300.0)
    done = confirming([first, second], lambda number: -5.0 if number == 3 else 300.0)
    assert [(each.number, each.confirms) for each in done[2:]] == [(3, 1), (4, 2)]
    assert [each.number for each in front_among(done)] == [4]


def test_after_a_confirmation_ran_out_only_what_needs_noticeably_more_is_excluded() -> None:
    here = machine(capacity_mib=700)
    study = study_of(boots=24, device_memory_bytes=1000 * MIB)
    worked = here.boot(
        Proposal(trial=0, point=Pairs(context=2048, kv_type="f16", n_max=0, batch=512)), 1
    )
    again = replace(worked, number=2, confirms=1, outcome=ran_out(1))
    search = Search(study, here.job, None, [worked, again])
    assert [each.attempt for each in search.bound.failures] == [2]
    # Before boots were repeated they are thought to differ by about 3 MiB of these 1000.
    assert 1 < search.bound.spread_bytes / MIB < 10
    assert search.bound.excluded_by(worked.footprint) is None
    more = Pairs(context=8192, kv_type="f16", n_max=0, batch=512)
    assert (search.refusal(more) or "").startswith("memory: needs at least as much")
