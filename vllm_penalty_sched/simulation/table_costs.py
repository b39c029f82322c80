"""What a step costs on a measured GPU: the true times of a simulation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from vllm_penalty_sched.simulation.cost_grids import (
    MOST_CHUNK_TOKENS,
    AttentionGrid,
    Curve,
    MixedGrid,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vllm_penalty_sched.batch import BatchShape


class StepCosts(Protocol):
    """Noise-free times of the steps of one GPU and model."""

    def step_s(self, shape: BatchShape) -> float:
        """Return the time of a step, seconds; 0 for a step without tokens."""

    def chunk_steps_s(self, shape: BatchShape, cached: int, most: int) -> NDArray[np.float64]:
        """Return the times of a step with one more chunk of 1, 2, ... ``most`` tokens.

        Args:
            shape: The step without that chunk.
            cached: Tokens of the chunk's request computed before, >= 0.
            most: Largest chunk, at most ``MOST_CHUNK_TOKENS``.

        Returns:
            Seconds, shape (most,); in general not ascending.
        """

    def most_tokens_within(self, limit_s: float) -> int:
        """Return a number of tokens such that every step of more costs more than the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCosts:
    """Step costs interpolated in measured tables.

    Attributes:
        linear: Everything but attention and logits, by tokens of the step; the next measured
            count is taken, which keeps the tile steps of the measurement.
        heads: By sequences of the step: logits, sampling; added up.
        prefill: By new tokens of a chunk and its cached tokens.
        decode: By decodes and the context of each, without a prefill in the step.
        mixed: One chunk together with the decodes, where that was measured.
        mixed_decode_factor: How much dearer a decode's attention is in a step with prefill, where
            that was not measured, >= 1.
        overhead_s: Added to every step, seconds.
    """

    linear: Curve
    heads: tuple[Curve, ...]
    prefill: AttentionGrid
    decode: AttentionGrid
    mixed: MixedGrid | None = None
    mixed_decode_factor: float = 1.0
    overhead_s: float = 0.0

    def step_s(self, shape: BatchShape) -> float:
        """Return the time of a step, seconds; 0 for a step without tokens."""
        tokens = shape.tokens
        if not tokens:
            return 0.0
        steady_s = self.linear.next_measured_s(tokens) + self.overhead_s
        return steady_s + self._heads_s(shape) + self._attention_s(shape)

    def chunk_steps_s(self, shape: BatchShape, cached: int, most: int) -> NDArray[np.float64]:
        """Return the times of a step with one more chunk; see ``StepCosts``."""
        one = shape.with_prefill(1, cached)
        linear_s = self.linear.next_measured_after_s(shape.tokens, most)
        fixed_s = self._heads_s(one) + self.overhead_s
        if self.mixed is None:
            fixed_s += self._attention_s(one) - self.prefill.cost_s(1, cached)
            return linear_s + self.prefill.costs_up_to_s(most, cached) + fixed_s
        if shape.prefills:
            fixed_s += self._attention_s(shape)
            return linear_s + self.mixed.costs_up_to_s(most, cached, 0, 0.0) + fixed_s
        decodes = (shape.decode_seqs, _mean_context(shape))
        return linear_s + self.mixed.costs_up_to_s(most, cached, *decodes) + fixed_s

    def most_tokens_within(self, limit_s: float) -> int:
        """Return a number of tokens such that every step of more costs more than the limit."""
        return self.linear.last_within(limit_s - self.overhead_s)

    def _heads_s(self, shape: BatchShape) -> float:
        seqs = shape.decode_seqs + len(shape.prefills)
        return sum(head.interpolated_s(seqs) for head in self.heads)

    def _attention_s(self, shape: BatchShape) -> float:
        seqs = shape.decode_seqs
        context = _mean_context(shape)
        if self.mixed is not None and shape.prefills:
            (new, cached), *others = shape.prefills
            first_s = self.mixed.cost_s(new, cached, seqs, context)
            return first_s + sum(self.mixed.cost_s(p, c, 0, 0.0) for p, c in others)
        chunks_s = sum(self.prefill.cost_s(new, cached) for new, cached in shape.prefills)
        if not seqs:
            return chunks_s
        factor = self.mixed_decode_factor if shape.prefills else 1.0
        return chunks_s + factor * self.decode.cost_s(seqs, context)


def largest_chunk(
    costs: StepCosts, shape: BatchShape, *, cached: int, limit_s: float, most: int
) -> int:
    """Return the most new tokens of one more chunk whose step costs at most the limit.

    Every size is looked at: measured costs fall at some sizes, so that bisecting would go wrong.

    Args:
        costs: The true costs.
        shape: The step without that chunk.
        cached: Tokens of the chunk's request computed before, >= 0.
        limit_s: Longest time the step may take, seconds.
        most: Largest chunk to consider, at most ``MOST_CHUNK_TOKENS``.

    Returns:
        0 if no size fits.
    """
    most = min(most, MOST_CHUNK_TOKENS, costs.most_tokens_within(limit_s) - shape.tokens)
    if most < 1:
        return 0
    fitting = np.flatnonzero(costs.chunk_steps_s(shape, cached, most) <= limit_s)
    return int(fitting[-1]) + 1 if fitting.size else 0


def _mean_context(shape: BatchShape) -> float:
    return shape.decode_context / shape.decode_seqs if shape.decode_seqs else 0.0
