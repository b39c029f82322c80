"""vLLM's own scheduler, where ours stays out of the way.

The module itself loads whatever vLLM has moved; vLLM's classes are imported inside.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

_FOLDER = "vllm.v1.core.sched"
# The diffusion models of versions before it (0.28-0.30) take the ordinary classes.
_FOR_DIFFUSION = f"{_FOLDER}.diffusion_scheduler"


def config_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the VllmConfig among a scheduler's constructor arguments."""
    return kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]


def is_diffusion(vllm_config: Any) -> bool:
    """Return whether the model denoises blocks of tokens, in place of decoding one by one."""
    return getattr(vllm_config, "diffusion_config", None) is not None


def make_stock_scheduler(*args: Any, **kwargs: Any) -> Any:
    """Return the scheduler that vLLM would have made of a scheduler's constructor arguments."""
    config = config_in(args, kwargs)
    is_async = config.scheduler_config.async_scheduling
    if is_diffusion(config) and find_spec(_FOR_DIFFUSION) is not None:
        module, name = (
            _FOR_DIFFUSION,
            "DiffusionAsyncScheduler" if is_async else "DiffusionScheduler",
        )
    elif is_async:
        module, name = f"{_FOLDER}.async_scheduler", "AsyncScheduler"
    else:
        module, name = f"{_FOLDER}.scheduler", "Scheduler"
    return getattr(import_module(module), name)(*args, **kwargs)
