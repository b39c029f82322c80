"""Show an engine's reports on the ``/metrics`` endpoint of vLLM's API server.

vLLM loads the plugin class through the entry point ``vllm.stat_logger_plugins`` in every API
server of the environment. No metric exists before the first report of one of our schedulers.
"""

from __future__ import annotations

import logging
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from vllm_penalty_sched.disaggregation.pricing import ChoiceReason, Side
from vllm_penalty_sched.disaggregation.remote_prefills import Fallback
from vllm_penalty_sched.engine import stats_transport
from vllm_penalty_sched.handover_report import HandoverReport
from vllm_penalty_sched.policy import Reason
from vllm_penalty_sched.telemetry import StepReport

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import SchedulerStats

log = logging.getLogger("vllm.penalty_sched")

_RATIO_BOUNDS = tuple(tenths / 10 for tenths in range(11))
_STEP_BOUNDS_S = (
    0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5,
    1.0, 2.0, 5.0,
)  # fmt: skip
_HANDOVER_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
_TOKEN_BOUNDS = (0, *(2**power for power in range(3, 17)))


class PenaltyStatLogger(AggregateStatLoggerBase):  # type: ignore[misc]  # vLLM is not type-checked
    """Feeds Prometheus with the reports that arrive in vLLM's statistics."""

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None) -> None:
        """Take vLLM's arguments; the metrics are per process and outlive this object."""
        del vllm_config, engine_indexes
        self._has_failed = False

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: Any = None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Take in the statistics of a step; vLLM's own loggers see them afterwards."""
        del iteration_stats, mm_cache_stats
        text = stats_transport.take(scheduler_stats)
        if text is None or self._has_failed:
            return
        try:
            _metrics().add(StepReport.from_json(text), engine=str(engine_idx))
        except (TypeError, ValueError) as error:
            # An exception here would end vLLM's output loop, and every request with it.
            self._has_failed = True
            log.warning("the penalty_sched_ metrics end here: %s", error)

    def log_engine_initialized(self) -> None:
        """Do nothing: there is nothing to show before the first step."""


class _Metrics:
    """The metrics of all engines in this process; with several API servers they add up."""

    def __init__(self) -> None:
        self.observed_s = _histogram(
            "observed_step_seconds", "Time of a step, as the decodes feel it", _STEP_BOUNDS_S
        )
        self.predicted_s = _histogram(
            "predicted_step_seconds", "Time predicted for a step", _STEP_BOUNDS_S
        )
        self.prefill_ratio = _histogram(
            "prefill_ratio", "Prefill tokens over all tokens of a step", _RATIO_BOUNDS
        )
        self.budget_tokens = _histogram(
            "budget_tokens", "Prefill budget of a step with decodes and prefills", _TOKEN_BOUNDS
        )
        self.penalty_s = _counter(
            "penalty_seconds", "Predicted time that prefills added to steps with decodes"
        )
        self.decisions = _counter("decisions", "Budget decisions by reason", "reason")
        self.slo_overruns = _counter("slo_overruns", "Steps with decodes over the SLO in force")
        self.admission_holds = _counter(
            "admission_holds", "Steps that held a waiting request back for the decodes' sake"
        )
        self.stalls = _counter("stalls", "Steps far slower than noise explains")
        self.faults = _counter("faults", "Plugin errors that were kept from the engine")
        self.margin = _gauge("margin", "Share by which predictions are raised, for noise")
        self.model_error = _gauge(
            "model_error", "Mean absolute relative error of the latest predictions"
        )
        self.decode_only_s = _gauge(
            "decode_only_seconds", "Learned time of a step with the present decodes alone"
        )
        self.slo_s = _gauge("slo_seconds", "TBT SLO in force")
        self.headroom = _gauge(
            "prefill_headroom_tokens_per_second",
            "What could still be prefilled under the SLO in force",
        )
        self.choices = _counter(
            "prefill_choices", "Prompts by who was to prefill them, and why", "side", "reason"
        )
        self.fallbacks = _counter(
            "prefill_fallbacks", "Prompts prefilled here after all, by cause", "cause"
        )
        self.handover_s = _histogram(
            "handover_seconds", "From asking for a prefill to its KV cache being here", _HANDOVER_S
        )
        self.prefill_is_up = _gauge(
            "prefill_instance_up", "Whether the prefill instance can be asked"
        )

    def add(self, report: StepReport, *, engine: str) -> None:
        """Add what a report tells; raises TypeError or ValueError if a value is none."""
        samples = (
            (self.observed_s, report.observed_s),
            (self.predicted_s, report.predicted_s),
            (self.prefill_ratio, report.prefill_ratios),
            (self.budget_tokens, report.budget_tokens),
        )
        for histogram, values in samples:
            child = histogram.labels(engine)
            for value in values:
                child.observe(value)
        counts = (
            (self.penalty_s, report.penalty_s),
            (self.slo_overruns, report.slo_overruns),
            (self.admission_holds, report.admission_holds),
            (self.stalls, report.stalls),
            (self.faults, report.faults),
        )
        for counter, count in counts:
            counter.labels(engine).inc(count)
        self._add_decisions(report, engine)
        if report.handovers is not None:
            self._add_handovers(report.handovers, engine)
        self._set_levels(report, engine)

    def _add_decisions(self, report: StepReport, engine: str) -> None:
        for reason in Reason:  # all of them: a rate needs a 0 to start from
            self.decisions.labels(engine, reason.value).inc(report.decisions.get(reason, 0))

    def _add_handovers(self, report: HandoverReport, engine: str) -> None:
        for side, reason in product(Side, ChoiceReason):  # all of them, as above
            count = report.choices.get(f"{side}:{reason}", 0)
            self.choices.labels(engine, side.value, reason.value).inc(count)
        for cause in Fallback:
            self.fallbacks.labels(engine, cause.value).inc(report.fallbacks.get(cause, 0))
        child = self.handover_s.labels(engine)
        for seconds in report.seconds:
            child.observe(seconds)
        self.prefill_is_up.labels(engine).set(report.is_up)

    def _set_levels(self, report: StepReport, engine: str) -> None:
        levels = (
            (self.margin, report.margin),
            (self.model_error, report.model_error),
            (self.decode_only_s, report.decode_only_s),
            (self.slo_s, report.slo_s),
            (self.headroom, report.headroom_tokens_per_s),
        )
        for gauge, level in levels:
            if level is not None:
                gauge.labels(engine).set(level)


@cache
def _metrics() -> _Metrics:
    # Once per process: vLLM builds the loggers anew when it scales, Prometheus knows a name once.
    return _Metrics()


# Not "vllm:": vLLM unregisters that prefix when it starts its own loggers.
def _histogram(name: str, meaning: str, bounds: tuple[float, ...]) -> Histogram:
    return Histogram(f"penalty_sched_{name}", meaning, ["engine"], buckets=bounds)


def _counter(name: str, meaning: str, *labels: str) -> Counter:
    return Counter(f"penalty_sched_{name}", meaning, ["engine", *labels])


def _gauge(name: str, meaning: str) -> Gauge:
    # An engine's reports reach one API server after the other: the latest one is right.
    return Gauge(f"penalty_sched_{name}", meaning, ["engine"], multiprocess_mode="mostrecent")
