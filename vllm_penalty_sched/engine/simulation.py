"""Play a trace through vLLM's scheduler or ours on virtual time."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler as VllmAsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler

from vllm_penalty_sched.engine.scheduler import Scheduler
from vllm_penalty_sched.engine.virtual_config import make_request, make_scheduler, make_vllm_config
from vllm_penalty_sched.engine.virtual_engine import VirtualEngine, VirtualStep
from vllm_penalty_sched.planner import Planner, StepLoad
from vllm_penalty_sched.policy import Decision, Reason
from vllm_penalty_sched.settings import Settings
from vllm_penalty_sched.simulation.device import NoMargin, TrueStepTimes, VirtualDevice
from vllm_penalty_sched.simulation.goodput import ServedRequest, measure_goodput
from vllm_penalty_sched.simulation.plan import SchedulerKind, SchedulerSpec, SimulationPlan
from vllm_penalty_sched.simulation.result import SimulationResult
from vllm_penalty_sched.simulation.traces import HASH_BLOCK_TOKENS, TraceRequest

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from vllm_penalty_sched.latency import StepTimeModel

# Turns of the engine's loop between two looks at the real clock.
_TURNS_A_LOOK = 500
_SAY_EVERY_S = 10.0


def simulate(
    spec: SchedulerSpec,
    plan: SimulationPlan,
    *,
    say: Callable[[str], None] | None = None,
    most_misses: float = np.inf,
) -> SimulationResult:
    """Run one scheduler.

    Args:
        spec: The scheduler.
        plan: The requests, the engine and the device.
        say: Gets a line about the progress every few seconds of a long run.
        most_misses: The run ends early once more requests than this have missed the TTFT SLO;
            those that were not served by then count as misses.

    Raises:
        ConfigError: If the scheduler cannot run in this engine or with these settings.
    """
    plan.check(spec)
    started_s = time.perf_counter()
    run = _Run(spec, plan)
    run.play(say=say, most_misses=most_misses)
    return run.result(wall_s=time.perf_counter() - started_s)


class StaticPlanner(Planner):
    """Plans nothing: vLLM's own budget holds in every step, and only the order is ours."""

    def plan(self, load: StepLoad, now_s: float) -> Decision:  # noqa: ARG002
        """Return a decision without a limit; its reason tells whether the budget suffices."""
        wanted = sum(demand.remaining for demand in load.demands)
        suffices = wanted <= load.base_tokens - load.decodes.decode_tokens
        return Decision(reason=Reason.FITS if suffices else Reason.SLO)


@dataclass(slots=True, kw_only=True)
class _StepCounts:
    """Counts over the steps with tokens."""

    steps: int = 0
    decode_steps: int = 0
    overruns: int = 0
    preemptions: int = 0
    longest_defer_s: float = 0.0
    deferred_since_s: float | None = None


