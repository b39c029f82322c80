"""Tell the operator, once, what the plugin settled on and what it cannot do."""

from __future__ import annotations

import logging

from vllm_penalty_sched.batch import BatchShape
from vllm_penalty_sched.policy import Decision, Reason
from vllm_penalty_sched.settings import Settings

log = logging.getLogger("vllm.penalty_sched")

# A derived SLO is told again when it has moved by this factor.
_MOVED = 1.5


class DecisionNotes:
    """Turns the first decision of each noteworthy kind into a log line."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._told: set[Reason] = set()
        self._told_slo_s: float | None = None

    def about(self, decision: Decision, decodes: BatchShape) -> None:
        """Log what is new in a decision."""
        if decision.slo_s is None:
            return
        if self._settings.tbt_slo_ms is None:
            self._tell_derived_slo(decision, decodes)
        if decision.reason in (Reason.INFEASIBLE, Reason.AGED, Reason.STALLED):
            self._tell_once(decision)

    def _tell_derived_slo(self, decision: Decision, decodes: BatchShape) -> None:
        if decision.decode_only_s is None:
            return
        scale = self._settings.tbt_slo_scale
        slo_s = scale * decision.decode_only_s
        told_s = self._told_slo_s
        if told_s is not None and told_s / _MOVED < slo_s < told_s * _MOVED:
            return
        self._told_slo_s = slo_s
        log.info(
            "TBT SLO %.1f ms: tbt_slo_ms is not set, so it is tbt_slo_scale %.2f x the learned "
            "decode-only time of %.1f ms (%d decodes, %d context tokens), and follows that time",
            1e3 * slo_s,
            scale,
            1e3 * decision.decode_only_s,
            decodes.decode_seqs,
            decodes.decode_context,
        )

    def _tell_once(self, decision: Decision) -> None:
        if decision.reason in self._told:
            return
        self._told.add(decision.reason)
        log.warning(
            "%s (SLO %.1f ms, decode-only step %.1f ms). Told once; every case is counted",
            _WORDS[decision.reason],
            1e3 * (decision.slo_s or 0.0),
            1e3 * (decision.decode_only_s or 0.0),
        )


_WORDS = {
    Reason.INFEASIBLE: (
        "TBT SLO infeasible: decode-only steps already take longer; prefills trickle and new "
        "requests wait until it holds again"
    ),
    Reason.AGED: (
        "TBT SLO leaves no room for prefills: a request waited as long as it may (max_defer_s at "
        "most) and gets a minimum chunk over the SLO"
    ),
    Reason.STALLED: "a granted prefill budget went unused for several steps; it is being raised",
}
