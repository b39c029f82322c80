"""The README's tables of vLLM's own tests and of vLLM's versions."""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from goodput_tables import markdown

# The first that fits a file's name below tests/v1/ counts it.
_ROWS = {
    "core/test_scheduler.py": "scheduler",
    "core/test_async_scheduler.py": "async scheduler",
    "core/test_priority": "priority policy",
    "core/test_output": "step output",
    "core/test_deferred_block_free": "deferred free",
    "core/test_prefix": "prefix cache",
    "core/prefix_cache": "prefix cache",
    "core/": "rest of core",
    "kv_connector/": "KV connectors",
    "ec_connector/": "encoder cache connectors",
    "": "admission, streaming input, speculative decoding",
}
_COUNTS = ("tests", "with_scheduler", "stock", "observe", "enforce")


def _read(results: Path, name: str) -> Any:
    return json.loads((results / f"{name}.json").read_text())


def _row_of(file: str) -> str:
    name = file.removeprefix("tests/v1/")
    return next(title for start, title in _ROWS.items() if name.startswith(start))


def conformance(results: Path) -> str:
    found = _read(results, "conformance")
    rows: dict[str, Counter[str]] = {title: Counter() for title in _ROWS.values()}
    for file, counts in found["files"].items():
        rows[_row_of(file)].update(counts)
    rows["**all**"] = sum(rows.values(), Counter())
    return markdown(
        [
            f"tests of {found['tests_of'].replace('vllm', 'vLLM')}",
            *("run", "set up a scheduler", "pass with stock", "ours, observing", "ours, enforcing"),
        ],
        [[title, *(str(counts[name]) for name in _COUNTS)] for title, counts in rows.items()],
    )


def conformance_differences(results: Path) -> str:
    modes: dict[str, list[str]] = {}
    tests: dict[str, list[str]] = {}
    for one in _read(results, "conformance")["expected"]:
        name = f"`{one['test'].rpartition('::')[2]}`"
        for found, new in ((modes, one["mode"]), (tests, name)):
            if new not in found.setdefault(one["reason"], []):
                found[one["reason"]].append(new)
    return markdown(
        ["differs", "in mode", "why"],
        [[", ".join(tests[why]), ", ".join(modes[why]), why] for why in tests],
    )


def versions(results: Path) -> str:
    found = _read(results, "matrix")
    rows = []
    for one in found["results"]:
        is_outside = one["version"] in found["never_tried"]
        rows.append(
            [
                one["version"],
                "stock's steps, one warning" if is_outside else "steers",
                *(str(one["passed"]), str(len(one["failed"])), str(len(one["skipped"]))),
            ]
        )
    return markdown(["vLLM", "our scheduler", "tests passed", "failed", "skipped"], rows)


TABLES: Mapping[str, Callable[[Path], str]] = {
    "conformance": conformance,
    "conformance_differences": conformance_differences,
    "versions": versions,
}
