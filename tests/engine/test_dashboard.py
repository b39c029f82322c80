from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana" / "dashboard.json"
OURS = re.compile(r"\bpenalty_sched_[a-z_]+")


def panels() -> list[dict]:
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    from vllm_penalty_sched.engine.stat_logger import _metrics

    found = {}
    for metric in vars(_metrics()).values():
        (family,) = metric.collect()
        names = {
            "counter": [f"{family.name}_total"],
            "gauge": [family.name],
            "histogram": [f"{family.name}_{part}" for part in ("bucket", "sum", "count")],
        }[family.type]
        found |= {name: set(metric._labelnames) for name in names}
    return found


@pytest.mark.vllm
def test_the_dashboard_asks_for_exported_metrics_and_labels_only(
    exported: dict[str, set[str]],
) -> None:
    for expression in expressions():
        names = set(OURS.findall(expression))
        grouped = re.findall(r"by \(([^)]*)\)", expression)
        labels = {label.strip() for part in grouped for label in part.split(",")} - {"le"}

        assert names <= exported.keys()
        assert all(labels <= exported[name] for name in names)


@pytest.mark.vllm
def test_the_dashboard_shows_every_exported_metric(exported: dict[str, set[str]]) -> None:
    shown = {name for expression in expressions() for name in OURS.findall(expression)}

    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported}
    assert families <= {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}


def test_every_panel_says_what_it_shows_and_has_a_unit() -> None:
    for panel in panels():
        assert panel["title"]
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert all(target["legendFormat"] for target in panel["targets"])


def test_no_two_panels_lie_on_each_other() -> None:
    taken = set()
    for panel in panels():
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not taken & cells
        taken |= cells
