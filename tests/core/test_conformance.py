import pytest

from tests.conformance.comparison import Comparison, Outcome, compare

PASSED, FAILED = Outcome(outcome="passed", schedulers=1), Outcome(outcome="failed", reason="1 == 2")
SPLITS, PLAIN, NETWORK = "a/test_a.py::test_splits", "a/test_a.py::test_plain", "b.py::test_network"
NONE: dict[str, dict[str, str]] = {"observe": {}, "enforce": {}}


def passes(**changes: dict[str, Outcome]) -> dict[str, dict[str, Outcome]]:
    same = {SPLITS: PASSED, PLAIN: PASSED, NETWORK: FAILED}
    return {mode: {**same, **changes.get(mode, {})} for mode in ("stock", "observe", "enforce")}


def differing(found: Comparison) -> list[tuple[str, str, str]]:
    return [(one.mode, one.test, one.reason) for one in found.unexpected]


def test_passes_that_end_alike_do_not_differ() -> None:
    found = compare(passes(), NONE)

    assert not found.expected
    assert not found.unexpected
    assert found.not_passing == {NETWORK: "failed: 1 == 2"}


@pytest.mark.parametrize("mode", ["observe", "enforce"])
def test_a_test_that_passes_with_stock_alone_differs(mode: str) -> None:
    found = compare(passes(**{mode: {PLAIN: FAILED}}), NONE)

    assert differing(found) == [(mode, PLAIN, "1 == 2")]


def test_a_test_that_did_not_run_with_ours_differs() -> None:
    ends = passes()
    del ends["observe"][PLAIN]

    assert [one.outcome for one in compare(ends, NONE).unexpected] == ["did not run"]


def test_a_listed_test_may_fail_when_enforcing_and_nowhere_else() -> None:
    allowed = {**NONE, "enforce": {SPLITS: "fixes the split"}}

    enforced = compare(passes(enforce={SPLITS: FAILED}), allowed)
    observed = compare(passes(enforce={SPLITS: FAILED}, observe={SPLITS: FAILED}), allowed)

    assert [one.reason for one in enforced.expected] == ["fixes the split"]
    assert not enforced.unexpected
    assert differing(observed) == [("observe", SPLITS, "1 == 2")]


@pytest.mark.parametrize("test", [SPLITS, "a/test_a.py::test_gone"])
def test_a_listed_test_that_does_not_differ_is_told(test: str) -> None:
    found = compare(passes(), {**NONE, "enforce": {test: "fixes the split"}})

    ((mode, name, reason),) = differing(found)
    assert (mode, name) == ("enforce", test)
    assert reason.startswith("listed, and no")


def test_the_files_are_counted_by_pass() -> None:
    found = compare(
        passes(enforce={SPLITS: FAILED}), {**NONE, "enforce": {SPLITS: "fixes the split"}}
    )

    assert found.files == {
        "a/test_a.py": {"tests": 2, "with_scheduler": 2, "stock": 2, "observe": 2, "enforce": 1},
        "b.py": {"tests": 1, "with_scheduler": 0, "stock": 0, "observe": 0, "enforce": 0},
    }
