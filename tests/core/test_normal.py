"""The normal distribution, held against SciPy's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special

from sweeper.search.normal import log_ndtr, ndtr


@given(st.lists(st.floats(-37, 37), min_size=1, max_size=20))
def test_the_probability_is_scipys_to_seven_digits(values: list[float]) -> None:
    assert ndtr(values) == pytest.approx(special.ndtr(np.array(values)), rel=2e-7)


@given(st.floats(-1e6, 8))
def test_its_logarithm_is_scipys_far_into_the_tail(value: float) -> None:
    assert log_ndtr(value) == pytest.approx(float(special.log_ndtr(value)), rel=1e-6, abs=1e-15)


def test_the_ends_are_nought_and_one() -> None:
    assert ndtr([-1e9, 0.0, 1e9]) == pytest.approx([0.0, 0.5, 1.0])
    assert np.all(np.diff(ndtr(np.linspace(-8, 8, 999))) >= 0)
