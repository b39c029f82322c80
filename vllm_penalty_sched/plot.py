"""Pictures; matplotlib is loaded only when one is drawn."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_penalty_sched.errors import MissingDependencyError
from vllm_penalty_sched.metrics import Quantiles, pooled_gaps, share_over

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from vllm_penalty_sched.metrics import RequestTrace

WITHIN_COLOR, OVER_COLOR, SLO_COLOR = "#2f6f9f", "#c8402f", "#222222"
PROMPT_COLOR, GRID_COLOR = "#e09b2d", "#e6e6e6"


@dataclass(frozen=True, slots=True, kw_only=True)
class GapPanel:
    """One load to draw.

    Attributes:
        name: What served it.
        traces: Every request.
        injections_s: When the long prompts were sent, seconds on the clock of the traces.
    """

    name: str
    traces: Sequence[RequestTrace]
    injections_s: Sequence[float]


def require_matplotlib() -> None:
    """Raise now rather than after the measurement if no picture could be drawn.

    Raises:
        MissingDependencyError: If matplotlib is not installed; names the extra.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependencyError(
            "drawing needs matplotlib: pip install 'vllm-penalty-sched[plot]'"
        )


def draw_gaps(path: Path, panels: Sequence[GapPanel], *, tbt_slo_s: float, title: str) -> None:
    """Draw every token gap over time, one panel above the other on the same axes.

    Args:
        path: File to write; its suffix names the format.
        panels: From top to bottom, at least one.
        tbt_slo_s: The line that gaps should stay under, seconds.
        title: Above the first panel.

    Raises:
        MissingDependencyError: If matplotlib is not installed; names the extra.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(10, 2.7 * len(panels) + 1.1), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(len(panels), sharex=True, sharey=True, squeeze=False)[:, 0])
    for axis, panel in zip(axes, panels, strict=True):
        _draw_gaps(axis, panel, tbt_slo_s)
        _draw_marks(axis, panel, tbt_slo_s)
        _label_panel(axis, panel, tbt_slo_s)
    axes[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes[0].set_ylim(bottom=_lowest_ms(panels))
    axes[-1].set_xlim(left=0)
    axes[-1].set_xlabel("seconds since the start of the load")
    figure.suptitle(title, fontsize=11)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=4, frameon=False, markerscale=1.5
    )
    figure.savefig(path)


def _draw_gaps(axis: Any, panel: GapPanel, tbt_slo_s: float) -> None:
    ends_s, gaps_s = pooled_gaps(panel.traces)
    is_over = gaps_s > tbt_slo_s
    for mask, color, size, label in (
        (~is_over, WITHIN_COLOR, 2.4, "gap within the SLO"),
        (is_over, OVER_COLOR, 4.0, "gap over the SLO"),
    ):
        axis.plot(
            ends_s[mask],
            gaps_s[mask] * 1e3,
            color=color,
            alpha=0.5,
            marker="o",
            markersize=size,
            markeredgewidth=0,
            linestyle="none",
            label=label,
        )


def _draw_marks(axis: Any, panel: GapPanel, tbt_slo_s: float) -> None:
    slo = {"color": SLO_COLOR, "linewidth": 1.2, "linestyle": "--"}
    axis.axhline(tbt_slo_s * 1e3, label=f"SLO, {tbt_slo_s * 1e3:.0f} ms", **slo)
    axis.plot(
        panel.injections_s,
        [0.03] * len(panel.injections_s),
        transform=axis.get_xaxis_transform(),
        color=PROMPT_COLOR,
        marker="^",
        markersize=6,
        markeredgewidth=0,
        linestyle="none",
        label="long prompt sent",
    )


def _label_panel(axis: Any, panel: GapPanel, tbt_slo_s: float) -> None:
    quantiles = Quantiles.of(pooled_gaps(panel.traces)[1])
    numbers = (
        f"p50 {quantiles.p50_s * 1e3:.0f} ms   p99 {quantiles.p99_s * 1e3:.0f} ms   "
        f"max {quantiles.max_s * 1e3:.0f} ms   "
        f"{1 - share_over(panel.traces, tbt_slo_s):.1%} within the SLO"
    )
    axis.set_title(panel.name, fontsize=11, fontweight="bold", loc="left")
    axis.set_title(numbers, fontsize=10, loc="right")
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:.0f}")
    axis.set_ylabel("time between\ntokens, ms")
    axis.grid(visible=True, color=GRID_COLOR, linewidth=0.8)
    axis.spines[["top", "right"]].set_visible(False)


def _lowest_ms(panels: Sequence[GapPanel]) -> float:
    # A gap shortened by the one before it says nothing; a log axis would give it half the room.
    medians_s = [Quantiles.of(pooled_gaps(panel.traces)[1]).p50_s for panel in panels]
    return min(medians_s) * 1e3 / 5
