"""The edge of what fits: what a boot that ran out of memory rules out, and what it does not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeper.core.memory import Footprint, MemoryBound, OutOfMemory
from sweeper.core.pairs import Pairs

# No deadline: on a busy machine, time says nothing.
QUICK = settings(deadline=None, max_examples=60)

parts = st.dictionaries(st.sampled_from(["weights", "kv_cache", "compute"]), st.integers(0, 3))
footprints = st.builds(
    Footprint,
    parts=parts.map(Pairs),
    alike=st.sampled_from([Pairs(spec="none"), Pairs(spec="mtp"), Pairs()]),
)


@st.composite
def failures(draw: st.DrawFn) -> list[OutOfMemory]:
    several = draw(st.lists(footprints, max_size=6))
    return [OutOfMemory(attempt=i, footprint=each) for i, each in enumerate(several)]


@QUICK
@given(failures(), footprints)
def test_what_is_excluded_needs_at_least_as_much_as_a_failure(
    seen: list[OutOfMemory], asked: Footprint
) -> None:
    by = MemoryBound.of(seen).excluded_by(asked)
    # Exactly: dropping failures that others imply never forgets anything.
    assert (by is not None) == any(asked.needs_at_least(each.footprint) for each in seen)
    if by is not None:
        assert by in seen
        assert asked.needs_at_least(by.footprint)
        assert all(
            asked.bytes_of(name) >= by.footprint.bytes_of(name) for name in by.footprint.parts
        )


@QUICK
@given(failures(), footprints, footprints)
def test_another_failure_only_grows_what_is_excluded(
    seen: list[OutOfMemory], new: Footprint, asked: Footprint
) -> None:
    before = MemoryBound.of(seen)
    after = before.with_failure(OutOfMemory(attempt=99, footprint=new))
    if before.excluded_by(asked) is not None:
        assert after.excluded_by(asked) is not None
    assert after.excluded_by(new) is not None


@QUICK
@given(failures(), footprints, st.data())
def test_the_order_of_failures_does_not_change_what_is_excluded(
    seen: list[OutOfMemory], asked: Footprint, data: st.DataObject
) -> None:
    one, other = MemoryBound.of(seen), MemoryBound.of(data.draw(st.permutations(seen)))
    assert (one.excluded_by(asked) is None) == (other.excluded_by(asked) is None)


@QUICK
@given(failures())
def test_no_failure_that_is_kept_implies_another(seen: list[OutOfMemory]) -> None:
    kept = MemoryBound.of(seen).failures
    for one in kept:
        for other in kept:
            assert one is other or not one.footprint.needs_at_least(other.footprint)


@QUICK
@given(parts, parts)
def test_what_is_not_alike_is_never_excluded(failed: dict[str, int], asked: dict[str, int]) -> None:
    failure = OutOfMemory(
        attempt=1, footprint=Footprint(parts=Pairs(failed), alike=Pairs(spec="mtp"))
    )
    for alike in (Pairs(), Pairs(spec="none"), Pairs(spec="mtp", more=1)):
        assert (
            MemoryBound.of([failure]).excluded_by(Footprint(parts=Pairs(asked), alike=alike))
            is None
        )


@QUICK
@given(footprints, footprints, footprints)
def test_needing_at_least_as_much_is_reflexive_and_transitive(
    a: Footprint, b: Footprint, c: Footprint
) -> None:
    assert a.needs_at_least(a)
    assert not (a.needs_at_least(b) and b.needs_at_least(c)) or a.needs_at_least(c)


def test_a_missing_part_is_one_of_no_bytes() -> None:
    none, some = Footprint(parts=Pairs()), Footprint(parts=Pairs(draft=1))
    assert some.needs_at_least(none)
    assert not none.needs_at_least(some)
    assert Footprint(parts=Pairs(draft=0)).needs_at_least(none)
    assert none.needs_at_least(Footprint(parts=Pairs(draft=0)))


def test_less_of_anything_may_fit() -> None:
    failed = OutOfMemory(attempt=1, footprint=Footprint(parts=Pairs(weights=2, kv_cache=2)))
    bound = MemoryBound.of([failed])
    assert bound.excluded_by(Footprint(parts=Pairs(weights=3, kv_cache=1))) is None
    assert bound.excluded_by(Footprint(parts=Pairs(weights=2, kv_cache=2))) is failed


@QUICK
@given(parts)
def test_the_total_is_the_sum_of_the_parts(some: dict[str, int]) -> None:
    assert Footprint(parts=Pairs(some)).total_bytes == sum(some.values())


@pytest.mark.parametrize("size", [-1, True, "1 GiB", None, float("nan")])
def test_a_part_is_a_size_in_bytes(size: object) -> None:
    with pytest.raises(ValueError, match="weights must be a size in bytes"):
        Footprint(parts=Pairs({"weights": size}))  # type: ignore[dict-item]


# ---- Where memory differs from boot to boot ----------------------------------------------------


def needing(weights: int, cache: int = 0) -> Footprint:
    return Footprint(parts=Pairs(weights=weights, kv_cache=cache))


def test_one_unlucky_boot_excludes_only_what_needs_noticeably_more() -> None:
    bound = MemoryBound.of([OutOfMemory(attempt=1, footprint=needing(1000))], spread_bytes=10)
    assert bound.excluded_by(needing(1000)) is None
    assert bound.excluded_by(needing(1019)) is None
    assert bound.excluded_by(needing(1020)) is not None
    assert bound.excluded_by(needing(990, 500)) is None  # it needs less of one part


def test_an_ending_that_lacked_far_more_than_chance_explains_excludes_at_once() -> None:
    lacking = OutOfMemory(attempt=1, footprint=needing(1000), shortfall_bytes=20)
    bound = MemoryBound.of([lacking], spread_bytes=10)
    assert bound.excluded_by(needing(1000)) == lacking
    by_chance = OutOfMemory(attempt=1, footprint=needing(1000), shortfall_bytes=19)
    assert MemoryBound.of([by_chance], spread_bytes=10).excluded_by(needing(1000)) is None


def test_bad_luck_twice_is_no_luck() -> None:
    twice = [OutOfMemory(attempt=n, footprint=needing(1000 + n)) for n in (1, 2)]
    bound = MemoryBound.of(twice, spread_bytes=10)
    assert bound.excluded_by(needing(1002)) is not None
    assert bound.excluded_by(needing(1001)) is None


def test_one_lucky_boot_near_the_edge_lifts_no_exclusion() -> None:
    failure = OutOfMemory(attempt=1, footprint=needing(1000), shortfall_bytes=50)
    bound = MemoryBound.of([failure], spread_bytes=10)
    assert bound.without(needing(1010)) == bound
    assert bound.without(needing(1020)).failures == ()


@QUICK
@given(failures(), footprints, st.integers(0, 6), st.integers(0, 6))
def test_a_wider_spread_never_excludes_more(
    seen: list[OutOfMemory], asked: Footprint, spread: int, more: int
) -> None:
    wide = MemoryBound.of(seen, spread_bytes=spread + more).excluded_by(asked)
    narrow = MemoryBound.of(seen, spread_bytes=spread).excluded_by(asked)
    assert wide is None or narrow is not None


@QUICK
@given(failures(), footprints, st.integers(0, 6), st.data())
def test_under_a_spread_too_the_order_of_failures_changes_nothing(
    seen: list[OutOfMemory], asked: Footprint, spread: int, data: st.DataObject
) -> None:
    other = data.draw(st.permutations(seen))
    one = MemoryBound.of(seen, spread_bytes=spread).excluded_by(asked)
    assert (one is None) == (MemoryBound.of(other, spread_bytes=spread).excluded_by(asked) is None)
