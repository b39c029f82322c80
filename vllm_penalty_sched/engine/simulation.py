"""Play a trace through vLLM's scheduler or ours on virtual time."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler as VllmAsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler

from vllm_penalty_sched.engine.scheduler import Scheduler
from vllm_penalty_sched.engine.step_counter import StepCounter
from vllm_penalty_sched.engine.virtual_cluster import VirtualCluster
from vllm_penalty_sched.engine.virtual_config import make_request, make_scheduler, make_vllm_config
from vllm_penalty_sched.engine.virtual_engine import VirtualEngine
from vllm_penalty_sched.engine.virtual_pair import DECODE, PREFILL, VirtualPair
from vllm_penalty_sched.planner import Planner, StepLoad
from vllm_penalty_sched.policy import Decision, Reason
from vllm_penalty_sched.settings import Settings
from vllm_penalty_sched.simulation.device import NoMargin, TrueStepTimes, VirtualDevice
from vllm_penalty_sched.simulation.goodput import ServedRequest, measure_goodput
from vllm_penalty_sched.simulation.plan import SimulationPlan
from vllm_penalty_sched.simulation.result import SimulationResult
from vllm_penalty_sched.simulation.scheduler_spec import SchedulerKind, SchedulerSpec
from vllm_penalty_sched.simulation.traces import HASH_BLOCK_TOKENS, TraceRequest

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from vllm_penalty_sched.learning.latency import StepTimeModel
    from vllm_penalty_sched.simulation.device import DeviceSpec
    from vllm_penalty_sched.simulation.link import LinkSpec

# Turns of the engine's loop between two looks at the real clock.
_TURNS_A_LOOK = 500
_SAY_EVERY_S = 10.0
# Largest step of a prefill instance: more prompts in one step would all wait for the last one.
_PREFILL_BUDGET = 2048


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


class _Run:
    """The engines of one scheduler spec, and what was counted."""

    def __init__(self, spec: SchedulerSpec, plan: SimulationPlan) -> None:
        self._spec = spec
        self._plan = plan
        self._counters: list[StepCounter] = []
        places = range(2 if spec.kind is SchedulerKind.PAIR else spec.engines)
        self._cluster = VirtualCluster([self._make_engine(place) for place in places])
        self._pair = self._make_pair() if spec.kind is SchedulerKind.PAIR else None

    def play(self, *, say: Callable[[str], None] | None, most_misses: float) -> None:
        """Play the requests in until all are finished or the time is up."""
        cluster, plan = self._cluster, self._plan
        arrivals = self._make_requests()
        request = next(arrivals, None)
        said_s = time.perf_counter()
        turns = 0
        while True:
            while request is not None and request.arrival_time <= cluster.next_s:
                self._take_in(request)
                request = next(arrivals, None)
            if cluster.next_s > plan.end_s:
                return
            cluster.step()
            turns += 1
            if turns % _TURNS_A_LOOK:
                continue
            if self._certain_misses() > most_misses:
                return
            if say is not None and time.perf_counter() - said_s > _SAY_EVERY_S:
                said_s = time.perf_counter()
                steps = sum(counter.steps for counter in self._counters)
                say(
                    f"{self._spec.name}: {cluster.now_s:.0f} of at most {plan.end_s:.0f} s, "
                    f"{steps} steps"
                )

    def result(self, *, wall_s: float) -> SimulationResult:
        """Return what came of the run."""
        plan, counters = self._plan, self._counters
        served = tuple(
            ServedRequest(
                arrival_s=request.arrival_s,
                token_times_s=tuple(self._token_times_s(str(index))),
                output_tokens=request.output_tokens,
            )
            for index, request in enumerate(plan.requests)
        )
        decode_steps = sum(counter.decode_steps for counter in counters)
        return SimulationResult(
            scheduler=self._spec.name,
            served=served,
            prompt_tokens=tuple(request.prompt_tokens for request in plan.requests),
            goodput=measure_goodput(served, ttft_slo_s=plan.ttft_slo_s, tbt_slo_s=plan.tbt_slo_s),
            steps=sum(counter.steps for counter in counters),
            virtual_s=self._cluster.now_s,
            wall_s=wall_s,
            overrun_share=sum(counter.overruns for counter in counters) / max(1, decode_steps),
            longest_defer_s=max(counter.longest_defer_s for counter in counters),
            preemptions=sum(counter.preemptions for counter in counters),
            reasons=self._reasons(),
            choices=dict(self._pair.choices) if self._pair else {},
        )

    def _make_engine(self, place: int) -> VirtualEngine:
        spec, plan = self._spec, self._plan
        is_prefill = spec.kind is SchedulerKind.PAIR and place == PREFILL
        device_spec = (is_prefill and plan.prefill_device) or plan.device
        device = VirtualDevice(device_spec, np.random.default_rng(plan.seed + place))
        budget = min(spec.budget_tokens, _PREFILL_BUDGET) if is_prefill else spec.budget_tokens
        scheduler = _make_scheduler(spec, plan, budget_tokens=budget)
        counter = StepCounter(scheduler, tbt_slo_s=plan.tbt_slo_s)
        self._counters.append(counter)
        engine = VirtualEngine(
            scheduler,
            lambda shape: device.step_s(shape, engine.now_s),
            on_step=counter.count,
            on_token=self._prefilled if is_prefill else None,
        )
        if spec.kind is SchedulerKind.ORACLE:
            self._tell_costs(engine, device_spec)
        elif spec.kind is SchedulerKind.STATIC:
            scheduler.planner = StaticPlanner(self._settings)
        elif spec.kind is SchedulerKind.UNGUARDED:
            cast("Planner", scheduler.planner).guards_admission = False
        return engine

    def _make_pair(self) -> VirtualPair:
        return VirtualPair(
            self._cluster,
            cast("LinkSpec", self._plan.link),  # plan.check() says so
            remote_from_tokens=self._spec.remote_from_tokens,
            ttft_slo_s=self._plan.ttft_slo_s,
            prefill_only=self._make_prefill,
        )

    def _prefilled(self, name: str) -> None:
        cast("VirtualPair", self._pair).prefilled(name)

    def _take_in(self, request: Request) -> None:
        if self._pair is not None:
            place, act = DECODE, partial(self._pair.take_in, request)
        else:
            engines = self._cluster.engines
            place = min(range(len(engines)), key=self._load)
            act = partial(engines[place].scheduler.add_request, request)
        self._cluster.send(place, request.arrival_time, act)

    def _load(self, place: int) -> int:
        """Return what vLLM's own balancer for data parallelism keeps even."""
        running, waiting = self._cluster.engines[place].scheduler.get_request_counts()
        return int(4 * (waiting + self._cluster.undelivered(place)) + running)

    def _reasons(self) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for engine in self._cluster.engines:
            counts.update(getattr(engine.scheduler, "reasons", {}))
        return {str(reason): count for reason, count in counts.items()}

    def _token_times_s(self, name: str) -> Sequence[float]:
        """Return when a request's tokens came; those of a prefill instance are thrown away."""
        engines = self._cluster.engines[:1] if self._pair else self._cluster.engines
        found = (times for engine in engines if (times := engine.token_times_s.get(name)))
        return next(found, ())

    def _make_requests(self) -> Iterator[Request]:
        """Make each request when it is about to arrive: a long trace's tokens are many."""
        return map(self._make_request, range(len(self._plan.requests)))

    def _make_request(self, index: int, ttft_slo_s: float | None = None) -> Request:
        """Return a request; with an SLO of its own the one that only prefills it."""
        request, caches = self._plan.requests[index], self._plan.engine.prefix_caching
        return make_request(
            str(index),
            _prompt(request, index) if caches else [0] * request.prompt_tokens,
            request.output_tokens if ttft_slo_s is None else 1,
            arrival_s=request.arrival_s,
            xargs=None if ttft_slo_s is None else {"ttft_slo_ms": 1e3 * ttft_slo_s},
            prefix_caching=caches,
        )

    def _make_prefill(self, name: str, ttft_slo_s: float) -> Request:
        return self._make_request(int(name), ttft_slo_s)

    @property
    def _settings(self) -> Settings:
        return Settings.from_mapping(self._plan.penalty_settings(self._spec.overrides))

    def _tell_costs(self, engine: VirtualEngine, device: DeviceSpec) -> None:
        settings = self._settings
        times = TrueStepTimes(device, lambda: engine.now_s)
        margin = None if device.noise_cv else NoMargin(settings.miss_rate)
        # The planner asks no more of its model than what TrueStepTimes answers.
        engine.scheduler.planner = Planner(settings, cast("StepTimeModel", times), margin=margin)

    def _certain_misses(self) -> int:
        """Return at least how many requests got their first token too late, or never will."""
        plan = self._plan
        now_s = min(engine.now_s for engine in self._cluster.engines)
        due = bisect_right(
            plan.requests, now_s - plan.ttft_slo_s, key=lambda request: request.arrival_s
        )
        return sum(self._is_late(index) for index in range(due))

    def _is_late(self, index: int) -> bool:
        times_s = self._token_times_s(str(index))
        arrival_s = self._plan.requests[index].arrival_s
        return not times_s or times_s[0] - arrival_s > self._plan.ttft_slo_s


def _make_scheduler(
    spec: SchedulerSpec, plan: SimulationPlan, *, budget_tokens: int
) -> VllmScheduler:
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
        max_num_batched_tokens=budget_tokens,
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
