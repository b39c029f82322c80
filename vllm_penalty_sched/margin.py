"""How much slower than predicted a step must be expected to be."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque

from vllm_penalty_sched.errors import ConfigError

# Residuals kept; a quantile at a miss rate of 0.001 needs a thousand.
_WINDOW = 1000
# Step of the level after each planned step (Gibbs and Candes call it gamma).
_LEVEL_STEP = 0.005
# Fewer residuals than this say little about their upper tail; the first ones, made while the
# model was still learning, say nothing about it later.
_ENOUGH, _UNSETTLED = 64, 24
_COLD_MARGIN = 0.35
# A residual this many times further above the median than the 95th percentile is a stall.
_STALL_FACTOR, _STALL_LEAST = 4.0, 0.25
_MOST = 1.0


class ConformalMargin:
    """A running upper quantile of the relative residuals of mixed steps.

    Its level is steered so that the long-run share of planned steps that overrun equals
    ``miss_rate``: a guarantee on average over time, not for any single step. Stalls, rare steps
    far outside of what the others spread over, are left out of it: no smaller chunk would have
    prevented them, and answering them with one would cost throughput for nothing.

    Attributes:
        stalls: Stalls so far.

    References:
        Gibbs and Candès, "Adaptive Conformal Inference Under Distribution Shift", NeurIPS 2021.
    """

    def __init__(self, miss_rate: float) -> None:
        if not 0.0 < miss_rate < 1.0:
            raise ConfigError(f"miss_rate must be in (0, 1), got {miss_rate}")
        self.stalls = 0
        self._miss_rate = miss_rate
        self._level = miss_rate
        self._unsettled: deque[float] = deque(maxlen=_UNSETTLED // 3)
        self._unsettled_left = _UNSETTLED
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    @property
    def relative(self) -> float:
        """Share by which a prediction is to be raised, -0.5 to 1."""
        if len(self._sorted) < _ENOUGH:
            return min(_MOST, max(_COLD_MARGIN, self._early_worst()))
        return min(_MOST, max(-0.5, self._quantile()))

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
        if len(self._sorted) >= _ENOUGH and residual > self._stall_bound():
            self.stalls += 1
        if len(self._recent) == _WINDOW:
            oldest = self._recent.popleft()
            del self._sorted[bisect_left(self._sorted, oldest)]
        self._recent.append(residual)
        insort(self._sorted, residual)
        if overran is not None:
            self._level += _LEVEL_STEP * (self._miss_rate - overran)
            self._level = min(0.5, max(-10.0 * _LEVEL_STEP, self._level))

    def _early_worst(self) -> float:
        # The second worst of few: a single stall is no noise.
        early = sorted([*self._unsettled, *self._sorted[-2:]])
        return 1.2 * early[-2] if len(early) > 1 else 0.0

    def _quantile(self) -> float:
        count = bisect_right(self._sorted, self._stall_bound())
        # With the finite-sample correction of conformal prediction.
        rank = math.ceil((count + 1) * (1.0 - self._level))
        if rank <= count:
            return self._sorted[max(rank, 1) - 1]
        # The level asks for more than was ever seen: go beyond it, further the longer it asks.
        beyond = 1.0 + 0.1 * max(0.0, -self._level) / _LEVEL_STEP
        return max(0.01, self._sorted[count - 1]) * beyond

    def _stall_bound(self) -> float:
        count = len(self._sorted)
        middle = self._sorted[count // 2]
        spread = self._sorted[int(0.95 * count)] - middle
        return max(_STALL_LEAST, middle + _STALL_FACTOR * spread)


# A step slower than predicted by less than this (log) is noise; more of it is taken to last.
_SLOW_LOG, _SLOW_RATE, _SLOWEST_LOG = 0.15, 0.7, 1.5


class Slowdown:
    """How much slower than usual the machine is right now, beyond ordinary noise.

    What slows one step down (another tenant, a full bus) mostly slows the next ones too: the
    factor rises with one slow step and is gone a few steps after the last.
    """

    def __init__(self) -> None:
        self._log = 0.0

    @property
    def factor(self) -> float:
        """Expected ratio of a step's time to its prediction, at least 1."""
        return math.exp(self._log)

    def observe(self, residual: float) -> None:
        """Take in a step's measured over predicted time, minus 1; above -1."""
        slow = min(_SLOWEST_LOG, max(0.0, math.log1p(residual) - _SLOW_LOG))
        self._log += _SLOW_RATE * (slow - self._log)
