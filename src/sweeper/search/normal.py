"""The standard normal distribution for whole arrays, without an import that takes 0.2 s.

`scipy.special` has the same functions; importing it would be a quarter of the time that `plan` of a
small study takes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

_COEFFICIENTS = (
    0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807, -0.18628806, 0.09678418,
    0.37409196, 1.00002368, -1.26551223,
)  # fmt: skip


def ndtr(x: ArrayLike) -> NDArray[np.float64]:
    """Return P(X < x) of a standard normal X, with a relative error below 1.2e-7 everywhere.

    The Chebyshev fit of the complementary error function of Press et al., Numerical Recipes,
    2nd edition, section 6.2 (`erfcc`).
    """
    values = np.asarray(x, dtype=np.float64)
    z = np.abs(values) / math.sqrt(2)
    t = 1.0 / (1.0 + 0.5 * z)
    fit = np.polyval(_COEFFICIENTS, t)
    tail = 0.5 * t * np.exp(np.maximum(fit - z * z, -745.0))
    return np.where(values < 0, tail, 1.0 - tail)


def log_ndtr(x: float) -> float:
    """Return log P(X < x), also where the probability is too small for a float.

    Below -30 by the first terms of the asymptotic series (Abramowitz & Stegun, 26.2.12).
    """
    if x > -30:
        return math.log(0.5 * math.erfc(-x / math.sqrt(2)))
    squared = x * x
    return (
        -0.5 * squared
        - math.log(-x)
        - 0.5 * math.log(2 * math.pi)
        + math.log1p(-1 / squared + 3 / squared**2)
    )
