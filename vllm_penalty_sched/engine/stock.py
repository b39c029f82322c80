"""vLLM's own scheduler, where ours stays out of the way.

The module itself loads whatever vLLM has moved; vLLM's classes are imported inside.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import Any

_FOLDER = "vllm.v1.core.sched"


def config_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the VllmConfig among a scheduler's constructor arguments."""
    return kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]


def is_diffusion(vllm_config: Any) -> bool:
    """Return whether the model denoises blocks of tokens, in place of decoding one by one."""
    return getattr(vllm_config, "diffusion_config", None) is not None


def make_stock_scheduler(*args: Any, **kwargs: Any) -> Any:
    """Return the scheduler that vLLM would have made of a scheduler's constructor arguments."""
    return _stock_class(config_in(args, kwargs))(*args, **kwargs)


def _stock_class(vllm_config: Any) -> Any:
    is_async = vllm_config.scheduler_config.async_scheduling
    ordinary = ("async_scheduler", "AsyncScheduler") if is_async else ("scheduler", "Scheduler")
    if is_diffusion(vllm_config):
        own = "DiffusionAsyncScheduler" if is_async else "DiffusionScheduler"
        # Before 0.31 diffusion models take the ordinary classes, in 0.31 the sync one.
        with suppress(ImportError, AttributeError):
            return _find("diffusion_scheduler", own)
    return _find(*ordinary)


def _find(module: str, name: str) -> Any:
    return getattr(import_module(f"{_FOLDER}.{module}"), name)
