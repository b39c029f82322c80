"""Pictures; matplotlib is loaded only when one is drawn."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_penalty_sched.errors import ConfigError, MissingDependencyError
from vllm_penalty_sched.learning.curve import PenaltyCurve
from vllm_penalty_sched.metrics import Quantiles, pooled_gaps, share_over

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from vllm_penalty_sched.calibration.fitting import CurveFit, StepFit
    from vllm_penalty_sched.metrics import RequestTrace

WITHIN_COLOR, OVER_COLOR, SLO_COLOR = "#2f6f9f", "#c8402f", "#222222"
PROMPT_COLOR, GRID_COLOR = "#e09b2d", "#e6e6e6"
# Told apart by the colour-blind too (Okabe and Ito); repeated beyond eight machines.
MACHINE_COLORS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999933",
)  # fmt: skip
# The band around perfect predictions.
BAND = 0.1
_PANEL_TITLE = {"fontsize": 10, "loc": "left"}
_DOTS = {"marker": "o", "markersize": 3, "alpha": 0.35, "markeredgewidth": 0, "linestyle": "none"}
_MEDIANS = {"marker": "D", "markersize": 5, "markeredgewidth": 0, "linestyle": "none"}
# Stalls many times longer than a step would press all else to the ground.
_HIGHEST_SHOWN = 1.25


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
        ConfigError: If the suffix names no format.
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
    save_figure(figure, path)


def draw_fit(path: Path, curve_fit: CurveFit, step_fit: StepFit, *, title: str) -> None:
    """Draw f(r) over the steps it was fitted to, and predicted against measured step times.

    Args:
        path: File to write; its suffix names the format.
        curve_fit: Drawn left, beside the published curve scaled to the same f(0).
        step_fit: Drawn right, with the predictions of its cross-validation.
        title: Above both.

    Raises:
        ConfigError: If the suffix names no format.
        MissingDependencyError: If matplotlib is not installed; names the extra.
    """
    figure, (left, right) = two_panels()
    _draw_curve(left, curve_fit)
    _draw_predictions(right, step_fit)
    figure.suptitle(title, fontsize=11)
    save_figure(figure, path)


def draw_curves(path: Path, fits: Mapping[str, CurveFit], *, title: str) -> None:
    """Draw f(r) of several machines, and what each would gain by disaggregating prefill.

    Args:
        path: File to write; its suffix names the format.
        fits: The fit of each machine by its name, at least one.
        title: Above both panels.

    Raises:
        ConfigError: If the suffix names no format.
        MissingDependencyError: If matplotlib is not installed; names the extra.
    """
    figure, (left, right) = two_panels()
    for index, (name, fit) in enumerate(fits.items()):
        color = MACHINE_COLORS[index % len(MACHINE_COLORS)]
        _draw_polynomial(
            left, fit.curve, color=color, label=f"{name}, R² {fit.curve.r_squared:.2f}"
        )
        _draw_measurements(left, fit, color=color)
        _draw_penalty(right, name, fit.curve, color=color)
    _label_curve(left, list(fits.values()))
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    left.set_title("penalty curve f(r), and the median of each composition", **_PANEL_TITLE)
    right.set_ylim(max(len(fits), 3) - 0.5, -0.5)
    right.margins(x=0.4)
    right.grid(visible=False, axis="y")
    right.axvline(0.0, color=SLO_COLOR, linewidth=0.8)
    right.set_xlabel("f(1) - f(0), ms")
    right.set_title("penalty, and its share of f(0)", **_PANEL_TITLE)
    figure.suptitle(title, fontsize=11)
    save_figure(figure, path)


def two_panels() -> tuple[Any, Any]:
    """Return an empty figure and its two axes side by side.

    Raises:
        MissingDependencyError: If matplotlib is not installed; names the extra.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2, width_ratios=(1.35, 1))
    for axis in axes:
        axis.grid(visible=True, color=GRID_COLOR, linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def check_suffix(path: Path) -> None:
    """Check that a picture can be written in the format that a file's suffix names.

    Raises:
        ConfigError: If the suffix names no format.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise ConfigError(f"a picture's suffix must be one of {', '.join(formats)}, got {path}")


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure.

    Raises:
        ConfigError: If the suffix names no format.
    """
    check_suffix(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_curve(axis: Any, fit: CurveFit) -> None:
    _draw_measurements(
        axis,
        fit,
        color=WITHIN_COLOR,
        labels=(f"{len(fit.seconds)} measurements", "median of a composition"),
    )
    own = f"own fit, R² {fit.curve.r_squared:.2f}, f(1) - f(0) {1e3 * fit.curve.penalty_s:.2f} ms"
    _draw_polynomial(axis, fit.curve, color=OVER_COLOR, label=own)
    published = PenaltyCurve.published().scaled_to(fit.curve.predict_s(0.0))
    _draw_polynomial(
        axis, published, color=SLO_COLOR, label="published f(r), same f(0)", linestyle="--"
    )
    _label_curve(axis, [fit])
    axis.legend(frameon=False, fontsize=9, loc="best")
    axis.set_title("penalty curve", **_PANEL_TITLE)


def _draw_measurements(
    axis: Any, fit: CurveFit, *, color: str, labels: tuple[str | None, str | None] = (None, None)
) -> None:
    for ratios, seconds, style, label in (
        (fit.ratios, fit.seconds, _DOTS, labels[0]),
        (fit.median_ratios, fit.medians_s, _MEDIANS, labels[1]),
    ):
        axis.plot(ratios, [1e3 * s for s in seconds], color=color, label=label, **style)


def _draw_polynomial(axis: Any, curve: PenaltyCurve, **style: Any) -> None:
    ratios = np.linspace(0.0, 1.0, 101)
    axis.plot(ratios, [1e3 * curve.predict_s(float(r)) for r in ratios], linewidth=1.8, **style)


def _draw_penalty(axis: Any, name: str, curve: PenaltyCurve, *, color: str) -> None:
    penalty_ms = 1e3 * curve.penalty_s
    bars = axis.barh(name, penalty_ms, color=color, height=0.5)
    share = curve.penalty_s / curve.predict_s(0.0)
    axis.bar_label(bars, [f"{penalty_ms:.2f} ms ({share:+.0%})"], padding=4)


def _label_curve(axis: Any, fits: Sequence[CurveFit]) -> None:
    axis.set_xlim(-0.02, 1.02)
    highest_s = max(max(*fit.medians_s, fit.curve.predict_s(1.0)) for fit in fits)
    axis.set_ylim(0, 1e3 * _HIGHEST_SHOWN * highest_s)
    axis.set_xlabel("prefill ratio r: prefill tokens / all tokens of the step")
    axis.set_ylabel("time between tokens, ms")


def _draw_predictions(axis: Any, fit: StepFit) -> None:
    measured_ms = 1e3 * np.array(fit.measured_s)
    predicted_ms = 1e3 * np.array(fit.predicted_s)
    both = np.concatenate([measured_ms, predicted_ms])
    ends = np.array([both.min() / 1.1, both.max() * 1.1])
    axis.fill_between(
        ends, ends * (1 - BAND), ends * (1 + BAND), color=GRID_COLOR, label=f"within {BAND:.0%}"
    )
    axis.plot(ends, ends, color=SLO_COLOR, linewidth=1.0, label="predicted = measured")
    axis.plot(measured_ms, predicted_ms, color=WITHIN_COLOR, label="held-out step", **_DOTS)
    axis.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    for side in (axis.xaxis, axis.yaxis):
        label_log(side)
    axis.set_xlabel("measured step time, ms")
    axis.set_ylabel("predicted, ms")
    axis.legend(frameon=False, fontsize=9, loc="upper left")
    r_squared = "" if fit.r_squared is None else f"R² {fit.r_squared:.3f}, "
    axis.set_title(f"step-time model: {r_squared}MAPE {fit.mape:.1%}", **_PANEL_TITLE)


def label_log(side: Any) -> None:
    """Put plain numbers 1, 2, 5, 10, ... on an axis's logarithmic side."""
    from matplotlib.ticker import LogLocator, NullFormatter

    side.set_major_locator(LogLocator(subs=(1, 2, 5)))
    side.set_major_formatter("{x:g}")
    side.set_minor_formatter(NullFormatter())


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
