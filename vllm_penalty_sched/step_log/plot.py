"""Draw a step trace over time; matplotlib is loaded only when it is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_penalty_sched.plot import (
    GRID_COLOR,
    OVER_COLOR,
    PROMPT_COLOR,
    SLO_COLOR,
    WITHIN_COLOR,
    label_log,
    require_matplotlib,
    save_figure,
)
from vllm_penalty_sched.policy import Reason
from vllm_penalty_sched.step_log.records import StepTable
from vllm_penalty_sched.step_log.summary import run_starts

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from vllm_penalty_sched.step_log.records import StepLog

# More points than twice this many are thinned to the first and the highest of so many groups.
_GROUPS = 2000
_TIME_BINS = 150
# A panel of step times that differ by more than this factor gets a logarithmic axis.
_LINEAR_RANGE = 15.0
# Errors beyond the share of errors that this panel shows are drawn at its edge.
_SHOWN_SHARE, _LEAST_SHOWN_PERCENT, _MOST_MARGIN_PERCENT = 0.995, 20.0, 60.0
# Steps without decodes have no SLO: above this multiple of the rest they are drawn at the edge.
_HEADROOM = 1.15
_DECODE_ONLY_COLOR, _QUIET_COLOR = "#8fb8d6", "#a8a8a8"
_DOTS = {"marker": "o", "markeredgewidth": 0, "linestyle": "none"}
_REASON_COLORS: dict[Reason | None, str] = {
    None: "#f4f4f4",
    Reason.NO_DECODE: "#bdbdbd",
    Reason.NO_PREFILL: "#dedede",
    Reason.COLD: "#cc79a7",
    Reason.FITS: "#009e73",
    Reason.SLO: "#0072b2",
    Reason.HELD: "#f0e442",
    Reason.DEFERRED: "#e69f00",
    Reason.AGED: "#d55e00",
    Reason.INFEASIBLE: "#8c1d18",
    Reason.STALLED: "#000000",
}


def draw_steps(path: Path, log: StepLog, *, title: str) -> None:
    """Draw step times, budgets, prefill ratio, prediction errors and reasons above each other.

    Long traces are thinned; a group of neighbouring overruns keeps its longest.

    Args:
        path: File to write; its suffix names the format.
        log: The trace; runs of the engine are drawn one after the other.
        title: Above all panels.

    Raises:
        ConfigError: If the suffix names no format.
        MissingDependencyError: If matplotlib is not installed; names the extra.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    table = StepTable.of(log.steps)
    time_s = elapsed_s(table)
    figure = Figure(figsize=(12, 11), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(5, sharex=True, height_ratios=(2.2, 1.4, 1, 1.2, 1.2)))
    for axis, draw in zip(
        axes,
        (_draw_times, _draw_tokens, _draw_ratio, _draw_errors, _draw_reasons),
        strict=True,
    ):
        axis.grid(visible=True, color=GRID_COLOR, linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        draw(axis, table, time_s)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(
                frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5),
                reverse=axis is axes[-1],
            )  # fmt: skip
    axes[-1].set_xlim(0, float(time_s[-1]))
    axes[-1].set_xlabel("seconds since the start of the trace")
    figure.align_ylabels(axes)
    figure.suptitle(title, fontsize=11)
    save_figure(figure, path)


def elapsed_s(table: StepTable) -> NDArray[np.float64]:
    """Return when each step completed after the start of the first, runs one after the other."""
    elapsed = np.empty_like(table.done_s)
    starts = run_starts(table)
    offset_s = 0.0
    for start, end in zip(starts, np.append(starts[1:], table.done_s.size), strict=True):
        began_s = table.done_s[start] - table.observed_s[start]
        elapsed[start:end] = offset_s + table.done_s[start:end] - began_s
        offset_s = float(elapsed[end - 1])
    return elapsed


