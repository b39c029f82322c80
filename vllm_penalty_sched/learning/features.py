"""The terms that a step's time is a non-negative sum of.

With N tokens in the step, d decodes whose contexts sum to S, chunks of p_i new tokens on c_i
cached ones, the longest of them L, and E tokens of images or sounds to encode, the time is

    T = h0 + sum_k h_k max(0, N - knot_k) + sum_e s_e [N > edge_e] + b S + a d
        + [a chunk is there] x S + min(1, L/16) (m d + sum_q y_q max(0, S - q) g_q(d)) + z d L
        + g sum p_i (c_i + p_i/2) + e sum c_i + k (number of chunks) + v E

The hinges give the memory-bound floor, the knee and the compute-bound slope; the edges give tile
and CUDA-graph steps; the terms of d, S and L give what decodes cost in a mixed attention kernel,
where g_q rises from 0 to 1 between two decode counts, linearly in 1/d. Every term grows with every
count, so with coefficients >= 0 a prediction never falls when tokens are added, and for one more
chunk T is a quadratic between two edges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_penalty_sched.batch import BatchShape

KNOTS = (0, 64, 128, 256, 512, 1024, 2048)
EDGES = (
    8, 16, 32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 576, 640, 704, 768, 832, 896,
    960, 1024, 1088, 1152, 1216, 1280, 1344, 1408, 1536, 1664, 1792, 2048,
)  # fmt: skip
RAMP_TOKENS = 16
"""A chunk this long makes a mixed step's decodes as dear as a longer one does."""


@dataclass(frozen=True, slots=True)
class MixedContext:
    """A term of S in mixed steps: ``max(0, S - over) * g(d)``, g rising from 0 to 1.

    Attributes:
        over: Context that costs nothing extra, tokens.
        first: Decodes up to which g is 0; 0 if g is 1 throughout.
        full: Decodes from which g is 1.
    """

    over: int
    first: int = 0
    full: int = 0

    @property
    def name(self) -> str:
        """What files call it."""
        decodes = f"_from_{self.first}_to_{self.full}_decodes" if self.full else ""
        return f"mixed_context_over_{self.over}{decodes}"

    @property
    def rise(self) -> tuple[float, float]:
        """``(a, b)`` of ``g(d) = min(1, max(0, a - b / d))`` for d >= 1."""
        if not self.full:
            return 1.0, 0.0
        width = 1.0 / self.first - 1.0 / self.full
        return 1.0 / (self.first * width), 1.0 / width


# Measured on two RTX cards with vLLM 0.19: a decode's attention costs more in a mixed kernel, twice
# as much again from 64 to 128 decodes, once their contexts no longer fit the cache.
MIXED_CONTEXTS = (
    MixedContext(0),
    MixedContext(16_384),
    MixedContext(131_072),
    MixedContext(0, 8, 32),
    MixedContext(0, 32, 64),
    MixedContext(65_536, 64, 128),
    MixedContext(262_144, 64, 128),
)

_TOKEN_TERMS = tuple(
    ["floor"] + [f"tokens_over_{k}" for k in KNOTS] + [f"step_at_{e}" for e in EDGES]
)
_SHAPE_TERMS = (
    "decode_context",
    "decode_seqs",
    "attention_work",
    "cached_tokens",
    "chunks",
    "every_mixed_context",
    "mixed_decodes_by_longest_chunk",
    "mixed_decodes",
    "encoder_tokens",
    *(term.name for term in MIXED_CONTEXTS),
)
TERMS = _TOKEN_TERMS + _SHAPE_TERMS
TOKEN_TERMS = len(_TOKEN_TERMS)

_KNOTS = np.array(KNOTS, dtype=np.float64)
_EDGES = np.array(EDGES, dtype=np.float64)
# What each term comes to in typical steps, so that one ridge strength suits all coefficients.
SCALES: NDArray[np.float64] = np.array(
    [1.0] + [128.0] * len(KNOTS) + [1.0] * len(EDGES)
    + [1e5, 100.0, 1e6, 1e4, 4.0, 1e5, 1e5, 100.0, 1e3] + [1e5] * len(MIXED_CONTEXTS)
)  # fmt: skip
# How dear a term is to the ridge. Few samples must be explained by the floor and one slope, which
# extrapolate; a step in the middle of a slope is believed only on evidence.
RIDGE_WEIGHTS: NDArray[np.float64] = np.array(
    [1e-3] + [0.05] + [0.2] * (len(KNOTS) - 1) + [20.0] * len(EDGES) + [1.0] * len(_SHAPE_TERMS)
)


_RISES = np.array([term.rise for term in MIXED_CONTEXTS])
_OVERS = np.array([term.over for term in MIXED_CONTEXTS], dtype=np.float64)


def term_matrix(shapes: Sequence[BatchShape]) -> NDArray[np.float64]:
    """Return all terms of n steps divided by ``SCALES``, shape (n, len(TERMS))."""
    sums = np.array([_sums(shape) for shape in shapes], dtype=np.float64)
    tokens, seqs, context, chunks, longest, work, cached, encoded = sums.T[:, :, np.newaxis]
    ramp = np.minimum(1.0, longest / RAMP_TOKENS)
    reach = _RISES[:, 0] - _RISES[:, 1] / np.maximum(1.0, seqs)
    columns = (
        np.ones_like(tokens),
        np.maximum(0.0, tokens - _KNOTS),
        tokens > _EDGES,
        context,
        seqs,
        work,
        cached,
        chunks,
        np.where(chunks > 0.0, context, 0.0),
        seqs * longest,
        ramp * seqs,
        encoded,
        ramp * np.maximum(0.0, context - _OVERS) * np.clip(reach, 0.0, 1.0),
    )
    matrix: NDArray[np.float64] = np.concatenate(columns, axis=1) / SCALES
    return matrix


def _sums(shape: BatchShape) -> tuple[int, int, int, int, int, float, int, int]:
    new = [chunk[0] for chunk in shape.prefills]
    return (
        shape.decode_tokens + sum(new),
        shape.decode_seqs,
        shape.decode_context,
        len(new),
        max(new, default=0),
        sum(tokens * (cached + 0.5 * tokens) for tokens, cached in shape.prefills),
        sum(cached for _, cached in shape.prefills),
        shape.encoder_tokens,
    )
