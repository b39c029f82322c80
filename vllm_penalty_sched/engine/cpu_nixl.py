"""Make NIXL usable on a small machine without a GPU (vLLM 0.32, NIXL 1.5)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# How often NIXL's thread looks for work, microseconds; its binding always asks for 0, which keeps a
# core busy in an idle instance.
PROGRESS_DELAY_US = 500


@contextmanager
def repaired() -> Iterator[None]:
    """Let the block set up NIXL's worker without its two habits that hurt a small machine.

    It moves the calling thread, which is the one that computes, to the last core of each NUMA node;
    and its progress thread polls without a pause.
    """
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    _let_progress_thread_sleep()
    try:
        yield
    finally:
        if affinity is not None:
            os.sched_setaffinity(0, affinity)


def _let_progress_thread_sleep() -> None:
    import nixl._api as api

    binding: Any = api.nixlBind
    own: Any = binding.nixlAgentConfig
    if getattr(own, "sleeps", False):
        return

    class SleepyAgentConfig(own):  # type: ignore[misc]  # NIXL has no types
        sleeps = True

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, PROGRESS_DELAY_US if name == "pthrDelay" else value)

    binding.nixlAgentConfig = SleepyAgentConfig
