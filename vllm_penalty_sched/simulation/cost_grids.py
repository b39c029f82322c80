"""Interpolate measured step costs the way that their tables ask for."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

# Largest chunk that is priced ahead; vLLM's budgets for a step are smaller.
MOST_CHUNK_TOKENS = 16_384


class Curve:
    """Cost over one count."""

    def __init__(self, costs_s: Mapping[int, float]) -> None:
        """Take over what was measured: seconds by count, at least one."""
        self.counts = tuple(sorted(costs_s))
        self.costs_s = tuple(costs_s[count] for count in self.counts)
        # Ascending, unlike the costs: what this and every later count costs at least.
        self._least_from_s = list(accumulate(reversed(self.costs_s), min))[::-1]
        self._ahead_s: NDArray[np.float64] = np.empty(0)

    def next_measured_s(self, count: int) -> float:
        """Return the cost of the next measured count; beyond the last one, in proportion to it."""
        if count > self.counts[-1]:
            return self.costs_s[-1] * count / self.counts[-1]
        return self.costs_s[bisect_left(self.counts, count)]

    def interpolated_s(self, count: int) -> float:
        """Return the linearly interpolated cost; the outermost one beyond the ends."""
        counts, costs_s = self.counts, self.costs_s
        if count <= counts[0]:
            return costs_s[0]
        if count >= counts[-1]:
            return costs_s[-1]
        low = bisect_right(counts, count) - 1
        share = (count - counts[low]) / (counts[low + 1] - counts[low])
        return costs_s[low] + (costs_s[low + 1] - costs_s[low]) * share

    def next_measured_after_s(self, count: int, most: int) -> NDArray[np.float64]:
        """Return ``next_measured_s`` of the ``most`` counts above ``count``, shape (most,)."""
        if count + most >= len(self._ahead_s):
            counts = range(2 * (count + most))
            self._ahead_s = np.array([self.next_measured_s(count) for count in counts])
        return self._ahead_s[count + 1 : count + 1 + most]

    def last_within(self, limit_s: float) -> int:
        """Return the largest count whose ``next_measured_s`` is within a limit; 0 if none is."""
        costs_s, last = self.costs_s, self.counts[-1]
        if costs_s[-1] <= limit_s:
            return int(last * limit_s / costs_s[-1])
        row = bisect_right(self._least_from_s, limit_s)
        return self.counts[row - 1] if row else 0


class AttentionGrid:
    """Cost of attention over two counts: log-log in the first, linear in the second.

    Beyond the largest measured count it grows in proportion; below the smallest it stays.
    """

    def __init__(
        self, first: tuple[int, ...], second: tuple[int, ...], costs_s: NDArray[np.float64]
    ) -> None:
        """Take over a table.

        Args:
            first: Ascending counts >= 1, at least two.
            second: Ascending counts, at least two.
            costs_s: Positive costs, shape (len(first), len(second)), seconds.
        """
        self._first, self._second = first, second
        self._costs_s: list[list[float]] = costs_s.tolist()
        self._log_ratios: list[list[float]] = np.diff(np.log(costs_s), axis=0).tolist()
        self._log_steps = np.diff(np.log(first)).tolist()
        self._ahead_s: NDArray[np.float64] | None = None

    def cost_s(self, x: float, y: float) -> float:
        """Return the cost at first count ``x`` > 0 and second count ``y``, seconds."""
        first = self._first
        column, share, beyond = self._column(y)
        if x > first[-1]:
            beyond *= x / first[-1]
        x = min(max(x, first[0]), first[-1])
        row = min(bisect_right(first, x) - 1, len(first) - 2)
        part = math.log(x / first[row]) / self._log_steps[row]
        costs_s, ratios = self._costs_s[row], self._log_ratios[row]
        low_s = costs_s[column] * math.exp(part * ratios[column])
        high_s = costs_s[column + 1] * math.exp(part * ratios[column + 1])
        return ((1.0 - share) * low_s + share * high_s) * beyond

    def costs_up_to_s(self, most: int, y: float) -> NDArray[np.float64]:
        """Return ``cost_s`` of 1, 2, ... ``most`` <= ``MOST_CHUNK_TOKENS``, shape (most,)."""
        if self._ahead_s is None:
            self._ahead_s = self._price_ahead()
        column, share, beyond = self._column(y)
        low_s, high_s = self._ahead_s[column, :most], self._ahead_s[column + 1, :most]
        return np.asarray(beyond * ((1.0 - share) * low_s + share * high_s))

    def _column(self, y: float) -> tuple[int, float, float]:
        second = self._second
        beyond = max(1.0, y / second[-1])
        y = min(max(y, second[0]), second[-1])
        column = min(bisect_right(second, y) - 1, len(second) - 2)
        return column, (y - second[column]) / (second[column + 1] - second[column]), beyond

    def _price_ahead(self) -> NDArray[np.float64]:
        counts = np.arange(1, MOST_CHUNK_TOKENS + 1)
        logs, knots = np.log(counts), np.log(self._first)
        beyond = np.maximum(1.0, counts / self._first[-1])
        columns = np.log(np.array(self._costs_s)).T
        return np.array([np.exp(np.interp(logs, knots, column)) * beyond for column in columns])


class MixedGrid:
    """Cost of one kernel call over a prefill chunk and decodes, linear in all four counts.

    Beyond the largest measured chunk and number of decodes it grows in proportion.
    """

    def __init__(self, axes: tuple[tuple[int, ...], ...], costs_s: NDArray[np.float64]) -> None:
        """Take over a table.

        Args:
            axes: Ascending counts, at least two each: new tokens of the chunk, its cached tokens,
                decodes, context of each.
            costs_s: Costs, shape (one for each count of each axis), seconds.
        """
        self._axes = axes
        self._costs_s = costs_s
        counts = np.arange(1, MOST_CHUNK_TOKENS + 1)
        chunks = np.array(axes[0])
        clipped = np.clip(counts, chunks[0], chunks[-1])
        self._rows = np.minimum(np.searchsorted(chunks, clipped, side="right") - 1, len(chunks) - 2)
        self._parts = (clipped - chunks[self._rows]) / (chunks[self._rows + 1] - chunks[self._rows])
        self._beyond = np.maximum(1.0, counts / chunks[-1])

    def cost_s(self, new: int, cached: int, decodes: int, context: float) -> float:
        """Return the cost of a chunk beside decodes of a mean context, seconds."""
        row, weights = _corner(self._axes[0], new)
        two_s = weights @ self._by_chunk_s(cached, decodes, context)[row : row + 2]
        return float(two_s) * max(1.0, new / self._axes[0][-1])

    def costs_up_to_s(
        self, most: int, cached: int, decodes: int, context: float
    ) -> NDArray[np.float64]:
        """Return ``cost_s`` of chunks of 1, 2, ... ``most`` <= ``MOST_CHUNK_TOKENS`` tokens."""
        knots_s = self._by_chunk_s(cached, decodes, context)
        rows, parts = self._rows[:most], self._parts[:most]
        costs_s = (1.0 - parts) * knots_s[rows] + parts * knots_s[rows + 1]
        return np.asarray(costs_s * self._beyond[:most])

    def _by_chunk_s(self, cached: int, decodes: int, context: float) -> NDArray[np.float64]:
        """Return the costs at the measured chunk sizes, shape (len(axes[0]),)."""
        i, by_cached = _corner(self._axes[1], cached)
        j, by_decodes = _corner(self._axes[2], decodes)
        k, by_context = _corner(self._axes[3], context)
        corners_s = self._costs_s[:, i : i + 2, j : j + 2, k : k + 2]
        costs_s = ((corners_s @ by_context) @ by_decodes) @ by_cached
        return np.asarray(costs_s * max(1.0, decodes / self._axes[2][-1]))


def _corner(axis: tuple[int, ...], value: float) -> tuple[int, NDArray[np.float64]]:
    value = min(max(value, axis[0]), axis[-1])
    low = min(bisect_right(axis, value) - 1, len(axis) - 2)
    share = (value - axis[low]) / (axis[low + 1] - axis[low])
    return low, np.array([1.0 - share, share])
