"""Build vLLM's real schedulers and requests without a model, weights or an engine."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from vllm_penalty_sched.simulation.plan import BLOCK_TOKENS

BLOCK_SIZE = BLOCK_TOKENS

_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 2048,
    "max_position_embeddings": 1 << 20,
}

init_none_hash(sha256)
_hash_blocks = get_request_block_hasher(BLOCK_SIZE, sha256)


def make_vllm_config(
    *,
    settings: Mapping[str, Any] | str | None = None,
    async_scheduling: bool = False,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 2048,
    max_model_len: int = 8192,
    prefix_caching: bool = True,
    **scheduler_options: Any,
) -> VllmConfig:
    """Return a configuration for a scheduler on virtual time.

    Args:
        settings: What ``additional_config`` holds under ``penalty_sched``; None: nothing.
        async_scheduling: As vLLM would decide it; its CPU platform always says False.
        max_num_seqs: As in vLLM.
        max_num_batched_tokens: As in vLLM: stock's budget for a step.
        max_model_len: As in vLLM.
        prefix_caching: As in vLLM.
        scheduler_options: Further fields of vLLM's ``SchedulerConfig``.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_MODEL), encoding="utf-8")
        model_config = ModelConfig(
            model=folder,
            dtype="float32",
            seed=0,
            skip_tokenizer_init=True,
            max_model_len=max_model_len,
        )
        config = VllmConfig(
            model_config=model_config,
            scheduler_config=SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=max_model_len,
                is_encoder_decoder=False,
                async_scheduling=async_scheduling,
                **{"enable_chunked_prefill": True, **scheduler_options},
            ),
            cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=prefix_caching),
            parallel_config=ParallelConfig(),
            additional_config={} if settings is None else {"penalty_sched": settings},
        )
    config.scheduler_config.async_scheduling = async_scheduling
    config.model_config.model = "virtual"  # the folder is gone
    return config


def make_scheduler(
    scheduler_cls: type[VllmScheduler],
    config: VllmConfig,
    *,
    kv_blocks: int = 20_000,
    log_stats: bool = True,
) -> VllmScheduler:
    """Return a scheduler as EngineCore would construct it, for one attention layer.

    Args:
        scheduler_cls: vLLM's class or ours.
        config: From ``make_vllm_config``.
        kv_blocks: Blocks of ``BLOCK_SIZE`` tokens, one of which vLLM keeps for itself.
        log_stats: As in vLLM: whether each step collects statistics.
    """
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    config.cache_config.num_gpu_blocks = kv_blocks
    return scheduler_cls(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=kv_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        log_stats=log_stats,
    )


def make_request(
    request_id: str,
    prompt_token_ids: Sequence[int],
    output_tokens: int,
    *,
    arrival_s: float = 0.0,
    priority: int = 0,
    xargs: Mapping[str, Any] | None = None,
    prefix_caching: bool = True,
) -> Request:
    """Return a request that generates exactly ``output_tokens`` tokens.

    Args:
        request_id: Its name.
        prompt_token_ids: Its prompt, at least one token.
        output_tokens: Tokens to generate, >= 1.
        arrival_s: Orders requests of equal priority.
        priority: As in vLLM: smaller goes first under the priority policy.
        xargs: The request's ``vllm_xargs``.
        prefix_caching: Whether to hash its blocks, which takes long and serves nothing else.
    """
    return Request(
        request_id=request_id,
        prompt_token_ids=list(prompt_token_ids),
        sampling_params=SamplingParams(
            max_tokens=output_tokens,
            ignore_eos=True,
            extra_args=dict(xargs) if xargs else None,
        ),
        pooling_params=None,
        arrival_time=arrival_s,
        priority=priority,
        block_hasher=_hash_blocks if prefix_caching else None,
    )
