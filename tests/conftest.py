"""Keep every test session offline and repeatable, and no suite that needs vLLM skipped unseen."""

import importlib.util
import os
import shutil

import pytest
from hypothesis import settings

# vLLM reads these when it is imported; child processes inherit them.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

# No deadline: a loaded two-core machine would fail tests for its speed.
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("repeatable")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and shutil.which("nvidia-smi") is None:
        pytest.skip("needs a CUDA device")
    if item.get_closest_marker("vllm") and importlib.util.find_spec("vllm") is None:
        if os.environ.get("VLLM_PENALTY_REQUIRE_VLLM") == "1":
            pytest.fail("vLLM is not installed, and VLLM_PENALTY_REQUIRE_VLLM=1 forbids to skip")
        pytest.skip("needs vLLM: make setup")
