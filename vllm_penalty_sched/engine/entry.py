"""The class that ``--scheduler-cls`` names: ours, or a stand-in where vLLM has moved too much."""

from __future__ import annotations

import inspect
import logging
from typing import Any

from vllm_penalty_sched.engine.compatibility import pass_through_warning

log = logging.getLogger("vllm.penalty_sched")


def _load() -> type:
    try:
        from vllm_penalty_sched.engine.scheduler import Scheduler
    except (ImportError, AttributeError) as error:
        if not _is_vllms(error):
            raise
        return _make_stand_in(str(error))
    return Scheduler


def _is_vllms(error: ImportError | AttributeError) -> bool:
    """Return whether our modules do not load for something that vLLM no longer has."""
    if isinstance(error, ImportError):
        return (error.name or "").startswith("vllm.")
    module = inspect.getmodule(error.obj)
    return module is not None and module.__name__.startswith("vllm.")


def _make_stand_in(problem: str) -> type:
    class StockScheduler:
        """Becomes vLLM's own scheduler for the configured mode."""

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            from vllm.v1.core.sched.async_scheduler import AsyncScheduler
            from vllm.v1.core.sched.scheduler import Scheduler as SyncScheduler

            log.warning(pass_through_warning([problem]))
            config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
            is_async = config.scheduler_config.async_scheduling
            return (AsyncScheduler if is_async else SyncScheduler)(*args, **kwargs)

    return StockScheduler


Scheduler = _load()
