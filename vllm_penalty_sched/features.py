"""The terms that a step's time is a non-negative sum of.

With N tokens in the step, S the sum of the decodes' contexts, d decodes and chunks of p_i new
tokens on c_i cached ones, the time is

    T = h0 + sum_k h_k max(0, N - knot_k) + sum_e s_e [N > edge_e] + b S + a d
        + [a chunk is there] (x S + m d + sum_j y_j S max(0, 1 - j/d) + sum_q z_q max(0, S - q))
        + g sum p_i (c_i + p_i/2) + e sum c_i + k (number of chunks)

The hinges give the memory-bound floor, the knee and the compute-bound slope; the edges give tile
and CUDA-graph steps. Every term grows with every count, so with coefficients >= 0 a prediction
never falls when tokens are added, and for one more chunk T is a quadratic between two edges.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_penalty_sched.batch import BatchShape

KNOTS = (0, 64, 128, 256, 512, 1024, 2048)
EDGES = (
    8, 16, 32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024,
    1280, 1536, 1792, 2048,
)  # fmt: skip
# In a mixed kernel a decode's attention costs more, the more decodes there are and the more context
# they have (measured on two RTX cards, vLLM 0.19).
CONTEXT_KNOTS = (16_384, 65_536, 262_144, 524_288)
DECODE_KNOTS = (8, 32, 64)

_TOKEN_TERMS = tuple(
    ["floor"] + [f"tokens_over_{k}" for k in KNOTS] + [f"step_at_{e}" for e in EDGES]
)
_SHAPE_TERMS = (
    "decode_context",
    "decode_seqs",
    "mixed_context",
    "mixed_decodes",
    *(f"mixed_context_over_{j}_decodes" for j in DECODE_KNOTS),
    *(f"mixed_context_over_{q}" for q in CONTEXT_KNOTS),
    "attention_work",
    "cached_tokens",
    "chunks",
)
TERMS = _TOKEN_TERMS + _SHAPE_TERMS
TOKEN_TERMS = len(_TOKEN_TERMS)
ATTENTION_WORK = TERMS.index("attention_work")

_NO_MIXED_TERMS = (0.0,) * (2 + len(DECODE_KNOTS) + len(CONTEXT_KNOTS))
_KNOTS = np.array(KNOTS, dtype=np.float64)
_EDGES = np.array(EDGES, dtype=np.float64)
# What each term comes to in typical steps, so that one ridge strength suits all coefficients.
SCALES: NDArray[np.float64] = np.array(
    [1.0] + [128.0] * len(KNOTS) + [1.0] * len(EDGES)
    + [1e5, 100.0, 1e5, 100.0] + [1e5] * (len(DECODE_KNOTS) + len(CONTEXT_KNOTS))
    + [1e6, 1e4, 4.0]
)  # fmt: skip
# How dear a term is to the ridge. Few samples must be explained by the floor and one slope, which
# extrapolate; a step in the middle of a slope is believed only on evidence.
RIDGE_WEIGHTS: NDArray[np.float64] = np.array(
    [1e-3] + [0.05] + [0.2] * (len(KNOTS) - 1) + [20.0] * len(EDGES) + [1.0] * len(_SHAPE_TERMS)
)


def shape_terms(shape: BatchShape) -> list[float]:
    """Return the terms that do not depend on the step's token count, in ``TERMS`` order."""
    context = float(shape.decode_context)
    seqs = shape.decode_seqs
    work = 0.0
    cached_tokens = 0
    for new, cached in shape.prefills:
        work += new * (cached + 0.5 * new)
        cached_tokens += cached
    chunks = float(len(shape.prefills))
    if not chunks or not seqs:
        return [context, float(seqs), *_NO_MIXED_TERMS, work, float(cached_tokens), chunks]
    mean_context = context / seqs
    return [
        context,
        float(seqs),
        context,
        float(seqs),
        *[mean_context * max(0, seqs - knot) for knot in DECODE_KNOTS],
        *[max(0.0, context - knot) for knot in CONTEXT_KNOTS],
        work,
        float(cached_tokens),
        chunks,
    ]


def term_vector(shape: BatchShape) -> NDArray[np.float64]:
    """Return all terms of one step divided by ``SCALES``, shape (len(TERMS),)."""
    tokens = shape.tokens
    vector = np.empty(len(TERMS))
    vector[0] = 1.0
    vector[1 : 1 + len(KNOTS)] = np.maximum(0.0, tokens - _KNOTS)
    vector[1 + len(KNOTS) : TOKEN_TERMS] = tokens > _EDGES
    vector[TOKEN_TERMS:] = shape_terms(shape)
    return vector / SCALES


def token_segments(
    coefficients: Sequence[float],
) -> tuple[list[float], list[float], list[float]]:
    """Return the token part of T as pieces that are linear in N.

    Args:
        coefficients: The coefficients of ``TERMS``, unscaled, seconds per unit.

    Returns:
        ``(bounds, intercepts, slopes)``: for ``bounds[i] < N <= bounds[i + 1]`` (the last piece is
        open) the token part is ``intercepts[i] + slopes[i] * N``, seconds.
    """
    bounds = sorted({-1.0, *map(float, KNOTS), *map(float, EDGES)})
    hinges = coefficients[1 : 1 + len(KNOTS)]
    steps = coefficients[1 + len(KNOTS) : TOKEN_TERMS]
    intercepts, slopes = [], []
    for bound in bounds:
        on = [(knot, value) for knot, value in zip(KNOTS, hinges, strict=True) if knot <= bound]
        slopes.append(sum(value for _, value in on))
        risen = sum(value for edge, value in zip(EDGES, steps, strict=True) if edge <= bound)
        intercepts.append(coefficients[0] + risen - sum(knot * value for knot, value in on))
    return bounds, intercepts, slopes
