"""Spaces: the points are exactly those that conditions allow and no rule forbids."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeper.core.pairs import Pairs, Scalar
from sweeper.core.space import Axis, AxisRef, Condition, Op, Rule, Space, SpaceError

# No deadline: on a busy machine, time says nothing.
QUICK = settings(deadline=None, max_examples=60)

MISSING = object()
scalars = st.sampled_from([0, 1, 2, 5, 0.5, True, False, None, "on", "off"])


@st.composite
def conditions(draw: st.DrawFn, names: list[str]) -> Condition:
    axis = draw(st.sampled_from(names))
    op = draw(st.sampled_from(["in", "not_in", "lt", "le", "gt", "ge"]))
    if op in ("in", "not_in"):
        return Condition(axis=axis, op=op, operand=tuple(draw(st.lists(scalars, max_size=3))))
    other = st.sampled_from(names).map(lambda name: AxisRef(axis=name))
    return Condition(axis=axis, op=op, operand=draw(st.integers(0, 5) | other))


@st.composite
def spaces(draw: st.DrawFn) -> Space:
    """Draw a space of up to four axes, declared in any order, with conditions and rules."""
    names = ["a", "b", "c", "d"][: draw(st.integers(1, 4))]
    axes = []
    for index, name in enumerate(names):
        values = draw(st.lists(scalars, min_size=1, max_size=3, unique_by=lambda v: (type(v), v)))
        when = draw(st.lists(conditions(names[:index]), max_size=2)) if index else []
        axes.append(
            Axis(name=name, values=tuple(values), ordered=draw(st.booleans()),
                 sets=(name,), when=tuple(when))
        )  # fmt: skip
    rules = [
        Rule(reason="x", forbid=tuple(draw(st.lists(conditions(names), min_size=1, max_size=2))))
        for _ in range(draw(st.integers(0, 2)))
    ]
    return Space(axes=tuple(draw(st.permutations(axes))), rules=tuple(rules))


def same(one: Any, other: Any) -> bool:
    """Say in another way what equal means: like JSON, where true is no number."""
    return bool(one == other) and (type(one) is bool) == (type(other) is bool)


def true_of(condition: Condition, values: Mapping[str, Any]) -> bool:
    """Say again, naively, what a condition means."""
    if any(name not in values for name in condition.axes()):
        return False
    left, right = values[condition.axis], condition.operand
    if isinstance(right, tuple):
        return any(same(left, each) for each in right) == (condition.op == "in")
    right = values[right.axis] if isinstance(right, AxisRef) else right
    if any(type(side) not in (int, float) for side in (left, right)):
        return False
    return bool(
        {"lt": left < right, "le": left <= right, "gt": left > right, "ge": left >= right}[
            condition.op
        ]
    )


def brute_force(space: Space) -> list[Pairs]:
    """Return the points by trying all assignments, the absence of each axis included."""
    found = []
    for row in itertools.product(*[(*axis.values, MISSING) for axis in space.axes]):
        values = {
            axis.name: value
            for axis, value in zip(space.axes, row, strict=True)
            if value is not MISSING
        }
        whole = all(
            (axis.name in values) == all(true_of(each, values) for each in axis.when)
            for axis in space.axes
        )
        ruled_out = any(all(true_of(each, values) for each in rule.forbid) for rule in space.rules)
        if whole and not ruled_out:
            found.append(Pairs(values))
    return found


@QUICK
@given(spaces())
def test_the_points_are_those_that_trying_everything_finds(space: Space) -> None:
    points = list(space.points())
    assert len(points) == len(set(points))
    assert set(points) == set(brute_force(space))


@QUICK
@given(spaces())
def test_every_point_satisfies_its_conditions_and_no_rule(space: Space) -> None:
    for point in space.points():
        assert space.refused_by(point) is None
        for axis in space.axes:
            assert axis.active(point) == (axis.name in point)


@QUICK
@given(spaces())
def test_the_declared_points_are_those_left_and_those_ruled_out(space: Space) -> None:
    declared = [Pairs(values) for values in space.declared()]
    assert len(declared) == space.declared_size()
    left = [each for each in declared if space.refused_by(each) is None]
    assert left == list(space.points())


@QUICK
@given(spaces(), st.data())
def test_checked_accepts_exactly_the_declared_points(space: Space, data: st.DataObject) -> None:
    declared = {Pairs(values) for values in space.declared()}
    for point in declared:
        assert space.checked(point, "enqueue[0]") == point
    names = st.sampled_from([*(axis.name for axis in space.axes), "unknown"])
    values = data.draw(st.dictionaries(names, scalars, max_size=5))
    try:
        found = space.checked(values, "enqueue[0]")
    except SpaceError as error:
        assert error.key.startswith("enqueue[0]")  # noqa: PT017 - either may happen here
        assert Pairs(values) not in declared
    else:
        assert found in declared


@QUICK
@given(spaces(), st.randoms(use_true_random=False))
def test_the_order_of_declaration_changes_neither_points_nor_digest(
    space: Space, chance: Any
) -> None:
    axes = list(space.axes)
    chance.shuffle(axes)
    again = Space(axes=tuple(axes), rules=space.rules)
    assert set(again.points()) == set(space.points())
    assert again.digest() == space.digest()


SPACE = Space(
    axes=(
        Axis(name="n_max", values=(0, 4), ordered=True, sets=("n_max",)),
        Axis(
            name="kind",
            values=("ngram", "draft"),
            ordered=False,
            sets=("spec_type",),
            when=(Condition(axis="n_max", op="gt", operand=0),),
        ),
    ),
    rules=(Rule(reason="no", forbid=(Condition(axis="kind", op="in", operand=("draft",)),)),),
)
N_MAX, KIND = SPACE.axes


def replaced(axis: Axis, **changes: Any) -> tuple[Axis, ...]:
    new = dataclasses.replace(axis, **changes)
    return tuple(new if each is axis else each for each in SPACE.axes)


@pytest.mark.parametrize(
    "changed",
    [
        {"axes": replaced(N_MAX, values=(0, 4, 8))},
        {"axes": replaced(N_MAX, values=(4, 0))},
        {"axes": replaced(N_MAX, values=(0, 4.0))},
        {"axes": replaced(N_MAX, ordered=False)},
        {"axes": replaced(N_MAX, sets=("n_max", "n_min"))},
        {"axes": replaced(KIND, name="sort"), "rules": ()},
        {"axes": replaced(KIND, when=())},
        {"axes": replaced(KIND, when=(Condition(axis="n_max", op="ge", operand=0),))},
        {"axes": replaced(KIND, when=(Condition(axis="n_max", op="gt", operand=1),))},
        {"axes": replaced(KIND, when=(Condition(axis="n_max", op="in", operand=(0,)),))},
        {"axes": replaced(KIND, when=(Condition(axis="n_max", op="in", operand=(False,)),))},
        {"rules": ()},
        {"rules": (dataclasses.replace(SPACE.rules[0], reason="never"),)},
        {"rules": (SPACE.rules[0], SPACE.rules[0])},
    ],
)
def test_any_change_of_a_space_changes_its_digest(changed: dict[str, Any]) -> None:
    assert dataclasses.replace(SPACE, **changed).digest() != SPACE.digest()


@pytest.mark.parametrize(
    ("op", "operand", "value", "holds"),
    [
        ("in", (1,), True, False),
        ("in", (True,), 1, False),
        ("in", (1,), 1.0, True),
        ("in", (0,), False, False),
        ("not_in", (1,), True, True),
        ("in", (None,), None, True),
        ("in", ("1",), 1, False),
        ("ge", 1, True, False),
        ("lt", 1, False, False),
        ("lt", 1, "0", False),
        ("lt", 1, None, False),
        ("le", 1, 1, True),
    ],
)
def test_a_boolean_is_no_number_to_a_condition(
    op: Op, operand: Any, value: Scalar, holds: bool
) -> None:
    assert Condition(axis="a", op=op, operand=operand).holds({"a": value}) is holds


@pytest.mark.parametrize("op", ["in", "not_in"])
def test_an_axis_that_is_not_there_satisfies_no_condition(op: Op) -> None:
    assert not Condition(axis="a", op=op, operand=(1,)).holds({})
    assert not Condition(axis="a", op="lt", operand=AxisRef(axis="b")).holds({"a": 1})


@pytest.mark.parametrize(("op", "operand"), [("in", 1), ("lt", (1,)), ("like", (1,))])
def test_a_condition_that_could_mean_nothing_cannot_be_built(op: Any, operand: Any) -> None:
    with pytest.raises(ValueError, match="cannot compare with"):
        Condition(axis="a", op=op, operand=operand)


def test_a_point_comes_back_in_the_words_of_its_axis() -> None:
    point = SPACE.checked({"n_max": 4.0, "kind": "ngram"}, "enqueue[0]")
    assert point == Pairs(n_max=4, kind="ngram")
    assert point in set(SPACE.points())


@pytest.mark.parametrize(
    ("values", "key", "message"),
    [
        ({"n_max": 4, "knd": "ngram"}, "enqueue[2]", "knd (did you mean kind?)"),
        ({"n_max": 0, "kind": "ngram"}, "enqueue[2].kind", "`when` does not hold here"),
        ({"n_max": 4}, "enqueue[2]", "gives no value for kind"),
        ({"n_max": 5}, "enqueue[2].n_max", "5 is not one of its values: 0, 4"),
        ({"n_max": False}, "enqueue[2].n_max", "false is not one of its values: 0, 4"),
    ],
)
def test_values_that_are_no_point_are_refused_with_their_place(
    values: dict[str, Any], key: str, message: str
) -> None:
    with pytest.raises(SpaceError) as refused:
        SPACE.checked(values, "enqueue[2]")
    assert refused.value.key == key
    assert message in refused.value.message


def axis(name: str, *values: Scalar, when: str | None = None) -> Axis:
    needs = () if when is None else (Condition(axis=when, op="ge", operand=0),)
    return Axis(name=name, values=values, ordered=True, sets=(name,), when=needs)


@pytest.mark.parametrize("values", [(), (1, 1), (1, 1.0), ("a", "a"), (None, None)])
def test_an_axis_names_each_of_its_values_once(values: tuple[Scalar, ...]) -> None:
    with pytest.raises(SpaceError, match=r"space\.a: (has no values|names a value twice)"):
        axis("a", *values)


def test_a_boolean_beside_a_number_is_another_value() -> None:
    assert len(list(Space(axes=(axis("a", 1, True, 0, False),)).points())) == 4


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_no_number_is_refused(value: float) -> None:
    with pytest.raises(SpaceError, match="no number"):
        axis("a", 1.0, value)


@pytest.mark.parametrize(
    ("axes", "forbid", "key", "message"),
    [
        ((), None, "space", "declares no axis"),
        ((axis("a", 1), axis("a", 2)), None, "space.a", "declared twice"),
        ((axis("a", 1, when="b"),), None, "space.a.when", "not declared: b"),
        ((axis("a", 1, when="a"),), None, "space.a.when", "waits for itself"),
        (
            (axis("a", 1, when="b"), axis("b", 1, when="a")),
            None, "space.a.when", "waits for itself through: a, b",
        ),
        ((axis("a", 1),), (), "rules[0].forbid", "would forbid all"),
        (
            (axis("context", 1),), (Condition(axis="contxt", op="in", operand=(1,)),),
            "rules[0].forbid", "did you mean context?",
        ),
        (
            (axis("a", 1),), (Condition(axis="a", op="lt", operand=AxisRef(axis="b")),),
            "rules[0].forbid", "not declared: b",
        ),
    ],
)  # fmt: skip
def test_a_space_that_makes_no_sense_cannot_be_built(
    axes: tuple[Axis, ...], forbid: tuple[Condition, ...] | None, key: str, message: str
) -> None:
    rules = () if forbid is None else (Rule(reason="x", forbid=forbid),)
    with pytest.raises(SpaceError) as refused:
        Space(axes=axes, rules=rules)
    assert refused.value.key == key
    assert message in refused.value.message
