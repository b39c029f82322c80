"""Non-negative least squares on normal equations, a bounded number of pivots at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# A gradient this small, relative to the largest at zero, is rounding.
_TOLERANCE = 1e-10


@dataclass(frozen=True, slots=True, kw_only=True)
class NonNegativeSolution:
    """A point on the way to the optimum, or the optimum.

    Attributes:
        values: The unknowns, shape (n,), each >= 0.
        is_optimal: Whether no pivot is left to do.
    """

    values: NDArray[np.float64]
    is_optimal: bool


def improve(
    gram: NDArray[np.float64],
    moment: NDArray[np.float64],
    start: NDArray[np.float64],
    *,
    most_pivots: int,
) -> NonNegativeSolution:
    """Lower ``x gram x / 2 - moment x`` over x >= 0, starting from a point that holds it.

    Every point on the way is >= 0 and no worse than the one before, so it can stop anywhere and go
    on from there later, also with other normal equations.

    Args:
        gram: Positive definite, shape (n, n).
        moment: Shape (n,).
        start: Shape (n,), each >= 0; which of them are 0 is the warm start.
        most_pivots: Systems to solve at most, each of at most n unknowns; with 2 or more, repeated
            calls come to the optimum.

    References:
        Lawson and Hanson, "Solving Least Squares Problems", 1974, chapter 23.
        Bro and de Jong, "A fast non-negativity-constrained least squares algorithm", 1997.
    """
    # To a unit diagonal, so that gradients of different unknowns compare.
    scale = 1.0 / np.sqrt(gram.diagonal())
    gram = gram * np.multiply.outer(scale, scale)
    moment = moment * scale
    values = start / scale
    tolerance = _TOLERANCE * float(np.abs(moment).max())
    is_free = values > 0.0
    entered = -1
    for _ in range(most_pivots):
        free = np.flatnonzero(is_free)
        target = np.linalg.solve(gram[np.ix_(free, free)], moment[free])
        below = target <= 0.0
        if not below.any():
            values[free] = target
            gradient = moment - gram @ values
            gradient[is_free] = -np.inf
            entered = int(gradient.argmax())
            if not gradient[entered] > tolerance:
                return NonNegativeSolution(values=values * scale, is_optimal=True)
            is_free[entered] = True
            continue
        if entered >= 0 and values[entered] == 0.0 and target[free == entered][0] <= 0.0:
            # Its gradient was rounding after all.
            is_free[entered] = False
            return NonNegativeSolution(values=values * scale, is_optimal=True)
        _step_towards(values, free, target, below, is_free)
    return NonNegativeSolution(values=values * scale, is_optimal=False)


def _step_towards(
    values: NDArray[np.float64],
    free: NDArray[np.intp],
    target: NDArray[np.floating[Any]],
    below: NDArray[np.bool_],
    is_free: NDArray[np.bool_],
) -> None:
    """Go towards ``target`` until the first unknown is 0, and hold at 0 what is there."""
    now = values[free]
    shares = np.full(len(free), np.inf)
    shares[below] = now[below] / (now[below] - target[below])
    first = int(shares.argmin())
    now += shares[first] * (target - now)
    now[first] = 0.0
    values[free] = np.maximum(now, 0.0)
    is_free[free[values[free] == 0.0]] = False
