"""Make the plugin's own errors fail the tests of this folder instead of being counted."""

import pytest


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENALTY_SCHED_STRICT", "1")
