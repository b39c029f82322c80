"""What share of requests meets both SLOs at which rate, and which part of the policy does it?

python benchmarks/simulated_goodput.py --trace FILE --costs FILE --start S --duration S
    (--capacity FILE | --stock-capacity RATE --best-static N) [--grid N,N,...] --json OUT
    [--plot OUT.png]

Traces and step costs are not part of this repository; the options are those of `vllm-penalty
simulate`. A run that was cut goes on where it stopped when the same command runs again.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from goodput_picture import (
    AT_EVERY_RATE,
    CHUNKED,
    ORACLE,
    ORDERED,
    PACED,
    PENALTY,
    STOCK,
    UNGUARDED,
    draw,
)

from vllm_penalty_sched.cli import simulation_arguments
from vllm_penalty_sched.cli.simulation_arguments import Window
from vllm_penalty_sched.errors import ConfigError
from vllm_penalty_sched.files import write_json
from vllm_penalty_sched.serving.run_record import record_run
from vllm_penalty_sched.simulation.scheduler_spec import SchedulerSpec

# Multiples of stock's capacity. The ablation runs at the first one, which comes first: a run that
# is cut leaves out the least telling rates.
RELATIVE_RATES = (1.5, 1.0, 2.0, 0.5)
AT_ABLATION_RATE = (STOCK, PENALTY, ORACLE, CHUNKED, ORDERED, UNGUARDED, PACED)
# Another budget than the one that is best at stock's capacity may be better at other rates.
LEFT_OUT_OF_GRID_ROWS = ("ttft_by_prompt_length", "reasons")


@dataclass(frozen=True)
class Stock:
    """Stock vLLM's best static budget in hindsight, and the rate that it holds."""

    budget: int
    rate: float


def read_stock(arguments: argparse.Namespace) -> Stock:
    if arguments.capacity is None:
        return Stock(arguments.best_static, arguments.stock_capacity)
    found = json.loads(arguments.capacity.read_text())
    rates = {entry["scheduler"]: entry["rate"] for entry in found["schedulers"]}
    name = found["best_static"]
    return Stock(SchedulerSpec.parse(name).budget_tokens, rates[name])


def read_earlier(path: Path, setup: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of an earlier run of the same setup."""
    if not path.exists():
        return []
    earlier = json.loads(path.read_text())
    for name, value in setup.items():
        if earlier.get(name) != value:
            raise ConfigError(
                f"{path} holds runs with another {name}: {earlier.get(name)}, now {value}"
            )
    return list(earlier["rows"])


def run_row(window: Window, spec: SchedulerSpec, *, rate: float) -> dict[str, Any]:
    from vllm_penalty_sched.engine.simulation import simulate

    return simulate(spec, window.at_rate(rate), say=say).to_json()


def run_all(arguments: argparse.Namespace) -> dict[str, Any]:
    stock, windows = read_stock(arguments), simulation_arguments.read_windows(arguments)
    plan, record = windows[0].plan, record_run(arguments.command, seed=windows[0].seed)
    # Through JSON, so that it compares equal to what an earlier run wrote.
    setup: dict[str, Any] = json.loads(
        json.dumps(
            {
                "trace": str(arguments.trace or arguments.synthetic),
                "costs": arguments.costs,
                "windows": [str(window) for window in windows],
                "slo_s": {"ttft": plan.ttft_slo_s, "tbt": plan.tbt_slo_s},
                "stock": {"best_static": f"stock:{stock.budget}", "capacity": stock.rate},
                "commit": record["commit"],
            }
        )
    )
    own_rate = float(np.mean([window.requests_per_s for window in windows]))
    content: dict[str, Any] = {
        "question": (__doc__ or "").partition("\n")[0],
        **setup,
        "requests_per_s_at_rate_1": round(own_rate, 4),
        "run": record,
        "rows": read_earlier(arguments.json, setup),
    }
    keys = ("relative_rate", "scheduler", "window")
    done = {tuple(row[key] for key in keys) for row in content["rows"]}
    for relative, name in planned_runs(arguments, stock.budget):
        for place, window in enumerate(windows):
            key = (relative, name, place)
            if key in done:
                continue
            rate = round(relative * stock.rate, 5)
            row = run_row(window, SchedulerSpec.parse(name), rate=rate)
            if name.startswith(("stock:", "static:")) and name != setup["stock"]["best_static"]:
                row = {k: value for k, value in row.items() if k not in LEFT_OUT_OF_GRID_ROWS}
            content["rows"].append(dict(zip(keys, key, strict=True)) | {"rate": rate} | row)
            write_json(arguments.json, content)
            say(f"{key}: {row['goodput']} in {row['wall_s']} s")
    return content


def planned_runs(arguments: argparse.Namespace, best_budget: int) -> list[tuple[float, str]]:
    """Return each relative rate and scheduler, the most telling first."""
    grid = [budget for budget in (arguments.grid or "").split(",") if budget]
    runs = []
    for rate in arguments.relative_rate or RELATIVE_RATES:
        kinds = AT_ABLATION_RATE if rate == RELATIVE_RATES[0] else AT_EVERY_RATE
        runs += [(rate, kind.format(budget=best_budget)) for kind in kinds]
        runs += [(rate, f"stock:{budget}") for budget in grid]
        if rate == RELATIVE_RATES[0]:
            runs += [(rate, ORDERED.format(budget=budget)) for budget in grid]
    return list(dict.fromkeys(runs))


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def read_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    simulation_arguments.add_arguments(parser)
    parser.add_argument("--capacity", type=Path, help="what `vllm-penalty capacity --json` wrote")
    parser.add_argument("--stock-capacity", type=float, metavar="RATE")
    parser.add_argument("--best-static", type=int, metavar="BUDGET")
    parser.add_argument("--grid", metavar="N,N,...", help="other budgets of stock vLLM")
    parser.add_argument("--relative-rate", type=float, action="append", metavar="R")
    parser.add_argument("--plot", type=Path, metavar="OUT.png")
    arguments = parser.parse_args(argv)
    if arguments.capacity is None and not (arguments.stock_capacity and arguments.best_static):
        parser.error("give --capacity, or --stock-capacity and --best-static")
    if arguments.json is None:
        parser.error("give --json")
    # A folder of this machine tells a reader nothing.
    told = [Path(word).name if Path(word).is_absolute() else word for word in argv]
    arguments.command = shlex.join(["python", "benchmarks/" + Path(__file__).name, *told])
    return arguments


def main(argv: list[str]) -> None:
    arguments = read_arguments(argv)
    logging.getLogger("vllm").setLevel(logging.ERROR)  # else a line for each configuration made
    os.environ.setdefault("PENALTY_SCHED_STRICT", "1")  # an error of ours must end a simulation
    content = run_all(arguments)
    if arguments.plot:
        draw(arguments.plot, [content])


if __name__ == "__main__":
    main(sys.argv[1:])