class _Run:
    """One scheduler, its engine and what was counted."""

    def __init__(self, spec: SchedulerSpec, plan: SimulationPlan) -> None:
        self._spec = spec
        self._plan = plan
        self._scheduler = _make_scheduler(spec, plan)
        device = VirtualDevice(plan.device, np.random.default_rng(plan.seed))
        self._engine = VirtualEngine(
            self._scheduler,
            lambda shape: device.step_s(shape, self._engine.now_s),
            on_step=self._count,
        )
        self._counts = _StepCounts()
        if spec.kind is SchedulerKind.ORACLE:
            self._tell_costs()
        elif spec.kind is SchedulerKind.STATIC:
            self._our_scheduler.planner = StaticPlanner(self._settings)
        elif spec.kind is SchedulerKind.UNGUARDED:
            cast("Planner", self._our_scheduler.planner).guards_admission = False

    def play(self, *, say: Callable[[str], None] | None, most_misses: float) -> None:
        """Play the requests in until all are finished or the time is up."""
        engine, plan = self._engine, self._plan
        arrivals = self._make_requests()
        request = next(arrivals, None)
        said_s = time.perf_counter()
        turns = 0
        while engine.now_s <= plan.end_s:
            while request is not None and request.arrival_time <= engine.now_s:
                self._scheduler.add_request(request)
                request = next(arrivals, None)
            if engine.is_busy:
                engine.step()
            elif request is not None:
                engine.now_s = request.arrival_time
            else:
                return
            turns += 1
            if turns % _TURNS_A_LOOK:
                continue
            if self._certain_misses() > most_misses:
                return
            if say is not None and time.perf_counter() - said_s > _SAY_EVERY_S:
                said_s = time.perf_counter()
                say(
                    f"{self._spec.name}: {engine.now_s:.0f} of at most {plan.end_s:.0f} s, "
                    f"{self._counts.steps} steps"
                )

    def result(self, *, wall_s: float) -> SimulationResult:
        """Return what came of the run."""
        plan, counts = self._plan, self._counts
        served = tuple(
            ServedRequest(
                arrival_s=request.arrival_s,
                token_times_s=tuple(self._engine.token_times_s.get(str(index), ())),
                output_tokens=request.output_tokens,
            )
            for index, request in enumerate(plan.requests)
        )
        return SimulationResult(
            scheduler=self._spec.name,
            served=served,
            prompt_tokens=tuple(request.prompt_tokens for request in plan.requests),
            goodput=measure_goodput(served, ttft_slo_s=plan.ttft_slo_s, tbt_slo_s=plan.tbt_slo_s),
            steps=counts.steps,
            virtual_s=self._engine.now_s,
            wall_s=wall_s,
            overrun_share=counts.overruns / max(1, counts.decode_steps),
            longest_defer_s=counts.longest_defer_s,
            preemptions=counts.preemptions,
            reasons={str(k): n for k, n in getattr(self._scheduler, "reasons", {}).items()},
        )

    def _make_requests(self) -> Iterator[Request]:
        """Make each request when it is about to arrive: a long trace's tokens are many."""
        caches = self._plan.engine.prefix_caching
        for index, request in enumerate(self._plan.requests):
            yield make_request(
                str(index),
                _prompt(request, index) if caches else [0] * request.prompt_tokens,
                request.output_tokens,
                arrival_s=request.arrival_s,
                prefix_caching=caches,
            )

    @property
    def _our_scheduler(self) -> Scheduler:
        return cast("Scheduler", self._scheduler)

    @property
    def _settings(self) -> Settings:
        return Settings.from_mapping(self._plan.penalty_settings(self._spec.overrides))

    def _tell_costs(self) -> None:
        settings = self._settings
        times = TrueStepTimes(self._plan.device, lambda: self._engine.now_s)
        margin = None if self._plan.device.noise_cv else NoMargin(settings.miss_rate)
        # The planner asks no more of its model than what TrueStepTimes answers.
        self._our_scheduler.planner = Planner(settings, cast("StepTimeModel", times), margin=margin)

    def _certain_misses(self) -> int:
        """Return at least how many requests got their first token too late, or never will."""
        plan, now_s = self._plan, self._engine.now_s
        due = bisect_right(
            plan.requests, now_s - plan.ttft_slo_s, key=lambda request: request.arrival_s
        )
        times_s = self._engine.token_times_s
        return sum(
            str(index) not in times_s
            or times_s[str(index)][0] - plan.requests[index].arrival_s > plan.ttft_slo_s
            for index in range(due)
        )

    def _count(self, step: VirtualStep) -> None:
        counts, shape = self._counts, step.shape
        counts.steps += 1
        counts.preemptions += len(step.output.preempted_req_ids or ())
        if not shape.decode_seqs:
            counts.deferred_since_s = None
            return
        counts.decode_steps += 1
        counts.overruns += step.seconds > self._plan.tbt_slo_s
        if shape.prefills or not _wants_prefill(self._scheduler):
            counts.deferred_since_s = None
            return
        if counts.deferred_since_s is None:
            counts.deferred_since_s = step.finished_s - step.seconds
        counts.longest_defer_s = max(
            counts.longest_defer_s, step.finished_s - counts.deferred_since_s
        )


def _make_scheduler(spec: SchedulerSpec, plan: SimulationPlan) -> VllmScheduler:
    engine = plan.engine
    is_stock = spec.kind is SchedulerKind.STOCK
    stock_cls = VllmAsyncScheduler if engine.async_scheduling else VllmScheduler
    options: dict[str, Any] = {}
    if spec.long_prefill_threshold:
        options["long_prefill_token_threshold"] = spec.long_prefill_threshold
    config = make_vllm_config(
        settings=None if is_stock else plan.penalty_settings(spec.overrides),
        async_scheduling=engine.async_scheduling,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=spec.budget_tokens,
        max_model_len=engine.max_model_len,
        prefix_caching=engine.prefix_caching,
        **options,
    )
    scheduler_cls = stock_cls if is_stock else Scheduler
    return make_scheduler(scheduler_cls, config, kv_blocks=engine.kv_blocks, log_stats=False)


def _prompt(request: TraceRequest, index: int) -> list[int]:
    """Return token ids that are equal where, and only where, the trace says so."""
    if not request.hash_ids:
        return [index] * request.prompt_tokens
    tokens = [hash_id for hash_id in request.hash_ids for _ in range(HASH_BLOCK_TOKENS)]
    tokens += [-1 - index] * (request.prompt_tokens - len(tokens))
    return tokens[: request.prompt_tokens]


def _wants_prefill(scheduler: VllmScheduler) -> bool:
    """Whether some request could be given prefill tokens now, were there a budget."""
    if any(request.is_prefill_chunk for request in scheduler.running):
        return True
    if not scheduler.waiting or len(scheduler.running) >= scheduler.max_num_running_reqs:
        return False
    free_blocks = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    return bool(scheduler.waiting.peek_request().num_tokens < free_blocks * scheduler.block_size)
