"""Which of the simulations' figures tell what the policy gains, and where it misses a target?

The tables of README.md on capacity_*.json (`vllm-penalty capacity --json`) and goodput_*.json
(simulated_goodput.py); readme_tables.py writes them.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

PAIRS = {
    "azure_conv-a100_8b": "Azure conversation, A100, 8B",
    "azure_code-a100_8b": "Azure code, A100, 8B",
    "azure_conv-rtxpro6000_8b": "Azure conversation, RTX PRO 6000, 8B",
    "mooncake_conv-h100_70b": "Mooncake conversation, 4 x H100, 70B",
}
KINDS = ("capacity", "goodput")
ORDER_COST_PAIR, ORDER_COST_RATES = "azure_conv-a100_8b", (1.0, 1.5)
RATES = (0.5, 1.0, 1.5, 2.0)
ABLATION_RATE, LOW_RATE = 1.5, 0.5
LEAST_CAPACITY_RATIO, LEAST_GOODPUT_RATIO, LEAST_OF_ORACLE, MOST_POINTS_BELOW = 1.35, 4, 0.95, 1
MOST_DEFER_S = 1.0  # our default max_defer_s
NOT_RUN = "not run"
UNBOUNDED = 1 << 30


class Goodput:
    """What simulated_goodput.py found for a pair."""

    def __init__(self, results: Path, pair: str) -> None:
        self.content = json.loads((results / f"goodput_{pair}.json").read_text())
        self.best_static = self.content["stock"]["best_static"]

    @property
    def rates(self) -> list[float]:
        """Multiples of stock's capacity at which all windows ran."""
        at = [row["relative_rate"] for row in self.content["rows"] if row["scheduler"] == "oracle"]
        return sorted(rate for rate in set(at) if at.count(rate) == len(self.content["windows"]))

    def rows(self, scheduler: str, rate: float) -> list[dict[str, Any]]:
        """Return a scheduler's runs at a multiple of stock's capacity, one a window."""
        rows = [
            row
            for row in self.content["rows"]
            if row["scheduler"] == scheduler and row["relative_rate"] == rate
        ]
        if not rows:
            raise LookupError(f"no run of {scheduler} at {rate} x stock's capacity")
        return rows

    def share(self, scheduler: str, rate: float, measure: str = "own_p99_gap") -> float:
        """Return the share of requests served well, the mean of the windows."""
        return fmean(row["goodput"][measure] for row in self.rows(scheduler, rate))

    def best(self, kind: str, rate: float) -> tuple[str, float]:
        """Return the budget with which stock or static is best at this rate, and its share."""
        at_rate = [row["scheduler"] for row in self.content["rows"] if row["relative_rate"] == rate]
        windows = len(self.content["windows"])
        names = {name for name in at_rate if at_rate.count(name) == windows}
        shares = {name: self.share(name, rate) for name in names if name.startswith(f"{kind}:")}
        return max(
            shares.items(), key=lambda found: (found[1], found[0] == self.best_static, found)
        )

    @property
    def longest_defer_s(self) -> float:
        """Longest time that prefills made no progress for the SLO's sake, over all runs of ours."""
        return max(
            row["longest_defer_s"] for row in self.content["rows"] if row["scheduler"] == "penalty"
        )

    def of_oracle(self) -> tuple[float, float]:
        """Return the smallest ratio of ours to the oracle's share, and at which rate."""
        return min(
            (self.share("penalty", rate) / self.share("oracle", rate), rate) for rate in self.rates
        )


class Capacities:
    """What `vllm-penalty capacity` found for a pair."""

    KIND = "capacity"

    def __init__(self, results: Path, pair: str) -> None:
        self.content = json.loads((results / f"{self.KIND}_{pair}.json").read_text())
        self.best_static = self.content["best_static"]
        self.rates = {entry["scheduler"]: entry["rate"] for entry in self.content["schedulers"]}

    def per_s(self, scheduler: str) -> str:
        """Return the requests a second that a scheduler carries."""
        return f"{self.rates[scheduler] * self.content['requests_per_s_at_rate_1']:.2f}"

    def ratio(self, scheduler: str, to: str) -> float:
        """Return one scheduler's rate relative to another's."""
        return float(self.rates[scheduler] / self.rates[to])


