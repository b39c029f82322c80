"""Bring an engine to compositions and measure them."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from vllm_penalty_sched.calibration.grid import GridPoint
from vllm_penalty_sched.calibration.samples import Sample
from vllm_penalty_sched.engine.stepped_engine import SteppedEngine, TimedShape

# A point is measured at least so often, then until its times agree or enough time has passed, an
# odd number of times for the median. Less than 0.15 s may lie within one stall of the machine.
_LEAST_STEPS, _MOST_STEPS = 3, 31
_LEAST_S, _ENOUGH_S = 0.15, 0.4
# Of steps that take this long one is enough: a stall makes little of it.
_LONG_STEP_S = 1.0
# Points are measured in turns at least and at most so often, in between until time has passed.
_LEAST_ROUNDS, _MOST_ROUNDS, _ROUNDS_S = 9, 31, 15.0
# The middle half of the times within this share of the median: they agree.
_AGREEING_SPREAD = 0.03
# The first steps of a new composition compile, allocate and fill caches.
_WARM_UP_STEPS = 1
# Set-up steps beyond what the tokens need, before a point is given up.
_SPARE_STEPS = 16


class PointMeasurer:
    """Brings an engine to a composition and measures it; points that differ by little in turns."""

    def __init__(self, engine: SteppedEngine, *, end_s: float = math.inf) -> None:
        """Take an engine, and the time when measuring ends on ``time.perf_counter``."""
        self._engine = engine
        self._end_s = end_s
        self._decodes: list[str] = []

    @property
    def is_late(self) -> bool:
        """Whether the time to measure is over."""
        return time.perf_counter() >= self._end_s

    def measure(self, point: GridPoint) -> Sample | None:
        """Return the step of median time; None if the engine did not run the composition.

        The sample is one step that ran, with its own shape: the decodes' contexts grow by a token
        a step. None, too, if the time was over before the least number of steps was measured.
        """
        steps: list[TimedShape] = []
        start_s = time.perf_counter()
        for turn in range(_WARM_UP_STEPS + _MOST_STEPS):
            step = self.run_once(point)
            if step is None:
                self._abort_all()
                return None
            if turn < _WARM_UP_STEPS:
                start_s = time.perf_counter()
                continue
            steps.append(step)
            if _is_enough([step.seconds for step in steps], time.perf_counter() - start_s):
                break
            if self.is_late:
                return None
        return _middle(point, steps)

    def measure_in_turns(self, points: Sequence[GridPoint]) -> list[Sample | None]:
        """Return the step of median time of each point; None as ``measure`` does.

        One step of each, round after round: a machine that is slower for a while is so for all of
        them. Of a round that the end of time cuts off no step counts.
        """
        rounds: list[dict[GridPoint, TimedShape]] = []
        runnable = list(points)
        enough_s = time.perf_counter() + _ROUNDS_S
        for number in range(_WARM_UP_STEPS + _MOST_ROUNDS):
            steps = {}
            for point in runnable[:: -1 if number % 2 else 1]:
                step = self.run_once(point)
                if step is not None:
                    steps[point] = step
                else:
                    self._abort_all()
                if self.is_late:
                    break
            if self.is_late:
                break
            runnable = [point for point in runnable if point in steps]
            if number >= _WARM_UP_STEPS:
                rounds.append(steps)
            if len(rounds) >= _LEAST_ROUNDS and time.perf_counter() >= enough_s:
                break
        is_measured = len(rounds) >= _LEAST_STEPS
        return [
            _middle(point, [steps[point] for steps in rounds])
            if is_measured and point in runnable
            else None
            for point in points
        ]

    def run_once(self, point: GridPoint) -> TimedShape | None:
        """Run the composition in one step; return it, None if the engine ran something else."""
        if not self._bring_decodes(point):
            return None
        prompts = self._bring_prompts(point)
        if prompts is None:
            return None
        step = self._engine.step()
        self._engine.abort(prompts)
        shape = step.shape
        as_planned = (
            sorted(shape.prefills) == sorted(point.prefills)
            and shape.decode_seqs == shape.decode_tokens == point.decode_seqs
        )
        return step if as_planned else None

    def _bring_decodes(self, point: GridPoint) -> bool:
        engine, wanted = self._engine, point.decode_seqs
        running = len(self._decodes)
        context = sum(map(engine.computed_tokens, self._decodes))
        if not running * point.decode_context <= context <= running * point.allowed_context:
            self._abort_all()
        engine.abort(self._decodes[wanted:])
        del self._decodes[wanted:]
        added = wanted - len(self._decodes)
        room = engine.limits.max_model_len - point.decode_context
        self._decodes += [engine.add(point.decode_context, room) for _ in range(added)]
        return self._decode_all(added, added * point.decode_context)

    def _decode_all(self, added: int, prompt_tokens: int) -> bool:
        budget = max(1, self._engine.limits.max_num_batched_tokens - len(self._decodes))
        for _ in range(prompt_tokens // budget + added + _SPARE_STEPS):
            if all(map(self._engine.is_decoding, self._decodes)):
                return True
            if self.is_late:
                break
            self._engine.step()
        return False

    def _bring_prompts(self, point: GridPoint) -> list[str] | None:
        """Queue the prompts, the first one computed up to its cached tokens.

        A prompt ends with its chunk, so that the next step computes exactly the chunks.
        """
        engine = self._engine
        if not point.prefills:
            return []
        # vLLM cleans up after ended requests in the step that follows: not in the measured one.
        engine.step()
        prompts = []
        for new, cached in point.prefills:
            prompts.append(engine.add(new + cached, 1))
            if cached and not self._compute(prompts[-1], cached):
                return None
        return prompts

    def _compute(self, request_id: str, tokens: int) -> bool:
        budget = max(1, self._engine.limits.max_num_batched_tokens - len(self._decodes))
        for _ in range(tokens // budget + _SPARE_STEPS):
            left = tokens - self._engine.computed_tokens(request_id)
            if left <= 0:
                return left == 0
            if self.is_late:
                break
            self._engine.step(prefill_limit=left)
        return False

    def _abort_all(self) -> None:
        self._engine.abort_all()
        self._decodes.clear()


def _middle(point: GridPoint, steps: Sequence[TimedShape]) -> Sample:
    middle = sorted(steps, key=lambda step: step.seconds)[len(steps) // 2]
    return Sample(series=point.series, point=point.name, shape=middle.shape, seconds=middle.seconds)


def _is_enough(seconds: Sequence[float], passed_s: float) -> bool:
    measured = len(seconds)
    if measured % 2 == 0:
        return False
    if measured < _LEAST_STEPS:
        return sum(seconds) >= _LONG_STEP_S
    if passed_s >= _ENOUGH_S:
        return True
    ordered = sorted(seconds)
    quarter = measured // 4
    spread = ordered[-1 - quarter] - ordered[quarter]
    return passed_s >= _LEAST_S and spread <= _AGREEING_SPREAD * ordered[measured // 2]
