"""On which versions of vLLM do the scheduler's own tests pass?

python tests/matrix/run.py [--json FILE] [VERSION ...]

Lays the pure Python of each version over the installed one (whose compiled parts schedulers do
not use), runs the tests of tests/engine on it and exits with 1 if one fails. Tests that start a
real engine or server need their version's compiled parts: they run on the installed version alone,
in make test.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from importlib.metadata import version as installed_version
from pathlib import Path
from xml.etree import ElementTree as ET

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.conformance.upstream import CACHE, REPOSITORY, unpack
from vllm_penalty_sched.serving.run_record import record_run

VERSIONS = ("0.28.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")
# Below the range: there the scheduler must pass everything through, with one warning.
NEVER_TRIED = ("0.27.1",)
LONGEST_RUN_S = 3600.0
_START_AN_ENGINE = ("calibrate", "calibration_time", "kill", "server")


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionResult:
    """How the tests ended on one version.

    Attributes:
        version: vLLM's.
        passed: Tests that passed.
        failed: Names of those that did not.
        skipped: Names of those that were skipped, with the reason.
        seconds: Of the run.
    """

    version: str
    passed: int
    failed: list[str]
    skipped: dict[str, str]
    seconds: float


def run_version(version: str, *tests: str) -> VersionResult:
    """Run tests on a version's pure Python."""
    report = CACHE / f"matrix-{version}.xml"
    report.unlink(missing_ok=True)
    began_s = time.monotonic()
    with report.with_suffix(".log").open("w", encoding="utf-8") as log:
        subprocess.run(
            [sys.executable, "-m", "pytest", f"--junit-xml={report}", *tests],
            cwd=REPOSITORY,
            env={**os.environ, **overlay(version), "VLLM_PENALTY_REQUIRE_VLLM": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=LONGEST_RUN_S,
            check=False,
        )
    if not report.exists():
        sys.exit(f"the tests on vLLM {version} ended early: see {report.with_suffix('.log')}")
    return read_report(version, report, time.monotonic() - began_s)


def overlay(version: str) -> dict[str, str]:
    """Return the environment in which ``import vllm`` finds a version."""
    if version == installed_version("vllm").partition("+")[0]:
        return {}
    return {"PYTHONPATH": str(unpack(version) / "package")}


def read_report(version: str, report: Path, seconds: float) -> VersionResult:
    """Return what a JUnit report tells."""
    counts: Counter[str] = Counter()
    failed, skipped = [], {}
    for case in ET.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(name)
        elif skip is not None:
            skipped[name] = str(skip.get("message"))
        else:
            counts["passed"] += 1
    return VersionResult(
        version=version,
        passed=counts["passed"],
        failed=failed,
        skipped=skipped,
        seconds=round(seconds, 1),
    )


def scheduler_tests() -> list[str]:
    """Return the test files of engine/ that start no real engine."""
    files = sorted((REPOSITORY / "tests" / "engine").glob("test_*.py"))
    return [
        str(path.relative_to(REPOSITORY))
        for path in files
        if path.stem.removeprefix("test_") not in _START_AN_ENGINE
    ]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    results = REPOSITORY / "benchmarks" / "results"
    parser.add_argument("--json", type=Path, default=results / "matrix.json")
    parser.add_argument("versions", nargs="*", default=[*VERSIONS, *NEVER_TRIED])
    arguments = parser.parse_args(argv)
    CACHE.mkdir(parents=True, exist_ok=True)
    found = []
    for version in arguments.versions:
        tests = ["tests/matrix/passing_through.py"] if version in NEVER_TRIED else scheduler_tests()
        found.append(run_version(version, *tests))
        latest = found[-1]
        print(
            f"vLLM {version}: {latest.passed} passed, {len(latest.failed)} failed, "
            f"{len(latest.skipped)} skipped, {latest.seconds:.0f} s",
            *(f"\n  failed: {name}" for name in latest.failed),
            flush=True,
        )
    record = {
        **record_run(" ".join(["python", "tests/matrix/run.py", *argv]), seed=0),
        "files": scheduler_tests(),
        "never_tried": list(NEVER_TRIED),
        "results": [asdict(one) for one in found],
    }
    arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return int(any(one.failed or not one.passed for one in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
