"""What steps cost by a fixed set of coefficients: predicted, and solved for the longest chunk."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_penalty_sched.batch import BatchShape
from vllm_penalty_sched.learning.features import (
    EDGES,
    KNOTS,
    MIXED_CONTEXTS,
    RAMP_TOKENS,
    TOKEN_TERMS,
)

MAX_PREFILL_TOKENS = 1 << 20
"""The most that ``largest_prefill`` returns: a model that has seen no slope cannot bound it."""

# No step takes no time, whatever was learned: measured times are divided by predicted ones.
_LEAST_S = 1e-9
# The token part of T is linear in N on each piece ``_BOUNDS[i] < N <= _BOUNDS[i + 1]``.
_BOUNDS = sorted({-1, *KNOTS, *EDGES})
_LAST = len(_BOUNDS) - 1


def _piece_matrices() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    bounds = np.array(_BOUNDS)[:, np.newaxis]
    knots, edges = np.array(KNOTS), np.array(EDGES)
    on = (knots <= bounds).astype(np.float64)
    risen = (edges <= bounds).astype(np.float64)
    one, none = np.ones_like(bounds, dtype=np.float64), np.zeros_like(bounds, dtype=np.float64)
    intercepts = np.hstack([one, -knots * on, risen])
    return intercepts, np.hstack([none, on, np.zeros_like(risen)])


_INTERCEPTS, _SLOPES = _piece_matrices()


class StepCost:
    """Predicts with the terms of ``features`` whose coefficient is not 0; does not change."""

    __slots__ = (
        "_cached_s",
        "_chunk_s",
        "_context_s",
        "_decode_s",
        "_encoder_s",
        "_intercepts",
        "_mixed_context_s",
        "_mixed_contexts",
        "_mixed_decode_s",
        "_mixed_longest_s",
        "_slopes",
        "_work_s",
        "coefficients_s",
    )

    def __init__(self, coefficients_s: Sequence[float]) -> None:
        self.coefficients_s = tuple(coefficients_s)
        token_part = np.array(self.coefficients_s[:TOKEN_TERMS])
        self._intercepts: list[float] = (_INTERCEPTS @ token_part).tolist()
        self._slopes: list[float] = (_SLOPES @ token_part).tolist()
        (
            self._context_s,
            self._decode_s,
            self._work_s,
            self._cached_s,
            self._chunk_s,
            self._mixed_context_s,
            self._mixed_longest_s,
            self._mixed_decode_s,
            self._encoder_s,
            *mixed_contexts,
        ) = self.coefficients_s[TOKEN_TERMS:]
        self._mixed_contexts = tuple(
            (value, float(term.over), *term.rise)
            for value, term in zip(mixed_contexts, MIXED_CONTEXTS, strict=True)
            if value
        )

    def seconds(self, shape: BatchShape) -> float:
        """Return the time of a step, above 0; 0 for one without tokens."""
        seqs, context, tokens = shape.decode_seqs, shape.decode_context, shape.decode_tokens
        total_s = self._context_s * context + self._decode_s * seqs
        prefills = shape.prefills
        if prefills:
            longest = cached_tokens = 0
            work = 0.0
            for new, cached in prefills:
                tokens += new
                work += new * (cached + 0.5 * new)
                cached_tokens += cached
                if new > longest:
                    longest = new
            total_s += (
                self._work_s * work
                + self._cached_s * cached_tokens
                + self._chunk_s * len(prefills)
                + self._mixed_context_s * context
                + self._mixed_longest_s * seqs * longest
                + self._encoder_s * shape.encoder_tokens
            )
            ramp = longest / RAMP_TOKENS if longest < RAMP_TOKENS else 1.0
            total_s += ramp * self._mixed_s(seqs, context)
        elif not tokens:
            return 0.0
        piece = bisect_left(_BOUNDS, tokens) - 1
        total_s += self._intercepts[piece] + self._slopes[piece] * tokens
        return max(_LEAST_S, total_s)

    def largest_prefill(self, shape: BatchShape, cached: int, limit_s: float) -> int:
        """Return the most new tokens of one more chunk that keep the step within a limit.

        Args:
            shape: The step without that chunk.
            cached: Tokens of the chunk's request computed before, >= 0.
            limit_s: Longest time the step may take, seconds.

        Returns:
            0 if not even one token fits, at most ``MAX_PREFILL_TOKENS``.
        """
        prefills, seqs, tokens = shape.prefills, shape.decode_seqs, shape.tokens
        left_s = limit_s - (self._context_s * shape.decode_context + self._decode_s * seqs)
        left_s -= self._chunk_s * (1 + len(prefills)) + self._cached_s * cached
        left_s -= self._mixed_context_s * shape.decode_context
        left_s -= self._encoder_s * shape.encoder_tokens
        longest = 0
        for new, other_cached in prefills:
            left_s -= self._work_s * new * (other_cached + 0.5 * new)
            left_s -= self._cached_s * other_cached
            longest = max(longest, new)
        # What the longest chunk makes the decodes cost is linear in it between two ends.
        longest_s = self._mixed_longest_s * seqs
        mixed_s = self._mixed_s(seqs, shape.decode_context)
        fits = 0
        if longest and (longest_s or mixed_s):
            ramp = min(1.0, longest / RAMP_TOKENS)
            spare_s = left_s - longest_s * longest - ramp * mixed_s
            fits = self._most_tokens(tokens, cached, spare_s, 0.0, longest)
            if fits < longest:
                return fits
        if mixed_s and longest < RAMP_TOKENS:
            per_token_s = longest_s + mixed_s / RAMP_TOKENS
            fits = self._most_tokens(tokens, cached, left_s, per_token_s, RAMP_TOKENS)
            if fits < RAMP_TOKENS:
                return fits
        return max(
            fits, self._most_tokens(tokens, cached, left_s - mixed_s, longest_s, MAX_PREFILL_TOKENS)
        )

    def _mixed_s(self, seqs: int, context: int) -> float:
        """Return what the decodes cost more in a step with a long chunk."""
        total_s = self._mixed_decode_s * seqs
        for value, over, reach, fall in self._mixed_contexts:
            if context > over:
                share = reach - fall / (seqs or 1)
                if share > 0.0:
                    total_s += value * (context - over) * min(1.0, share)
        return total_s

    def _most_tokens(
        self, tokens: int, cached: int, spare_s: float, per_token_s: float, most: int
    ) -> int:
        """Return the most new tokens that cost at most ``spare_s``, 0 to ``most``.

        They cost the token part, the attention work, and ``per_token_s`` for each.
        """
        intercepts, slopes, work_s = self._intercepts, self._slopes, self._work_s
        low, high = 0, len(_BOUNDS)
        while high - low > 1:  # the last piece whose first token fits
            piece = (low + high) // 2
            new = _BOUNDS[piece] + 1 - tokens
            if new < 1:
                new = 1
            cost_s = intercepts[piece] + slopes[piece] * (tokens + new)
            if cost_s + new * (work_s * (cached + 0.5 * new) + per_token_s) <= spare_s:
                low = piece
            else:
                high = piece
        if low < _LAST:
            most = min(most, _BOUNDS[low + 1] - tokens)
        one_s = intercepts[low] + slopes[low] * (tokens + 1) + work_s * (cached + 0.5)
        if most < 1 or not one_s + per_token_s <= spare_s:
            return 0
        slope = slopes[low] + work_s * cached + per_token_s
        spare_s -= intercepts[low] + slopes[low] * tokens
        # The stable root of work_s / 2 p^2 + slope p = spare_s.
        divisor = slope + math.sqrt(slope * slope + 2.0 * work_s * max(0.0, spare_s))
        if divisor * most <= 2.0 * spare_s:
            return most
        return max(0, min(most, int(2.0 * spare_s / divisor)))