def thin(places: NDArray[np.int64], heights: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the places to draw: all, or of many groups of neighbours the first and the highest.

    Args:
        places: Ascending, shape (m,).
        heights: What may not be hidden when it is large, of every step, shape (n,).
    """
    if places.size <= 2 * _GROUPS:
        return places
    groups = np.array_split(places, _GROUPS)
    kept = [(group[0], group[np.argmax(heights[group])]) for group in groups]
    return np.unique(np.array(kept, dtype=np.int64))


def _draw_times(axis: Any, table: StepTable, time_s: NDArray[np.float64]) -> None:
    top_ms = _HEADROOM * 1e3 * _longest_judged_s(table)
    observed_ms = np.minimum(1e3 * table.observed_s, top_ms)
    longest_ms = 1e3 * np.max(table.observed_s, where=~table.has_decodes, initial=0.0)
    quiet_label = f"without decodes (to {longest_ms:.0f} ms)"
    for chosen, color, size, label in (
        (~table.has_decodes, _QUIET_COLOR, 3.0, quiet_label),
        (table.is_decode_only & ~table.is_over, _DECODE_ONLY_COLOR, 2.4, "decode-only"),
        (table.is_mixed & ~table.is_over, WITHIN_COLOR, 3.0, "mixed"),
        (table.is_over, OVER_COLOR, 5.0, f"over the SLO ({np.sum(table.is_over)})"),
    ):
        places = thin(np.flatnonzero(chosen), observed_ms)
        if places.size:
            axis.plot(
                time_s[places], observed_ms[places],
                color=color, markersize=size, label=label, **_DOTS,
            )  # fmt: skip
    places = thin(np.flatnonzero(table.has_decodes & ~np.isnan(table.slo_s)), table.slo_s)
    if places.size:
        axis.plot(
            time_s[places], 1e3 * table.slo_s[places],
            color=SLO_COLOR, linewidth=1.2, linestyle="--", label="SLO in force",
        )  # fmt: skip
    if np.max(observed_ms) > _LINEAR_RANGE * np.min(observed_ms):
        axis.set_yscale("log")
        label_log(axis.yaxis)
    else:
        axis.set_ylim(0, 1.03 * top_ms)
    axis.set_ylabel("step time, ms")


def _longest_judged_s(table: StepTable) -> float:
    """Return the longest step with decodes, or the SLO above it; of all if none had decodes."""
    if not table.has_decodes.any():
        return float(np.max(table.observed_s))
    longest_s = np.fmax(table.observed_s, table.slo_s)  # of a number and NaN, the number
    return float(np.max(longest_s[table.has_decodes]))


def _draw_tokens(axis: Any, table: StepTable, time_s: NDArray[np.float64]) -> None:
    has_budget = table.has_decodes & (table.budget_tokens > 0)
    for chosen, heights, color, size, label in (
        (has_budget, table.budget_tokens, PROMPT_COLOR, 5.0, "budget"),
        (table.is_mixed, table.prefill_tokens, WITHIN_COLOR, 2.6, "prefill computed"),
    ):
        places = thin(np.flatnonzero(chosen), heights)
        axis.plot(
            time_s[places], heights[places], color=color, markersize=size, label=label, **_DOTS
        )
    axis.set_ylim(bottom=0)
    axis.set_ylabel("beside decodes,\ntokens a step")


def _draw_ratio(axis: Any, table: StepTable, time_s: NDArray[np.float64]) -> None:
    ratio = table.prefill_tokens / (table.prefill_tokens + table.decode_tokens)
    places = thin(np.arange(ratio.size), ratio)
    axis.plot(
        time_s[places], ratio[places],
        color=WITHIN_COLOR, markersize=2.6, label="prefill ratio r", **_DOTS,
    )  # fmt: skip
    axis.set_ylim(-0.04, 1.04)
    axis.set_ylabel("prefill tokens /\nall tokens")


def _draw_errors(axis: Any, table: StepTable, time_s: NDArray[np.float64]) -> None:
    is_predicted = table.has_decodes & (table.predicted_s > 0)
    error_percent = np.full(time_s.shape, np.nan)
    error_percent[is_predicted] = 100.0 * (
        table.observed_s[is_predicted] / table.predicted_s[is_predicted] - 1.0
    )
    limit = float(np.clip(100.0 * np.max(table.margin), _LEAST_SHOWN_PERCENT, _MOST_MARGIN_PERCENT))
    if is_predicted.any():
        sizes = np.abs(error_percent[is_predicted])
        limit = max(limit, 1.3 * float(np.quantile(sizes, _SHOWN_SHARE)))
    shown = np.clip(error_percent, -limit, limit)
    for chosen, color, label in (
        (is_predicted & table.is_decode_only, _DECODE_ONLY_COLOR, "decode-only"),
        (is_predicted & table.is_mixed, WITHIN_COLOR, "mixed"),
    ):
        places = thin(np.flatnonzero(chosen), np.abs(shown))
        axis.plot(time_s[places], shown[places], color=color, markersize=2.6, label=label, **_DOTS)
    places = thin(np.arange(time_s.size), table.margin)
    axis.plot(
        time_s[places], 100.0 * table.margin[places],
        color=SLO_COLOR, linewidth=1.0, linestyle=":", label="margin",
    )  # fmt: skip
    axis.axhline(0.0, color=SLO_COLOR, linewidth=0.8)
    axis.set_ylim(-1.08 * limit, 1.08 * limit)
    axis.set_ylabel("observed over\npredicted, %")


def _draw_reasons(axis: Any, table: StepTable, time_s: NDArray[np.float64]) -> None:
    edges_s = np.linspace(0.0, float(time_s[-1]), _TIME_BINS + 1)
    widths_s = np.diff(edges_s)
    # Each step's start and end; rounding must not let one start before the last one ended.
    corners_s = np.column_stack((time_s - table.observed_s, time_s)).ravel()
    corners_s = np.maximum.accumulate(corners_s)
    below = np.zeros(_TIME_BINS)
    present = set(table.reasons)
    for reason, color in _REASON_COLORS.items():
        if reason not in present:
            continue
        is_reason = np.array([own is reason for own in table.reasons])
        spent_s = np.where(is_reason, corners_s[1::2] - corners_s[::2], 0.0)
        sums_s = np.cumsum(np.column_stack((np.zeros_like(spent_s), spent_s)).ravel())
        share = np.diff(np.interp(edges_s, corners_s, sums_s, left=0.0)) / widths_s
        axis.bar(
            edges_s[:-1],
            share,
            width=widths_s,
            bottom=below,
            align="edge",
            color=color,
            linewidth=0,
            label=reason or "not steered",
        )
        below += share
    axis.grid(visible=False)
    axis.set_ylim(0, 1)
    axis.set_ylabel("share of time\nby reason")
