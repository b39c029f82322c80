"""Do vLLM's own scheduler tests pass with our class in place of vLLM's?

python tests/conformance/run.py [--json FILE] [--quick]

Fetches vLLM's source distribution once, runs its tests three times (vLLM's class, ours observing,
ours enforcing a loose SLO), compares them test by test and exits with 1 if anything but the listed
tests differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.conformance.allowed_differences import ALLOWED
from tests.conformance.comparison import PASSES, Comparison, Outcome, compare
from tests.conformance.model_folders import write_model_folders
from tests.conformance.upstream import REPOSITORY, install_additions, unpack
from vllm_penalty_sched.serving.run_record import record_run

# Below tests/v1/: those that set up schedulers or call their methods.
FILES = (
    "core/test_scheduler.py",
    "core/test_async_scheduler.py",
    "core/test_priority_preemption_bug.py",
    "core/test_output.py",
    "core/test_deferred_block_free.py",
    "core/test_prefix_caching.py",
    "core/test_prefix_replay.py",
    "core/test_mamba_align_chunk_split.py",
    "core/test_swa_inflight_window_free.py",
    "core/test_worker_slot_overflow.py",
    "kv_connector/unit/test_bidirectional_kv_transfer.py",
    "kv_connector/unit/test_cache_pollution_prevention.py",
    "kv_connector/unit/test_decode_bench_connector.py",
    "kv_connector/unit/test_error_propagation.py",
    "kv_connector/unit/test_invalid_blocks_correctness.py",
    "kv_connector/unit/test_kv_connector_lifecycle.py",
    "kv_connector/unit/test_kv_load_failure_recovery.py",
    "kv_connector/unit/test_multi_connector.py",
    "kv_connector/unit/test_nixl_simple_cpu_offload.py",
    "kv_connector/unit/test_remote_decode_lifecycle.py",
    "kv_connector/unit/test_remote_prefill_lifecycle.py",
    "kv_connector/unit/test_scheduler_kv_connector_override.py",
    "kv_connector/unit/offloading_connector/test_scheduler.py",
    "ec_connector/unit/test_ec_transfer_params.py",
    "spec_decode/test_dynamic_sd.py",
    "streaming_input/test_scheduler_streaming.py",
)
# Eight tests of 20,000 steps, and many whose workers wait for each other: minutes on a quiet core.
SLOW_FILES = (
    "core/test_priority_scheduler_random.py",
    "kv_connector/unit/test_nixl_connector.py",
)
LONGEST_PASS_S = 7200.0
# Without it pytest would take this repository's settings. vLLM's own conftest needs models.
SETTINGS = """
[pytest]
addopts = -p no:cacheprovider -p scheduler_plugin --confcutdir=tests/v1
    --continue-on-collection-errors --disable-warnings --tb=native -q
asyncio_mode = auto
"""


def run_pass(
    name: str, folder: Path, files: Iterable[str]
) -> tuple[dict[str, Outcome], dict[str, int]]:
    """Run tests once.

    Returns:
        How each ended, and how often our schedulers decided what.
    """
    outcomes_path = folder / f"outcomes-{name}.jsonl"
    outcomes_path.unlink(missing_ok=True)
    (folder / "pytest.ini").write_text(SETTINGS)
    environment = {
        **os.environ,
        "CONFORMANCE_PASS": name,
        "CONFORMANCE_OUTCOMES": str(outcomes_path),
        "PYTHONPATH": os.pathsep.join(
            str(path) for path in (Path(__file__).parent, install_additions(), REPOSITORY)
        ),
        "PENALTY_SCHED_STRICT": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with (folder / f"pytest-{name}.log").open("w", encoding="utf-8") as log:
        subprocess.run(
            [sys.executable, "-m", "pytest", *existing(files, folder)],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=LONGEST_PASS_S,
            check=False,
        )
    return read_outcomes(outcomes_path)


def existing(files: Iterable[str], folder: Path) -> list[str]:
    """Return those of the files that this version of vLLM has."""
    return [f"tests/v1/{name}" for name in files if (folder / "tests/v1" / name).exists()]


def read_outcomes(path: Path) -> tuple[dict[str, Outcome], dict[str, int]]:
    """Return the outcomes that the plugin wrote, and how often ours decided what.

    Raises:
        SystemExit: If the last line is missing: the tests did not run to their end.
    """
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if not lines or "decisions" not in lines[-1]:
        sys.exit(f"the tests ended early: see {path.parent} for their log")
    outcomes = {line.pop("test"): Outcome(**line) for line in lines[:-1]}
    return outcomes, lines[-1]["decisions"]


def as_record(
    comparison: Comparison, decisions: Mapping[str, Mapping[str, int]], command: str, tests_of: str
) -> dict[str, Any]:
    """Return what the report holds."""
    return {
        **record_run(command, seed=0),
        "tests_of": f"vllm {tests_of}",
        **asdict(comparison),
        "decisions": dict(decisions),
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    results = REPOSITORY / "benchmarks" / "results"
    parser.add_argument("--json", type=Path, default=results / "conformance.json")
    parser.add_argument("--quick", action="store_true", help="leave out the slow files")
    arguments = parser.parse_args(argv)
    installed = version("vllm").partition("+")[0]
    folder = unpack(installed) / "tests"
    write_model_folders(folder)
    files = FILES if arguments.quick else (*FILES, *SLOW_FILES)
    passes, decisions = {}, {}
    for name in PASSES:
        began_s = time.monotonic()
        passes[name], decisions[name] = run_pass(name, folder, files)
        passed = sum(one.outcome == "passed" for one in passes[name].values())
        seconds = time.monotonic() - began_s
        print(f"{name}: {passed} of {len(passes[name])} pass, {seconds:.0f} s", flush=True)
    comparison = compare(passes, ALLOWED)
    command = " ".join(["python", "tests/conformance/run.py", *argv])
    record = as_record(comparison, decisions, command, installed)
    arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for difference in comparison.unexpected:
        print(
            f"unexpected: {difference.mode} {difference.test}: {difference.outcome}: "
            f"{difference.reason}"
        )
    print(
        f"{len(comparison.expected)} tests differ as listed, {len(comparison.unexpected)} "
        f"otherwise; written to {arguments.json}"
    )
    return int(bool(comparison.unexpected))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
