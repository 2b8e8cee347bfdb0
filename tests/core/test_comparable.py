from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import attempt_of, broken_attempt, oom_attempt

from sweeper.core.comparable import FACTS, Fact, Group, Scope, facts_of, incomparable
from sweeper.core.outcome import Attempt, Measured, ProvenContext
from sweeper.core.pairs import Pairs, Scalar
from sweeper.core.space import Axis
from sweeper.core.stats import summarise
from sweeper.core.telemetry import Telemetry

ENGINE = Pairs(name="llamacpp", simulated=False, attached_to=None, engine_version="b4567")
MODEL = Pairs(name="demo", sha256="ab" * 32)
ON_CPU = Pairs(cpu="EPYC", cpu_count=8, memory_bytes=32 * 2**30, memory_limit_bytes=None)
ON_GPU = Pairs(
    {
        **ON_CPU,
        "gpu": "NVIDIA H200",
        "gpu_count": 1,
        "gpu_driver": "580.1",
        "gpu_power_limit_w": 700.0,
        "gpu_clocks_policy": "persistence on",
    }
)
WORKLOAD = Pairs(name="short", digest="0123456789abcdef", schema=2)
MEASURED = Measured(
    decode_tok_s=summarise([39.0, 40.0, 41.0]),
    ttft_s=summarise([0.2, 0.21, 0.22]),
    context=ProvenContext(
        configured_tokens=512,
        proven_tokens=512,
        prompt_tokens=504,
        completion_tokens=8,
        prefill_tok_s=1000.0,
        decode_tok_s=40.0,
    ),
)
VARIANT = Axis(name="quant", values=("q4", "q8"), ordered=False, sets=("model.variant", "parallel"))
CONTEXT = Axis(name="context", values=(512, 1024), ordered=True, sets=("context",))


def attempt(**changes: Any) -> Attempt:
    facts = {"engine": ENGINE, "model": MODEL, "host": ON_GPU, "workload": WORKLOAD, **changes}
    return replace(attempt_of(MEASURED), **facts)


def with_telemetry(one: Attempt, telemetry: Telemetry) -> Attempt:
    assert isinstance(one.outcome, Measured)
    return replace(one, outcome=replace(one.outcome, telemetry=telemetry))


def changed(fact: Fact, value: Scalar) -> Attempt:
    """Return the attempt in which one kept fact has another value."""
    host = ON_CPU if fact.group is Group.CPU else ON_GPU
    kept = {"engine": ENGINE, "model": MODEL, "host": host, "workload": WORKLOAD}
    kept[fact.kept_in] = kept[fact.kept_in].with_(**{fact.key: value})
    return attempt(**kept)


# ---- Any two attempts ---------------------------------------------------------------------------

values = (
    st.none() | st.booleans() | st.integers(0, 2**34) | st.floats() | st.sampled_from(["a", "b"])
)


@st.composite
def attempts(draw: st.DrawFn) -> Attempt:
    kept: dict[str, dict[str, Scalar]] = {"engine": {}, "model": {}, "host": {}, "workload": {}}
    for fact in FACTS:
        if fact.kept_in and draw(st.booleans()):
            kept[fact.kept_in][fact.key] = draw(values)
    point = Pairs(quant=draw(st.sampled_from(["q4", "q8"])))
    made = attempt(point=point, **{name: Pairs(pairs) for name, pairs in kept.items()})
    seen = draw(
        st.sampled_from([None, Telemetry(seconds=1.0), Telemetry(seconds=1.0, gpu_power_w=9.0)])
    )
    return made if seen is None else with_telemetry(made, seen)


scopes = st.sampled_from(list(Scope))
axes = st.sampled_from([(), (VARIANT,), (CONTEXT,)])


@settings(max_examples=60, deadline=None)
@given(attempts(), scopes, axes)
def test_an_attempt_is_comparable_with_itself(
    one: Attempt, scope: Scope, axes: tuple[Axis, ...]
) -> None:
    assert incomparable(one, one, scope=scope, axes=axes) == ()


@settings(max_examples=60, deadline=None)
@given(attempts(), attempts(), scopes, axes)
def test_the_differences_are_as_many_from_either_side(
    one: Attempt, other: Attempt, scope: Scope, axes: tuple[Axis, ...]
) -> None:
    there = incomparable(one, other, scope=scope, axes=axes)
    back = incomparable(other, one, scope=scope, axes=axes)
    assert len(there) == len(back)
    assert len(set(there)) == len(there)


@settings(max_examples=60, deadline=None)
@given(attempts(), attempts(), axes)
def test_a_leaderboard_asks_for_no_more_than_a_study(
    one: Attempt, other: Attempt, axes: tuple[Axis, ...]
) -> None:
    board = incomparable(one, other, scope=Scope.LEADERBOARD, axes=axes)
    assert set(board) <= set(incomparable(one, other, scope=Scope.STUDY, axes=axes))


@settings(max_examples=60, deadline=None)
@given(attempts(), attempts(), scopes)
def test_what_is_allowed_to_differ_is_no_difference(
    one: Attempt, other: Attempt, scope: Scope
) -> None:
    everything = [fact.name for fact in FACTS]
    assert incomparable(one, other, scope=scope, allowed=everything) == ()


