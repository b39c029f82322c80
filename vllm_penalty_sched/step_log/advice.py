"""What to change, by rules over a step trace: one function a rule, with what it measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from vllm_penalty_sched.policy import Reason
from vllm_penalty_sched.step_log.decode_only_times import estimate_decode_only_s
from vllm_penalty_sched.step_log.graph_jumps import find_worst_jump
from vllm_penalty_sched.step_log.records import StepTable
from vllm_penalty_sched.step_log.summary import StepSummary

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vllm_penalty_sched.step_log.records import StepLog

# Shares from which a rule fires; below them it is noise, or not worth a change.
INFEASIBLE_TIME_SHARE = 0.01
WAITING_STEP_SHARE = 0.05
AGED_STEP_SHARE = 0.005
COLD_TIME_SHARE = 0.1
UNUSED_STEP_SHARE = 0.01
OVERRUN_SHARE = 0.01
UNSTEERED_STEP_SHARE = 0.5
# Mean error of the predictions, and steps that a mean needs.
PREDICTION_ERROR, LEAST_PREDICTED_STEPS = 0.1, 50
# A step that took so many times its prediction is a stall; fewer than this are by chance.
STALL_FACTOR, LEAST_STALLS, STALL_STEP_SHARE = 3.0, 3, 0.0005
# A margin above this is noise, and no longer that of a cold start.
NOISY_MARGIN = 0.5
# An engine is full if prefills are cut in so many of its steps and use so much of their budgets.
FULL_STEP_SHARE, FULL_BUDGET_USE = 0.8, 0.9
# Errors that are high and low alike scatter: their mean is below this share of their size.
SCATTER_SHARE = 0.3
# Of its decode-only time, what a feasible SLO should leave for prefills.
ROOM = 0.25
# A smaller batch is advised if it is at least this share of the one that is too large.
LEAST_BATCH_SHARE = 0.25
# So many steps at a decode count are needed to say whether it holds an SLO.
LEAST_COUNT_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One thing to change.

    Attributes:
        rule: The rule's name.
        finding: What was measured, in words.
        change: What to do about it.
    """

    rule: str
    finding: str
    change: str

    def __str__(self) -> str:
        return f"{self.finding}: {self.change}"


def advise(log: StepLog, summary: StepSummary) -> list[Advice]:
    """Return what to change, the most pressing first; empty if nothing is.

    Args:
        log: The trace.
        summary: Its figures.
    """
    table = StepTable.of(log.steps)
    found = [rule(table, summary) for rule in _RULES]
    return [advice for advice in found if advice is not None]


def _unsteered(_table: StepTable, summary: StepSummary) -> Advice | None:
    share = summary.share_of(None).step_share
    if share <= UNSTEERED_STEP_SHARE:
        return None
    return Advice(
        rule="unsteered",
        finding=f"{share:.0%} of the steps ran without a decision of the plugin",
        change='set "mode": "enforce", or read the server\'s log for a fault if it is set',
    )


def _infeasible(table: StepTable, summary: StepSummary) -> Advice | None:
    is_infeasible = table.is_infeasible
    time_share = float(np.sum(table.observed_s[is_infeasible])) / summary.busy_s
    if time_share <= INFEASIBLE_TIME_SHARE:
        return None
    slo_s = _median(table.slo_s[is_infeasible])
    alone_s = estimate_decode_only_s(table)[is_infeasible]
    alone_s = alone_s[~np.isnan(alone_s)]
    ways = []
    most_seqs = None if slo_s is None else _most_decode_seqs(table, slo_s)
    usual_seqs = float(np.median(table.decode_seqs[is_infeasible]))
    # A batch far smaller than that is no way out: its steps are not much shorter.
    if most_seqs is not None and LEAST_BATCH_SHARE * usual_seqs <= most_seqs < usual_seqs:
        ways.append(f"lower --max-num-seqs to about {most_seqs}")
    if alone_s.size:
        enough_ms = 1e3 * (1 + ROOM) * float(np.quantile(alone_s, 0.95))
        ways.append(f"raise tbt_slo_ms to about {_rounded(enough_ms)}")
    return Advice(
        rule="infeasible",
        finding=f"SLO infeasible {time_share:.0%} of the time",
        change=_why_infeasible(table, usual_seqs, most_seqs)
        + (" or ".join(ways) or "lower --max-num-seqs or raise tbt_slo_ms"),
    )


