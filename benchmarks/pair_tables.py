"""Tables of what a prefill and a decode instance carry, and of how good the advice is."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from goodput_tables import Capacities, markdown, pairs

RULES = {
    "pair:priced": "priced",
    "pair:always": "always away",
    "pair:never": "never away",
    "pair:2048": "2,048 tokens and more",
    "2x:penalty": "two engines that do both",
}


class PairCapacities(Capacities):
    """What `vllm-penalty capacity` found for a prefill and a decode instance."""

    KIND = "pair"


def pair_capacity(results: Path) -> str:
    rows = []
    for pair, title in pairs(results, "pair").items():
        found = PairCapacities(results, pair)
        fixed = max(found.rates[rule] for rule in ("pair:always", "pair:never", "pair:2048"))
        ratio = found.rates["pair:priced"] / fixed
        rows.append([title, *(found.per_s(rule) for rule in RULES), f"{ratio:.2f}"])
    return markdown(["requests/s at 90% goodput", *RULES.values(), "priced / best other"], rows)


def advice(results: Path) -> str:
    found = json.loads((results / "advice_cases.json").read_text())
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for case in found["cases"]:
        slo_ms = f"{1e3 * case['slo_s']['tbt']:.0f} ms"
        groups.setdefault(f"{case['profile']}, {slo_ms}", []).append(case)
    rows = [[name, *map(str, counts(cases))] for name, cases in groups.items()]
    rows.append(["all", *map(str, counts(found["cases"]))])
    head = ["GPU and TBT SLO", "cases", "pays", "advice agrees", "else near ties", "else wrong"]
    return markdown(head, rows)


def counts(cases: list[Mapping[str, Any]]) -> list[int]:
    others = [case for case in cases if case["advised"] != case["pays"]]
    ties = sum(case["is_near_tie"] for case in others)
    pays = sum(case["pays"] for case in cases)
    return [len(cases), pays, len(cases) - len(others), ties, len(others) - ties]


TABLES: Mapping[str, Callable[[Path], str]] = {"pair_capacity": pair_capacity, "advice": advice}
