"""A vLLM scheduler that learns what prefill costs the running decodes and holds a decode SLO.

Names load on first use: importing the package loads neither vLLM, torch nor scikit-learn.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vllm_penalty_sched.errors import (
    ConfigError,
    MissingDependencyError,
    ModelFileError,
    NotFittedError,
    PenaltySchedError,
    ServerError,
)

if TYPE_CHECKING:
    from vllm_penalty_sched.batch import BatchShape
    from vllm_penalty_sched.engine.connector import PenaltyConnector
    from vllm_penalty_sched.engine.scheduler import Scheduler
    from vllm_penalty_sched.learning.curve import PenaltyCurve
    from vllm_penalty_sched.learning.latency import StepTimeModel, load_model
    from vllm_penalty_sched.settings import Settings

__all__ = [
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

_MODULES = {
    "BatchShape": "batch",
    "PenaltyConnector": "engine.connector",
    "PenaltyCurve": "learning.curve",
    "Scheduler": "engine.entry",
    "Settings": "settings",
    "StepTimeModel": "learning.latency",
    "load_model": "learning.latency",
}


def __getattr__(name: str) -> Any:
    # vLLM finds --scheduler-cls with getattr on the module, so that this is enough for it.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f"{__name__}.{_MODULES[name]}")
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise MissingDependencyError(
            f"{__name__}.{name} needs vLLM, which is not installed: "
            "pip install 'vllm-penalty-sched[vllm]'"
        ) from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
