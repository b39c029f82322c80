"""A prefill and a decode instance on virtual time, and who prefills which prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from vllm_penalty_sched.disaggregation.handover_time import HandoverTime
from vllm_penalty_sched.disaggregation.pricing import Side, choose
from vllm_penalty_sched.engine.composition import uncached_tokens
from vllm_penalty_sched.engine.prefill_offer import read_offer
from vllm_penalty_sched.simulation.link import Link

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from vllm_penalty_sched.engine.scheduler import Scheduler
    from vllm_penalty_sched.engine.virtual_cluster import VirtualCluster
    from vllm_penalty_sched.planner import Planner
    from vllm_penalty_sched.simulation.link import LinkSpec

# With async scheduling a request's first step follows one that is in flight.
_STEPS_IN_FLIGHT = 2
_LEAST_SLO_S = 1e-3

DECODE, PREFILL = 0, 1
"""Places of the two engines in the cluster."""


class VirtualPair:
    """Takes requests in at the decode instance, and sends some to the prefill instance first.

    The prefill instance computes a request's prompt and one token, which is thrown away, as in
    vLLM's protocol. Then its KV cache crosses the link, one after the other, and the request enters
    the decode instance as vLLM sees one whose KV cache has been received: with all but its last
    prompt token computed. (Its blocks there are taken when it is admitted, not when the transfer
    starts, and those on the prefill instance are free at once.) A request that the decode instance
    preempts later is computed anew there.

    Attributes:
        choices: How often each reason decided where to prefill.
    """

    def __init__(
        self,
        cluster: VirtualCluster,
        link: LinkSpec,
        *,
        remote_from_tokens: float | None,
        ttft_slo_s: float,
        prefill_only: Callable[[str, float], Request],
    ) -> None:
        """Set up a pair of fresh engines.

        Args:
            cluster: The decode instance and the prefill instance.
            link: Between the two.
            remote_from_tokens: Prompts with so many tokens to compute or more go to the prefill
                instance; None: those that it serves cheaper.
            ttft_slo_s: SLO of the time to the first token.
            prefill_only: Returns the request of a name with one output token and a TTFT SLO of
                its own, seconds.
        """
        self._cluster = cluster
        self._link_spec, self._link = link, Link(link)
        self._remote_from_tokens = remote_from_tokens
        self._ttft_slo_s = ttft_slo_s
        self._prefill_only = prefill_only
        self._scheduler: Scheduler = cluster.engines[DECODE].scheduler
        self._handovers = HandoverTime(self._guess_s)
        self._away: dict[str, Request] = {}
        self.choices: Counter[str] = Counter()

    @property
    def _planner(self) -> Planner:
        return cast("Planner", self._scheduler.planner)

    @property
    def _first_step_s(self) -> float:
        """How long a request that is received waits for its first token under load, seconds."""
        return _STEPS_IN_FLIGHT * self._planner.limited_step_s

    def take_in(self, request: Request) -> None:
        """Take in a request at the decode instance, now."""
        if self._side(request) is Side.LOCAL:
            self._scheduler.add_request(request)
            return
        name, now_s = request.request_id, self._cluster.engines[DECODE].now_s
        self._away[name] = request
        tokens = uncached_tokens(self._scheduler, request)
        due_s = request.arrival_time + self._ttft_slo_s
        self._handovers.start(name, tokens, now_s=now_s, due_s=due_s)
        # So that the instance works on none that would be late once it is here.
        afterwards_s = self._link_spec.transfer_s(tokens) + self._first_step_s
        prefill = self._prefill_only(name, max(_LEAST_SLO_S, due_s - now_s - afterwards_s))
        scheduler = self._cluster.engines[PREFILL].scheduler
        self._cluster.send(PREFILL, now_s, lambda: scheduler.add_request(prefill))

    def prefilled(self, name: str) -> None:
        """Send off the KV cache of a prompt that the prefill instance has just computed."""
        request = self._away.pop(name)
        arrival_s = self._link.send(
            uncached_tokens(self._scheduler, request), self._cluster.engines[PREFILL].now_s
        )
        self._cluster.send(DECODE, arrival_s, lambda: self._received(request))

    def _received(self, request: Request) -> None:
        self._handovers.finish(request.request_id, now_s=self._cluster.engines[DECODE].now_s)
        # What vLLM sees of a request whose KV cache it has received (0.28-0.33).
        request.num_computed_tokens = request.num_tokens - 1
        self._scheduler.add_request(request)

    def _side(self, request: Request) -> Side:
        threshold = self._remote_from_tokens
        tokens = uncached_tokens(self._scheduler, request)
        if threshold is not None:
            return Side.REMOTE if tokens >= threshold else Side.LOCAL
        now_s = self._cluster.engines[DECODE].now_s
        handover_s = self._handovers.predict_s(tokens, now_s=now_s)
        choice = choose(
            read_offer(self._scheduler, self._planner, request),
            None if handover_s is None else handover_s + self._first_step_s,
            ttft_left_s=request.arrival_time + self._ttft_slo_s - now_s,
        )
        self.choices[f"{choice.side}:{choice.reason}"] += 1
        return choice.side

    def _guess_s(self, tokens: int) -> float | None:
        """Until hand-overs were seen: what the prompt would take here, and its transfer."""
        prefill_s = self._planner.prefill_alone_s(tokens)
        return None if prefill_s is None else prefill_s + self._link_spec.transfer_s(tokens)
