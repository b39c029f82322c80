"""The subcommands ``simulate`` and ``capacity``."""

from __future__ import annotations

import importlib.util
import logging
import math
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from vllm_penalty_sched.cli import simulation_arguments
from vllm_penalty_sched.errors import MissingDependencyError
from vllm_penalty_sched.files import check_writable, write_json
from vllm_penalty_sched.serving.run_record import record_run
from vllm_penalty_sched.simulation.capacity import Capacity, find_capacity
from vllm_penalty_sched.simulation.plan import SimulationPlan
from vllm_penalty_sched.simulation.plot import draw_simulation
from vllm_penalty_sched.simulation.result import SimulationResult, format_results
from vllm_penalty_sched.simulation.scheduler_spec import SchedulerKind, SchedulerSpec

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from vllm_penalty_sched.cli.simulation_arguments import Window
    from vllm_penalty_sched.simulation.goodput import ServedRequest

MEASURES = ("own_p99_gap", "tpot", "deadline")
_Result = TypeVar("_Result")


def add_simulate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``simulate``."""
    simulation_arguments.add_arguments(parser)
    parser.add_argument("--rate", type=float, default=1.0, help="multiple of the trace's (1)")
    parser.add_argument(
        "--plot",
        type=Path,
        dest="picture",
        metavar="OUT",
        help="draw the distributions of TTFT and TBT",
    )


def add_capacity_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``capacity``."""
    simulation_arguments.add_arguments(parser)
    add = parser.add_argument
    add("--target", type=float, default=0.9, help="share of the requests (%(default)g)")
    add("--measure", choices=MEASURES, default=MEASURES[0], help="goodput (%(default)s)")
    add(
        "--grid",
        metavar="N,N,...",
        help="budgets of stock vLLM, of which the best is searched: one that fails at the rate "
        "that an earlier one reached is not searched further (rate 0), so name likely ones first",
    )
    add(
        "--tolerance",
        type=float,
        default=0.03,
        help="stop when the rates tried are this share apart (%(default)g)",
    )
    add(
        "--first-rate",
        type=float,
        default=1.0,
        help="multiple of the trace's rate to begin with (%(default)g); far above what can be "
        "carried a run takes longest",
    )


def run_simulate(arguments: argparse.Namespace) -> int:
    """Run every scheduler over every window, print a table, write results and picture."""
    specs = simulation_arguments.read_schedulers(arguments)
    windows = simulation_arguments.read_windows(arguments)
    plans = [window.at_rate(arguments.rate) for window in windows]
    _check_all(specs, plans)
    calls = [partial(_simulate, spec, plan) for plan in plans for spec in specs]
    results = _run_all(calls, jobs=arguments.jobs)
    runs = []
    for place, window in enumerate(windows):
        of_window = results[place * len(specs) : (place + 1) * len(specs)]
        print(f"{window}, rate x {arguments.rate:g}", format_results(of_window), sep="\n")
        runs += [
            {**result.to_json(), "rate": arguments.rate, **_origin(window, arguments)}
            for result in of_window
        ]
    if arguments.json:
        write_json(arguments.json, runs)
    if arguments.picture:
        draw_simulation(
            arguments.picture,
            _pooled(specs, results),
            ttft_slo_s=plans[0].ttft_slo_s,
            tbt_slo_s=plans[0].tbt_slo_s,
            title=f"{arguments.trace or arguments.synthetic}, {arguments.costs}, "
            f"rate x {arguments.rate:g}",
        )
    return 0


def run_capacity(arguments: argparse.Namespace) -> int:
    """Search every scheduler's capacity, print a table and write the results."""
    grid = _read_grid(arguments.grid)
    if grid and not arguments.scheduler:
        arguments.scheduler = ["penalty"]
    specs = simulation_arguments.read_schedulers(arguments)
    windows = simulation_arguments.read_windows(arguments)
    _check_all([*specs, *grid], [window.plan for window in windows])
    search = partial(
        _search,
        windows,
        measure=arguments.measure,
        target=arguments.target,
        tolerance=arguments.tolerance,
        first_rate=arguments.first_rate,
    )
    calls = [partial(_search_best, search, [spec]) for spec in specs]
    if grid:
        calls.append(partial(_search_best, search, grid))
    found = [entry for entries in _run_all(calls, jobs=arguments.jobs) for entry in entries]
    best = _best_static(found)
    own_rate = np.mean([window.requests_per_s for window in windows])
    print(*windows, sep="\n")
    print(_format_capacities(found, own_rate=float(own_rate), measure=arguments.measure))
    if arguments.json:
        write_json(
            arguments.json,
            {
                "target": arguments.target,
                "measure": arguments.measure,
                "tolerance": arguments.tolerance,
                "requests_per_s_at_rate_1": round(float(own_rate), 4),
                "best_static": best.spec.name if best else None,
                "schedulers": [entry.to_json() for entry in found],
                "windows": [_origin(window, arguments) for window in windows],
                **record_run(arguments.command, seed=windows[0].seed),
            },
        )
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    spec: SchedulerSpec
    capacity: Capacity

    def to_json(self) -> dict[str, object]:
        return {
            "scheduler": self.spec.name,
            "rate": round(self.capacity.rate, 4),
            "share": round(self.capacity.share, 5),
            "probes": [asdict(probe) for probe in self.capacity.probes],
        }


