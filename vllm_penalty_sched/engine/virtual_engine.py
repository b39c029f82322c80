"""Run a real vLLM scheduler on virtual time: real decisions, computed step times."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_penalty_sched.batch import BatchShape
from vllm_penalty_sched.engine.composition import (
    Composition,
    read_composition,
    read_encoder_tokens,
)

_TOKEN = 7
# EngineCore sleeps this long after a step without tokens (vLLM 0.28-0.33).
_EMPTY_STEP_S = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualStep:
    """One call of ``schedule()`` and what came of it.

    Attributes:
        output: What the scheduler returned.
        before: The composition just before the call; None if steps are not kept.
        shape: What the step computes.
        samples: Requests that get a token from it.
        seconds: How long the device computes it.
        finished_s: Virtual time at which the device is done with it.
    """

    output: SchedulerOutput
    before: Composition | None
    shape: BatchShape
    samples: frozenset[str]
    seconds: float
    finished_s: float


class VirtualEngine:
    """EngineCore's loop around a scheduler, with a clock that only the steps move.

    Attributes:
        scheduler: vLLM's or ours; ours reads this engine's clock.
        now_s: Virtual time, seconds.
        steps: Every step with tokens, in order; empty with ``on_step``.
        token_times_s: For each request, when its tokens came.
    """

    def __init__(
        self,
        scheduler: VllmScheduler,
        step_time_s: Callable[[BatchShape], float],
        *,
        accept_drafts: Callable[[int], int] = lambda drafts: drafts,
        on_step: Callable[[VirtualStep], None] | None = None,
        on_token: Callable[[str], None] | None = None,
    ) -> None:
        """Set up a loop.

        Args:
            scheduler: A fresh scheduler.
            step_time_s: Time that the device takes for a shape, seconds.
            accept_drafts: Of so many draft tokens, how many are accepted.
            on_step: Called with each step with tokens when it was scheduled. Steps are then not
                kept, nor what was before them looked at: a long run stays small and quick.
            on_token: Called with a request's name whenever it got tokens.
        """
        self.scheduler = scheduler
        self.now_s = 0.0
        self.steps: list[VirtualStep] = []
        self.token_times_s: dict[str, list[float]] = defaultdict(list)
        self._step_time_s = step_time_s
        self._accept_drafts = accept_drafts
        self._on_step = on_step
        self._on_token = on_token
        # Requests whose last scheduled step gave them a token: they decode in their next one.
        self._decoding: set[str] = set()
        # Async scheduling fills a queue of two before it waits for the older one.
        self._depth = 2 if scheduler.scheduler_config.async_scheduling else 1
        self._in_flight: deque[VirtualStep] = deque()
        self._device_free_s = 0.0
        if hasattr(scheduler, "clock"):
            scheduler.clock = lambda: self.now_s

    @property
    def is_busy(self) -> bool:
        """Whether there is anything left to schedule or to hand back."""
        return self.scheduler.has_requests() or bool(self._in_flight)

    def step(self) -> VirtualStep | None:
        """Schedule once, then hand back the oldest step if the queue is full.

        Returns:
            The step that was scheduled, None if there was nothing to schedule.
        """
        scheduled = None
        if self.scheduler.has_requests():
            scheduled = self._schedule()
            could_fill = scheduled.shape.tokens or self.scheduler.has_requests()
            if len(self._in_flight) < self._depth and could_fill:
                return scheduled
        if self._in_flight:
            self._complete(self._in_flight.popleft())
        return scheduled

    def run(self, arrivals: Sequence[tuple[float, Request]], *, most_steps: int = 10**7) -> None:
        """Play requests in at their times, seconds, until all have finished.

        Raises:
            TimeoutError: If they have not finished after ``most_steps`` calls of ``schedule()``.
        """
        waiting = deque(sorted(arrivals, key=lambda arrival: arrival[0]))
        for _ in range(most_steps):
            while waiting and waiting[0][0] <= self.now_s:
                self.scheduler.add_request(waiting.popleft()[1])
            if self.is_busy:
                self.step()
            elif waiting:
                self.now_s = waiting[0][0]
            else:
                return
        raise TimeoutError(f"requests unfinished after {most_steps} steps")

    def _schedule(self) -> VirtualStep:
        before = None if self._on_step else read_composition(self.scheduler)
        output = self.scheduler.schedule()
        shape, samples = self._read(output)
        seconds = self._step_time_s(shape) if shape.tokens else 0.0
        finished_s = self.now_s
        if shape.tokens:
            self._device_free_s = max(self.now_s, self._device_free_s) + seconds
            finished_s = self._device_free_s
        step = VirtualStep(
            output=output,
            before=before,
            shape=shape,
            samples=samples,
            seconds=seconds,
            finished_s=finished_s,
        )
        self._in_flight.append(step)
        if shape.tokens:
            (self._on_step or self.steps.append)(step)
        return step

    def _read(self, output: SchedulerOutput) -> tuple[BatchShape, frozenset[str]]:
        """Return what a step computes, and who gets a token from it."""
        requests, decoding = self.scheduler.requests, self._decoding
        decoding.difference_update(output.finished_req_ids, output.preempted_req_ids or ())
        chunks, samples = [], []
        seqs = tokens = context = 0
        for request_id, new in output.num_scheduled_tokens.items():
            request = requests[request_id]
            computed_before = request.num_computed_tokens - new
            if request_id in decoding:
                seqs += 1
                tokens += new
                context += computed_before
            else:
                chunks.append((new, max(0, computed_before)))
            if not request.is_prefill_chunk:
                samples.append(request_id)
        decoding.update(samples)
        shape = BatchShape(
            prefills=tuple(chunks),
            decode_seqs=seqs,
            decode_tokens=tokens,
            decode_context=context,
            encoder_tokens=read_encoder_tokens(self.scheduler, output),
        )
        return shape, frozenset(samples)

    def _complete(self, step: VirtualStep) -> None:
        self.now_s = max(self.now_s, step.finished_s)
        outputs = self.scheduler.update_from_output(step.output, self._runner_output(step))
        for engine_outputs in outputs.values():
            for output in engine_outputs.outputs:
                times_s = self.token_times_s[output.request_id]
                times_s.extend([self.now_s] * len(output.new_token_ids))
                if self._on_token is not None and output.new_token_ids:
                    self._on_token(output.request_id)
        self._propose_drafts(step)
        if not step.shape.tokens:
            self.now_s += _EMPTY_STEP_S

    def _runner_output(self, step: VirtualStep) -> ModelRunnerOutput:
        ids = list(step.output.num_scheduled_tokens)
        if not ids:
            return EMPTY_MODEL_RUNNER_OUTPUT
        drafts = step.output.scheduled_spec_decode_tokens
        tokens = [
            [_TOKEN] * (1 + self._accept_drafts(len(drafts.get(request_id, ()))))
            if request_id in step.samples
            else []
            for request_id in ids
        ]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=tokens,
        )

    def _propose_drafts(self, step: VirtualStep) -> None:
        # Under sync scheduling EngineCore hands the drafter's tokens back after each step.
        drafts = self.scheduler.num_spec_tokens
        if not drafts or self._depth > 1:
            return
        for request_id in step.samples:
            request = self.scheduler.requests.get(request_id)
            if request is not None and request.status is RequestStatus.RUNNING:
                request.spec_token_ids = [_TOKEN] * drafts