def _why_infeasible(table: StepTable, usual_seqs: float, most_seqs: int | None) -> str:
    seqs, counts = np.unique(table.decode_seqs[table.is_decode_only], return_counts=True)
    tried = seqs[counts >= LEAST_COUNT_STEPS]
    if most_seqs is None and tried.size and tried[0] < max(2.0, LEAST_BATCH_SHARE * usual_seqs):
        return f"a batch of {tried[0]:.0f} takes longer already; "
    return "the decode batch is too large for it; "


def _most_decode_seqs(table: StepTable, slo_s: float) -> int | None:
    """Return the most decodes of which the median decode-only step held the SLO."""
    places = np.flatnonzero(table.is_infeasible)
    between = np.zeros(table.done_s.size, dtype=np.bool_)
    between[places[0] : places[-1] + 1] = True
    # The machine may have been quicker at other times: those count only if nothing else does.
    for chosen in (table.is_decode_only & between, table.is_decode_only):
        seqs, times_s = table.decode_seqs[chosen], table.observed_s[chosen]
        for count in np.unique(seqs)[::-1]:
            own_s = times_s[seqs == count]
            if own_s.size >= LEAST_COUNT_STEPS and np.median(own_s) <= slo_s:
                return int(count)
    return None


def _deferred(table: StepTable, summary: StepSummary) -> Advice | None:
    share = summary.share_of(Reason.DEFERRED).step_share
    if share <= WAITING_STEP_SHARE:
        return None
    is_deferred = table.has_reason(Reason.DEFERRED)
    slo_s = _median(table.slo_s[is_deferred])
    alone_s = _median(estimate_decode_only_s(table)[is_deferred])
    margin = _median(table.margin[is_deferred])
    room = ""
    if slo_s is not None and alone_s is not None:
        room = f" (SLO {1e3 * slo_s:.1f} ms, decode-only step {1e3 * alone_s:.1f} ms)"
    return Advice(
        rule="deferred",
        finding=f"prefills were deferred {share:.0%} of steps, "
        f"at the longest for {summary.longest_wait_s:.2f} s{room}",
        change=f"the machine's noise takes the room (margin {margin:.0%}): find the other load, or "
        "raise miss_rate"
        if margin is not None and margin > NOISY_MARGIN
        else "the SLO leaves too little room for a chunk; raise tbt_slo_ms, lower --max-num-seqs, "
        "or send fewer requests to this engine",
    )


def _held(table: StepTable, summary: StepSummary) -> Advice | None:
    share = summary.share_of(Reason.HELD).step_share
    if share <= WAITING_STEP_SHARE:
        return None
    seqs = _median(table.decode_seqs[table.has_reason(Reason.HELD)])
    return Advice(
        rule="held",
        finding=f"admission was held {share:.0%} of steps, at about {seqs:.0f} decodes",
        change="one more decode would break the SLO; raise tbt_slo_ms, or send fewer requests to "
        "this engine",
    )


def _aged(table: StepTable, summary: StepSummary) -> Advice | None:
    share = summary.share_of(Reason.AGED)
    if share.step_share <= AGED_STEP_SHARE:
        return None
    over = float(np.mean(table.is_over[table.has_reason(Reason.AGED)]))
    return Advice(
        rule="aged",
        finding=f"aged chunks in {share.step_share:.1%} of steps ({share.steps}), "
        f"{over:.0%} of them over the SLO",
        change="prefills waited for max_defer_s without room; raise tbt_slo_ms or add engines, or "
        "raise max_defer_s if later first tokens are the smaller harm",
    )


def _graph_size(table: StepTable, _summary: StepSummary) -> Advice | None:
    worst = find_worst_jump(table)
    if worst is None:
        return None
    return Advice(
        rule="graph_size",
        finding=f"decode-only steps themselves jump above {worst.size} decode tokens, from "
        f"{1e3 * worst.below_s:.1f} to {1e3 * worst.above_s:.1f} ms",
        change="CUDA graphs seem to end there; raise --max-cudagraph-capture-size above "
        f"{worst.size}",
    )


