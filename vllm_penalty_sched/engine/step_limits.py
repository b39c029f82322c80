"""Hold one call of vLLM's ``schedule()`` within a planned step, by the inputs that it reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.core.sched.request_queue import SchedulingPolicy

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from vllm_penalty_sched.engine.composition import Composition
    from vllm_penalty_sched.engine.kv_loads import KvLoads
    from vllm_penalty_sched.engine.scheduler import Scheduler
    from vllm_penalty_sched.planner import StepLoad
    from vllm_penalty_sched.policy import Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """What one call may schedule.

    Attributes:
        budget_tokens: All tokens of the step.
        chunk_tokens: Most tokens of one request; 0: no limit.
        held: Running prefills that get none, for the sake of those whose KV cache is here.
        admits_prefills: Whether a waiting prompt may be admitted to be prefilled.
    """

    budget_tokens: int
    chunk_tokens: int
    held: tuple[Request, ...] = ()
    admits_prefills: bool = True


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A decision and what it was made from; None where a look at the queues was enough."""

    decision: Decision
    load: StepLoad | None = None
    before: Composition | None = None
    limits: StepLimits | None = None


def put_decodes_first(scheduler: Scheduler, before: Composition | None) -> None:
    """Let vLLM serve every running decode before the first prefill.

    Args:
        scheduler: Whose ``running`` to sort.
        before: What the step is made of, where it was looked at.
    """
    if scheduler.policy == SchedulingPolicy.PRIORITY:
        # A request that must give up its own blocks ends vLLM's loop over running (0.28-0.33):
        # with the least urgent last, no decode behind it goes without its tokens.
        scheduler.running.sort(key=_urgency)
    elif before is not None and not before.is_sorted:
        scheduler.running.sort(key=_is_prefilling)  # stable: vLLM's order within each kind


def _is_prefilling(request: Request) -> bool:
    return bool(request.is_prefill_chunk)


def _urgency(request: Request) -> tuple[bool, int, float]:
    return request.is_prefill_chunk, request.priority, request.arrival_time


def find_limits(
    scheduler: Scheduler,
    prefill_tokens: int | None,
    before: Composition | None,
    loads: KvLoads | None,
) -> StepLimits | None:
    """Return the limits of a step; None if there are none.

    Args:
        scheduler: With the requests in ``running`` in their final order.
        prefill_tokens: Most prefill tokens of the step; None: no limit.
        before: What it is made of; None where nobody decodes, or nobody could prefill.
        loads: Requests that vLLM is to have tokens left for; None: nobody.
    """
    if loads is None and (prefill_tokens is None or before is None):
        return None
    joining_tokens = loads.tokens if loads else 0
    decode_tokens = before.decodes.decode_tokens if before else joining_tokens
    most = scheduler.max_num_scheduled_tokens
    spare = int(loads.could_start) if loads else 0
    budget = most if prefill_tokens is None else min(most, decode_tokens + prefill_tokens + spare)
    chunk_tokens = int(scheduler.scheduler_config.long_prefill_token_threshold)
    if scheduler.need_mamba_block_aligned_split and prefill_tokens:
        # Lets a block wider than the budget advance in parts (vLLM 0.28-0.33).
        chunk_tokens = _tighter(scheduler, chunk_tokens, prefill_tokens)
    held: list[Request] = []
    if loads is not None:
        left, held = _share(scheduler, max(0, budget - decode_tokens - spare))
        if left:
            chunk_tokens = _tighter(scheduler, chunk_tokens, left)
    return StepLimits(
        budget_tokens=budget,
        chunk_tokens=chunk_tokens,
        held=tuple(held),
        admits_prefills=prefill_tokens != 0,
    )


@contextmanager
def held_within(scheduler: Scheduler, limits: StepLimits) -> Iterator[None]:
    """Let the block's call of ``schedule()`` keep to the limits."""
    config, sides = scheduler.scheduler_config, scheduler.sides
    base_tokens = scheduler.max_num_scheduled_tokens
    threshold = config.long_prefill_token_threshold
    scheduler.max_num_scheduled_tokens = limits.budget_tokens
    config.long_prefill_token_threshold = limits.chunk_tokens
    for request in limits.held:
        # schedule() counts up on entry: it is passed over once.
        request.next_decode_eligible_step = scheduler.current_step + 2
    if sides is not None:
        sides.admits_prefills = limits.admits_prefills
    try:
        yield
    finally:
        scheduler.max_num_scheduled_tokens = base_tokens
        config.long_prefill_token_threshold = threshold
        if sides is not None:
            sides.admits_prefills = True


def _share(scheduler: Scheduler, tokens: int) -> tuple[int, list[Request]]:
    """Keep running prefills, which vLLM serves first, from taking more than their share.

    Returns:
        Most tokens of the first one that does not fit, 0 if all fit; and those that get none.
    """
    cut, held = 0, []
    for request in scheduler.running:
        if not request.is_prefill_chunk:
            continue
        needed = request.num_tokens - request.num_computed_tokens
        if needed <= tokens:
            tokens -= needed
        elif tokens and not cut:
            cut, tokens = tokens, 0
        elif scheduler.lora_config is None:  # passing one over with a LoRA kills vLLM up to 0.32
            held.append(request)
    return cut, held


def _tighter(scheduler: Scheduler, chunk_tokens: int, tokens: int) -> int:
    # It limits decodes too, whose drafts it must not cut off.
    tokens = max(tokens, 1 + scheduler.num_spec_tokens)
    return min(chunk_tokens or tokens, tokens)
