"""Where decode-only steps jump because vLLM's CUDA graphs end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_penalty_sched.step_log.records import StepTable

# vLLM captures CUDA graphs up to a power of two or 512 tokens. Steps within this share of tokens
# above such a size are compared with those up to it; so many steps are needed on either side.
_GRAPH_SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
_GRAPH_WINDOW, _LEAST_GRAPH_STEPS = 0.2, 10
# A jump by this factor more than tokens and context grew by.
_GRAPH_JUMP = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Jump:
    """A jump of the decode-only time.

    Attributes:
        size: Decode tokens above which it is.
        below_s: Median time of steps up to that size.
        above_s: Of those a little larger.
        factor: By how much more the time grew than tokens and context did.
    """

    size: int
    below_s: float
    above_s: float
    factor: float


def find_worst_jump(table: StepTable) -> Jump | None:
    """Return the largest jump of a trace; None if there is none."""
    jumps = [jump for size in _GRAPH_SIZES if (jump := _jump_above(table, size)) is not None]
    return max(jumps, key=lambda jump: jump.factor, default=None)


def _jump_above(table: StepTable, size: int) -> Jump | None:
    tokens = table.decode_tokens
    below = table.is_decode_only & (tokens > (1 - _GRAPH_WINDOW) * size) & (tokens <= size)
    above = table.is_decode_only & (tokens > size) & (tokens <= (1 + _GRAPH_WINDOW) * size)
    if min(np.sum(below), np.sum(above)) < _LEAST_GRAPH_STEPS:
        return None
    below_s, above_s = np.median(table.observed_s[below]), np.median(table.observed_s[above])
    # A step is at most proportional to its tokens and context: what grew more is a jump.
    growth = max(
        float(np.median(column[above])) / max(1.0, float(np.median(column[below])))
        for column in (tokens, table.decode_context)
    )
    factor = float(above_s / below_s / max(1.0, growth))
    if factor <= _GRAPH_JUMP:
        return None
    return Jump(size=size, below_s=float(below_s), above_s=float(above_s), factor=factor)