def _predictions(_table: StepTable, summary: StepSummary) -> Advice | None:
    off = {
        kind: error
        for kind, error in (
            ("mixed", summary.mixed_error),
            ("decode-only", summary.decode_only_error),
        )
        if error and error.steps >= LEAST_PREDICTED_STEPS and error.mape > PREDICTION_ERROR
    }
    if not off:
        return None
    told = [
        f"{error.mape:.0%} for {kind} steps (bias {error.bias:+.0%})" for kind, error in off.items()
    ]
    scatters = all(abs(error.bias) < SCATTER_SHARE * error.mape for error in off.values())
    return Advice(
        rule="predictions",
        finding=f"predictions are off by more than {PREDICTION_ERROR:.0%}: {' and '.join(told)}",
        change="they are high and low alike, so the steps scatter: check for other tenants of the "
        "machine"
        if scatters
        else "recalibrate (vllm-penalty calibrate), or check for other tenants of the machine",
    )


def _stalls(table: StepTable, summary: StepSummary) -> Advice | None:
    is_stall = table.observed_s > STALL_FACTOR * table.predicted_s  # false for NaN
    stalls = int(np.sum(is_stall))
    if stalls < max(LEAST_STALLS, STALL_STEP_SHARE * summary.steps):
        return None
    longest_s = float(np.max(table.observed_s[is_stall]))
    return Advice(
        rule="stalls",
        finding=f"stalls: {stalls} steps took over {STALL_FACTOR:g} x their prediction, the "
        f"longest {1e3 * longest_s:.0f} ms",
        change="no budget prevents them; look for other processes, compilation, swapping and "
        "collection of garbage at those times",
    )


def _cold(_table: StepTable, summary: StepSummary) -> Advice | None:
    share = summary.share_of(Reason.COLD).time_share
    if share <= COLD_TIME_SHARE:
        return None
    return Advice(
        rule="cold",
        finding=f"the cold start took {share:.0%} of the time",
        change='start from a calibrated "model", or keep what was learned in "state_path"',
    )


def _unused(_table: StepTable, summary: StepSummary) -> Advice | None:
    share = summary.share_of(Reason.STALLED).step_share
    if share <= UNUSED_STEP_SHARE:
        return None
    return Advice(
        rule="unused",
        finding=f"granted budgets went unused before {share:.1%} of steps",
        change="vLLM could not place the prefills: check for a full KV cache, and report it if "
        "there are free blocks",
    )


def _full(_table: StepTable, summary: StepSummary) -> Advice | None:
    share, use = summary.share_of(Reason.SLO).step_share, summary.budget_use
    if share <= FULL_STEP_SHARE or use is None or use <= FULL_BUDGET_USE:
        return None
    return Advice(
        rule="full",
        finding=f"prefills were cut to fit the SLO in {share:.0%} of the steps and used {use:.0%} "
        "of their budgets",
        change="prompts come faster than the SLO lets them in; if first tokens are late, raise "
        "tbt_slo_ms or add an engine",
    )


def _overruns(table: StepTable, _summary: StepSummary) -> Advice | None:
    is_feasible = table.has_decodes & ~np.isnan(table.slo_s) & ~table.is_infeasible
    decode_only = is_feasible & table.is_decode_only
    own = float(np.mean(table.is_over[decode_only])) if decode_only.any() else 0.0
    if own > OVERRUN_SHARE:
        enough_ms = 1e3 * float(np.quantile(table.observed_s[decode_only], 0.99))
        return Advice(
            rule="overruns",
            finding=f"{own:.1%} of the decode-only steps overran the SLO where it was feasible",
            change=f"no budget prevents them; raise tbt_slo_ms to {_rounded(enough_ms)} or more, "
            "or lower --max-num-seqs",
        )
    mixed = is_feasible & table.is_mixed & ~table.has_reason(Reason.AGED)
    share = float(np.mean(table.is_over[mixed])) if mixed.any() else 0.0
    if share <= OVERRUN_SHARE:
        return None
    return Advice(
        rule="overruns",
        finding=f"{share:.1%} of the mixed steps overran the SLO where it was feasible",
        change="lower miss_rate; if predictions are off as well, see to them first",
    )


def _median(values: NDArray[np.float64]) -> float | None:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if known.size else None


def _rounded(milliseconds: float) -> str:
    """Return a figure rounded up to two digits' worth: what an operator would type."""
    step = 10.0 ** max(-1, np.floor(np.log10(milliseconds)) - 1)
    return f"{float(np.ceil(milliseconds / step)) * step:g}"


_Rule: TypeAlias = Callable[[StepTable, StepSummary], Advice | None]
_RULES: tuple[_Rule, ...] = (
    _unsteered,
    _infeasible,
    _overruns,
    _graph_size,
    _predictions,
    _stalls,
    _aged,
    _held,
    _deferred,
    _cold,
    _unused,
    _full,
)
