"""Match each scheduled step with the time that it took."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from vllm_penalty_sched.batch import BatchShape
from vllm_penalty_sched.policy import Decision


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step that ran: what it computed, why, and the time that its requests waited for it."""

    shape: BatchShape
    decision: Decision | None
    seconds: float


@dataclass(frozen=True, slots=True)
class _InFlight:
    output: object
    shape: BatchShape
    decision: Decision | None
    started_s: float


class StepTimer:
    """Times steps between the calls that hand their outputs back.

    While requests run, a step lasts from the previous step's completion to its own: that is the
    gap between tokens which a user sees, scheduling included, and under async scheduling it does
    not count the wait behind the step in flight. After an idle stretch it starts at ``schedule()``.
    """

    def __init__(self) -> None:
        self._in_flight: deque[_InFlight] = deque()
        self._done_s: float | None = None

    @property
    def in_flight(self) -> int:
        """Steps scheduled and not completed yet."""
        return len(self._in_flight)

    def next_start_s(self, now_s: float, expected_s: Callable[[BatchShape], float]) -> float:
        """Return when a step that is scheduled now can start: behind those in flight.

        Args:
            now_s: The time.
            expected_s: Expected time of a step, seconds.
        """
        if not self._in_flight:
            return now_s
        first_s = self._in_flight[0].started_s if self._done_s is None else self._done_s
        return max(now_s, first_s + sum(expected_s(step.shape) for step in self._in_flight))

    def scheduled(
        self, output: object, shape: BatchShape, decision: Decision | None, *, started_s: float
    ) -> None:
        """Take in a step; ``started_s`` is when ``schedule()`` was entered."""
        self._in_flight.append(_InFlight(output, shape, decision, started_s))

    def completed(self, output: object, *, done_s: float) -> TimedStep | None:
        """Return the step that ``output`` belongs to, None if it computed nothing or is unknown."""
        step = self._take(output)
        done_before_s, self._done_s = self._done_s, done_s
        if step is None or not step.shape.tokens:
            return None
        start_s = step.started_s if done_before_s is None else done_before_s
        seconds = done_s - start_s
        return TimedStep(step.shape, step.decision, seconds) if seconds > 0.0 else None

    def idle(self) -> None:
        """Take in that nothing runs: the next step starts when it is scheduled."""
        self._done_s = None

    def _take(self, output: object) -> _InFlight | None:
        # Steps come back in order; one that never does (an aborted engine step) is dropped.
        while self._in_flight:
            step = self._in_flight.popleft()
            if step.output is output:
                return step
        return None
