"""What a step trace shows: SLO held, penalty paid, decisions and prediction errors."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from vllm_penalty_sched.policy import Reason
from vllm_penalty_sched.step_log.decode_only_times import estimate_decode_only_s
from vllm_penalty_sched.step_log.records import StepTable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vllm_penalty_sched.step_log.records import StepLog

# Reasons under which prefills wait for the decodes' sake.
WAITING = (Reason.DEFERRED, Reason.HELD, Reason.INFEASIBLE, Reason.AGED)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstStep:
    """The step that took longest by its SLO; ``number`` counts from 1."""

    number: int
    done_s: float
    observed_s: float
    slo_s: float
    predicted_s: float | None
    reason: Reason | None
    decode_seqs: int
    prefill_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SloFigures:
    """How the SLO was held by the steps that had decodes and an SLO.

    Attributes:
        least_s: Tightest SLO in force.
        most_s: Loosest.
        steps: Steps judged.
        overruns: Steps that took longer than their SLO.
        held_share: Share of the steps within their SLO, 0 to 1.
        mixed_held_share: The same of steps with prefill; None if there was none.
        decode_only_held_share: The same of steps without.
        worst: Largest time by its SLO.
    """

    least_s: float
    most_s: float
    steps: int
    overruns: int
    held_share: float
    mixed_held_share: float | None
    decode_only_held_share: float | None
    worst: WorstStep


@dataclass(frozen=True, slots=True, kw_only=True)
class PenaltyFigures:
    """What prefills cost the decodes: mixed steps' times minus those of their decodes alone.

    Attributes:
        mixed_steps: Steps with decodes and prefill.
        estimated_steps: Those among them whose time without prefill can be told
            (``estimate_decode_only_s``); the other figures are of these.
        penalty_s: Sum, seconds; noise may make a single step's part negative.
        share: The sum over the time of all steps with decodes.
        mean_s: Mean of a mixed step.
    """

    mixed_steps: int
    estimated_steps: int
    penalty_s: float
    share: float
    mean_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasonShare:
    """How often a reason set the budget; None: the plugin did not steer."""

    reason: Reason | None
    steps: int
    step_share: float
    time_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionError:
    """Predicted against observed times, relative to the observed.

    Attributes:
        steps: Steps with a prediction.
        mape: Mean of the absolute errors, a share.
        bias: Mean of the errors, a share; above 0 if predictions are too high.
    """

    steps: int
    mape: float
    bias: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """The figures of a trace.

    Attributes:
        steps: Steps in it.
        cut_lines: Lines that were not written to their end.
        runs: Parts between which the clock went back: the engine was started anew.
        span_s: From the start of the first step to the end of the last one, over all runs.
        busy_s: Time of all steps.
        decode_s: Time of the steps with decodes.
        decode_time_share: ``decode_s`` over ``span_s``.
        slo: None if no step with decodes had an SLO.
        penalty: What prefills cost the decodes.
        prefill_tokens: Prompt tokens computed.
        prefill_tokens_per_s: The same over ``span_s``.
        budget_use: Prefill tokens over budgeted ones, of the steps with a budget above 0; None
            if there was none.
        reasons: By steps, the most frequent first.
        mixed_error: Of steps with decodes and prefill; None without a prediction.
        decode_only_error: Of steps with decodes only.
        least_margin: Smallest margin in force.
        most_margin: Largest.
        longest_wait_s: Longest time without a prefill token while budgets were deferred, held,
            infeasible or aged.
    """

    steps: int
    cut_lines: int
    runs: int
    span_s: float
    busy_s: float
    decode_s: float
    decode_time_share: float
    slo: SloFigures | None
    penalty: PenaltyFigures
    prefill_tokens: int
    prefill_tokens_per_s: float
    budget_use: float | None
    reasons: tuple[ReasonShare, ...]
    mixed_error: PredictionError | None
    decode_only_error: PredictionError | None
    least_margin: float
    most_margin: float
    longest_wait_s: float

    def share_of(self, reason: Reason | None) -> ReasonShare:
        """Return how often a reason occurred, also if it did not."""
        found = [share for share in self.reasons if share.reason is reason]
        return found[0] if found else _NEVER

    def to_json(self) -> dict[str, object]:
        """Return all figures: seconds, tokens and shares, null for what is unknown."""
        return asdict(self)


_NEVER = ReasonShare(reason=None, steps=0, step_share=0.0, time_share=0.0)


def summarize_steps(log: StepLog) -> StepSummary:
    """Return the figures of a trace."""
    table = StepTable.of(log.steps)
    runs, span_s = _runs(table)
    busy_s = float(np.sum(table.observed_s))
    span_s = max(span_s, busy_s)  # rounding aside, steps do not overlap
    decode_s = float(np.sum(table.observed_s[table.has_decodes]))
    prefill_tokens = int(np.sum(table.prefill_tokens))
    return StepSummary(
        steps=len(log.steps),
        cut_lines=log.cut_lines,
        runs=runs,
        span_s=span_s,
        busy_s=busy_s,
        decode_s=decode_s,
        decode_time_share=decode_s / span_s,
        slo=_slo_figures(table),
        penalty=_penalty(table, decode_s),
        prefill_tokens=prefill_tokens,
        prefill_tokens_per_s=prefill_tokens / span_s,
        budget_use=_budget_use(table),
        reasons=_reasons(table, busy_s),
        mixed_error=_prediction_error(table, table.is_mixed),
        decode_only_error=_prediction_error(table, table.is_decode_only),
        least_margin=float(np.min(table.margin)),
        most_margin=float(np.max(table.margin)),
        longest_wait_s=_longest_wait_s(table),
    )


def run_starts(table: StepTable) -> NDArray[np.int64]:
    """Return the places of the first step after each start of the engine's clock."""
    return np.append(0, np.flatnonzero(np.diff(table.done_s) < 0) + 1)


