"""The class that ``--scheduler-cls`` names: ours, or a stand-in where vLLM has moved too much."""

from __future__ import annotations

import inspect
import logging
from typing import Any

from vllm_penalty_sched.engine.compatibility import pass_through_warning
from vllm_penalty_sched.engine.stock import make_stock_scheduler

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
            log.warning(pass_through_warning([problem]))
            return make_stock_scheduler(*args, **kwargs)

    return StockScheduler


Scheduler = _load()
