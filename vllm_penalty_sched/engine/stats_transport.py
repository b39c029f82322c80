"""Carry text from an engine to its API server inside vLLM's own statistics.

vLLM hands each step's ``SchedulerStats`` to one API server; what a subclass or an extra attribute
holds is dropped on the way (0.28-0.33). ``cudagraph_stats.runtime_mode`` is a string that arrives,
and that nobody reads unless ``--cudagraph-metrics`` is given: then this transport is closed. The
reader clears the field, so that vLLM's own loggers never see it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import SchedulerStats

log = logging.getLogger("vllm.penalty_sched")

_PREFIX = "penalty_sched:"
_CARRIER_FIELDS = {"num_unpadded_tokens", "num_padded_tokens", "num_paddings", "runtime_mode"}


def is_open(vllm_config: VllmConfig, *, log_stats: bool) -> bool:
    """Return whether text can be sent; if not, say why in the log."""
    if not log_stats:
        # As asked for; an offline LLM has no endpoint to begin with.
        log.info("no penalty_sched_ metrics: vLLM's statistics are off (log_stats)")
        return False
    if getattr(vllm_config.observability_config, "cudagraph_metrics", True):
        reason = "--cudagraph-metrics uses the field that would carry them"
    elif not _has_field():
        reason = "this vLLM has no field that could carry them to the API server"
    else:
        return True
    log.warning("no penalty_sched_ metrics: %s. Scheduling goes on as usual", reason)
    return False


def _has_field() -> bool:
    try:
        from vllm.compilation.cuda_graph import CUDAGraphStat
        from vllm.v1.metrics.stats import SchedulerStats
    except ImportError:
        return False
    names = {field.name for field in fields(CUDAGraphStat)}
    return names == _CARRIER_FIELDS and "cudagraph_stats" in {
        field.name for field in fields(SchedulerStats)
    }


def find_carrier(outputs: Mapping[int, Any]) -> SchedulerStats | None:
    """Return the statistics among a step's ``EngineCoreOutputs`` that can carry text."""
    for engine_outputs in outputs.values():
        stats: SchedulerStats | None = engine_outputs.scheduler_stats
        if stats is not None and stats.cudagraph_stats is None:
            return stats
    return None


def put(stats: SchedulerStats, text: str) -> None:
    """Let the statistics carry a text."""
    from vllm.compilation.cuda_graph import CUDAGraphStat

    stats.cudagraph_stats = CUDAGraphStat(
        num_unpadded_tokens=0, num_padded_tokens=0, num_paddings=0, runtime_mode=_PREFIX + text
    )


def take(stats: SchedulerStats | None) -> str | None:
    """Return the text that statistics carry, once; None if they carry none of ours."""
    carried = getattr(stats, "cudagraph_stats", None)
    if stats is None or carried is None or not carried.runtime_mode.startswith(_PREFIX):
        return None
    stats.cudagraph_stats = None
    return str(carried.runtime_mode[len(_PREFIX) :])
