"""Tables of real servers under load, and of which GPU serves which part."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from goodput_tables import markdown

MODES = {
    "none": "one engine",
    "data": "`--data-parallel-size 2`",
    "tensor": "`--tensor-parallel-size 2`",
    "pipeline": "`--pipeline-parallel-size 2`",
}


def bench_serve(results: Path) -> str:
    runs = _read(results, "bench_serve")["runs"]
    figures = {
        "TTFT, median": ("median_ttft_ms", "{:.0f} ms"),
        "TTFT, p99": ("p99_ttft_ms", "{:.0f} ms"),
        "TBT, median": ("median_itl_ms", "{:.0f} ms"),
        "TBT, p99": ("p99_itl_ms", "{:.0f} ms"),
        "TBT, longest": ("max_itl_ms", "{:.0f} ms"),
        "gaps within the SLO": ("within_tbt_slo", "{:.1%}"),
        "output tokens/s": ("output_throughput", "{:.0f}"),
        "goodput by mean TPOT, requests/s": ("request_goodput", "{:.2f}"),
    }
    rows = [
        [name, *(_each(runs[side], key, form) for side in ("stock", "penalty"))]
        for name, (key, form) in figures.items()
    ]
    return markdown(["mean (each round)", "stock vLLM", "vllm_penalty_sched"], rows)


def _each(rounds: Sequence[Mapping[str, Any]], key: str, form: str) -> str:
    values = [found[key] for found in rounds]
    return f"{form.format(fmean(values))} ({', '.join(form.format(value) for value in values)})"


def roles_by_gpu(results: Path) -> str:
    rows = [
        [
            row["gpu"] + ("" if row["is_measured"] else " (not measured: from data sheets)"),
            f"{row['prefill_tokens_per_s']:,}",
            f"{row['decode_tokens_per_s']:,} ({row['decode_seqs']}, by {row['decode_limited_by']})",
            f"{row['prefill_per_decode_token']:.1f}",
            f"{row['penalty_ms']:.0f} ms",
        ]
        for row in _read(results, "roles_by_gpu")["rows"]
    ]
    head = ["GPU", "prefill tokens/s", "decode tokens/s (decodes)", "prefill per decode token"]
    return markdown([*head, "penalty of 2,048 tokens"], rows)


def parallelism(results: Path) -> str:
    rows = []
    for run in _read(results, "parallelism")["runs"]:
        mode = MODES[run["mode"]]
        if "error" in run:
            rows.append([mode, run["error"], "", "", ""])
        rows += [[mode, *_scheduler_cells(found)] for found in run.get("schedulers", ())]
    return markdown(["mode", "step trace", "steps", "SLO", "steps within it"], rows)


def _scheduler_cells(found: Mapping[str, Any]) -> list[str]:
    slo, held = f"{found['slo_ms']:.0f} ms", f"{found['held_share']:.2%}"
    return [f"`{found['trace']}`", str(found["steps"]), slo, held]


def server_soak(results: Path) -> str:
    found = _read(results, "server_soak")
    sides = {"stock vLLM": found["stock"], "vllm_penalty_sched": found["penalty"]}
    rows = [
        ["ran", *(f"{run['minutes']:g} min" for run in sides.values())],
        ["requests", *(str(run["requests"]) for run in sides.values())],
        [
            "kinds of error lines while it served",
            *(str(len(run["error_lines"])) for run in sides.values()),
        ],
        ["gaps within the SLO", *(f"{run['gaps']['held_share']:.2%}" for run in sides.values())],
        ["the same, worst minute", *(_worst_minute(run["gaps"]) for run in sides.values())],
        [
            "gaps p50 / p99 / longest",
            *(
                " / ".join(
                    f"{run['gaps'][name]:.0f}" for name in ("p50_ms", "p99_ms", "longest_ms")
                )
                + " ms"
                for run in sides.values()
            ),
        ],
        *(
            [name, "", f"{found['penalty'][key]:.2%}"]
            for name, key in (
                ("steps with prefill within the SLO", "slo_held_share_of_mixed_steps"),
                ("decode-only steps within it", "slo_held_share_of_decode_only_steps"),
            )
        ),
    ]
    for process in found["penalty"]["memory_mib"]:
        cells = [
            _growth(run["memory_mib"][process], run["late_slope_mib_per_hour"][process])
            for run in sides.values()
        ]
        rows.append([f"memory of {process}; its slope in the second half", *cells])
    return markdown(["", *sides], rows)


def _worst_minute(gaps: Mapping[str, Any]) -> str:
    return f"{min(gaps['held_share_by_minute']):.2%}"


def _growth(memory_mib: Sequence[Sequence[float]], slope: float) -> str:
    first, last = memory_mib[0][1], memory_mib[-1][1]
    return f"{first:,.0f} to {last:,.0f} MiB; {round(slope):+d} MiB/h"


def real_pair(results: Path) -> str:
    rows = [
        [
            run["servers"],
            " / ".join(f"{run['tbt_ms'][name]:.0f}" for name in ("p50", "p99", "max")) + " ms",
            f"{run['within_slo']:.2%}",
            " / ".join(f"{run['ttft_ms'][name] / 1e3:.1f}" for name in ("p50", "p99")) + " s",
            f"{run['output_tokens'] / run['seconds']:.0f} tokens/s",
            ", ".join(f"{count:.0f} {choice}" for choice, count in run["choices"].items() if count),
        ]
        for run in _read(results, "real_pair")["runs"]
    ]
    head = ["", "TBT p50 / p99 / max", "gaps within the SLO", "TTFT p50 / p99", "throughput"]
    return markdown([*head, "prompts by who prefilled them"], rows)


def _read(results: Path, name: str) -> Any:
    return json.loads((results / f"{name}.json").read_text())


TABLES: Mapping[str, Callable[[Path], str]] = {
    "bench_serve": bench_serve,
    "roles_by_gpu": roles_by_gpu,
    "parallelism": parallelism,
    "server_soak": server_soak,
    "real_pair": real_pair,
}
