"""What must hold in every step of vLLM's scheduler under the plugin, whatever was done to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from math import ceil, inf

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
from vllm.v1.request import Request, RequestStatus

from vllm_penalty_sched.engine.virtual_config import BLOCK_SIZE
from vllm_penalty_sched.engine.virtual_engine import VirtualStep
from vllm_penalty_sched.policy import Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """All of vLLM's own settings that a plugin could be tempted to change."""

    step_tokens: int
    batched_tokens: int
    seqs: int
    running_seqs: int
    long_prefill_tokens: int
    chunked_prefill: bool

    @classmethod
    def of(cls, scheduler: VllmScheduler) -> Knobs:
        config = scheduler.scheduler_config
        return cls(
            step_tokens=scheduler.max_num_scheduled_tokens,
            batched_tokens=config.max_num_batched_tokens,
            seqs=config.max_num_seqs,
            running_seqs=scheduler.max_num_running_reqs,
            long_prefill_tokens=config.long_prefill_token_threshold,
            chunked_prefill=config.enable_chunked_prefill,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """What the next step owes to whom, looked up before it is scheduled.

    Attributes:
        now_s: Virtual time.
        is_paused: Whether vLLM pauses admission or everything.
        decodes_due: Tokens that each running decode must get.
        prefilling: Admitted requests that prefill, in vLLM's order.
        could_use: Those of them that can use any number of tokens: no images wait for a cache.
        could_prefill: Whether stock vLLM would surely prefill something in an empty enough step.
    """

    now_s: float
    is_paused: bool
    decodes_due: dict[str, int]
    prefilling: tuple[str, ...]
    could_use: frozenset[str]
    could_prefill: bool

    @classmethod
    def of(cls, scheduler: VllmScheduler, now_s: float) -> Before:
        is_paused = scheduler.pause_state != PauseState.UNPAUSED
        prefilling = [request for request in scheduler.running if request.is_prefill_chunk]
        if scheduler.policy == SchedulingPolicy.PRIORITY:
            prefilling.sort(key=lambda request: (request.priority, request.arrival_time))
        due = {
            request.request_id: tokens_due(scheduler, request)
            for request in scheduler.running
            if not request.is_prefill_chunk
        }
        return cls(
            now_s=now_s,
            is_paused=is_paused,
            decodes_due=due,
            prefilling=tuple(request.request_id for request in prefilling),
            could_use=frozenset(
                request.request_id
                for request in prefilling
                if not request.has_encoder_inputs and tokens_due(scheduler, request)
            ),
            could_prefill=not is_paused and _could_prefill(scheduler, prefilling, due),
        )


def tokens_due(scheduler: VllmScheduler, request: Request) -> int:
    """What vLLM's loop over ``running`` gives a request if nothing limits the step (0.32)."""
    in_flight, computed = request.num_output_placeholders, request.num_computed_tokens
    last = request.num_prompt_tokens + request.max_tokens
    if in_flight and computed + 2 - in_flight >= last:
        return 0
    if scheduler.current_step + 1 < request.next_decode_eligible_step:
        return 0
    longest = scheduler.max_model_len - scheduler.num_sampled_tokens_per_step
    return max(0, min(request.num_tokens_with_spec + in_flight, longest) - computed)


def _could_prefill(
    scheduler: VllmScheduler, prefilling: list[Request], due: dict[str, int]
) -> bool:
    """Whether somebody waits for nothing but tokens; False where that is not certain."""
    # Each running request may take a block or two; vLLM keeps one for itself.
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks() - 1
    free -= 2 * len(scheduler.running)
    if prefilling:
        first = prefilling[0]
        left = tokens_due(scheduler, first)
        return bool(left) and not first.has_encoder_inputs and ceil(left / BLOCK_SIZE) < free
    most = getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs)  # from 0.31
    seats = most - len(scheduler.running)
    ready = list(_ready(scheduler))
    room = scheduler.max_num_scheduled_tokens - sum(due.values())
    if seats - scheduler.num_waiting_for_streaming_input <= 0 or not ready:
        return False
    if not scheduler.scheduler_config.enable_chunked_prefill:
        room -= max(request.num_tokens for request in ready)
    longest = max(ceil(request.num_tokens / BLOCK_SIZE) for request in ready)
    return room >= 0 and longest + 1 < free and all(map(_waits_for_tokens_alone, ready))


