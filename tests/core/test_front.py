"""The Pareto front and its hypervolume, against their definitions."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeper.core.front import Entry, dominates, hypervolume, pareto_front

# No deadline: on a busy machine, time says nothing.
QUICK = settings(deadline=None, max_examples=60)

Vector = tuple[float, ...]


def vectors(dimensions: int, most: int = 4) -> st.SearchStrategy[Vector]:
    return st.tuples(*[st.integers(0, most).map(float)] * dimensions)


@st.composite
def entries(draw: st.DrawFn) -> list[Entry[int]]:
    several = draw(st.lists(vectors(draw(st.integers(1, 3))), max_size=12))
    return [Entry(label=i, objectives=each) for i, each in enumerate(several)]


@st.composite
def clouds(draw: st.DrawFn) -> tuple[list[Vector], Vector]:
    """Draw points and a reference, in one to four dimensions, on a small grid."""
    dimensions = draw(st.integers(1, 4))
    points = draw(st.lists(vectors(dimensions), max_size=6))
    return points, draw(vectors(dimensions, most=2))


@QUICK
@given(entries())
def test_nothing_on_the_front_is_dominated_and_everything_off_it_is(
    everyone: list[Entry[int]],
) -> None:
    front = pareto_front(everyone)
    for entry in everyone:
        dominated = any(dominates(other.objectives, entry.objectives) for other in everyone)
        assert (entry in front) != dominated
        # What is off the front is beaten by something that is on it.
        assert dominated == any(dominates(each.objectives, entry.objectives) for each in front)


@QUICK
@given(entries(), st.data())
def test_the_order_of_the_entries_does_not_change_the_front(
    everyone: list[Entry[int]], data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(everyone))
    assert set(pareto_front(shuffled)) == set(pareto_front(everyone))
    firsts = [entry.objectives[0] for entry in pareto_front(shuffled)]
    assert firsts == sorted(firsts, reverse=True)


def test_equal_entries_all_stay() -> None:
    twins = [Entry(label=label, objectives=(1.0, 2.0)) for label in "abc"]
    assert pareto_front([*twins, Entry(label="worse", objectives=(1.0, 1.0))]) == tuple(twins)


def test_nothing_has_an_empty_front() -> None:
    assert pareto_front([]) == ()


@QUICK
@given(vectors(3), vectors(3), vectors(3))
def test_dominance_is_a_strict_order(a: Vector, b: Vector, c: Vector) -> None:
    assert not dominates(a, a)
    assert not (dominates(a, b) and dominates(b, a))
    assert not (dominates(a, b) and dominates(b, c)) or dominates(a, c)


@pytest.mark.parametrize("objectives", [(), (1.0, math.nan), (math.inf,)])
def test_an_entry_has_finite_objectives(objectives: Vector) -> None:
    with pytest.raises(ValueError, match=r"objective"):
        Entry(label=0, objectives=objectives)


def counted(points: list[Vector], reference: Vector) -> int:
    """Return the number of unit cells above the reference that lie below some point."""
    cells = itertools.product(*[range(int(low), 5) for low in reference])
    return sum(
        any(all(cell + 1 <= top for cell, top in zip(at, point, strict=True)) for point in points)
        for at in cells
    )


@QUICK
@given(clouds())
def test_the_hypervolume_is_the_number_of_cells_below_the_points(
    cloud: tuple[list[Vector], Vector],
) -> None:
    assert hypervolume(*cloud) == counted(*cloud)


@QUICK
@given(clouds(), st.data())
def test_another_point_never_makes_the_hypervolume_smaller(
    cloud: tuple[list[Vector], Vector], data: st.DataObject
) -> None:
    points, reference = cloud
    more = data.draw(vectors(len(reference)))
    before, after = hypervolume(points, reference), hypervolume([*points, more], reference)
    assert after >= before
    # It grows exactly where the new point is above the reference and nothing covers it.
    covered = any(all(p >= m for p, m in zip(point, more, strict=True)) for point in points)
    above = all(m > r for m, r in zip(more, reference, strict=True))
    assert (after > before) == (above and not covered)


@QUICK
@given(clouds())
def test_only_the_front_counts_for_the_hypervolume(cloud: tuple[list[Vector], Vector]) -> None:
    points, reference = cloud
    front = pareto_front(Entry(label=i, objectives=each) for i, each in enumerate(points))
    assert hypervolume([each.objectives for each in front], reference) == hypervolume(*cloud)


@QUICK
@given(clouds())
def test_the_reference_itself_has_no_volume(cloud: tuple[list[Vector], Vector]) -> None:
    _, reference = cloud
    assert hypervolume([], reference) == 0
    assert hypervolume([reference], reference) == 0


@QUICK
@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)), min_size=1, max_size=6),
    st.floats(0.001, 1000),
)
def test_the_hypervolume_scales_with_the_unit(
    points: list[tuple[float, float]], factor: float
) -> None:
    scaled = hypervolume([(x * factor, y) for x, y in points], (0, 0))
    assert scaled == pytest.approx(hypervolume(points, (0, 0)) * factor)


def test_vectors_of_different_lengths_are_not_compared() -> None:
    with pytest.raises(ValueError, match=r"shorter|longer"):
        dominates((1.0,), (1.0, 2.0))
    with pytest.raises(ValueError, match=r"shorter|longer"):
        hypervolume([(1.0,)], (0.0, 0.0))
