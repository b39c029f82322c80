"""Set up real schedulers on virtual time for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import vllm
from vllm.config import KVTransferConfig

from vllm_penalty_sched.batch import BatchShape
from vllm_penalty_sched.engine.virtual_config import make_request, make_scheduler, make_vllm_config
from vllm_penalty_sched.engine.virtual_engine import VirtualEngine, VirtualStep

NEEDS_KV_QUEUES = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        tuple(map(int, vllm.__version__.split(".")[:2])) < (0, 31),
        reason="disaggregation needs the queues of vLLM 0.31",
    ),
]
"""Marks of the tests of requests whose KV cache comes from elsewhere."""


def cpu_like_s(seed: int = 0, noise: float = 0.03) -> Callable[[BatchShape], float]:
    """Time of a small model on two cores: 14 ms, 0.35 ms a prefill token, attention."""
    rng = np.random.default_rng(seed)

    def step_time_s(shape: BatchShape) -> float:
        work = sum(new * (cached + new / 2) for new, cached in shape.prefills)
        steady_s = 13e-3 + 1.2e-4 * shape.decode_tokens + 3.5e-4 * shape.prefill_tokens
        return (steady_s + 1e-8 * work) * float(np.exp(noise * rng.standard_normal()))

    return step_time_s


def make_engine(
    scheduler_cls: type,
    settings: Mapping[str, Any] | str | None = None,
    *,
    step_time_s: Callable[[BatchShape], float] | None = None,
    kv_blocks: int = 20_000,
    spec_tokens: int = 0,
    accept_drafts: Callable[[int], int] = lambda drafts: drafts,
    kv_transfer: Mapping[str, Any] | None = None,
    **config: Any,
) -> VirtualEngine:
    vllm_config = make_vllm_config(settings=settings, **config)
    if kv_transfer is not None:
        vllm_config.kv_transfer_config = KVTransferConfig(**kv_transfer)
    scheduler = make_scheduler(scheduler_cls, vllm_config, kv_blocks=kv_blocks)
    if spec_tokens:
        scheduler.num_spec_tokens = spec_tokens
    return VirtualEngine(scheduler, step_time_s or cpu_like_s(), accept_drafts=accept_drafts)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([length, seed]).integers(0, 2000, length).tolist()


def add(engine: VirtualEngine, name: str, length: int, output: int, **options: Any) -> None:
    request = make_request(name, prompt(length, crc32(name.encode())), output, **options)
    engine.scheduler.add_request(request)


def start_decodes(engine: VirtualEngine, count: int, *, output: int = 5000, **options: Any) -> None:
    for index in range(count):
        add(engine, f"decode-{index}", 16 + index, output, **options)
    while not all(f"decode-{index}" in engine.token_times_s for index in range(count)):
        engine.step()


def play(engine: VirtualEngine, steps: int) -> list[VirtualStep]:
    before = len(engine.steps)
    while len(engine.steps) < before + steps and engine.is_busy:
        engine.step()
    return engine.steps[before:]


def gaps_s(engine: VirtualEngine, prefix: str = "") -> np.ndarray:
    gaps = [
        np.diff(times_s)
        for request_id, times_s in engine.token_times_s.items()
        if request_id.startswith(prefix)
    ]
    return np.concatenate([gap for gap in gaps if len(gap)])


def is_clean(engine: VirtualEngine) -> bool:
    """Whether no request and no block is left (vLLM keeps one block for itself)."""
    scheduler = engine.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    return not scheduler.requests and pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
