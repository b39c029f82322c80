"""How does the share of requests that meet both SLOs fall with the rate?

python benchmarks/goodput_picture.py OUT.png FILE...

One panel for each file that simulated_goodput.py wrote; the band is from the worst to the best
window.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from vllm_penalty_sched.plot import MACHINE_COLORS, SLO_COLOR, require_matplotlib, save_figure

# vLLM's own scheduler with the best static budget; that budget with our order; and so on.
STOCK, ORDERED, CHUNKED = "stock:{budget}", "static:{budget}", "penalty,order=fcfs"
UNGUARDED, PENALTY, PACED, ORACLE = "unguarded", "penalty", "penalty,pacing=deadline", "oracle"
AT_EVERY_RATE = (STOCK, PENALTY, ORACLE)
LABELS = {
    STOCK: "stock, best static budget",
    PENALTY: "vllm_penalty_sched",
    ORACLE: "same policy, true costs",
    CHUNKED: "chunking alone",
    ORDERED: "ordering alone",
    UNGUARDED: "without admission guard",
    PACED: "deadline pacing",
}


def draw(path: Path, contents: list[dict[str, Any]]) -> None:
    """Draw goodput against rate, one panel a pair of a trace and a GPU."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(2, len(contents))
    rows = -(-len(contents) // columns)
    figure = Figure(figsize=(5.8 * columns, 3.7 * rows + 0.7), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis, content in zip(axes, contents, strict=False):
        draw_pair(axis, content)
    for axis in axes[len(contents) :]:
        axis.set_visible(False)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    save_figure(figure, path)


def draw_pair(axis: Any, content: dict[str, Any]) -> None:
    budget = content["stock"]["best_static"].partition(":")[2]
    per_s = content["requests_per_s_at_rate_1"]
    for color, (kind, label) in zip(MACHINE_COLORS, LABELS.items(), strict=False):
        name = kind.format(budget=budget)
        at = [row["rate"] for row in content["rows"] if row["scheduler"] == name]
        rates = sorted(rate for rate in set(at) if at.count(rate) == len(content["windows"]))
        shares = [shares_of(content, name, rate=rate) for rate in rates]
        x = [per_s * rate for rate in rates]
        line = {"color": color, "label": label, "marker": "o", "markersize": 4}
        if kind not in AT_EVERY_RATE:
            line |= {"linestyle": "none", "marker": "D", "markersize": 6, "fillstyle": "none"}
        axis.plot(x, [np.mean(found) for found in shares], **line)
        if len(x) > 1:
            axis.fill_between(
                x, [*map(min, shares)], [*map(max, shares)], color=color, alpha=0.15, linewidth=0
            )
    axis.axvline(per_s * content["stock"]["capacity"], color=SLO_COLOR, linewidth=1, linestyle=":")
    axis.set_ylim(-0.02, 1.02)
    axis.set_xlabel("requests arriving a second (dotted: stock's capacity)", fontsize=9)
    axis.set_ylabel("share meeting both SLOs", fontsize=9)
    axis.set_title(f"{stem(content['trace'])} on {stem(content['costs'])}", fontsize=10, loc="left")
    axis.spines[["top", "right"]].set_visible(False)


def shares_of(content: dict[str, Any], name: str, *, rate: float) -> list[float]:
    return [
        row["goodput"]["own_p99_gap"]
        for row in content["rows"]
        if row["scheduler"] == name and row["rate"] == rate
    ]


def stem(file: str) -> str:
    return file.rpartition("/")[2].partition(".")[0]


def main(argv: list[str]) -> None:
    out, *files = map(Path, argv)
    draw(out, [json.loads(file.read_text()) for file in files])


if __name__ == "__main__":
    main(sys.argv[1:])
