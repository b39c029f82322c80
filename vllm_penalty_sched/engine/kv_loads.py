"""See which waiting requests get their KV cache from elsewhere, and how far they are."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING

from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
    from vllm.v1.request import Request

# Of the ordinary queue, whose first requests matter.
_MOST_LOOKED_AT = 16
READY = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLoads:
    """Requests that are to be served ahead of every prefill, as they need hardly a token.

    Attributes:
        arrived: Whose KV cache is here: like decodes, they need their prompt's last token.
        tokens: What these need, with vLLM's padding for speculative decoding.
        could_start: Whether vLLM could start reading a KV cache: it looks only while it has a token
            left to give, although a read costs none.
    """

    arrived: tuple[Request, ...]
    tokens: int
    could_start: bool

    @property
    def room_tokens(self) -> int:
        """Tokens that a step must have left when vLLM has served what runs."""
        return self.tokens + int(self.could_start)


def free_seats(scheduler: VllmScheduler) -> int:
    """Return how many more requests may run."""
    taken = len(scheduler.running) + scheduler.num_waiting_for_streaming_input
    seats = getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs)
    return int(seats - taken)


def served_first(scheduler: VllmScheduler) -> Collection[Request]:
    """Return the waiting requests that vLLM looks at before the ordinary queue.

    In 0.31-0.33 these hold KV blocks; in 0.28-0.30 an earlier step passed them over, as they waited
    for a grammar, a LoRA slot or a KV cache (under the priority policy the more urgent head goes).
    """
    first: Collection[Request] = getattr(scheduler, "kv_holding_waiting", ())
    return first or getattr(scheduler, "skipped_waiting", ())


def awaits_kv(scheduler: VllmScheduler, request: Request) -> bool:
    """Return whether a waiting request wants no prefill tokens, for its KV cache comes or is here.

    Without a KV connector none does.
    """
    if scheduler.connector is None:
        return False
    sides = getattr(scheduler.connector, "sides", None)
    if may_load(request) or (sides is not None and sides.is_asked(request)):
        return True
    if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
        return request.request_id not in scheduler.failed_recving_kv_req_ids
    return _has_arrived(scheduler, request)


def may_load(request: Request) -> bool:
    """Return whether a request's KV cache lies ready elsewhere, and reading it has not begun."""
    params = request.kv_transfer_params
    return bool(params and params.get("do_remote_prefill"))


def put_ahead(scheduler: VllmScheduler, request: Request) -> None:
    """Let vLLM look at a waiting request before every prompt: reading its KV cache takes no token.

    vLLM 0.31-0.33 serve those that hold blocks first, from a queue of their own. Ordered by
    priority, one that does not fit could keep those behind it from ending: there it stays put.
    """
    holding = getattr(scheduler, "kv_holding_waiting", None)
    if holding is None or scheduler.policy is SchedulingPolicy.PRIORITY:
        return
    scheduler.waiting.remove_request(request)
    holding.add_request(request)


def read_loads(scheduler: VllmScheduler) -> KvLoads | None:
    """Return whose KV caches are here or could be read; None if there are none.

    Without a KV connector it costs nothing.
    """
    if scheduler.connector is None:
        return None
    seats = free_seats(scheduler)
    if seats <= 0:
        return None
    queue = list(chain(served_first(scheduler), islice(scheduler.waiting, _MOST_LOOKED_AT)))
    arrived = [request for request in queue if _has_arrived(scheduler, request)][:seats]
    could_start = any(map(may_load, queue)) and len(arrived) < seats
    if not arrived and not could_start:
        return None
    return KvLoads(
        arrived=tuple(arrived),
        tokens=len(arrived) * (1 + scheduler.num_spec_tokens),
        could_start=could_start,
    )


def _has_arrived(scheduler: VllmScheduler, request: Request) -> bool:
    name = request.request_id
    if request.num_tokens - request.num_computed_tokens > 1 + scheduler.num_spec_tokens:
        return False
    if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
        return (
            name in scheduler.finished_recving_kv_req_ids
            and name not in scheduler.failed_recving_kv_req_ids
        )
    return request.status in READY and request.num_computed_tokens > 0