def _search_best(search: Callable[..., Capacity], specs: Sequence[SchedulerSpec]) -> list[_Found]:
    """Search the best of some schedulers: one that fails where the best so far did not is left."""
    found: list[_Found] = []
    for spec in specs:
        least_rate = max((entry.capacity.rate for entry in found), default=0.0) or None
        found.append(_Found(spec=spec, capacity=search(spec, least_rate=least_rate)))
    return found


def _read_grid(text: str | None) -> list[SchedulerSpec]:
    if text is None:
        return []
    return [SchedulerSpec.parse(f"stock:{budget}") for budget in text.split(",")]


def _check_all(specs: Sequence[SchedulerSpec], plans: Sequence[SimulationPlan]) -> None:
    """Raise what can be known to be wrong before vLLM is imported, which takes long."""
    for spec in specs:
        for plan in plans:
            plan.check(spec)
        _check_outputs(spec)
    if importlib.util.find_spec("vllm") is None:
        raise MissingDependencyError(
            "simulating needs vLLM, which is not installed: pip install 'vllm-penalty-sched[vllm]'"
        )


def _check_outputs(spec: SchedulerSpec) -> None:
    """Raise what the engine, where a bad path must not stop serving, only logs."""
    for name in ("trace_path", "state_path"):
        path = spec.overrides.get(name)
        if path is not None:
            check_writable(path, by_rename=name == "state_path")


def _simulate(
    spec: SchedulerSpec, plan: SimulationPlan, *, most_misses: float = math.inf
) -> SimulationResult:
    logging.getLogger("vllm").setLevel(logging.ERROR)  # else a line for each configuration made
    os.environ.setdefault("PENALTY_SCHED_STRICT", "1")  # an error of ours must end a simulation
    from vllm_penalty_sched.engine.simulation import simulate

    return simulate(spec, plan, say=_say, most_misses=most_misses)


def _search(
    windows: Sequence[Window],
    spec: SchedulerSpec,
    *,
    measure: str,
    target: float,
    tolerance: float,
    first_rate: float,
    least_rate: float | None,
) -> Capacity:
    def share_at(rate: float) -> float:
        shares: list[float] = []
        for place, window in enumerate(windows):
            # What this window must reach if all that follow were perfect.
            least_share = target * len(windows) - sum(shares) - (len(windows) - 1 - place)
            if least_share > 1.0:
                break
            plan = window.at_rate(rate)
            most_misses = (1.0 - least_share) * len(plan.requests)
            result = _simulate(spec, plan, most_misses=most_misses)
            shares.append(float(getattr(result.goodput, measure)))
        share = sum(shares) / len(windows)
        _say(f"{spec.name}: {share:.1%} at rate x {rate:.3g}")
        return share

    return find_capacity(
        share_at,
        target=target,
        tolerance=tolerance,
        least_rate=least_rate,
        first_rate=first_rate,
    )


def _run_all(calls: Sequence[Callable[[], _Result]], *, jobs: int) -> list[_Result]:
    """Return what the calls return, in their order."""
    if jobs == 1 or len(calls) == 1:
        return [call() for call in calls]
    # A forked process would inherit vLLM's threads in whatever state they were.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(calls)), mp_context=context) as pool:
        return list(pool.map(_call, calls))


def _call(call: Callable[[], _Result]) -> _Result:
    return call()


def _pooled(
    specs: Sequence[SchedulerSpec], results: Sequence[SimulationResult]
) -> dict[str, list[ServedRequest]]:
    """Return every scheduler's requests over all windows."""
    return {
        spec.name: [request for result in results[place :: len(specs)] for request in result.served]
        for place, spec in enumerate(specs)
    }


def _origin(window: Window, arguments: argparse.Namespace) -> dict[str, object]:
    """Return what a reader needs to repeat a window's runs."""
    return {
        "start_s": window.start_s,
        "left_out": window.left_out,
        **record_run(arguments.command, seed=window.seed),
    }


def _best_static(found: Sequence[_Found]) -> _Found | None:
    static = [entry for entry in found if entry.spec.kind is SchedulerKind.STOCK]
    return max(static, key=lambda entry: entry.capacity.rate, default=None)


def _format_capacities(found: Sequence[_Found], *, own_rate: float, measure: str) -> str:
    best = _best_static(found)
    lines = [f"{'scheduler':<24}{'rate':>8}{'req/s':>8}{'of best static':>16}{measure:>14}"]
    for entry in found:
        rate = entry.capacity.rate
        ratio = f"{rate / best.capacity.rate:.2f}" if best and best.capacity.rate else "-"
        lines.append(
            f"{entry.spec.name:<24}{rate:>8.3f}{rate * own_rate:>8.2f}{ratio:>16}"
            f"{entry.capacity.share:>14.3f}"
        )
    if best:
        lines.append(f"best static budget in hindsight: {best.spec.name}")
    return "\n".join(lines)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