# ---- Each fact ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fact", [each for each in FACTS if each.kept_in], ids=lambda f: f.name)
def test_each_fact_counts_in_a_study_and_can_be_allowed(fact: Fact) -> None:
    one, other = changed(fact, "this"), changed(fact, "that")
    assert incomparable(one, other, scope=Scope.STUDY) == (f"{fact.title} this against that",)
    assert incomparable(one, other, scope=Scope.STUDY, allowed=[fact.name]) == ()
    assert facts_of(one)[fact.name] == "this"


@pytest.mark.parametrize("fact", [each for each in FACTS if each.kept_in], ids=lambda f: f.name)
def test_engines_and_models_alone_may_differ_on_a_leaderboard(fact: Fact) -> None:
    found = incomparable(changed(fact, 1), changed(fact, 2), scope=Scope.LEADERBOARD)
    assert bool(found) is (fact.group not in (Group.ENGINE, Group.MODEL))


def test_a_fact_known_of_one_attempt_only_is_a_difference() -> None:
    one = attempt()
    other = attempt(host=Pairs({k: v for k, v in ON_GPU.items() if k != "gpu_driver"}))
    assert incomparable(one, other, scope=Scope.STUDY) == ("GPU driver 580.1 against unknown",)


def test_a_limit_that_is_not_there_is_called_none() -> None:
    other = attempt(host=ON_GPU.with_(memory_limit_bytes=600 * 2**20))
    assert incomparable(attempt(), other, scope=Scope.STUDY) == (
        "memory limit none against 600 MiB",
    )


def test_sizes_and_checksums_are_as_long_as_tells_them_apart() -> None:
    def said(one: dict[str, Any], other: dict[str, Any]) -> tuple[str, ...]:
        return incomparable(attempt(**one), attempt(**other), scope=Scope.STUDY)

    exact = [ON_GPU.with_(memory_limit_bytes=2**30 + more) for more in (0, 1)]
    assert said({"host": exact[0]}, {"host": exact[1]}) == (
        "memory limit 1073741824 against 1073741825",
    )
    sums = [MODEL.with_(sha256=start * 32) for start in ("ab", "cd")]
    assert said({"model": sums[0]}, {"model": sums[1]}) == (
        "SHA-256 of the model abababababab against cdcdcdcdcdcd",
    )
    late = MODEL.with_(sha256="ab" * 31 + "ac")
    assert said({"model": MODEL}, {"model": late})[0].endswith("ac")


def test_differences_come_in_the_order_of_the_list() -> None:
    other = attempt(
        engine=ENGINE.with_(engine_version="b5000"), host=ON_GPU.with_(gpu_power_limit_w=450.0)
    )
    assert incomparable(attempt(), other, scope=Scope.STUDY) == (
        "engine version b4567 against b5000",
        "GPU power limit in watts 700.0 against 450.0",
    )


def test_a_name_that_is_no_facts_cannot_be_allowed() -> None:
    with pytest.raises(ValueError, match=r"weather: no such fact; there are .*gpu_driver"):
        incomparable(attempt(), attempt(), scope=Scope.STUDY, allowed=["weather", "gpu"])


# ---- What follows from the point ----------------------------------------------------------------


def test_a_model_that_the_points_choose_may_differ_in_a_study() -> None:
    small = attempt(point=Pairs(quant="q4"))
    large = attempt(point=Pairs(quant="q8"), model=MODEL.with_(sha256="cd" * 32))
    assert incomparable(small, large, scope=Scope.STUDY, axes=(CONTEXT, VARIANT)) == ()
    assert len(incomparable(small, large, scope=Scope.STUDY, axes=(CONTEXT,))) == 1


def test_a_model_that_was_changed_under_equal_points_may_not() -> None:
    before = attempt(point=Pairs(quant="q4"))
    after = attempt(point=Pairs(quant="q4"), model=MODEL.with_(sha256="cd" * 32))
    assert len(incomparable(before, after, scope=Scope.STUDY, axes=(VARIANT,))) == 1


# ---- What the engine computed on ----------------------------------------------------------------


def test_the_processor_does_not_count_for_an_engine_on_cards() -> None:
    other = attempt(host=ON_GPU.with_(cpu="Xeon", cpu_count=64))
    assert incomparable(attempt(), other, scope=Scope.STUDY) == ()
    assert "cpu" not in facts_of(other)


def test_the_cards_do_not_count_for_an_engine_that_was_seen_to_use_none() -> None:
    seen = Telemetry(seconds=10.0, engine_cpu_s=80.0)
    one = with_telemetry(attempt(), seen)
    other = with_telemetry(attempt(host=ON_GPU.with_(gpu_driver="999")), seen)
    assert facts_of(one)["device"] == "cpu"
    assert incomparable(one, other, scope=Scope.LEADERBOARD) == ()
    other = with_telemetry(attempt(host=ON_GPU.with_(cpu="Xeon")), seen)
    assert incomparable(one, other, scope=Scope.LEADERBOARD) == ("processor EPYC against Xeon",)


def test_cards_against_a_processor_is_one_difference() -> None:
    found = incomparable(attempt(), attempt(host=ON_CPU), scope=Scope.LEADERBOARD)
    assert found == ("computing on gpu against cpu",)


def test_an_attempt_that_was_not_measured_counts_as_on_the_cards_of_its_host() -> None:
    for one in (oom_attempt(), broken_attempt()):
        assert facts_of(replace(one, host=ON_GPU))["device"] == "gpu"
        assert facts_of(replace(one, host=ON_CPU))["device"] == "cpu"
