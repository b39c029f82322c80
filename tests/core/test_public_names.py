import subprocess
import sys

import pytest

import vllm_penalty_sched

HEAVY_MODULES = {"matplotlib", "sklearn", "torch", "vllm"}


def run_python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout


def test_the_public_names_are_exactly_these() -> None:
    assert sorted(vllm_penalty_sched.__all__) == [
        "BatchShape",
        "ConfigError",
        "MissingDependencyError",
        "ModelFileError",
        "NotFittedError",
        "PenaltyConnector",
        "PenaltyCurve",
        "PenaltySchedError",
        "Scheduler",
        "ServerError",
        "Settings",
        "StepTimeModel",
        "load_model",
    ]


def test_every_public_name_is_listed_by_dir() -> None:
    assert set(vllm_penalty_sched.__all__) <= set(dir(vllm_penalty_sched))


def test_an_unknown_name_raises_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        vllm_penalty_sched.no_such_name  # noqa: B018


def test_the_import_loads_no_heavy_module() -> None:
    loaded = run_python("import vllm_penalty_sched, sys; print(*sys.modules)").split()

    assert HEAVY_MODULES.isdisjoint(loaded)


def test_the_import_takes_less_than_half_a_second() -> None:
    code = (
        "import time; start = time.perf_counter(); import vllm_penalty_sched;"
        "print(time.perf_counter() - start)"
    )

    best_s = min(float(run_python(code)) for _ in range(5))

    assert best_s < 0.5
