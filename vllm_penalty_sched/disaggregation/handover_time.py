"""Learn how long a prefill instance takes from being asked to a KV cache that can be read."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_penalty_sched.learning.nonnegative import improve

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
# A hand-over that follows another within this share of its own work was prefilled together with
# it; so many at most are taken together, lest an instance that became faster goes unnoticed.
_TOGETHER_SHARE, _MOST_TOGETHER = 0.5, 16
# How fast the time that such prompts take together is followed, and after how many times that one
# is overdue: nothing is handed over while a step computes.
_SPAN_RATE, _PATIENT_SPANS = 0.1, 2.0


@dataclass(slots=True, kw_only=True)
class _Pending:
    tokens: int
    started_s: float
    due_s: float
    is_alone: bool


@dataclass(slots=True, kw_only=True)
class _Together:
    """Prompts that were prefilled together: learned from as one."""

    terms: NDArray[np.float64]
    guess_s: float
    begun_s: float
    done_s: float
    prompts: int = 1

    @property
    def seconds(self) -> float:
        return max(0.0, self.done_s - self.begun_s)


@dataclass(frozen=True, slots=True)
class _Sums:
    """What was learned, as sums."""

    gram: NDArray[np.float64]
    moment: NDArray[np.float64]
    taken_s: float = 0.0
    guessed_s: float = 0.0
    span_s: float = 0.0

    def plus(self, prompts: _Together, weight: float) -> _Sums:
        terms, seconds = prompts.terms, prompts.seconds
        # Weighed by size, not by time: one that took no time of its own has no relative error.
        weight /= float(terms @ terms)
        return _Sums(
            _FADE * self.gram + weight * np.outer(terms, terms),
            _FADE * self.moment + weight * seconds * terms,
            self.taken_s + seconds,
            self.guessed_s + (prompts.guess_s or seconds),
            self.span_s + _SPAN_RATE * (seconds - self.span_s),
        )


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
        self._sums = self._settled = _Sums(np.zeros((3, 3)), np.zeros(3))
        self._latest: _Together | None = None
        self._scaled = np.zeros(3)
        self.samples = 0

    @property
    def pending_tokens(self) -> int:
        """Tokens asked for and not handed over yet."""
        return sum(pending.tokens for pending in self._pending.values())

    def start(self, name: Hashable, tokens: int, *, now_s: float, due_s: float = math.inf) -> None:
        """Note that a prompt was asked for.

        Args:
            name: To finish or drop it by.
            tokens: What there is to prefill, >= 1.
            now_s: The time.
            due_s: When its first token is due: later ones do not wait for a prompt that is late
                (our scheduler, which the instance runs too, puts it behind them).
        """
        self._pending[name] = _Pending(
            tokens=tokens, started_s=now_s, due_s=due_s, is_alone=not self._pending
        )

    def finish(self, name: Hashable, *, now_s: float) -> None:
        """Learn from a prompt that is handed over; nothing if it is unknown."""
        pending = self._pending.pop(name, None)
        if pending is None:
            return
        begun_s = pending.started_s
        if not pending.is_alone:
            begun_s = max(begun_s, self._last_done_s)
        self._last_done_s = now_s
        self.samples += 1
        self._learn(self._joined(pending, begun_s, now_s))

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
        expected_s = sum(
            self._work_s(pending.tokens)
            for pending in self._pending.values()
            if pending.due_s > now_s
        )
        running_s = now_s - max(oldest.started_s, self._last_done_s)
        oldest_s = self._alone_s(oldest.tokens) or 0.0
        patience_s = max(oldest_s, min(expected_s, _PATIENT_SPANS * self._sums.span_s))
        overdue_s = max(0.0, running_s - patience_s)
        return max(0.0, expected_s - running_s) + overdue_s

    def _alone_s(self, tokens: int) -> float | None:
        if self.samples >= _FEWEST:
            return float(_terms(tokens, is_alone=True) @ self._scaled)
        guess_s = self._guess_s(tokens)
        if guess_s is None:
            return None
        sums = self._sums
        return guess_s * (sums.taken_s / sums.guessed_s if sums.guessed_s else 1.0)

    def _work_s(self, tokens: int) -> float:
        if self.samples >= _FEWEST:
            return float(_terms(tokens, is_alone=False) @ self._scaled)
        return self._alone_s(tokens) or 0.0

    def _joined(self, pending: _Pending, begun_s: float, done_s: float) -> _Together:
        """Return the prompts that were prefilled together with one, itself included."""
        latest = self._latest
        own = _Together(
            terms=_terms(pending.tokens, is_alone=pending.is_alone),
            guess_s=self._guess_s(pending.tokens) or 0.0,
            begun_s=begun_s,
            done_s=done_s,
        )
        if (
            latest is None
            or pending.is_alone
            or own.seconds >= _TOGETHER_SHARE * self._work_s(pending.tokens)
            or latest.prompts >= _MOST_TOGETHER
        ):
            return own
        return _Together(
            terms=latest.terms + own.terms,
            guess_s=latest.guess_s + own.guess_s,
            begun_s=latest.begun_s,
            done_s=done_s,
            prompts=latest.prompts + 1,
        )

    def _learn(self, prompts: _Together) -> None:
        """Learn from prompts, in place of what was learned from those among them before."""
        if prompts.prompts == 1:
            self._settled = self._sums
        self._latest = prompts
        weight = 1.0
        if self.samples > _FEWEST:
            expected_s = float(prompts.terms @ self._scaled)
            error = abs(prompts.seconds - expected_s) / max(expected_s, 1e-6)
            weight = _ORDINARY_ERROR / max(_ORDINARY_ERROR, error)
        self._sums = self._settled.plus(prompts, weight)
        gram = self._sums.gram + _RIDGE * np.trace(self._sums.gram) * np.eye(3)
        solved = improve(gram, self._sums.moment, self._scaled, most_pivots=_MOST_PIVOTS)
        self._scaled = solved.values


def _terms(tokens: int, *, is_alone: bool) -> NDArray[np.float64]:
    terms = np.array([float(is_alone), tokens, 0.5 * tokens * tokens])
    return np.asarray(terms / _SCALES)
