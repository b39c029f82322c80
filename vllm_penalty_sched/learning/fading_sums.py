"""Sums over the steps of one kind that a robust least-squares fit needs; older steps fade."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_penalty_sched.batch import BatchShape
from vllm_penalty_sched.learning.features import TERMS, term_matrix
from vllm_penalty_sched.learning.model_state import LearnedSums

# Older steps fade with this factor for each new one: a memory of about 2,000 steps.
_FADE = 1.0 - 1.0 / 2000
# The latest steps are kept one by one: what an early fit took for an outlier may be none.
_RECENT_STEPS = 128
# A relative error above this counts in proportion, not squared (Huber's loss) ...
_ORDINARY_ERROR = 0.05
# ... once the fit knows so many steps: one that knows fewer is itself far off.
_TRUSTED_STEPS = 24
# Products of so few rows keep BLAS from starting threads, which may take it milliseconds.
_BLOCK_ROWS = 64


class FadingSums:
    """Normal equations for relative errors: each step weighs its weight over its squared time.

    Attributes:
        samples: Steps taken.
        offered: Steps of this kind that ran, taken or not.
    """

    __slots__ = ("_gram", "_learned", "_moment", "_new", "_recent", "offered", "samples")

    def __init__(self, learned: LearnedSums | None = None) -> None:
        self._gram = learned.gram.copy() if learned else np.zeros((len(TERMS), len(TERMS)))
        self._moment = learned.moment.copy() if learned else np.zeros(len(TERMS))
        self.samples = learned.samples if learned else 0
        self.offered = 0
        self._new: list[tuple[BatchShape, float]] = []
        self._recent = np.empty((0, len(TERMS)))
        self._learned = learned

    def add(self, shape: BatchShape, seconds: float) -> None:
        """Take one step."""
        self._new.append((shape, seconds))
        self.samples += 1
        self._learned = None

    def replace(self, relative: NDArray[np.float64], scaled: NDArray[np.float64] | None) -> None:
        """Forget all steps and take these, without fading.

        Args:
            relative: Their terms over their times, shape (n, len(TERMS)).
            scaled: Coefficients that tell outliers, shape (len(TERMS),); None: none is one.
        """
        self.__init__()  # type: ignore[misc]  # the one place that starts the sums afresh
        self.samples = len(relative)
        self._gram, self._moment = _normal_equations(relative, scaled)

    def learned(self, scaled: NDArray[np.float64]) -> LearnedSums:
        """Return the sums.

        Args:
            scaled: The present coefficients times ``SCALES``, shape (len(TERMS),); they tell which
                of the latest steps are outliers.
        """
        if self._learned is None:
            self._settle(scaled)
            known = scaled if self.samples >= _TRUSTED_STEPS else None
            gram, moment = _normal_equations(self._recent, known)
            self._learned = LearnedSums(
                gram=self._gram + gram, moment=self._moment + moment, samples=self.samples
            )
        return self._learned

    def _settle(self, scaled: NDArray[np.float64]) -> None:
        if not self._new:
            return
        times_s = np.array([seconds for _, seconds in self._new])
        terms = term_matrix([shape for shape, _ in self._new])
        self._new.clear()
        rows = np.concatenate([self._recent, terms / times_s[:, np.newaxis]])
        leaving, self._recent = rows[:-_RECENT_STEPS], rows[-_RECENT_STEPS:]
        if len(leaving):
            gram, moment = _normal_equations(leaving, scaled)
            fade = _FADE ** len(leaving)
            self._gram = fade * self._gram + gram
            self._moment = fade * self._moment + moment


def _normal_equations(
    relative: NDArray[np.float64], scaled: NDArray[np.float64] | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    weighted = relative
    if scaled is not None:
        errors = np.abs(relative @ scaled - 1.0)
        weighted = relative * (_ORDINARY_ERROR / np.maximum(_ORDINARY_ERROR, errors))[:, np.newaxis]
    gram = np.zeros((len(TERMS), len(TERMS)))
    for row in range(0, len(relative), _BLOCK_ROWS):
        block = slice(row, row + _BLOCK_ROWS)
        gram += weighted[block].T @ relative[block]
    return gram, weighted.sum(axis=0)
