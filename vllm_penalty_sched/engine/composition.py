"""Read off vLLM's scheduler what its next step will compute, without changing anything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any
from zlib import crc32

from vllm.v1.request import Request, RequestStatus

from vllm_penalty_sched.batch import BatchShape
from vllm_penalty_sched.engine.kv_loads import (
    READY,
    KvLoads,
    awaits_kv,
    free_seats,
    served_first,
)
from vllm_penalty_sched.policy import PrefillDemand

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler

# Prefills that one budget is planned for; more of them rarely fit beside running decodes.
MOST_DEMANDS = 8
# A waiting request's prefix-cache hit is looked up again every so many steps, not all in one.
_HIT_STEPS = 16
# Of a queue in which everybody may wait for a KV cache from elsewhere.
_MOST_LOOKED_AT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """The next step as it stands before vLLM schedules it.

    Attributes:
        decode_needs: Tokens that each decode will get, by request id; 0 for one that must wait
            for a step in flight.
        decodes: The decodes' part of the step, with those that join them with a KV cache computed
            elsewhere.
        prefills: Admitted requests that still prefill, with the tokens they need, in vLLM's order.
        is_sorted: Whether every decode stands before every prefill in ``running``.
    """

    decode_needs: Mapping[str, int]
    decodes: BatchShape
    prefills: Sequence[tuple[Request, int]]
    is_sorted: bool


def read_prefilling(scheduler: VllmScheduler) -> list[Request]:
    """Return the admitted requests that prefill, in vLLM's order."""
    return [request for request in scheduler.running if request.is_prefill_chunk]


def could_admit(scheduler: VllmScheduler) -> bool:
    """Return whether a request waits and there is a seat for one."""
    waiting = scheduler.waiting or served_first(scheduler)
    return bool(waiting) and free_seats(scheduler) > 0


def read_composition(scheduler: VllmScheduler, loads: KvLoads | None = None) -> Composition:
    """Return who decodes and who prefills in the next step, with exact token counts.

    The counts are those of vLLM's own loop over ``running`` (0.28-0.33) under an unlimited budget.

    Args:
        scheduler: vLLM's scheduler before it schedules.
        loads: From ``read_loads``.
    """
    next_step = scheduler.current_step + 1  # schedule() counts up on entry
    longest = scheduler.max_model_len - getattr(scheduler, "num_sampled_tokens_per_step", 1)
    decode_needs: dict[str, int] = {}
    prefills: list[tuple[Request, int]] = []
    tokens = context = 0
    is_sorted = True
    # One pass of a few attribute reads a request: with hundreds running it is what planning costs.
    for request in scheduler.running:
        computed = request.num_computed_tokens
        wanted = request.num_tokens_with_spec
        placeholders = request.num_output_placeholders
        if placeholders:
            # Async scheduling: the step in flight already brings the last token (vLLM's own rule).
            if computed + 2 - placeholders >= request.num_prompt_tokens + request.max_tokens:
                continue
            wanted += placeholders
        if wanted > longest:
            wanted = longest
        needed = wanted - computed
        if needed < 0 or request.next_decode_eligible_step > next_step:
            needed = 0
        if request.is_prefill_chunk:
            prefills.append((request, needed))
            continue
        if prefills:
            is_sorted = False
        decode_needs[request.request_id] = needed
        tokens += needed
        context += computed
    decodes = BatchShape(
        decode_seqs=len(decode_needs), decode_tokens=tokens, decode_context=context
    )
    decodes = decodes if loads is None else _with_arrived(decodes, loads)
    return Composition(
        decode_needs=decode_needs, decodes=decodes, prefills=prefills, is_sorted=is_sorted
    )


def _with_arrived(decodes: BatchShape, loads: KvLoads) -> BatchShape:
    return BatchShape(
        decode_seqs=decodes.decode_seqs + len(loads.arrived),
        decode_tokens=decodes.decode_tokens + loads.tokens,
        decode_context=decodes.decode_context
        + sum(request.num_tokens - 1 for request in loads.arrived),
    )