def pairs(results: Path, *kinds: str) -> dict[str, str]:
    """Return the titles of the pairs whose results of these kinds are there."""
    return {
        pair: title
        for pair, title in PAIRS.items()
        if all((results / f"{kind}_{pair}.json").exists() for kind in kinds)
    }


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), *map(list, rows)]
    texts = [f"| {' | '.join(cells)} |" for cells in lines]
    texts[0] = texts[0].replace("|  |", "| |")
    return "\n".join([texts[0], "|" + "---|" * len(lines[0]), *texts[1:]])


def capacity(results: Path) -> str:
    head = ["requests/s at 90% goodput", "best static budget", "ours", "true costs"]
    rows = []
    for pair, title in pairs(results, "capacity").items():
        found = Capacities(results, pair)
        best = found.best_static
        rows.append(
            [
                title,
                f"{found.per_s(best)} ({best.partition(':')[2]} tokens)",
                found.per_s("penalty"),
                found.per_s("oracle"),
                f"{found.ratio('penalty', best):.2f}",
                f"{found.ratio('penalty', 'oracle'):.2f}",
            ]
        )
    table = markdown([*head, "ours / best static", "ours / true costs"], rows)
    return f"{table}\n\n{origin(results)}"


def origin(results: Path) -> str:
    """Say when and with what the simulations ran."""
    paths = [path for kind in KINDS for path in sorted(results.glob(f"{kind}_*.json"))]
    contents = [json.loads(path.read_text()) for path in paths]
    runs = [content.get("run", content) for content in contents]
    dates = sorted({run["date"][:10] for run in runs})
    versions = sorted({run["versions"]["vllm"] for run in runs})
    commits = sorted({run["commit"][:7] for run in runs})
    return (
        f"(Simulated {' and '.join(dates)} with the schedulers of vLLM {' and '.join(versions)}, "
        f"commit {' and '.join(commits)}, no GPU.)"
    )


def goodput(results: Path) -> str:
    head = ["stock (its budget) / ours / true costs", *(f"{rate:g} x" for rate in RATES)]
    rows = []
    for pair, title in pairs(results, "goodput").items():
        found = Goodput(results, pair)
        cells = []
        for rate in RATES:
            if rate not in found.rates:
                cells.append(NOT_RUN)
                continue
            name, stock = found.best("stock", rate)
            ours, oracle = (100 * found.share(name, rate) for name in ("penalty", "oracle"))
            budget = name.partition(":")[2]
            cells.append(f"{100 * stock:.1f} ({budget}) / {ours:.1f} / {oracle:.1f}%")
        rows.append([title, *cells])
    return markdown(head, rows)


def ablation(results: Path) -> str:
    columns = {
        "stock": "{stock}",
        "chunking alone": "penalty,order=fcfs",
        "ordering alone": "{static}",
        "both": "unguarded",
        "and admission guard": "penalty",
        "deadline pacing": "penalty,pacing=deadline",
    }
    rows = []
    for pair, title in pairs(results, "goodput").items():
        found = Goodput(results, pair)
        best = {kind: found.best(kind, ABLATION_RATE)[0] for kind in ("stock", "static")}
        names = [name.format(**best) for name in columns.values()]
        shares = [
            [found.share(name, ABLATION_RATE, measure) for measure in ("own_p99_gap", "tpot")]
            for name in names
        ]
        rows.append([title, *(f"{p99:.1%} ({tpot:.1%})" for p99, tpot in shares)])
    return markdown(["goodput at 1.5 x (by mean TPOT)", *columns], rows)


