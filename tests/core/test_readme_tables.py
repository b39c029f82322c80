import json
import re
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
RESULTS = REPOSITORY / "benchmarks" / "results"
TEXT = (REPOSITORY / "README.md").read_text()
# Folders of the machine that measured, which tell a reader nothing.
A_FOLDER_OF_ITS_OWN = re.compile(r"(?<![\w.])/(?:home|root|tmp|work|mnt|data|opt)/")


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(REPOSITORY / "benchmarks" / "readme_tables.py"))


@pytest.fixture(scope="module")
def with_tables(script: dict[str, Any]) -> Callable[[str, Path], str]:
    return script["with_tables"]


def test_the_tables_of_the_readme_are_those_of_the_committed_results(
    with_tables: Callable[[str, Path], str],
) -> None:
    assert with_tables(TEXT, RESULTS) == TEXT, "stale: python benchmarks/readme_tables.py"


def test_the_readme_has_every_table_whose_results_are_there(script: dict[str, Any]) -> None:
    in_readme = {match[2] for match in script["BLOCK"].finditer(TEXT)}
    is_measured = (RESULTS / "scheduler_overhead.json").exists()

    assert in_readme == script["TABLES"].keys() - (set() if is_measured else {"overhead"})
    assert len(re.findall("<!-- /?table", TEXT)) == 2 * len(in_readme)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("demo", lambda found: found["penalty"].update(within_slo=0.1234)),
        (
            "goodput_azure_conv-a100_8b",
            lambda found: [row["goodput"].update(own_p99_gap=0.4321) for row in found["rows"]],
        ),
    ],
)
def test_a_changed_figure_makes_the_readme_stale(
    with_tables: Callable[[str, Path], str],
    tmp_path: Path,
    name: str,
    change: Callable[[dict[str, Any]], object],
) -> None:
    shutil.copytree(RESULTS, tmp_path / "results")
    path = tmp_path / "results" / f"{name}.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))

    assert with_tables(TEXT, tmp_path / "results") != TEXT


def test_a_marker_of_an_unknown_table_is_an_error(
    with_tables: Callable[[str, Path], str],
) -> None:
    with pytest.raises(KeyError, match="no_such"):
        with_tables("<!-- table: no_such -->\n<!-- /table -->\n", RESULTS)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_the_results_name_no_folder_of_the_machine_that_measured(path: Path) -> None:
    assert not A_FOLDER_OF_ITS_OWN.search(path.read_text())
