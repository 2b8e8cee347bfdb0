"""The kernel of the search's Gaussian processes, for scikit-learn, whose import takes a second."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.optimize import minimize
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import Hyperparameter, Kernel
from threadpoolctl import ThreadpoolController

from sweeper.search.frontier_space import Codes, Floats
from sweeper.search.frontier_speed import variances

BLAS = ThreadpoolController()
"""The threads of linear algebra, as they were loaded with scikit-learn."""


class AnovaKernel(Kernel):  # type: ignore[misc]
    """Effects of single axes, of pairs of axes, and of the whole point, as a kernel over codes.

    k(x, y) = b + sum_a s_a^2 k_a + r^2 sum_{a<b} s_a s_b k_a k_b + t^2 prod_a k_a, plus noise on
    the diagonal, where k_a = `tables[a][x_a, y_a]`: the functional analysis of variance of Duvenaud
    et al. 2011, "Additive Gaussian Processes", cut after the second order. `scales` are
    (s_1, ..., s_A, r, t, noise), and b is `base`.
    """

    def __init__(
        self,
        tables: Sequence[Floats],
        scales: Floats,
        scales_bounds: Any = (1e-4, 1e2),
        base: float = 1.0,
    ) -> None:
        self.tables = tables
        self.base = base
        self.scales = scales
        self.scales_bounds = scales_bounds

    @property
    def hyperparameter_scales(self) -> Hyperparameter:
        """The scales, as scikit-learn wants to know them."""
        return Hyperparameter("scales", "numeric", self.scales_bounds, len(self.scales))

    def __call__(self, X: Any, Y: Any = None, eval_gradient: bool = False) -> Any:  # noqa: N803
        """Return the kernel matrix, and its gradient by the logarithms of the scales."""
        left = np.asarray(X, dtype=np.int64)
        right = left if Y is None else np.asarray(Y, dtype=np.int64)
        amounts = self.scales
        count = len(self.tables)
        ratio, whole, noise = (float(each) for each in amounts[count:])
        # Rows are copied from a small table of values against the right-hand points.
        each = [table[:, right[:, a]][left[:, a]] for a, table in enumerate(self.tables)]
        product = np.full(each[0].shape, whole**2)
        linear = np.zeros(each[0].shape)
        squares = np.zeros(each[0].shape)
        result = np.full(each[0].shape, self.base)
        for a, one in enumerate(each):
            product *= one
            # The gradient reads the tables once more; without it they may be overwritten.
            scaled = np.multiply(one, amounts[a], out=None if eval_gradient else one)
            linear += scaled
            squares += scaled * scaled
            result += amounts[a] * scaled
        linear_squared = linear * linear
        pairs = 0.5 * ratio**2 * (linear_squared - squares)
        result += pairs
        result += product
        if Y is not None:
            return result
        result[np.diag_indices_from(result)] += noise**2
        if not eval_gradient:
            return result
        gradient = np.empty((*result.shape, count + 3))
        for a in range(count):
            own = amounts[a] * each[a]
            gradient[:, :, a] = 2 * amounts[a] * own + ratio**2 * own * (linear - own)
        gradient[:, :, count] = 2 * pairs
        gradient[:, :, count + 1] = 2 * product
        gradient[:, :, count + 2] = 2 * noise**2 * np.eye(len(result))
        return result, gradient

    def diag(self, X: Any) -> Floats:  # noqa: N803
        """Return the variance of each point; no noise, for it is the function that is asked."""
        return variances(self.tables, self.scales, np.asarray(X, dtype=np.int64), self.base)

    def is_stationary(self) -> bool:
        """Tell that it is not."""
        return False


def conditioned(
    kernel: AnovaKernel, codes: Codes, values: Floats, optimiser: Callable[..., Any] | None
) -> GaussianProcessRegressor:
    """Return the process given these values; the optimiser, if there is one, moves the scales."""
    regressor = GaussianProcessRegressor(kernel=kernel, alpha=1e-9, optimizer=optimiser)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        regressor.fit(codes.astype(np.float64), values)
    return regressor


def least(objective: Callable[..., Any], initial: Floats, bounds: Any) -> tuple[Floats, float]:
    """Return where the objective is least, and its value there; it returns its gradient as well."""
    found = minimize(
        objective, initial, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 25}
    )
    return found.x, float(found.fun)
