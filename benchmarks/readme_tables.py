"""Are the tables in README.md those of the committed results?

python benchmarks/readme_tables.py [--check]

Writes them anew between <!-- table: NAME --> and <!-- /table -->; with --check it writes nothing
and exits with 1 if one is stale.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import compatibility_tables
import goodput_tables
import operations_tables
import pair_tables
from goodput_tables import markdown

README = Path(__file__).parents[1] / "README.md"
RESULTS = Path(__file__).parent / "results"
BLOCK = re.compile(r"(?ms)^(<!-- table: (\w+) -->\n)(.*?)^(<!-- /table -->)$")


def read(results: Path, name: str) -> Any:
    return json.loads((results / f"{name}.json").read_text())


def step_time_accuracy(results: Path) -> str:
    head = ["measured table", "after 200 steps", "after 1,000", "quadratic in r", "overruns"]
    rows = []
    for name, found in read(results, "step_time_accuracy")["tables"].items():
        early, late = (found["accuracy"][f"after_{n}_steps"] for n in (200, 1000))
        planned = found["planned"]
        rows.append(
            [
                name,
                f"{early['mape']:.1%}",
                f"{late['mape']:.1%}",
                f"{late['quadratic_mape']:.0%}",
                f"{planned['overrun_share']:.2%}",
                f"{planned['chunks_relative_to_oracle']:.0%}",
            ]
        )
    return markdown([*head, "chunk, of the true costs'"], rows)


def demo(results: Path) -> str:
    found = read(results, "demo")
    sides = [found["stock"], found["penalty"]]
    slo = f"{found['slo_ms']:.0f} ms ({found['slo_factor']:g} x decode-only)"

    def row(name: str, cell: Callable[[Mapping[str, Any]], str]) -> list[str]:
        return [name, *map(cell, sides)]

    return markdown(
        ["", "stock vLLM", "vllm_penalty_sched"],
        [
            row("TBT p50 / p99 / max", lambda s: in_ms(s["tbt_ms"], ("p50", "p99", "max"))),
            row(f"gaps within the SLO of {slo}", lambda s: f"{s['within_slo']:.2%}"),
            row("TTFT p50 / p99", lambda s: in_s(s["ttft_ms"], ("p50", "p99"))),
            row("whole load", lambda s: f"{s['seconds']:.1f} s"),
            row("failed requests", lambda s: f"{s['errors']} of {s['requests']}"),
        ],
    )


def in_ms(quantiles_ms: Mapping[str, float], names: Iterable[str]) -> str:
    return " / ".join(f"{quantiles_ms[name]:.0f}" for name in names) + " ms"


def in_s(quantiles_ms: Mapping[str, float], names: Iterable[str]) -> str:
    return " / ".join(f"{quantiles_ms[name] / 1e3:.1f}" for name in names) + " s"


def penalty_curves(results: Path) -> str:
    rows = []
    for name, model in read(results, "penalty_curves")["models"].items():
        curve = model["curve"]
        level, slope, square = curve["coefficients_ms"]
        share = curve["penalty_ms"] / level
        rows.append(
            [
                name.rpartition("-")[2].upper(),
                f"{square:.2f} r^2 {'-' if slope < 0 else '+'} {abs(slope):.2f} r + {level:.2f}",
                f"{curve['r_squared']:.2f} ({curve['r_squared_all']:.2f})",
                f"{curve['penalty_ms']:.2f} ms, {share:.0%} of f(0)",
            ]
        )
    return markdown(["parameters", "f(r), ms", "R^2", "f(1) - f(0)"], rows)


def overhead(results: Path) -> str:
    head = ["steady state", "stock, median", "ours, median", "median ratio", "p99 ratio"]
    rows = [
        [
            name,
            f"{found['stock_median_us']:.0f} us",
            f"{found['ours_median_us']:.0f} us",
            f"{found['median_ratio']:.2f}",
            f"{found['p99_ratio']:.2f}",
        ]
        for name, found in read(results, "scheduler_overhead")["cases"].items()
    ]
    return markdown(head, rows)


TABLES: Mapping[str, Callable[[Path], str]] = {
    "demo": demo,
    "penalty_curves": penalty_curves,
    "step_time_accuracy": step_time_accuracy,
    "overhead": overhead,
    **goodput_tables.TABLES,
    **compatibility_tables.TABLES,
    **operations_tables.TABLES,
    **pair_tables.TABLES,
}


def with_tables(text: str, results: Path) -> str:
    """Return a page with the tables that its markers name.

    Raises:
        KeyError: If a marker names no table.
        OSError: If the results of one are missing.
    """

    def fill(match: re.Match[str]) -> str:
        return match[1] + TABLES[match[2]](results) + "\n" + match[4]

    return BLOCK.sub(fill, text)


def main(argv: list[str]) -> int:
    text = README.read_text()
    fresh = with_tables(text, RESULTS)
    if argv == ["--check"]:
        if fresh != text:
            print("README.md is stale: python benchmarks/readme_tables.py", file=sys.stderr)
        return int(fresh != text)
    README.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
