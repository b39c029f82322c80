"""How much slower than predicted a step must be expected to be."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque

from vllm_penalty_sched.batch import BatchShape
from vllm_penalty_sched.errors import ConfigError

# Residuals kept, and the share of the largest of them that tell how the tail goes on.
_WINDOW, _TAIL_SHARE, _TAIL_LEAST = 2000, 0.01, 8
# An overrun divides the share of overruns aimed at by e to the correction; steps that hold the SLO
# raise it back. Rare overruns teach rarely, so each counts more, but at most as much as this.
_CORRECTION_SCALE, _LARGEST_CORRECTION = 0.05, 1.0
_MOST_LOG_CORRECTION = 6.0
# Fewer residuals than this say little about their upper tail; the first ones, made while the
# model was still learning, say nothing about it later.
_ENOUGH, _UNSETTLED = 32, 24
_COLD_MARGIN = 0.35
# A residual this many times further above the median than the 95th percentile is a stall.
_STALL_FACTOR, _STALL_LEAST = 4.0, 0.25
_LEAST, _MOST = -0.5, 1.0
# What is known about a kind of steps before its first one weighs as much as this many of them; it
# forgets after so many. A residual counts as at most so many widths.
_PRIOR_STEPS, _SPREAD_STEPS, _CLIP_WIDTHS = 10, 100, 4.0
_FIRST_WIDTH, _LEAST_WIDTH = 0.05, 0.002


class ConformalMargin:
    """A running upper quantile of the relative residuals of mixed steps, by kind of step.

    A kind is a power of two of decodes and of their mean context. Residuals are compared after
    subtracting their kind's mean and dividing by its spread, so that kinds that are predicted well
    keep a small margin. The share of overruns aimed at is steered so that in the long run the
    share of planned steps that overrun equals ``miss_rate``: a guarantee on average over time, not
    for any single step or kind. Stalls, rare steps far outside of what the others spread over, are
    left out of it: no smaller chunk would have prevented them, and answering them with one would
    cost throughput for nothing.

    Attributes:
        stalls: Stalls so far.

    References:
        Gibbs and Candès, "Adaptive Conformal Inference Under Distribution Shift", NeurIPS 2021.
        Lei et al., "Distribution-Free Predictive Inference for Regression", JASA 2018, section 5.2
        (residuals divided by their local spread).
    """

    def __init__(self, miss_rate: float) -> None:
        if not 0.0 < miss_rate < 1.0:
            raise ConfigError(f"miss_rate must be in (0, 1), got {miss_rate}")
        self.stalls = 0
        self._miss_rate = miss_rate
        self._log_correction = 0.0
        self._unsettled: deque[float] = deque(maxlen=_UNSETTLED // 3)
        self._unsettled_left = _UNSETTLED
        self._scores = _Recent()
        self._residuals = _Recent()
        self._overall = _Spread(0.0, _FIRST_WIDTH)
        self._kinds: dict[tuple[int, int], _Spread] = {}

    @property
    def relative(self) -> float:
        """Share by which the prediction of a step of no known kind is to be raised, -0.5 to 1."""
        return self._margin(self._overall)

    def relative_for(self, shape: BatchShape) -> float:
        """Return the share by which a mixed step's prediction is to be raised, -0.5 to 1.

        Args:
            shape: The step; its chunks do not matter, as they are chosen by the margin.
        """
        return self._margin(self._kinds.get(_kind(shape), self._overall))

    def observe(
        self, residual: float, *, overran: bool | None, shape: BatchShape | None = None
    ) -> None:
        """Learn from one mixed step.

        Args:
            residual: Measured over predicted time, minus 1.
            overran: Whether it took longer than the SLO; None if the budget was not set by the
                SLO, so that the step says nothing about the share of overruns.
            shape: The step; None if its kind is not known.
        """
        if self._unsettled_left:
            self._unsettled_left -= 1
            self._unsettled.append(residual)
            return
        if self._unsettled:
            self._unsettled.popleft()
        spread = self._overall if shape is None else self._spread_of(shape)
        is_stall = len(self._residuals) >= _ENOUGH and residual > self._residuals.stall_bound()
        self._residuals.add(residual)
        self._scores.add(spread.score(residual))
        if is_stall:
            self.stalls += 1
        else:
            spread.observe(residual)
            if spread is not self._overall:
                self._overall.observe(residual)
        if overran is not None:
            size = min(_LARGEST_CORRECTION, _CORRECTION_SCALE / math.sqrt(self._miss_rate))
            correction = self._log_correction + size * (self._miss_rate - overran)
            self._log_correction = min(_MOST_LOG_CORRECTION, max(-_MOST_LOG_CORRECTION, correction))

    def _spread_of(self, shape: BatchShape) -> _Spread:
        kind = _kind(shape)
        if kind not in self._kinds:
            self._kinds[kind] = _Spread(self._overall.middle, self._overall.width)
        return self._kinds[kind]

    def _margin(self, spread: _Spread) -> float:
        if len(self._residuals) < _ENOUGH:
            return min(_MOST, max(_COLD_MARGIN, self._early_worst()))
        share = min(0.5, self._miss_rate * math.exp(self._log_correction))
        # Each alone is an upper quantile; which is the tighter depends on the machine.
        most = self._residuals.stall_bound()
        by_kind = spread.residual(self._scores.quantile(share, most=self._overall.score(most)))
        return min(_MOST, max(_LEAST, min(by_kind, self._residuals.quantile(share, most=most))))

    def _early_worst(self) -> float:
        # The second worst of few: a single stall is no noise.
        early = sorted([*self._unsettled, *self._residuals.largest(2)])
        return 1.2 * early[-2] if len(early) > 1 else 0.0


class _Recent:
    """The latest half of all values, at most so many: early ones say little about later ones."""

    __slots__ = ("_by_age", "_by_size", "_seen")

    def __init__(self) -> None:
        self._by_age: deque[float] = deque()
        self._by_size: list[float] = []
        self._seen = 0

    def __len__(self) -> int:
        return len(self._by_age)

    def add(self, value: float) -> None:
        self._seen += 1
        self._by_age.append(value)
        insort(self._by_size, value)
        while len(self._by_age) > max(_ENOUGH, min(_WINDOW, self._seen // 2)):
            oldest = self._by_age.popleft()
            del self._by_size[bisect_left(self._by_size, oldest)]

    def largest(self, count: int) -> list[float]:
        return self._by_size[-count:]

    def stall_bound(self) -> float:
        count = len(self._by_size)
        middle = self._by_size[count // 2]
        spread = self._by_size[int(0.95 * count)] - middle
        return max(_STALL_LEAST, middle + _STALL_FACTOR * spread)

    def quantile(self, share: float, *, most: float) -> float:
        """Return what a share of the values up to ``most`` exceeds, also a share never seen yet."""
        count = bisect_right(self._by_size, most)
        tail = max(_TAIL_LEAST, int(_TAIL_SHARE * count))
        if share * count >= tail:
            return self._by_size[count - 1 - int(share * count)]
        # From the tail's start on, also where nothing was seen yet, as exponential noise falls off.
        start = self._by_size[count - 1 - tail]
        mean_excess = sum(self._by_size[count - tail : count]) / tail - start
        return start + mean_excess * math.log(tail / (share * count))


class _Spread:
    """Where the residuals of some steps lie: their mean, and their mean distance from it."""

    __slots__ = ("_steps", "middle", "width")

    def __init__(self, middle: float, width: float) -> None:
        self.middle = middle
        self.width = width
        self._steps = _PRIOR_STEPS

    def residual(self, score: float) -> float:
        return self.middle + self.width * score

    def score(self, residual: float) -> float:
        return (residual - self.middle) / self.width

    def observe(self, residual: float) -> None:
        self._steps = min(_SPREAD_STEPS, self._steps + 1)
        most = _CLIP_WIDTHS * self.width
        away = min(most, max(-most, residual - self.middle))
        self.middle += away / self._steps
        self.width = max(_LEAST_WIDTH, self.width + (abs(away) - self.width) / self._steps)


def _kind(shape: BatchShape) -> tuple[int, int]:
    seqs = shape.decode_seqs
    return seqs.bit_length(), (shape.decode_context // max(1, seqs)).bit_length()


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
