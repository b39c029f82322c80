"""Count what a simulated engine's steps did to the decodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler

    from vllm_penalty_sched.engine.virtual_engine import VirtualStep


class StepCounter:
    """Counts over the steps with tokens of one engine.

    Attributes:
        steps: Steps with tokens.
        decode_steps: Those with decodes.
        overruns: Those with decodes that took longer than the TBT SLO.
        preemptions: Requests that lost their blocks, counted each time.
        longest_defer_s: Longest time in a row in which decodes ran, a request that could have been
            given prefill tokens was there, and none got any.
    """

    def __init__(self, scheduler: VllmScheduler, *, tbt_slo_s: float) -> None:
        self._scheduler = scheduler
        self._tbt_slo_s = tbt_slo_s
        self.steps = self.decode_steps = self.overruns = self.preemptions = 0
        self.longest_defer_s = 0.0
        self._deferred_since_s: float | None = None

    def count(self, step: VirtualStep) -> None:
        """Take in a step when it was scheduled."""
        shape = step.shape
        self.steps += 1
        self.preemptions += len(step.output.preempted_req_ids or ())
        if not shape.decode_seqs:
            self._deferred_since_s = None
            return
        self.decode_steps += 1
        self.overruns += step.seconds > self._tbt_slo_s
        if shape.prefills or not _wants_prefill(self._scheduler):
            self._deferred_since_s = None
            return
        if self._deferred_since_s is None:
            self._deferred_since_s = step.finished_s - step.seconds
        self.longest_defer_s = max(self.longest_defer_s, step.finished_s - self._deferred_since_s)


def _wants_prefill(scheduler: VllmScheduler) -> bool:
    """Whether some request could be given prefill tokens now, were there a budget."""
    if any(request.is_prefill_chunk for request in scheduler.running):
        return True
    if not scheduler.waiting or len(scheduler.running) >= scheduler.max_num_running_reqs:
        return False
    free_blocks = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    return bool(scheduler.waiting.peek_request().num_tokens < free_blocks * scheduler.block_size)
