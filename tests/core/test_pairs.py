"""Pairs: a mapping that can be a key, and in which 1, 1.0 and true are three values."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeper.core.pairs import Pairs, text

# No deadline: on a busy machine, time says nothing.
QUICK = settings(deadline=None, max_examples=50)

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
)
mappings = st.dictionaries(st.text(max_size=8), scalars, max_size=6)


@QUICK
@given(mappings, st.randoms(use_true_random=False))
def test_the_order_of_the_entries_never_matters(
    mapping: dict[str, Any], chance: random.Random
) -> None:
    entries = list(mapping.items())
    chance.shuffle(entries)
    one, other = Pairs(mapping), Pairs(dict(entries))
    assert one == other
    assert hash(one) == hash(other)
    assert one.digest() == other.digest()
    assert list(one) == sorted(mapping)


@QUICK
@given(mappings)
def test_pairs_hold_what_they_were_given(mapping: dict[str, Any]) -> None:
    pairs = Pairs(mapping)
    assert dict(pairs) == mapping
    assert len(pairs) == len(mapping)
    assert json.loads(pairs.canonical()) == mapping
    assert Pairs(pairs) == pairs


@QUICK
@given(mappings, mappings)
def test_pairs_are_equal_exactly_where_their_digests_are(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    assert (Pairs(one) == Pairs(other)) == (Pairs(one).digest() == Pairs(other).digest())


@QUICK
@given(mappings, st.text(max_size=8), scalars)
def test_a_replaced_entry_leaves_the_original_alone(
    mapping: dict[str, Any], name: str, value: Any
) -> None:
    pairs = Pairs(mapping)
    changed = pairs.with_(**{name: value})
    assert changed[name] is value
    assert pairs == Pairs(mapping)
    assert set(changed) == {*mapping, name}


def test_one_and_one_point_zero_and_true_are_three_values() -> None:
    points = {Pairs(a=1), Pairs(a=1.0), Pairs(a=True)}
    assert len(points) == 3
    assert len({each.digest() for each in points}) == 3


def test_pairs_are_no_dict() -> None:
    assert Pairs(a=1) != {"a": 1}


@pytest.mark.parametrize("value", [[1], (1,), {"a": 1}, b"x", 1j, object()])
def test_only_scalars_fit_in(value: Any) -> None:
    with pytest.raises(TypeError, match="a must be a scalar"):
        Pairs({"a": value})


def test_a_name_is_text() -> None:
    with pytest.raises(TypeError, match="a name must be a string, got 1"):
        Pairs({1: "a"})  # type: ignore[dict-item]


def test_pairs_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        Pairs(a=1)["a"] = 2  # type: ignore[index]


def test_a_scalar_reads_as_in_yaml() -> None:
    said = [text(each) for each in (None, True, False, 4096, 0.5, "f16")]
    assert said == ["null", "true", "false", "4096", "0.5", "f16"]
    assert str(Pairs(n_max=None, flash=True)) == "flash=true n_max=null"
