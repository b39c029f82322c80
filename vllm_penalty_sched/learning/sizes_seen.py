"""Which step sizes a model has learned from."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from vllm_penalty_sched.learning.features import EDGES, TERMS

# A size is known once so many steps between the same two edges were learned from.
_ENOUGH = 3
_FIRST_EDGE = TERMS.index(f"step_at_{EDGES[0]}")


class SizesSeen:
    """Counts mixed steps between the edges at which a step's time may jump."""

    def __init__(self) -> None:
        self._steps = [0] * (len(EDGES) + 1)

    @classmethod
    def of_gram(cls, gram: NDArray[np.float64]) -> SizesSeen:
        """Return the sizes that sums of squared terms hold any step of.

        Args:
            gram: Shape (len(TERMS), len(TERMS)); a term ``step_at_E`` is 1 above E tokens, else 0.
        """
        above = [gram[0, 0], *np.diagonal(gram)[_FIRST_EDGE : _FIRST_EDGE + len(EDGES)], 0.0]
        sizes = cls()
        sizes._steps = [
            _ENOUGH if here - further > 1e-9 * gram[0, 0] else 0
            for here, further in pairwise(above)
        ]
        return sizes

    def add(self, tokens: int) -> None:
        """Take in a mixed step of so many tokens."""
        self._steps[bisect_left(EDGES, tokens)] += 1

    def knows(self, tokens: int) -> bool:
        """Return whether steps of about so many tokens were learned from."""
        return self._steps[bisect_left(EDGES, tokens)] >= _ENOUGH
