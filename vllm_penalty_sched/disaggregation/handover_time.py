"""Learn how long a prefill instance takes from being asked to a KV cache that can be read."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_penalty_sched.nonnegative import improve

# Older hand-overs fade with this factor for each new one: a memory of about 100.
_FADE = 1.0 - 1.0 / 100
# Until so many are learned from, the guess is scaled; three coefficients need a few more.
_FEWEST = 8
# A relative error above this counts in proportion, not squared (Huber's loss).
_ORDINARY_ERROR = 0.5
# Pull towards nothing, relative to the weight of the samples: keeps the equations solvable.
_RIDGE = 1e-6
# Brings the three terms of a prompt of a thousand tokens to the same size.
_SCALES = np.array([1.0, 1e3, 0.5e6])
_MOST_PIVOTS = 12


@dataclass(slots=True, kw_only=True)
class _Pending:
    tokens: int
    started_s: float
    is_alone: bool


class HandoverTime:
    """Predicts hand-overs to one prefill instance, which serves its prompts one after the other.

    A hand-over of n tokens takes ``latency + per_token n + per_pair n^2 / 2`` after those asked for
    before it: prefill and transfer together, as they are seen from here. Who else asks the instance
    makes it look slower, which is what matters. One that is overdue is expected to take as long
    again; so an instance that hangs becomes dearer every second, and cheap again once it answers.

    Args:
        guess_s: What a prompt of n tokens would take, until enough was seen; None if unknown.
    """

    def __init__(self, guess_s: Callable[[int], float | None]) -> None:
        self._guess_s = guess_s
        self._pending: dict[Hashable, _Pending] = {}
        self._last_done_s = -np.inf
        self._gram = np.zeros((3, 3))
        self._moment = np.zeros(3)
        self._scaled = np.zeros(3)
        self._taken_s = self._guessed_s = 0.0
        self.samples = 0

    @property
    def pending_tokens(self) -> int:
        """Tokens asked for and not handed over yet."""
        return sum(pending.tokens for pending in self._pending.values())

    def start(self, name: Hashable, tokens: int, *, now_s: float) -> None:
        """Note that a prompt of ``tokens`` tokens, >= 1, was asked for."""
        self._pending[name] = _Pending(tokens=tokens, started_s=now_s, is_alone=not self._pending)

    def finish(self, name: Hashable, *, now_s: float) -> None:
        """Learn from a prompt that is handed over; nothing if it is unknown."""
        pending = self._pending.pop(name, None)
        if pending is None:
            return
        begun_s = (
            pending.started_s if pending.is_alone else max(pending.started_s, self._last_done_s)
        )
        self._last_done_s = now_s
        # Prompts that were prefilled in one step come at once: the first bears the time of all.
        self._learn(pending, max(0.0, now_s - begun_s))

    def drop(self, name: Hashable) -> None:
        """Forget a prompt that will not be handed over."""
        self._pending.pop(name, None)

    def predict_s(self, tokens: int, *, now_s: float) -> float | None:
        """Return how long a prompt asked for now would take, seconds; None if unknown."""
        own_s = self._alone_s(tokens)
        if own_s is None:
            return None
        return self._queue_s(now_s) + own_s

    def _queue_s(self, now_s: float) -> float:
        """Return how long those asked for still take, seconds."""
        if not self._pending:
            return 0.0
        oldest = next(iter(self._pending.values()))
        expected_s = sum(self._work_s(pending.tokens) for pending in self._pending.values())
        running_s = now_s - max(oldest.started_s, self._last_done_s)
        oldest_s = self._alone_s(oldest.tokens) or 0.0
        overdue_s = max(0.0, running_s - oldest_s)
        return max(0.0, expected_s - running_s) + overdue_s

    def _alone_s(self, tokens: int) -> float | None:
        if self.samples >= _FEWEST:
            return float(_terms(tokens, is_alone=True) @ self._scaled)
        guess_s = self._guess_s(tokens)
        if guess_s is None:
            return None
        return guess_s * (self._taken_s / self._guessed_s if self._guessed_s else 1.0)

    def _work_s(self, tokens: int) -> float:
        if self.samples >= _FEWEST:
            return float(_terms(tokens, is_alone=False) @ self._scaled)
        return self._alone_s(tokens) or 0.0

    def _learn(self, pending: _Pending, seconds: float) -> None:
        self.samples += 1
        self._taken_s += seconds
        self._guessed_s += self._guess_s(pending.tokens) or seconds
        terms = _terms(pending.tokens, is_alone=pending.is_alone)
        weight = 1.0
        if self.samples > _FEWEST:
            expected_s = float(terms @ self._scaled)
            error = abs(seconds - expected_s) / max(expected_s, 1e-6)
            weight = _ORDINARY_ERROR / max(_ORDINARY_ERROR, error)
        # Weighed by size, not by time: one that took no time of its own has no relative error.
        weight /= float(terms @ terms)
        self._gram = _FADE * self._gram + weight * np.outer(terms, terms)
        self._moment = _FADE * self._moment + weight * seconds * terms
        gram = self._gram + _RIDGE * np.trace(self._gram) * np.eye(3)
        self._scaled = improve(gram, self._moment, self._scaled, most_pivots=_MOST_PIVOTS).values


def _terms(tokens: int, *, is_alone: bool) -> NDArray[np.float64]:
    terms: NDArray[np.float64] = np.array([float(is_alone), tokens, 0.5 * tokens * tokens])
    return terms / _SCALES
