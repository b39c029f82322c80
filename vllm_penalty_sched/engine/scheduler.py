"""vLLM's scheduler with a planned prefill budget in each step."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler as VllmAsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import RequestQueue, SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler

from vllm_penalty_sched.engine.compatibility import find_problems, pass_through_warning
from vllm_penalty_sched.engine.composition import (
    Composition,
    could_admit,
    read_composition,
    read_demands,
    read_prefilling,
    read_scheduled,
    wanted_tokens,
)
from vllm_penalty_sched.engine.configuration import (
    ranked_path,
    read_model,
    read_settings,
)
from vllm_penalty_sched.engine.decision_notes import DecisionNotes
from vllm_penalty_sched.engine.fault_guard import STRICT_VARIABLE, FaultGuard
from vllm_penalty_sched.engine.kv_loads import KvLoads, may_load, put_ahead, read_loads
from vllm_penalty_sched.engine.learned_state import StateSaver
from vllm_penalty_sched.engine.prefill_sides import PrefillSides, start_sides
from vllm_penalty_sched.engine.request_slos import RequestSlos
from vllm_penalty_sched.engine.slack_queue import SlackQueue
from vllm_penalty_sched.engine.step_limits import (
    PlannedStep,
    find_limits,
    held_within,
    put_decodes_first,
)
from vllm_penalty_sched.engine.step_reports import StepReports
from vllm_penalty_sched.engine.step_timer import StepTimer
from vllm_penalty_sched.engine.step_trace import StepTrace
from vllm_penalty_sched.engine.stock import config_in, is_diffusion, make_stock_scheduler
from vllm_penalty_sched.engine.token_deadlines import TokenDeadlines
from vllm_penalty_sched.planner import Planner, StepLoad
from vllm_penalty_sched.policy import Reason

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

log = logging.getLogger("vllm.penalty_sched")


class Scheduler(FaultGuard, VllmScheduler):  # type: ignore[misc]  # vLLM is not type-checked here
    """The class to name in ``--scheduler-cls``; right for sync and async scheduling.

    Before vLLM's ``schedule()`` it puts running decodes first and lowers the step's token budget
    to their tokens plus the planned prefill tokens; afterwards it restores the budget. Everything
    else is vLLM's.
    """

    clock: Callable[[], float] = staticmethod(time.monotonic)
    # None where vLLM is not one that we can steer, or was built without __init__ (by vLLM's tests):
    # such a scheduler behaves like stock.
    planner: Planner | None = None
    # Chooses between the prefill instance and this one; None unless there is one to ask.
    sides: PrefillSides | None = None
    _is_throttled = False
    _steers = False
    max_num_scheduled_tokens: int
    waiting: RequestQueue

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Choose the class for the model and the scheduling mode, which is final by now."""
        config = config_in(args, kwargs)
        if is_diffusion(config):
            log.warning("penalty_sched is off: diffusion models keep vLLM's own scheduler")
            return make_stock_scheduler(*args, **kwargs)
        if cls is Scheduler and config.scheduler_config.async_scheduling:
            cls = AsyncPenaltyScheduler
        return object.__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        problems = find_problems(self)
        if problems:
            log.warning(pass_through_warning(problems))
            return
        settings = read_settings(self.vllm_config)
        self.planner = Planner(settings, read_model(settings, self.vllm_config))
        self.reasons: Counter[str] = Counter()
        self._steers = settings.mode == "enforce"
        self._orders = self._steers and settings.order == "slack"
        self._ttft_slo_s = math.inf if settings.ttft_slo_ms is None else settings.ttft_slo_ms / 1e3
        self._is_strict = os.environ.get(STRICT_VARIABLE) == "1"
        self._timer = StepTimer()
        self._deadlines = TokenDeadlines() if settings.pacing == "deadline" else None
        self._slos = RequestSlos(least_tbt_slo_s=(settings.least_request_tbt_slo_ms or 0.0) / 1e3)
        self._notes = DecisionNotes(settings)
        self._reports = StepReports(self)
        rank = self.parallel_config.data_parallel_index
        self._trace = (
            StepTrace(ranked_path(settings.trace_path, rank)) if settings.trace_path else None
        )
        self._saver = (
            StateSaver(ranked_path(settings.state_path, rank)) if settings.state_path else None
        )
        self.sides = start_sides(self, self.planner)

    def add_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Take in a request and the SLOs in its ``vllm_xargs``."""
        if self.planner is not None:
            self._guarded(self._slos.add, request, self.requests)
            if self._orders:
                self._guarded(self._order_waiting, request)
            if self.sides is not None:
                slo_s = self._ttft_slo_of(request)
                self._guarded(self.sides.choose, self, self.planner, request, slo_s)
        super().add_request(request, *args, **kwargs)
        if self.planner is not None and self.connector is not None and may_load(request):
            self._guarded(put_ahead, self, request)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule one step within the planned budget."""
        if self.planner is None:
            return super().schedule(*args, **kwargs)
        started_s = self.clock()
        # The one argument: data-parallel ranks keep prefills to steps that they share.
        self._is_throttled = any((*args, *kwargs.values()))
        self._guarded(self._count_faulty_steps, started_s)
        if self.sides is not None:
            self._guarded(self.sides.take_in, self, started_s)
        prefilling = self._guarded(read_prefilling, self)
        loads = self._guarded(read_loads, self)
        planned = None
        if prefilling is not None and self._may_steer():
            planned = self._guarded(self._prepare, self.planner, prefilling, loads, started_s)
        output = self._schedule_within(planned, *args, **kwargs)
        if prefilling is not None:
            take_in = partial(self._take_in, loads=loads, started_s=started_s)
            self._guarded(take_in, self.planner, output, prefilling, planned)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> Any:
        """Learn from the step that ended, then let vLLM process its output."""
        if self.planner is None:
            return super().update_from_output(scheduler_output, *args, **kwargs)
        now_s = self.clock()
        self._guarded(self._learn, self.planner, scheduler_output, now_s)
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)
        if self._deadlines is not None and self._steers:
            self._guarded(partial(self._deadlines.take_in, outputs, now_s=now_s))
        self._guarded(self._reports.send, self, self.planner, outputs, now_s)
        if not self.running or self.pause_state != PauseState.UNPAUSED:
            self._guarded(self._timer.idle)
        return outputs

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Pause or go on: the time in between is no step's."""
        super().set_pause_state(pause_state)
        if self.planner is not None:
            self._guarded(self._timer.idle)

    def shutdown(self) -> None:
        """Write what was learned and the rest of the trace, then let vLLM shut down."""
        if self.planner is not None:
            self._guarded(self._save, self.planner)
        super().shutdown()

    def _save(self, planner: Planner) -> None:
        # Not left to the interpreter's end: a forked process has none.
        if self._trace is not None:
            self._trace.close()
        if self._saver is not None and planner.model.is_fitted:
            self._saver.take(planner.model)
            self._saver.write()

    def _order_waiting(self, request: Request) -> None:
        """Put our queue in the place of vLLM's once a request has a TTFT SLO."""
        if isinstance(self.waiting, SlackQueue) or math.isinf(self._ttft_deadline_s(request)):
            return
        queue = SlackQueue(
            deadline_s=self._deadline_in_queue_s,
            tokens_left=self._tokens_in_queue,
            by_priority=self.policy == SchedulingPolicy.PRIORITY,
        )
        for waiting in self.waiting:
            queue.add_request(waiting)
        self.waiting = queue

    def _ttft_slo_of(self, request: Request) -> float:
        own_s = self._slos.ttft_s(request.request_id)
        return self._ttft_slo_s if own_s is None else own_s

    def _ttft_deadline_s(self, request: Request) -> float:
        return self.clock() + self._ttft_slo_of(request)

    def _deadline_in_queue_s(self, request: Request) -> float:
        # vLLM's own calls reach these two through the queue: outside of any other guard.
        deadline_s: float | None = self._guarded(self._ttft_deadline_s, request)
        return math.inf if deadline_s is None else deadline_s

    def _tokens_in_queue(self, request: Request) -> int:
        tokens: int | None = self._guarded(wanted_tokens, self, request)
        return int(request.num_tokens) if tokens is None else tokens

    def _may_steer(self) -> bool:
        may_plan = self._steers and not self._is_suspended
        return may_plan and self.pause_state == PauseState.UNPAUSED

    def _prepare(
        self,
        planner: Planner,
        prefilling: Sequence[Request],
        loads: KvLoads | None,
        now_s: float,
    ) -> PlannedStep:
        planned = self._plan(planner, prefilling, loads, now_s)
        self._put_decodes_first(planned.before)
        limits = find_limits(self, planned.decision.prefill_tokens, planned.before, loads)
        return planned if limits is None else replace(planned, limits=limits)

    def _plan(
        self,
        planner: Planner,
        prefilling: Sequence[Request],
        loads: KvLoads | None,
        now_s: float,
    ) -> PlannedStep:
        if not prefilling and not could_admit(self):
            own_slo_s = self._slos.tightest_tbt_s(request.request_id for request in self.running)
            return PlannedStep(planner.nothing_to_prefill(own_slo_s))
        if isinstance(self.waiting, SlackQueue):
            self._rank(self.waiting, planner, prefilling, now_s)
        if len(prefilling) == len(self.running):
            return PlannedStep(planner.nothing_to_protect())
        before = read_composition(self, loads)
        demands, could_use = read_demands(self, before.prefills)
        load = StepLoad(
            decodes=before.decodes,
            demands=demands,
            demands_could_use_tokens=could_use and not self._is_throttled,
            own_slo_s=self._slos.tightest_tbt_s(before.decode_needs),
            base_tokens=self.max_num_scheduled_tokens,
            slack_s=self._slack_s(planner, before, now_s),
        )
        decision = planner.plan(load, now_s)
        if decision.reason is Reason.AGED and could_use and demands[0].is_waiting:
            # What was found in the prefix cache may be gone: a prompt that cannot be chunked would
            # not fit into the one budget in max_defer_s.
            demands, _ = read_demands(self, before.prefills, looks_afresh=True)
            load = replace(load, demands=demands)
            decision = planner.plan(load, now_s)
        return PlannedStep(decision, load, before)

    def _slack_s(self, planner: Planner, before: Composition, now_s: float) -> float | None:
        default_s = planner.latest_slo_s
        if self._deadlines is None or default_s is None or not planner.model.is_fitted:
            return None
        self._deadlines.forget_all_but(self.requests)
        return self._deadlines.slack_s(
            [self.requests[name] for name in before.decode_needs],
            slo_s=lambda name: self._slos.tbt_s(name) or default_s,
            starts_s=self._timer.next_start_s(now_s, planner.model.predict_s),
        )

    def _rank(
        self, queue: SlackQueue, planner: Planner, prefilling: Sequence[Request], now_s: float
    ) -> None:
        queue.rank(
            now_s,
            planner.prefill_tokens_per_s,
            started_tokens=sum(
                request.num_tokens - request.num_computed_tokens for request in prefilling
            ),
            latency_s=planner.limited_step_s * (1 + self._timer.in_flight),
        )

    def _schedule_within(
        self, planned: PlannedStep | None, *args: Any, **kwargs: Any
    ) -> SchedulerOutput:
        if planned is None or planned.limits is None:
            return super().schedule(*args, **kwargs)
        with held_within(self, planned.limits):
            return super().schedule(*args, **kwargs)

    def _put_decodes_first(self, before: Composition | None) -> None:
        put_decodes_first(self, before)

    def _take_in(
        self,
        planner: Planner,
        output: SchedulerOutput,
        prefilling: Sequence[Request],
        planned: PlannedStep | None,
        *,
        loads: KvLoads | None,
        started_s: float,
    ) -> None:
        shape = read_scheduled(self, output, prefilling, loads)
        decision = planned.decision if planned else None
        self._timer.scheduled(output, shape, decision, started_s=started_s)
        if planned is None:
            return
        self.reasons[planned.decision.reason] += 1
        if planned.load is not None:
            planner.scheduled(
                planned.decision,
                planned.load,
                prefill_tokens=shape.prefill_tokens,
                now_s=started_s,
            )
            self._notes.about(planned.decision, planned.load.decodes)

    def _learn(self, planner: Planner, output: SchedulerOutput, now_s: float) -> None:
        step = self._timer.completed(output, done_s=now_s)
        if step is None:
            return
        predicted_s = planner.learn(step.shape, step.seconds, step.decision)
        if self._saver is not None:
            self._saver.offer(planner.model, now_s=now_s)
        if self._trace is not None:
            margin = planner.margin.relative
            choices = self.sides.take_notes() if self.sides is not None else ()
            self._trace.add(
                step,
                done_s=now_s,
                predicted_s=predicted_s,
                margin=margin,
                slo_s=planner.latest_slo_s,
                choices=choices,
            )
        self._reports.add(step, predicted_s, planner)


class AsyncPenaltyScheduler(Scheduler, VllmAsyncScheduler):  # type: ignore[misc]  # as above
    """What ``Scheduler`` becomes under async scheduling."""