def read_demands(
    scheduler: VllmScheduler,
    prefills: Sequence[tuple[Request, int]],
    *,
    looks_afresh: bool = False,
) -> tuple[tuple[PrefillDemand, ...], bool]:
    """Return who wants prefill tokens, and whether any of them could use some.

    Args:
        scheduler: vLLM's scheduler before it schedules.
        prefills: The admitted ones, from ``read_composition``.
        looks_afresh: Whether to look up what the prefix cache holds of the first waiting request
            even if that was done a few steps ago.

    Returns:
        The first ``MOST_DEMANDS`` in the order in which vLLM will serve them. The second value is
        False if all of them wait for something else than tokens (a grammar, a KV transfer, blocks).
    """
    demands = [
        PrefillDemand(
            remaining=needed,
            cached=request.num_computed_tokens,
            minimum=_minimum_tokens(scheduler, request, needed),
            to_encode=_to_encode(scheduler, request, request.num_computed_tokens),
        )
        for request, needed in prefills[:MOST_DEMANDS]
        if needed
    ]
    waiting = list(islice(_admissible(scheduler), MOST_DEMANDS - len(demands)))
    if looks_afresh and waiting:
        waiting[0]._penalty_sched_hit = None
    # vLLM stops at the first waiting request that it cannot admit.
    could_use = bool(demands) or (bool(waiting) and _could_start(scheduler, waiting[0]))
    demands += [_waiting_demand(scheduler, request) for request in waiting]
    return tuple(demands), could_use


def _admissible(scheduler: VllmScheduler) -> Iterator[Request]:
    """Yield waiting requests in vLLM's order, ready ones alone if there are any."""
    seats = free_seats(scheduler)
    if seats <= 0:
        return iter(())
    first_served = islice(served_first(scheduler), _MOST_LOOKED_AT)
    queues = chain(first_served, islice(scheduler.waiting, _MOST_LOOKED_AT))
    wanting = (request for request in queues if not awaits_kv(scheduler, request))
    first = list(islice(wanting, 2 * MOST_DEMANDS))
    ready = [request for request in first if _is_ready(request)]
    return islice(ready or first, seats)


def uncached_tokens(
    scheduler: VllmScheduler, request: Request, *, is_estimate: bool = False
) -> int:
    """Return the tokens that must be computed for a waiting request.

    Args:
        scheduler: vLLM's scheduler.
        request: The request.
        is_estimate: Whether the prefix cache as it was at an earlier look at it is good enough.
    """
    return int(request.num_tokens - _cached_tokens(scheduler, request, is_estimate=is_estimate))


def wanted_tokens(scheduler: VllmScheduler, request: Request) -> int:
    """Return the tokens that are to be prefilled here for a waiting request, at least one."""
    return 1 if awaits_kv(scheduler, request) else max(1, uncached_tokens(scheduler, request))


def _waiting_demand(scheduler: VllmScheduler, request: Request) -> PrefillDemand:
    cached = _cached_tokens(scheduler, request)
    remaining = max(1, request.num_tokens - cached)
    if remaining == 1 and scheduler.num_spec_tokens > 0:
        # vLLM pads such a request to a whole row of drafts, and waits if that does not fit.
        remaining = 1 + scheduler.num_spec_tokens
    return PrefillDemand(
        remaining=remaining,
        cached=cached,
        minimum=_minimum_tokens(scheduler, request, remaining),
        is_waiting=True,
        to_encode=_to_encode(scheduler, request, cached),
    )


def _minimum_tokens(scheduler: VllmScheduler, request: Request, needed: int) -> int:
    """Return the fewest tokens that make progress; vLLM grants nothing below (0.28-0.33).

    Encoder-decoder models have chunked prefill off. What stalls whatever the budget (a full encoder
    cache, LoRA slots, an operator's own too low ``long_prefill_token_threshold``) stalls stock too.
    """
    config = scheduler.scheduler_config
    if not config.enable_chunked_prefill:
        return needed
    minimum = max(1 + scheduler.num_spec_tokens, getattr(scheduler, "num_prefill_lookahead", 0))
    if request.has_encoder_inputs and config.disable_chunked_mm_input:
        start = request.num_computed_tokens
        ahead = [
            feature.mm_position.length
            for feature in request.mm_features
            if feature.mm_position.offset + feature.mm_position.length > start
        ]
        minimum = max(minimum, *ahead, 1)
    return int(min(minimum, needed))


def _to_encode(
    scheduler: VllmScheduler, request: Request, computed: int
) -> tuple[tuple[int, int], ...]:
    """Return position and tokens of the inputs that vLLM has an encoder work on (0.28-0.33).

    Args:
        scheduler: vLLM's scheduler before it schedules.
        request: One that prefills or waits.
        computed: Tokens of it that are computed, or in the prefix cache.
    """
    if not request.has_encoder_inputs or (scheduler.is_encoder_decoder and computed):
        return ()
    # The encoder of an encoder-decoder model keeps nothing.
    encoded = getattr(scheduler.encoder_cache_manager, "cached", ())
    shift = 1 if scheduler.use_eagle else 0  # a drafter looks a token ahead
    return tuple(
        (feature.mm_position.offset - shift, feature.mm_position.length)
        for feature in request.mm_features
        if feature.mm_position.offset + feature.mm_position.length > computed
        and feature.identifier not in encoded
    )


