"""Sum up what steps did into reports about a second apart that add up to everything."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from vllm_penalty_sched.batch import BatchShape
from vllm_penalty_sched.handover_report import HandoverReport
from vllm_penalty_sched.planner import Planner
from vllm_penalty_sched.policy import Decision, Reason, longest_planned_s

REPORT_PERIOD_S = 1.0
# A report of so many steps goes out at once, so that none takes the engine long to write.
_FULL_STEPS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What happened since the report before it, and how things stand now.

    Attributes:
        observed_s: Time of each step, seconds.
        predicted_s: What was predicted for those that could be, before learning from them.
        prefill_ratios: Prefill tokens over all tokens of each step, 0 to 1.
        budget_tokens: Prefill budget of each step that was given one while decodes ran and
            somebody wanted prefill.
        penalty_s: Predicted time less that without prefill, summed over steps with decodes.
        decisions: Decisions that steps ran under, by reason.
        slo_overruns: Steps with decodes that took longer than the SLO in force.
        admission_holds: Steps in which a waiting request was held back for the decodes' sake.
        stalls: Steps far slower than noise explains.
        faults: Errors of the plugin's own logic that were kept from the engine.
        margin: Share by which predictions are raised, for noise.
        model_error: Mean absolute relative error of the latest predictions; None before any.
        decode_only_s: Predicted time of the latest decodes alone; None without any or a model.
        slo_s: The SLO in force; None while unsettled.
        headroom_tokens_per_s: What could be prefilled beside the present decodes under the SLO,
            on top of what is being prefilled; None while the model is cold.
        handovers: Who prefilled what; None where there is no prefill instance to ask.
    """

    observed_s: Sequence[float]
    predicted_s: Sequence[float]
    prefill_ratios: Sequence[float]
    budget_tokens: Sequence[int]
    penalty_s: float
    decisions: Mapping[str, int]
    slo_overruns: int
    admission_holds: int
    stalls: int
    faults: int
    margin: float
    model_error: float | None
    decode_only_s: float | None
    slo_s: float | None
    headroom_tokens_per_s: float | None
    handovers: HandoverReport | None = None

    def to_json(self) -> str:
        """Return the report as one compact line."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["handovers"] = asdict(self.handovers) if self.handovers else None
        return json.dumps(values, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> StepReport:
        """Return the report that ``to_json`` wrote.

        Raises:
            ValueError: If the text is no JSON.
            TypeError: If a field is missing or foreign.
        """
        values = json.loads(text)
        if not isinstance(values, dict):
            raise TypeError(f"a report is a JSON object, got {type(values).__name__}")
        handovers = values.pop("handovers", None)
        return cls(**values, handovers=HandoverReport(**handovers) if handovers else None)


class StepTally:
    """Takes in each step that ran, and hands out what has come together."""

    def __init__(self) -> None:
        self._reported_s = -math.inf
        self._told_stalls = self._told_faults = 0
        self._start()

    def _start(self) -> None:
        self._observed_s: list[float] = []
        self._predicted_s: list[float] = []
        self._prefill_ratios: list[float] = []
        self._budget_tokens: list[int] = []
        self._decisions: Counter[str] = Counter()
        self._penalty_s = 0.0
        self._prefill_tokens = self._slo_overruns = self._admission_holds = 0
        self._latest = BatchShape()

    def add(
        self,
        shape: BatchShape,
        seconds: float,
        *,
        predicted_s: float | None,
        decision: Decision | None,
        planner: Planner,
    ) -> None:
        """Take in a step that ran.

        Args:
            shape: What it computed, at least one token.
            seconds: How long it took.
            predicted_s: What was predicted for it, if anything.
            decision: What it ran under; None if it was not planned.
            planner: Tells the SLO of an unplanned step, and what prefill costs.
        """
        if len(self._observed_s) >= 10 * _FULL_STEPS:
            return  # nobody takes the reports: let memory stay bounded
        self._latest = shape
        self._observed_s.append(seconds)
        if predicted_s is not None and predicted_s < math.inf:  # not NaN either
            self._predicted_s.append(predicted_s)
        self._prefill_ratios.append(shape.prefill_ratio)
        if shape.prefills:
            self._prefill_tokens += shape.prefill_tokens
            self._add_penalty(shape, planner)
        slo_s = planner.latest_slo_s
        if decision is not None:
            slo_s = decision.slo_s
            self._decisions[decision.reason] += 1
            self._admission_holds += decision.holds_admission
            budget_tokens = decision.prefill_tokens
            if budget_tokens is not None and decision.reason is not Reason.NO_PREFILL:
                self._budget_tokens.append(budget_tokens)
        if slo_s is not None and seconds > slo_s and shape.decode_seqs:
            self._slo_overruns += 1

    def _add_penalty(self, shape: BatchShape, planner: Planner) -> None:
        if shape.decode_seqs and planner.model.is_fitted:
            penalty_s = planner.model.penalty_s(shape)
            if 0.0 < penalty_s < math.inf:
                self._penalty_s += penalty_s

    def is_due(self, now_s: float, *, is_idle: bool) -> bool:
        """Return whether to report now.

        Args:
            now_s: A monotonic clock's reading, seconds.
            is_idle: Whether no request is left: no further step will bring the next report.
        """
        waited_s = now_s - self._reported_s
        is_full = len(self._observed_s) >= _FULL_STEPS
        is_last = is_idle and bool(self._observed_s)
        return is_full or is_last or not 0.0 <= waited_s < REPORT_PERIOD_S

    @property
    def _prefilled_per_s(self) -> float:
        busy_s = sum(self._observed_s)
        return self._prefill_tokens / busy_s if busy_s else 0.0

    def take(
        self,
        planner: Planner,
        now_s: float,
        *,
        faults: int,
        base_tokens: int,
        is_idle: bool,
        handovers: HandoverReport | None = None,
    ) -> StepReport:
        """Return what has come together since the last call, and begin anew.

        Args:
            planner: The engine's planner.
            now_s: As for ``is_due``.
            faults: All faults so far.
            base_tokens: The engine's own token budget for a step.
            is_idle: As for ``is_due``.
            handovers: Who prefilled what since the last call; None without a prefill instance.
        """
        decodes = BatchShape() if is_idle else self._latest.without_prefill()
        decode_only_s = None
        if decodes.decode_seqs and planner.model.is_fitted:
            decode_only_s = planner.model.predict_s(decodes)
        slo_s = planner.latest_slo_s or planner.slo_s(None, decode_only_s)
        report = StepReport(
            observed_s=self._observed_s,
            predicted_s=self._predicted_s,
            prefill_ratios=self._prefill_ratios,
            budget_tokens=self._budget_tokens,
            penalty_s=self._penalty_s,
            decisions=self._decisions,
            slo_overruns=self._slo_overruns,
            admission_holds=self._admission_holds,
            stalls=max(0, planner.margin.stalls - self._told_stalls),
            faults=max(0, faults - self._told_faults),
            margin=planner.margin.relative,
            model_error=planner.model.mape,
            decode_only_s=decode_only_s,
            slo_s=slo_s,
            headroom_tokens_per_s=headroom_tokens_per_s(
                planner,
                decodes,
                slo_s=slo_s,
                base_tokens=base_tokens,
                prefilled_per_s=0.0 if is_idle else self._prefilled_per_s,
            ),
            handovers=handovers,
        )
        self._reported_s = now_s
        self._told_stalls, self._told_faults = planner.margin.stalls, faults
        self._start()
        return report


def headroom_tokens_per_s(
    planner: Planner,
    decodes: BatchShape,
    *,
    slo_s: float | None,
    base_tokens: int,
    prefilled_per_s: float,
) -> float | None:
    """Return what could be prefilled on top of what is being prefilled, tokens per second.

    Args:
        planner: Knows what steps cost and what noise to expect.
        decodes: The step without prefill.
        slo_s: The SLO that the step must hold.
        base_tokens: The engine's own token budget for a step.
        prefilled_per_s: What is being prefilled, tokens per second.

    Returns:
        At least 0; 0 if the decodes alone overrun; None while the model is cold or no SLO is set.
    """
    if planner.is_cold:
        return None
    room = max(0, base_tokens - decodes.decode_tokens)
    if not decodes.decode_seqs:
        tokens = room
    elif slo_s is None:
        return None
    else:
        tokens = _tokens_within(planner, decodes, slo_s, room)
    if not tokens:
        return 0.0
    step_s = planner.model.predict_s(decodes.with_prefill(tokens, 0)) * planner.slowdown.factor
    return max(0.0, tokens / step_s - prefilled_per_s)


def _tokens_within(planner: Planner, decodes: BatchShape, slo_s: float, room: int) -> int:
    decode_only_s = planner.model.predict_s(decodes)
    if decode_only_s > slo_s:
        return 0
    limit_s = longest_planned_s(
        slo_s,
        decode_only_s,
        margin=planner.margin.relative_for(decodes),
        slowdown=planner.slowdown.factor,
    )
    return planner.model.largest_prefill(decodes, 0, limit_s, room)