def _runs(table: StepTable) -> tuple[int, float]:
    starts = run_starts(table)
    lasts = np.append(starts[1:], table.done_s.size) - 1
    spans_s = table.done_s[lasts] - table.done_s[starts] + table.observed_s[starts]
    return int(starts.size), float(np.sum(spans_s))


def _slo_figures(table: StepTable) -> SloFigures | None:
    judged = table.has_decodes & ~np.isnan(table.slo_s)
    if not judged.any():
        return None
    worst = int(np.argmax(np.where(judged, table.observed_s / table.slo_s, -np.inf)))
    overruns = int(np.sum(table.is_over))
    return SloFigures(
        least_s=float(np.min(table.slo_s[judged])),
        most_s=float(np.max(table.slo_s[judged])),
        steps=int(np.sum(judged)),
        overruns=overruns,
        held_share=1.0 - overruns / int(np.sum(judged)),
        mixed_held_share=_held_share(table, judged & table.is_mixed),
        decode_only_held_share=_held_share(table, judged & table.is_decode_only),
        worst=WorstStep(
            number=worst + 1,
            done_s=float(table.done_s[worst]),
            observed_s=float(table.observed_s[worst]),
            slo_s=float(table.slo_s[worst]),
            predicted_s=_or_none(table.predicted_s[worst]),
            reason=table.reasons[worst],
            decode_seqs=int(table.decode_seqs[worst]),
            prefill_tokens=int(table.prefill_tokens[worst]),
        ),
    )


def _held_share(table: StepTable, judged: NDArray[np.bool_]) -> float | None:
    return float(np.mean(~table.is_over[judged])) if judged.any() else None


def _penalty(table: StepTable, decode_s: float) -> PenaltyFigures:
    parts_s = (table.observed_s - estimate_decode_only_s(table))[table.is_mixed]
    parts_s = parts_s[~np.isnan(parts_s)]
    penalty_s = float(np.sum(parts_s))
    return PenaltyFigures(
        mixed_steps=int(np.sum(table.is_mixed)),
        estimated_steps=parts_s.size,
        penalty_s=penalty_s,
        share=penalty_s / decode_s if decode_s else 0.0,
        mean_s=penalty_s / parts_s.size if parts_s.size else None,
    )


def _budget_use(table: StepTable) -> float | None:
    has_budget = table.budget_tokens > 0  # false for NaN
    if not has_budget.any():
        return None
    used = float(np.sum(table.prefill_tokens[has_budget]))
    return used / float(np.sum(table.budget_tokens[has_budget]))


def _reasons(table: StepTable, busy_s: float) -> tuple[ReasonShare, ...]:
    steps: dict[Reason | None, int] = defaultdict(int)
    seconds: dict[Reason | None, float] = defaultdict(float)
    for reason, observed_s in zip(table.reasons, table.observed_s.tolist(), strict=True):
        steps[reason] += 1
        seconds[reason] += observed_s
    return tuple(
        ReasonShare(
            reason=reason,
            steps=count,
            step_share=count / len(table.reasons),
            time_share=min(1.0, seconds[reason] / busy_s),
        )
        for reason, count in sorted(steps.items(), key=lambda item: (-item[1], str(item[0])))
    )


def _prediction_error(table: StepTable, chosen: NDArray[np.bool_]) -> PredictionError | None:
    chosen = chosen & ~np.isnan(table.predicted_s)
    if not chosen.any():
        return None
    errors = table.predicted_s[chosen] / table.observed_s[chosen] - 1.0
    return PredictionError(
        steps=int(errors.size), mape=float(np.mean(np.abs(errors))), bias=float(np.mean(errors))
    )


def _longest_wait_s(table: StepTable) -> float:
    waits = table.has_reason(*WAITING) & (table.prefill_tokens == 0)
    starts = set(run_starts(table).tolist())
    longest_s, began_s = 0.0, None
    for place in range(waits.size):
        if began_s is None or place in starts or not waits[place]:
            began_s = table.done_s[place] - table.observed_s[place] if waits[place] else None
        if began_s is not None:
            longest_s = max(longest_s, float(table.done_s[place] - began_s))
    return longest_s


def _or_none(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
