"""Skip where NIXL is missing, make the model, and keep what the failure tests found."""

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_penalty_sched.serving.run_record import record_run
from vllm_penalty_sched.serving.tiny_model import make_tiny_model

RESULTS_VARIABLE = "DISAGGREGATION_RESULTS"


def require_nixl() -> None:
    if importlib.util.find_spec("nixl") is None:
        if os.environ.get("VLLM_PENALTY_REQUIRE_VLLM") == "1":
            pytest.fail("NIXL is not installed, and VLLM_PENALTY_REQUIRE_VLLM=1 forbids to skip")
        pytest.skip("needs NIXL: make setup")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    require_nixl()
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder)  # attention sees the whole prompt: a wrong KV cache changes the tokens
    return str(folder)


@pytest.fixture(scope="session")
def findings() -> Iterator[dict[str, Any]]:
    """Collect what tests measured; written to the file that the variable names."""
    found: dict[str, Any] = {}
    yield found
    path = os.environ.get(RESULTS_VARIABLE)
    if path and found:
        run = record_run("make disagg", seed=0)
        rounded = json.loads(json.dumps(found), parse_float=lambda text: round(float(text), 3))
        Path(path).write_text(json.dumps({"run": run, "cases": rounded}, indent=1) + "\n")
