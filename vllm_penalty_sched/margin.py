"""How much slower than predicted a step must be expected to be."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque

from vllm_penalty_sched.errors import ConfigError

# Residuals kept; a quantile at a miss rate of 0.001 needs a thousand.
_WINDOW = 1000
# Step of the level after each planned step (Gibbs and Candes call it gamma).
_LEVEL_STEP = 0.005
# Fewer residuals than this say little about their upper tail; the first ones, made while the
# model was still learning, say nothing about it later.
_ENOUGH, _UNSETTLED = 64, 24
_COLD_MARGIN = 0.15
_MOST = 1.0


class ConformalMargin:
    """A running upper quantile of the relative residuals of mixed steps.

    Its level is steered so that the long-run share of planned steps that overrun equals
    ``miss_rate``: a guarantee on average over time, not for any single step.

    References:
        Gibbs and Candès, "Adaptive Conformal Inference Under Distribution Shift", NeurIPS 2021.
    """

    def __init__(self, miss_rate: float) -> None:
        if not 0.0 < miss_rate < 1.0:
            raise ConfigError(f"miss_rate must be in (0, 1), got {miss_rate}")
        self._miss_rate = miss_rate
        self._level = miss_rate
        self._unsettled: deque[float] = deque(maxlen=_UNSETTLED // 3)
        self._unsettled_left = _UNSETTLED
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    @property
    def relative(self) -> float:
        """Share by which a prediction is to be raised, -0.5 to 1."""
        count = len(self._sorted)
        if count < _ENOUGH:
            worst = max([*self._unsettled, *self._sorted[-1:]], default=0.0)
            return min(_MOST, max(_COLD_MARGIN, 1.2 * worst))
        # With the finite-sample correction of conformal prediction.
        rank = math.ceil((count + 1) * (1.0 - self._level))
        if rank <= count:
            return min(_MOST, max(-0.5, self._sorted[max(rank, 1) - 1]))
        # The level asks for more than was ever seen: go beyond it, further the longer it asks.
        beyond = 1.0 + 0.1 * max(0.0, -self._level) / _LEVEL_STEP
        return min(_MOST, max(0.01, self._sorted[-1]) * beyond)

    def observe(self, residual: float, *, overran: bool | None) -> None:
        """Learn from one mixed step.

        Args:
            residual: Measured over predicted time, minus 1.
            overran: Whether it took longer than the SLO; None if the budget was not set by the
                SLO, so that the step says nothing about the level.
        """
        if self._unsettled_left:
            self._unsettled_left -= 1
            self._unsettled.append(residual)
            return
        if self._unsettled:
            self._unsettled.popleft()
        if len(self._recent) == _WINDOW:
            oldest = self._recent.popleft()
            del self._sorted[bisect_left(self._sorted, oldest)]
        self._recent.append(residual)
        insort(self._sorted, residual)
        if overran is not None:
            self._level += _LEVEL_STEP * (self._miss_rate - overran)
            self._level = min(0.5, max(-10.0 * _LEVEL_STEP, self._level))
