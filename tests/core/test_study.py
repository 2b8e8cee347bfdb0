"""What makes two runs the same study, and what differs where they are not."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeper.core.pairs import Pairs
from sweeper.core.space import Axis, Condition, Rule, Space
from sweeper.core.study import Budget, SamplerChoice, Study, differences
from sweeper.core.workload import Repeats, Workload

# No deadline: on a busy machine, time says nothing.
QUICK = settings(deadline=None, max_examples=40)

CONTEXT = Axis(name="context", values=(1024, 2048), ordered=True, sets=("context",))
STUDY = Study(
    name="mine",
    description="",
    seed=0,
    space=Space(axes=(CONTEXT,)),
    enqueue=(),
    budget=Budget(boots=5),
    sampler=SamplerChoice(name="tpe", startup=3),
    retries=1,
    engine_name="llamacpp",
    engine_params={"threads": 1},
    engine_env=Pairs(HF_TOKEN="geheim"),
    engine_prefix=(),
    engine_extra_args=("--verbose",),
    model_name="gemma",
    hardware_name="local",
    memory_limit_bytes=None,
    workload=Workload(
        name="short",
        prompt="Tell",
        max_tokens=8,
        proof_answer_tokens=4,
        repeats=Repeats(least=3, most=5),
    ),
)
json_data = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
identities = st.dictionaries(st.text(max_size=4), json_data, max_size=4)


def changed(**changes: Any) -> tuple[str, ...]:
    return differences(STUDY.identity(), dataclasses.replace(STUDY, **changes).identity())


@QUICK
@given(identities)
def test_an_identity_does_not_differ_from_itself_read_back(identity: dict[str, Any]) -> None:
    assert differences(identity, json.loads(json.dumps(identity))) == ()


@QUICK
@given(identities, identities)
def test_identities_differ_by_the_same_entries_in_both_directions(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    there, back = differences(one, other), differences(other, one)
    assert len(there) == len(back)
    assert (there == ()) == (json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True))


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 7},
        {"budget": Budget(boots=50, minutes=2.0)},
        {"sampler": SamplerChoice(name="random", startup=1)},
        {"description": "words"},
        {"retries": 3},
        {"enqueue": (Pairs(context=1024),)},
    ],
)
def test_what_changes_no_number_may_change(changes: dict[str, Any]) -> None:
    assert changed(**changes) == ()


WIDER = dataclasses.replace(CONTEXT, values=(1024, 2048, 4096))
RULE = Rule(reason="no", forbid=(Condition(axis="context", op="gt", operand=1024),))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"engine_name": "fake"}, 'engine.name was "llamacpp" and is now "fake"'),
        ({"engine_params": {"threads": 2}}, "engine.params.threads was 1 and is now 2"),
        ({"engine_params": {"threads": True}}, "engine.params.threads was 1 and is now true"),
        ({"engine_params": {}}, "engine.params.threads is gone; it was 1"),
        ({"engine_params": {"threads": 1, "x": 0}}, "engine.params.x is new: 0"),
        ({"engine_extra_args": ()}, 'engine.extra_args was ["--verbose"] and is now []'),
        ({"model_name": "qwen"}, 'model.name was "gemma" and is now "qwen"'),
        ({"hardware_name": "card"}, 'hardware.name was "local" and is now "card"'),
        ({"memory_limit_bytes": 9}, "hardware.memory_limit_bytes was null and is now 9"),
        (
            {"space": Space(axes=(WIDER,))},
            "space.context was [1024, 2048] and is now [1024, 2048, 4096]",
        ),
        (
            {"workload": dataclasses.replace(STUDY.workload, repeats=Repeats(least=4, most=5))},
            "workload.repeats.least was 3 and is now 4",
        ),
        (
            {"workload": dataclasses.replace(STUDY.workload, request=Pairs(top_k=1))},
            "workload.request.top_k is new: 1",
        ),
    ],
)
def test_what_changes_numbers_is_named_with_both_values(changes: dict[str, Any], line: str) -> None:
    assert changed(**changes) == (line,)


def test_a_new_rule_is_a_difference() -> None:
    (line,) = changed(space=Space(axes=(CONTEXT,), rules=(RULE,)))
    assert line.startswith("rules was []")


def test_values_of_the_environment_are_compared_but_never_shown() -> None:
    (line,) = changed(engine_env=Pairs(HF_TOKEN="anders"))
    assert line.startswith("engine.env.HF_TOKEN was ")
    assert "geheim" not in json.dumps(STUDY.identity()) + line
    assert "anders" not in line


def test_a_long_value_is_cut_in_a_difference() -> None:
    (line,) = changed(model_name="x" * 500)
    assert len(line) < 150


def test_a_further_workload_is_named_key_by_key() -> None:
    lines = changed(also=(dataclasses.replace(STUDY.workload, name="more"),))
    assert 'also.0.name is new: "more"' in lines
    assert "also.0.repeats.most is new: 5" in lines
    assert all(line.startswith("also.0.") for line in lines)
