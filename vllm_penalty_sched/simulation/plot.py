"""Draw how the schedulers of a simulation served the same requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_penalty_sched.plot import MACHINE_COLORS, SLO_COLOR, label_log, save_figure, two_panels
from vllm_penalty_sched.simulation.goodput import pooled_gaps_s, ttfts_s

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from vllm_penalty_sched.simulation.goodput import ServedRequest

# A distribution of more points than this is drawn through this many of its quantiles.
_MOST_POINTS = 2000
# Shares of the values that are at most as long as drawn, beyond which an axis ends.
_TAIL = 1e-4


def draw_simulation(
    path: Path,
    served: Mapping[str, Sequence[ServedRequest]],
    *,
    ttft_slo_s: float,
    tbt_slo_s: float,
    title: str,
) -> None:
    """Draw the share of requests and of token gaps that took longer than a time.

    Args:
        path: File to write; its suffix names the format.
        served: The requests of each scheduler by its name, at least one scheduler.
        ttft_slo_s: Line in the left panel, seconds.
        tbt_slo_s: Line in the right panel, seconds.
        title: Above both panels.

    Raises:
        ConfigError: If the suffix names no format.
        MissingDependencyError: If matplotlib is not installed; names the extra.
    """
    figure, (left, right) = two_panels()
    for index, (name, requests) in enumerate(served.items()):
        style = {"color": MACHINE_COLORS[index % len(MACHINE_COLORS)], "label": name}
        # A request without a first token stays above every time that was seen.
        _draw_tail(left, ttfts_s(requests), total=len(requests), **style)
        gaps_ms = 1e3 * pooled_gaps_s(requests)
        _draw_tail(right, gaps_ms, total=gaps_ms.size, **style)
    _label(left, slo=ttft_slo_s, unit="s", what="time to first token", of="requests")
    _label(right, slo=1e3 * tbt_slo_s, unit="ms", what="time between tokens", of="gaps")
    left.legend(frameon=False, fontsize=9, loc="lower left")
    figure.suptitle(title, fontsize=11)
    save_figure(figure, path)


def _draw_tail(axis: Any, durations: NDArray[np.float64], *, total: int, **style: Any) -> None:
    if not durations.size:
        return
    ascending = np.sort(durations)
    longer = 1.0 - np.arange(1, ascending.size + 1) / total
    keep = np.unique(np.geomspace(1, ascending.size, _MOST_POINTS).astype(int))
    places = ascending.size - keep[::-1]
    axis.step(ascending[places], longer[places], where="post", linewidth=1.6, **style)


def _label(axis: Any, *, slo: float, unit: str, what: str, of: str) -> None:
    axis.axvline(slo, color=SLO_COLOR, linewidth=1.2, linestyle="--")
    axis.annotate(
        f"SLO {slo:g} {unit}",
        (slo, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(4, -4),
        textcoords="offset points",
        va="top",
        fontsize=9,
    )
    axis.set(xscale="log", yscale="log")
    axis.set_ylim(bottom=_TAIL, top=1.1)
    label_log(axis.xaxis)
    axis.set_xlabel(f"{what}, {unit}")
    axis.set_ylabel(f"share of {of} that took longer")
