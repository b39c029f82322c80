"""Compare test by test how vLLM's tests end with its own scheduler and with ours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

STOCK, OBSERVE, ENFORCE = "stock", "observe", "enforce"
PASSES = (STOCK, OBSERVE, ENFORCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a test ended.

    Attributes:
        outcome: ``passed``, ``failed`` or ``skipped``.
        reason: Its last words if it did not pass.
        schedulers: Schedulers that it set up.
    """

    outcome: str
    reason: str = ""
    schedulers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A test that passes with stock and not with ours, or was to and does.

    Attributes:
        test: Its name.
        mode: The pass in which it differs.
        outcome: How it ended there.
        reason: Why that is right, or its last words.
    """

    test: str
    mode: str
    outcome: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What came of the three passes.

    Attributes:
        files: For each file its tests, those that set up a scheduler, and how many pass with each.
        expected: Tests that differ, as listed.
        unexpected: Tests that differ and are not listed, or are listed and do not differ.
        not_passing: Tests that do not pass with stock here, with their last words.
    """

    files: Mapping[str, Mapping[str, int]]
    expected: Sequence[Difference]
    unexpected: Sequence[Difference]
    not_passing: Mapping[str, str]


def compare(passes: Mapping[str, Mapping[str, Outcome]], allowed: Mapping[str, str]) -> Comparison:
    """Compare the passes.

    Args:
        passes: For each pass, how each test ended.
        allowed: For each pass of ours the tests that do not pass in it, and why that is right.
    """
    stock = passes[STOCK]
    expected: list[Difference] = []
    unexpected: list[Difference] = []
    for mode in (OBSERVE, ENFORCE):
        for test, theirs in stock.items():
            ours = passes[mode].get(test, Outcome(outcome="did not run"))
            is_listed = test in allowed[mode]
            differs = theirs.outcome == "passed" and ours.outcome != "passed"
            if differs and is_listed:
                expected.append(_difference(test, mode, ours.outcome, allowed[mode][test]))
            elif differs:
                unexpected.append(_difference(test, mode, ours.outcome, ours.reason))
            elif is_listed:
                unexpected.append(_difference(test, mode, ours.outcome, "listed, and no different"))
        unexpected += [
            _difference(test, mode, "did not run", "listed, and not among the tests")
            for test in allowed[mode].keys() - stock.keys()
        ]
    return Comparison(
        files=_count(passes),
        expected=expected,
        unexpected=unexpected,
        not_passing={
            test: f"{one.outcome}: {one.reason}"
            for test, one in stock.items()
            if one.outcome != "passed"
        },
    )


def _difference(test: str, mode: str, outcome: str, reason: str) -> Difference:
    return Difference(test=test, mode=mode, outcome=outcome, reason=reason)


def _count(passes: Mapping[str, Mapping[str, Outcome]]) -> dict[str, dict[str, int]]:
    files: dict[str, Counter[str]] = {}
    for mode, outcomes in passes.items():
        for test, one in outcomes.items():
            counts = files.setdefault(test.partition("::")[0], Counter())
            counts["tests"] += mode == STOCK
            counts["with_scheduler"] += mode == STOCK and one.schedulers > 0
            counts[mode] += one.outcome == "passed"
    return {name: dict(counts) for name, counts in sorted(files.items())}