def _ready(scheduler: VllmScheduler) -> Iterator[Request]:
    for request in chain(getattr(scheduler, "kv_holding_waiting", ()), scheduler.waiting):
        if request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            yield request


def _waits_for_tokens_alone(request: Request) -> bool:
    return (
        request.lora_request is None
        and not request.has_encoder_inputs
        and not request.num_stale_output_tokens
    )


@dataclass(slots=True, kw_only=True)
class StepLaws:
    """Checks each step against what was due, and follows how long nobody could prefill.

    Attributes:
        knobs: As they were when the scheduler was new.
        max_defer_s: After so long without prefill, the next step must have some.
        steers: Whether the plugin is to plan steps at all.
    """

    knobs: Knobs
    max_defer_s: float
    steers: bool
    _starved_since_s: float = field(default=inf)

    def clock_went_back(self) -> None:
        """Start the wait afresh: a scheduler cannot know how long it was."""
        self._starved_since_s = inf

    def check(
        self, before: Before, step: VirtualStep, after: VllmScheduler, decision: Decision | None
    ) -> list[str]:
        """Return what was broken, in words, by a step that was just scheduled."""
        granted = step.output.num_scheduled_tokens
        preempted = set(step.output.preempted_req_ids or ())
        prefill_tokens = sum(
            tokens for name, tokens in granted.items() if name not in before.decodes_due
        )
        problems = []
        if Knobs.of(after) != self.knobs:
            problems.append(f"knobs: {Knobs.of(after)} instead of {self.knobs}")
        if sum(granted.values()) > self.knobs.step_tokens:
            problems.append(f"budget: {sum(granted.values())} tokens exceed the engine's own")
        if self.steers and not before.is_paused:
            problems += _decodes_without_tokens(before, granted, preempted)
            problems += _overtaken(before, granted, preempted)
        if decision is not None:
            problems += self._outside_budget(before, granted, preempted, decision)
        problems += self._starved(before, prefill_tokens, is_disturbed=bool(preempted))
        return problems

    def _outside_budget(
        self, before: Before, granted: dict[str, int], preempted: set[str], decision: Decision
    ) -> list[str]:
        budget = decision.prefill_tokens
        if budget is None:
            return []
        if not 0 <= budget <= self.knobs.step_tokens:
            return [f"budget: {budget} prefill tokens, the engine has {self.knobs.step_tokens}"]
        decode_tokens = sum(before.decodes_due.values())
        prefill_tokens = sum(
            tokens for name, tokens in granted.items() if name not in before.decodes_due
        )
        # A decode that loses its blocks within the step hands its tokens on (priority policy).
        handed_on = sum(before.decodes_due.get(name, 0) for name in preempted)
        if prefill_tokens > budget + handed_on:
            return [f"budget: {prefill_tokens} prefill tokens exceed {budget}"]
        if sum(granted.values()) > decode_tokens + budget:
            return [f"budget: {sum(granted.values())} exceed {decode_tokens} + {budget}"]
        return []

    def _starved(self, before: Before, prefill_tokens: int, *, is_disturbed: bool) -> list[str]:
        if prefill_tokens or not before.could_prefill or is_disturbed:
            self._starved_since_s = inf
            return []
        waited_s = before.now_s - self._starved_since_s
        if waited_s == -inf:
            self._starved_since_s = before.now_s
        elif waited_s > self.max_defer_s + 1e-9:
            self._starved_since_s = inf
            return [f"starved: no prefill for {waited_s:.3f} s, max_defer_s {self.max_defer_s}"]
        return []


def _decodes_without_tokens(
    before: Before, granted: dict[str, int], preempted: set[str]
) -> list[str]:
    return [
        f"decode: {name} got {granted.get(name, 0)} of {tokens} tokens"
        for name, tokens in before.decodes_due.items()
        if granted.get(name, 0) != tokens and name not in preempted
    ]


def _overtaken(before: Before, granted: dict[str, int], preempted: set[str]) -> list[str]:
    """Admitted prefills go first, and in their order: then each gets its turn."""
    order = before.prefilling
    first = next((name for name in order if name in before.could_use), None)
    if preempted or first is None or first in granted:
        return []
    ahead = {*before.decodes_due, *order[: order.index(first)]}
    overtakers = [name for name in granted if name not in ahead]
    return [f"overtaken: {first} got nothing, but {name} did" for name in overtakers[:1]]