def targets(results: Path) -> str:
    """Say for each pair what was asked for and what came out; a miss is in bold."""
    head = [
        "target (missed: bold)",
        f"capacity, of best static: {LEAST_CAPACITY_RATIO}",
        f"capacity, of true costs': {LEAST_OF_ORACLE}",
        f"goodput at {ABLATION_RATE} x, of stock's: {LEAST_GOODPUT_RATIO}",
        f"goodput at {LOW_RATE} x, to best static: -{MOST_POINTS_BELOW} point",
        f"least goodput, of true costs': {LEAST_OF_ORACLE}",
        f"longest wait without prefill progress: {MOST_DEFER_S:g} s",
    ]
    rows = [
        [title, *capacity_verdicts(results, pair), *goodput_verdicts(Goodput(results, pair))]
        for pair, title in pairs(results, "goodput").items()
    ]
    return markdown(head, rows)


def capacity_verdicts(results: Path, pair: str) -> list[str]:
    if pair not in pairs(results, "capacity"):
        return [NOT_RUN, NOT_RUN]
    found = Capacities(results, pair)
    ratio, of_oracle = found.ratio("penalty", found.best_static), found.ratio("penalty", "oracle")
    return [
        verdict(f"{ratio:.2f}", is_met=ratio >= LEAST_CAPACITY_RATIO),
        verdict(f"{of_oracle:.3f}", is_met=of_oracle >= LEAST_OF_ORACLE),
    ]


def goodput_verdicts(found: Goodput) -> list[str]:
    _, stock = found.best("stock", ABLATION_RATE)
    ratio = found.share("penalty", ABLATION_RATE) / stock
    low = NOT_RUN
    if LOW_RATE in found.rates:
        points = 100 * (found.share("penalty", LOW_RATE) - found.best("stock", LOW_RATE)[1])
        low = verdict(f"{points:+.1f} points", is_met=points >= -MOST_POINTS_BELOW)
    least, at_rate = found.of_oracle()
    defer_s = found.longest_defer_s
    return [
        verdict(f"{ratio:.1f} of at most {1 / stock:.1f}", is_met=ratio >= LEAST_GOODPUT_RATIO),
        low,
        verdict(f"{least:.3f} at {at_rate:g} x", is_met=least >= LEAST_OF_ORACLE),
        verdict(f"{defer_s:.2f} s", is_met=defer_s <= MOST_DEFER_S),
    ]


def verdict(figure: str, *, is_met: bool) -> str:
    return figure if is_met else f"**{figure}**"


def order_cost(results: Path) -> str:
    found = Goodput(results, ORDER_COST_PAIR)
    sides = [(name, rate) for rate in ORDER_COST_RATES for name in (found.best_static, "penalty")]
    head = ["TTFT p50 / p99, s", "requests"]
    head += [f"{'ours' if name == 'penalty' else 'stock'}, {rate:g} x" for name, rate in sides]
    lengths = {
        entry["most_prompt_tokens"]
        for row in found.rows(*sides[0])
        for entry in row["ttft_by_prompt_length"]
    }
    rows = []
    for most in sorted(lengths):
        of_length = [entries(found.rows(*side), most) for side in sides]
        requests = sum(entry["requests"] for entry in of_length[0])
        rows.append([length_text(most), str(requests), *map(mean_ttft, of_length)])
    finished = [f"{sum(row['finished'] for row in found.rows(*side))}" for side in sides]
    arrived = sum(row["requests"] for row in found.rows(*sides[0]))
    rows.append(["finished within the run", str(arrived), *finished])
    return markdown(head, rows)


def entries(rows: Iterable[Mapping[str, Any]], most: int) -> list[Mapping[str, Any]]:
    return [
        entry
        for row in rows
        for entry in row["ttft_by_prompt_length"]
        if entry["most_prompt_tokens"] == most
    ]


def mean_ttft(of_windows: list[Mapping[str, Any]]) -> str:
    told = [entry for entry in of_windows if entry["p50"] is not None]
    if not told:
        return "none came"
    return " / ".join(f"{fmean(entry[name] for entry in told):.2f}" for name in ("p50", "p99"))


def length_text(most: int) -> str:
    return "longer" if most == UNBOUNDED else f"up to {most:,} tokens"


TABLES: Mapping[str, Callable[[Path], str]] = {
    "capacity": capacity,
    "goodput": goodput,
    "targets": targets,
    "ablation": ablation,
    "order_cost": order_cost,
}
