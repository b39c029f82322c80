"""Report what an engine's steps did to its API server, about once a second."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_penalty_sched.engine import stats_transport
from vllm_penalty_sched.telemetry import StepTally

if TYPE_CHECKING:
    from vllm_penalty_sched.engine.scheduler import Scheduler
    from vllm_penalty_sched.engine.step_timer import TimedStep
    from vllm_penalty_sched.planner import Planner


class StepReports:
    """Sums up steps and sends the sums along with vLLM's own statistics; inert if it cannot."""

    def __init__(self, scheduler: Scheduler) -> None:
        can_send = stats_transport.is_open(scheduler.vllm_config, log_stats=scheduler.log_stats)
        self._tally = StepTally() if can_send else None

    def add(self, step: TimedStep, predicted_s: float | None, planner: Planner) -> None:
        """Take in a step that ran."""
        if self._tally is not None:
            self._tally.add(
                step.shape,
                step.seconds,
                predicted_s=predicted_s,
                decision=step.decision,
                planner=planner,
            )

    def send(
        self, scheduler: Scheduler, planner: Planner, outputs: Mapping[int, Any], now_s: float
    ) -> None:
        """Let a step's outputs carry a report if one is due.

        Args:
            scheduler: Whose step it is.
            planner: The scheduler's.
            outputs: What vLLM's ``update_from_output`` returned.
            now_s: The scheduler's clock.
        """
        if self._tally is None:
            return
        is_idle = not scheduler.has_unfinished_requests()
        if not self._tally.is_due(now_s, is_idle=is_idle):
            return
        carrier = stats_transport.find_carrier(outputs)
        if carrier is None:
            return
        report = self._tally.take(
            planner,
            now_s,
            faults=scheduler.faults,
            base_tokens=scheduler.max_num_scheduled_tokens,
            is_idle=is_idle,
            handovers=scheduler.sides.take_report() if scheduler.sides is not None else None,
        )
        stats_transport.put(carrier, report.to_json())
