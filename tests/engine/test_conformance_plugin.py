"""The pytest plugin that runs vLLM's own tests on our class."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

REPOSITORY = Path(__file__).parents[2]
THEIRS = """
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm_penalty_sched.engine.virtual_config import make_scheduler, make_vllm_config

def test_scheduler():
    scheduler = make_scheduler(Scheduler, make_vllm_config())
    assert [cls.__module__ for cls in (type(scheduler), AsyncScheduler)] == [
        "vllm_penalty_sched.engine.scheduler"
    ] * 2
    assert scheduler.planner.slo_s(None, None) == 60.0
    assert not scheduler.planner.is_cold

def test_that_fails():
    raise FileNotFoundError("/some/where/else.json")
"""


def test_a_test_of_vllms_gets_our_class_and_its_end_is_written_down(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_theirs.py").write_text(THEIRS)
    outcomes = tmp_path / "outcomes.jsonl"

    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "scheduler_plugin", "test_theirs.py"],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                str(path)
                for path in (
                    REPOSITORY / "tests" / "conformance",
                    os.environ.get("PYTHONPATH", ""),
                    REPOSITORY,
                )
            ),
            "CONFORMANCE_PASS": "enforce",
            "CONFORMANCE_OUTCOMES": str(outcomes),
        },
        capture_output=True,
        check=False,
    )

    *tests, last = [json.loads(line) for line in outcomes.read_text().splitlines()]
    assert [(one["test"], one["outcome"], one["schedulers"]) for one in tests] == [
        ("test_theirs.py::test_scheduler", "passed", 1),
        ("test_theirs.py::test_that_fails", "failed", 0),
    ]
    assert tests[1]["reason"] == "FileNotFoundError: else.json"
    assert last == {"decisions": {}}
