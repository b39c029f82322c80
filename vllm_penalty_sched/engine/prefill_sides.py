"""Choose who prefills each request of a decode instance, and see it through."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm_penalty_sched.disaggregation.pricing import Choice, ChoiceReason, Side, choose
from vllm_penalty_sched.disaggregation.remote_prefills import RemotePrefills
from vllm_penalty_sched.engine.composition import uncached_tokens
from vllm_penalty_sched.engine.kv_loads import may_load, put_ahead
from vllm_penalty_sched.engine.prefill_client import PrefillClient
from vllm_penalty_sched.engine.prefill_offer import read_offer

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from vllm_penalty_sched.engine.connector import PenaltyConnector
    from vllm_penalty_sched.engine.scheduler import Scheduler
    from vllm_penalty_sched.handover_report import HandoverReport
    from vllm_penalty_sched.planner import Planner

log = logging.getLogger("vllm.penalty_sched")

# A prefill instance that seems dear is tried again where it could be cheaper by this factor.
TRIAL_GAIN = 1.25
# Choices kept for a trace line that no step brings.
_MOST_NOTES = 1000


def start_sides(scheduler: Scheduler, planner: Planner) -> PrefillSides | None:
    """Let a decode instance with our connector choose; None for every other scheduler."""
    connector: Any = scheduler.connector
    settings = getattr(connector, "handover_settings", None)
    if settings is None or settings.prefill_url is None:
        return None
    if not hasattr(scheduler, "kv_holding_waiting"):
        log.warning("asking a prefill instance needs vLLM 0.31: every prompt is prefilled here")
        return None

    def clock() -> float:
        return scheduler.clock()

    client = PrefillClient(settings.prefill_url, timeout_s=settings.prefill_timeout_s, clock=clock)

    # Until hand-overs were seen: what an idle instance like this one would take.
    remote = RemotePrefills(client.ask, settings, guess_s=planner.prefill_alone_s)
    connector.sides = PrefillSides(remote, connector, clock=clock, close=client.close)
    log.info("prompts may be prefilled by %s, where that is cheaper", settings.prefill_url)
    sides: PrefillSides = connector.sides
    return sides


class PrefillSides:
    """Stands between our scheduler, which knows the prices, and our connector.

    Attributes:
        admits_prefills: Whether vLLM may admit prompts that are prefilled here in this step. Where
            not, it still may start reading KV caches.
    """

    def __init__(
        self,
        remote: RemotePrefills,
        connector: PenaltyConnector,
        *,
        clock: Callable[[], float],
        close: Callable[[], None],
    ) -> None:
        """Take over what does the work.

        Args:
            remote: Follows the prompts that are prefilled elsewhere.
            connector: Reads their KV caches.
            clock: A monotonic clock, seconds.
            close: Called at the end.
        """
        self.admits_prefills = True
        self.close = close
        self._remote = remote
        self._connector = connector
        self._clock = clock
        self._notes: list[dict[str, Any]] = []

    def choose(
        self, scheduler: Scheduler, planner: Planner, request: Request, ttft_slo_s: float
    ) -> None:
        """Choose for a request that is about to be added, and ask at once if it goes away."""
        if request.request_id in scheduler.requests:
            return  # more input for a session that is under way
        if self._connector.handover_settings.allow_client_kv_params and request.kv_transfer_params:
            return  # a router has chosen
        now_s = self._clock()
        self.take_in(scheduler, now_s)
        tokens = max(1, uncached_tokens(scheduler, request))
        choice = self._choice(scheduler, planner, request, tokens, ttft_slo_s, now_s)
        self._remote.chosen(choice)
        self._note(request, tokens, choice)
        if choice.side is Side.REMOTE:
            self._remote.ask(
                request.request_id,
                _body(request, ttft_slo_s),
                tokens=tokens,
                now_s=now_s,
                due_s=now_s + ttft_slo_s,
            )

    def _choice(
        self,
        scheduler: Scheduler,
        planner: Planner,
        request: Request,
        tokens: int,
        ttft_slo_s: float,
        now_s: float,
    ) -> Choice:
        if not _can_be_handed_over(request):
            return Choice(side=Side.LOCAL, reason=ChoiceReason.UNSUPPORTED)
        if not self._remote.availability.is_up:
            return Choice(side=Side.LOCAL, reason=ChoiceReason.UNAVAILABLE)
        choice = choose(
            read_offer(scheduler, planner, request),
            self._remote.price_s(tokens, now_s=now_s),
            ttft_left_s=ttft_slo_s if math.isfinite(ttft_slo_s) else None,
        )
        return self._or_trial(choice, tokens, now_s)

    def _or_trial(self, choice: Choice, tokens: int, now_s: float) -> Choice:
        """Return the choice, or now and then the other side if that might be cheaper by now."""
        if choice.side is Side.REMOTE or choice.local_s is None:
            return choice
        trial_s = self._remote.trial_s(tokens, now_s=now_s)
        if trial_s is None or trial_s * TRIAL_GAIN > choice.local_s:
            return choice
        return replace(choice, side=Side.REMOTE, reason=ChoiceReason.TRIAL)

    def take_in(self, scheduler: Scheduler, now_s: float) -> None:
        """Take in the prefill instance's answers."""
        for name, kv_params in self._remote.poll(now_s).items():
            request = scheduler.requests.get(name)
            if request is None or request.is_finished():
                self._remote.forget(name)
                continue
            self._connector.found(request, dict(kv_params))
            put_ahead(scheduler, request)

    def is_asked(self, request: Request) -> bool:
        """Return whether the prefill instance was asked for a request and has not answered."""
        return self._remote.is_asked(request.request_id)

    def must_wait(self, request: Request) -> bool:
        """Return whether vLLM must pass over a waiting request in this step."""
        return self.is_asked(request) or not (self.admits_prefills or may_load(request))

    def give_up_if_late(self, request: Request) -> None:
        """Prefill here after all if an announced KV cache is about to lose its lease."""
        if may_load(request) and self._remote.expires(request.request_id, now_s=self._clock()):
            self._connector.give_up(request)

    def got_blocks(self, request: Request, *, external_tokens: int) -> None:
        """Take in that vLLM gave a request blocks; those for external tokens are being filled."""
        name, now_s = request.request_id, self._clock()
        self._remote.read_begins(name, now_s=now_s)
        if not external_tokens:  # the prefix cache holds all of it by now
            self._remote.read_ends(name, succeeded=True, now_s=now_s)

    def reads_ended(self, names: Iterable[str], failed: Iterable[str]) -> None:
        """Take in which KV caches are here, and which of these could not be read."""
        now_s, lost = self._clock(), set(failed)
        for name in names:
            self._remote.read_ends(name, succeeded=name not in lost, now_s=now_s)

    def ended(self, request: Request) -> None:
        """Take in that a request has ended; what is being prefilled for it is called off."""
        self._remote.forget(request.request_id)

    def take_notes(self) -> list[dict[str, Any]]:
        """Return what was chosen since the last call, for the trace."""
        notes, self._notes = self._notes, []
        return notes

    def take_report(self) -> HandoverReport:
        """Return what happened since the last call, for the metrics."""
        return self._remote.take_report()

    def _note(self, request: Request, tokens: int, choice: Choice) -> None:
        if len(self._notes) < _MOST_NOTES:
            self._notes.append(
                {
                    "request": request.request_id,
                    "tokens": tokens,
                    "side": choice.side,
                    "reason": choice.reason,
                    "local_s": choice.local_s,
                    "remote_s": choice.remote_s,
                }
            )


def _can_be_handed_over(request: Request) -> bool:
    """Return whether a token prompt says all there is to prefill."""
    return (
        request.sampling_params is not None
        and bool(request.prompt_token_ids)
        and request.prompt_embeds is None
        and not request.mm_features
        and request.lora_request is None
        and not request.skip_reading_prefix_cache
        and not getattr(request, "resumable", False)
    )


def _body(request: Request, ttft_slo_s: float) -> dict[str, Any]:
    body: dict[str, Any] = {
        "prompt": list(request.prompt_token_ids or ()),
        "max_tokens": 1,
        "temperature": 0,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
    }
    if request.priority:
        body["priority"] = request.priority
    if request.cache_salt is not None:
        body["cache_salt"] = request.cache_salt
    if math.isfinite(ttft_slo_s):
        body["vllm_xargs"] = {"ttft_slo_ms": 1e3 * ttft_slo_s}
    return body