def _cached_tokens(scheduler: VllmScheduler, request: Request, *, is_estimate: bool = False) -> int:
    computed = request.num_computed_tokens
    return int(computed or _prefix_hit_tokens(scheduler, request, is_estimate=is_estimate))


def _prefix_hit_tokens(scheduler: VllmScheduler, request: Request, *, is_estimate: bool) -> int:
    """Look up the cached prefix as vLLM will, without its statistics and events."""
    manager = scheduler.kv_cache_manager
    if not manager.enable_caching or request.skip_reading_prefix_cache:
        return 0
    known: tuple[int, int] | None = getattr(request, "_penalty_sched_hit", None)
    turn = (scheduler.current_step + crc32(request.request_id.encode()) % _HIT_STEPS) // _HIT_STEPS
    if known is None or (known[0] != turn and not is_estimate):
        found: Any = manager.coordinator.find_longest_cache_hit(
            request.block_hashes, request.num_tokens - 1
        )
        hit_tokens = int(found[1])
        # Of a sliding window that is not cached vLLM computes the tokens again (0.31 and later).
        replayed = min(hit_tokens, getattr(scheduler, "prefix_replay_tokens", 0))
        known = (turn, hit_tokens - replayed)
        request._penalty_sched_hit = known
    return known[1]


def _is_ready(request: Request) -> bool:
    """Return whether vLLM's next look at a waiting request admits it, if it can."""
    if request.status is not RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
        return request.status in READY
    grammar = request.structured_output_request.grammar  # vLLM notices in schedule() that it came
    return grammar is not None and not isinstance(grammar, Exception)


def _could_start(scheduler: VllmScheduler, request: Request) -> bool:
    if not _is_ready(request) or request.lora_request is not None:
        return False
    free_blocks = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    return bool((free_blocks - 1) * scheduler.block_size > request.num_tokens)


def read_scheduled(
    scheduler: VllmScheduler,
    output: SchedulerOutput,
    prefilling: Iterable[Request],
    loads: KvLoads | None = None,
) -> BatchShape:
    """Return the shape of the step that vLLM scheduled; call it right after ``schedule()``.

    Args:
        scheduler: vLLM's scheduler.
        output: What it returned.
        prefilling: From ``read_prefilling``, before the call. Who was running and not among them
            decodes; who comes from waiting prefills, be it a single token, unless its KV cache
            comes from elsewhere.
        loads: From ``read_loads``, before the call.
    """
    granted = output.num_scheduled_tokens
    requests = scheduler.requests
    candidates = chain(
        [request.request_id for request in prefilling],
        [new.req_id for new in output.scheduled_new_reqs],
        output.scheduled_cached_reqs.resumed_req_ids,
    )
    joined = {request.request_id for request in loads.arrived} if loads else ()
    chunk_ids = [name for name in candidates if name in granted and name not in joined]
    chunks = [
        (granted[name], max(0, requests[name].num_computed_tokens - granted[name]))
        for name in chunk_ids
    ]
    seqs = len(granted) - len(chunks)
    tokens = output.total_num_scheduled_tokens - sum(new for new, _ in chunks)
    context = 0
    if seqs and len(granted) == len(scheduler.running):
        everything = sum([request.num_computed_tokens for request in scheduler.running])
        context = everything - tokens - sum(new + cached for new, cached in chunks)
    elif seqs:
        decoding = granted.keys() - chunk_ids
        context = sum(requests[name].num_computed_tokens for name in decoding) - tokens
    return BatchShape(
        prefills=tuple(chunks),
        decode_seqs=seqs,
        decode_tokens=tokens,
        decode_context=context,
        encoder_tokens=read_encoder_tokens(scheduler, output),
    )


def read_encoder_tokens(scheduler: VllmScheduler, output: SchedulerOutput) -> int:
    """Return the tokens of the images and sounds that an encoder works on in a step."""
    return sum(
        scheduler.requests[name].mm_features[index].mm_position.length
        for name, indices in output.scheduled_encoder_inputs.items()
        for index in indices
    )
