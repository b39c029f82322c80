"""A real server under mixed load for long: ``python -m tests.soak.server``.

Stock vLLM gets the same load for a while, so that its own errors are told from ours.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil

from tests.soak.mixed_load import MixedLoad
from vllm_penalty_sched.files import write_json
from vllm_penalty_sched.serving.run_record import record_run
from vllm_penalty_sched.serving.server import CPU_ENGINE_ARGS, RunningServer, ServerSpec, serve
from vllm_penalty_sched.serving.tiny_model import DEMO_MODEL, make_tiny_model
from vllm_penalty_sched.step_log.records import StepTable, TraceText, read_step_log
from vllm_penalty_sched.step_log.summary import summarize_steps

PERIOD_S = 10.0
# vLLM names its processes: the engine core holds the scheduler, the worker the model and its KV.
TITLE = re.compile(r"VLLM::(?P<name>[A-Za-z]+)")
ERROR_LINE = re.compile(r"\bERROR\b|Traceback")


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=20.0, help="of ours (%(default)g)")
    parser.add_argument("--stock-minutes", type=float, default=10.0, help="(%(default)g)")
    parser.add_argument("--clients", type=int, default=8, help="(%(default)s)")
    parser.add_argument(
        "--pause-s", type=float, default=4.0, help="of a client, mean (%(default)g)"
    )
    parser.add_argument("--tbt-slo-ms", type=float, default=200.0, help="(%(default)g)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def resident_mib(server: RunningServer) -> dict[str, float]:
    """Return the resident memory of the server's processes by their titles, MiB."""
    first = psutil.Process(server.process.pid)
    sizes: Counter[str] = Counter()
    for process in (first, *first.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # it ended meanwhile
            title = TITLE.match((process.cmdline() or [""])[0])
            name = title["name"] if title else "API server and helpers"
            sizes[name] += process.memory_info().rss / 2**20
    return dict(sizes)


def late_slope_mib_per_hour(samples: Sequence[tuple[float, float]]) -> float | None:
    """Return how memory grows in the second half, once pools and caches have filled."""
    late = samples[len(samples) // 2 :]
    if len(late) < 3:
        return None
    times_s, sizes = zip(*late, strict=True)
    return float(np.polyfit(times_s, sizes, 1)[0] * 3600)


def soak(name: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    trace = folder / "steps.jsonl"
    settings = {
        "tbt_slo_ms": arguments.tbt_slo_ms,
        "ttft_slo_ms": 5000,
        "trace_path": str(trace),
        "state_path": str(folder / "state.json"),
    }
    ours = name == "penalty"
    spec = ServerSpec(
        model=str(folder / "model"),
        log_path=folder / f"{name}.log",
        engine_args=CPU_ENGINE_ARGS,
        scheduler_cls="vllm_penalty_sched.Scheduler" if ours else None,
        additional_config={"penalty_sched": settings} if ours else None,
    )
    minutes = arguments.minutes if ours else arguments.stock_minutes
    memory: dict[str, list[tuple[float, float]]] = {}
    rounds = count(1)
    with serve(spec) as server:
        load = MixedLoad(
            server.url,
            server.model,
            clients=arguments.clients,
            pause_s=arguments.pause_s,
            seed=arguments.seed,
        )

        def watch(now_s: float) -> None:
            server.raise_if_dead()
            sizes = resident_mib(server)
            for process, size in sizes.items():
                memory.setdefault(process, []).append((round(now_s), round(size, 1)))
            if next(rounds) % 6 == 0:
                print(
                    f"{name}: {now_s / 60:.1f} of {minutes:g} min, {load.seen.total()} requests, "
                    f"{sum(sizes.values()):.0f} MiB",
                    flush=True,
                )

        asyncio.run(load.run(60 * minutes, watch, PERIOD_S))
        # Before it stops: its API server may find its engine gone a moment sooner, and says so.
        log = spec.log_path.read_text(encoding="utf-8", errors="replace")
    found = {
        "minutes": minutes,
        "requests": load.seen.total(),
        "outcomes": dict(sorted(load.seen.items())),
        "error_lines": sorted({_without_details(line) for line in _error_lines(log)}),
        "late_slope_mib_per_hour": {
            process: late_slope_mib_per_hour(samples) for process, samples in memory.items()
        },
        "memory_mib": memory,
        "gaps": gap_figures(load.gaps, arguments.tbt_slo_ms / 1e3),
    }
    return found | (slo_figures(trace) if ours else {})


def _error_lines(log: str) -> list[str]:
    return [line for line in log.splitlines() if ERROR_LINE.search(line)]


def _without_details(line: str) -> str:
    line = re.sub(r'"[^"]*/site-packages/', '"', line)
    return re.sub(r"[0-9a-f]{8,}|\d+", "N", line)[:200]


def gap_figures(gaps: Sequence[tuple[float, float]], slo_s: float) -> dict[str, Any]:
    """Return what a client sees of the SLO: gaps between tokens, in all and by the minute."""
    ended_s, length_s = np.array(gaps).T
    is_held = length_s <= slo_s
    minute = ended_s // 60
    return {
        "gaps": len(gaps),
        "p50_ms": round(1e3 * float(np.quantile(length_s, 0.5)), 1),
        "p99_ms": round(1e3 * float(np.quantile(length_s, 0.99)), 1),
        "longest_ms": round(1e3 * float(length_s.max()), 1),
        "held_share": round(float(is_held.mean()), 4),
        "held_share_by_minute": [
            round(float(is_held[minute == one].mean()), 4) for one in np.unique(minute)
        ],
    }


def slo_figures(trace: Path) -> dict[str, Any]:
    """Return what the scheduler's own trace says: of every step with decodes, by its own SLO."""
    log = read_step_log([TraceText(source=trace.name, text=trace.read_text(encoding="utf-8"))])
    summary, table = summarize_steps(log), StepTable.of(log.steps)
    assert summary.slo is not None
    is_judged = table.has_decodes & ~np.isnan(table.slo_s)
    minute = (table.done_s - table.done_s[0]) // 60
    late = [step.reason for step, is_over in zip(log.steps, table.is_over, strict=True) if is_over]
    return {
        "steps": summary.steps,
        "slo_held_share": summary.slo.held_share,
        "slo_held_share_of_mixed_steps": summary.slo.mixed_held_share,
        "slo_held_share_of_decode_only_steps": summary.slo.decode_only_held_share,
        "slo_held_share_by_minute": [
            round(1.0 - float(table.is_over[is_judged & (minute == one)].mean()), 4)
            for one in np.unique(minute[is_judged])
        ],
        "late_steps_by_reason": dict(Counter(map(str, late))),
        "longest_wait_s": summary.longest_wait_s,
        "reasons": {str(one.reason): one.steps for one in summary.reasons},
    }


def problems_of(ours: dict[str, Any], stock: dict[str, Any]) -> list[str]:
    """Return what stock does not show as well."""
    fine = {"200", "400", "404", "aborted"}
    found = [
        f"{count} x {outcome}"
        for outcome, count in ours["outcomes"].items()
        if outcome.partition(" ")[2] not in fine and outcome not in stock["outcomes"]
    ]
    return found + [line for line in ours["error_lines"] if line not in stock["error_lines"]]


def main() -> int:
    arguments = read_arguments()
    with TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny_model(folder / "model", DEMO_MODEL)
        stock = soak("stock", folder, arguments)
        ours = soak("penalty", folder, arguments)
    problems = problems_of(ours, stock)
    for name, run in (("stock", stock), ("penalty", ours)):
        print(
            name,
            run["gaps"],
            {key: value for key, value in run.items() if key not in ("memory_mib", "gaps")},
        )
    print(*problems or ["nothing that stock does not show"], sep="\n")
    if arguments.json:
        command = shlex.join(["python", "-m", "tests.soak.server", *sys.argv[1:]])
        runs = {"stock": stock, "penalty": ours, "problems": problems}
        write_json(arguments.json, {**record_run(command, seed=arguments.seed), **runs})
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
