"""Read off a scheduler what prefilling a request here would cost."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from vllm_penalty_sched.disaggregation.pricing import LocalOffer, offer_here
from vllm_penalty_sched.engine.composition import (
    read_composition,
    read_prefilling,
    uncached_tokens,
)
from vllm_penalty_sched.engine.kv_loads import awaits_kv
from vllm_penalty_sched.engine.slack_queue import SlackQueue
from vllm_penalty_sched.policy import TRICKLE_SHARE, longest_planned_s

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
    from vllm.v1.request import Request

    from vllm_penalty_sched.batch import BatchShape
    from vllm_penalty_sched.planner import Planner


def read_offer(
    scheduler: VllmScheduler, planner: Planner, request: Request, *, tokens_ahead: int | None = None
) -> LocalOffer | None:
    """Return what prefilling a request here would cost.

    Args:
        scheduler: Ours, before it schedules.
        planner: Its planner.
        request: Waits, or is about to.
        tokens_ahead: Prefill tokens that go before it; None: those of everybody there, for a
            request that is not added yet.

    Returns:
        None while the step times are not known.
    """
    if planner.is_cold or planner.latest_slo_s is None:
        return None
    if tokens_ahead is None:
        tokens_ahead = read_tokens_ahead(scheduler)
    decodes = read_composition(scheduler).decodes
    tokens = max(1, uncached_tokens(scheduler, request))
    return offer_here(
        planner.model,
        decodes=decodes,
        tokens=tokens,
        cached=request.num_tokens - tokens,
        tokens_ahead=tokens_ahead,
        limit_s=_longest_step_s(planner, decodes, planner.latest_slo_s),
        most_tokens=scheduler.max_num_scheduled_tokens,
        max_defer_s=planner.max_defer_s,
    )


def read_tokens_ahead(scheduler: VllmScheduler) -> int:
    """Return the prefill tokens that go before those of a request that arrives now.

    Prompts that are late already wait behind it.
    """
    started = sum(
        request.num_tokens - request.num_computed_tokens for request in read_prefilling(scheduler)
    )
    waiting = scheduler.waiting
    if isinstance(waiting, SlackQueue):
        return int(started + waiting.tokens_in_time)
    here = [request for request in waiting if not awaits_kv(scheduler, request)]
    # With hundreds waiting, a fresh look at the prefix cache for each would stop the engine.
    tokens = sum(uncached_tokens(scheduler, request, is_estimate=True) for request in here)
    return int(started + tokens)


def _longest_step_s(planner: Planner, decodes: BatchShape, slo_s: float) -> float:
    if not decodes.decode_seqs:
        return math.inf
    decode_only_s = planner.model.predict_s(decodes)
    if decode_only_s > slo_s:
        return decode_only_s * (1.0 + TRICKLE_SHARE)
    return longest_planned_s(
        slo_s,
        decode_only_s,
        margin=planner.margin.relative_for(decodes),
        slowdown=planner.slowdown.factor,
    )
