"""Make the plugin's own errors fail the tests of this folder, and none change another's logs."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENALTY_SCHED_STRICT", "1")


@pytest.fixture(autouse=True)
def vllms_log_level() -> Iterator[None]:
    """Put back the level that the command line sets for a simulation."""
    level = logging.getLogger("vllm").level
    yield
    logging.getLogger("vllm").setLevel(level)
