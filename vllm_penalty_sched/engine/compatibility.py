"""Check at start-up that this vLLM has the scheduler that we know how to steer.

The module itself loads whatever vLLM has moved; what it checks is imported inside.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import vllm

FIRST_VERSION, END_VERSION = (0, 28), (0, 34)
"""The versions that were tried (``make matrix``): from the first, below the end."""

# What engine/ reads from or sets on vLLM's objects, and the type that it counts on.
_SCHEDULER: Mapping[str, type] = {
    "running": list,
    "requests": dict,
    "max_num_scheduled_tokens": int,
    "scheduler_config.long_prefill_token_threshold": int,
    "scheduler_config.enable_chunked_prefill": bool,
    "scheduler_config.disable_chunked_mm_input": bool,
    "pause_state": int,
    "current_step": int,
    "max_model_len": int,
    "max_num_running_reqs": int,
    "num_waiting_for_streaming_input": int,
    "num_spec_tokens": int,
    "block_size": int,
    "need_mamba_block_aligned_split": bool,
    "kv_cache_manager.enable_caching": bool,
    "kv_cache_manager.coordinator.find_longest_cache_hit": object,
    "kv_cache_manager.block_pool.get_num_free_blocks": object,
    "has_unfinished_requests": object,
    "vllm_config.additional_config": object,
    "vllm_config.observability_config": object,
    "vllm_config.model_config.model": object,
    "parallel_config.data_parallel_index": int,
    "log_stats": bool,
    "connector": object,
    "lora_config": object,
    "encoder_cache_manager": object,
    "is_encoder_decoder": bool,
    "use_eagle": bool,
    "finished_recving_kv_req_ids": set,
    "failed_recving_kv_req_ids": set,
}
_REQUEST: Mapping[str, type] = {
    "request_id": str,
    "is_prefill_chunk": bool,
    "num_computed_tokens": int,
    "num_tokens": int,
    "num_tokens_with_spec": int,
    "num_prompt_tokens": int,
    "num_output_tokens": int,
    "num_output_placeholders": int,
    "next_decode_eligible_step": int,
    "max_tokens": int,
    "priority": int,
    "arrival_time": float,
    "status": object,
    "sampling_params.extra_args": object,
    "lora_request": object,
    "kv_transfer_params": object,
    "block_hashes": list,
    "skip_reading_prefix_cache": object,
    "has_encoder_inputs": bool,
    "mm_features": list,
}
_OUTPUT: Mapping[str, type] = {
    "num_scheduled_tokens": dict,
    "total_num_scheduled_tokens": int,
    "scheduled_new_reqs": list,
    "scheduled_encoder_inputs": dict,
    "scheduled_cached_reqs.resumed_req_ids": set,
}
# Methods that we override, with the arguments that vLLM must pass; any others need a default.
_METHODS: Mapping[str, tuple[str, ...]] = {
    "add_request": ("request",),
    "schedule": (),
    "set_pause_state": ("pause_state",),
    "update_from_output": ("scheduler_output", "model_runner_output"),
}


def find_problems(scheduler: Any) -> list[str]:
    """Return in what this vLLM differs from the ones we know, a few words each.

    Args:
        scheduler: One of ours that vLLM's own ``__init__`` has set up.

    Returns:
        An empty list if it can be steered.
    """
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.request_queue import RequestQueue, SchedulingPolicy

    from vllm_penalty_sched.engine.slack_queue import SlackQueue

    queue_types = {"waiting": RequestQueue, "policy": SchedulingPolicy}
    return [
        *_version_problems(str(vllm.__version__)),
        *_attribute_problems("Scheduler", scheduler, {**_SCHEDULER, **queue_types}),
        *_method_problems(type(scheduler)),
        *_sample_problems("Request", _make_request, _REQUEST),
        *_sample_problems("SchedulerOutput", _make_output, _OUTPUT),
        *_attribute_problems("PauseState", PauseState, {"UNPAUSED": PauseState}),
        *_attribute_problems("SchedulingPolicy", SchedulingPolicy, {"PRIORITY": SchedulingPolicy}),
        *(f"RequestQueue wants {name}()" for name in sorted(SlackQueue.__abstractmethods__)),
    ]


def pass_through_warning(problems: Sequence[str]) -> str:
    """Return what to tell the operator where we leave the scheduling to vLLM."""
    first, last = (f"0.{minor}" for minor in (FIRST_VERSION[1], END_VERSION[1] - 1))
    return (
        "penalty_sched is off, requests are scheduled as in stock vLLM: this vLLM, "
        f"{vllm.__version__}, is not one that it can steer ({'; '.join(problems)}). It works with "
        f"vLLM {first} to {last}"
    )


def _version_problems(version: str) -> Iterator[str]:
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or not FIRST_VERSION <= (int(found[1]), int(found[2])) < END_VERSION:
        yield "its version was never tried"


def _make_request() -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    return Request("probe", [0], SamplingParams(max_tokens=1), None)


def _make_output() -> Any:
    from vllm.v1.core.sched.output import SchedulerOutput

    return SchedulerOutput.make_empty()


def _sample_problems(
    owner: str, make: Callable[[], Any], wanted: Mapping[str, type]
) -> Iterator[str]:
    try:
        sample = make()
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        yield f"{owner} cannot be made: {error}"
    else:
        yield from _attribute_problems(owner, sample, wanted)


def _attribute_problems(owner: str, subject: Any, wanted: Mapping[str, type]) -> Iterator[str]:
    for name, kind in wanted.items():
        try:
            value = attrgetter(name)(subject)
        except AttributeError:
            yield f"{owner} has no {name}"
            continue
        if not isinstance(value, kind):
            yield f"{owner}.{name} is {type(value).__name__}, not {kind.__name__}"


def _method_problems(scheduler_cls: type) -> Iterator[str]:
    for name, wanted in _METHODS.items():
        method = _vllms_own(scheduler_cls, name)
        if method is None:
            yield f"Scheduler has no {name}()"
            continue
        parameters = list(inspect.signature(method).parameters.values())[1:]
        got = tuple(parameter.name for parameter in parameters if _is_required(parameter))
        if got != wanted:
            yield f"Scheduler.{name}() wants ({', '.join(got)}), not ({', '.join(wanted)})"
    schedule = inspect.unwrap(_vllms_own(scheduler_cls, "schedule") or _nothing)
    if "max_num_scheduled_tokens" not in schedule.__code__.co_names:
        yield "Scheduler.schedule() takes no budget from max_num_scheduled_tokens"


def _vllms_own(scheduler_cls: type, name: str) -> Any:
    for cls in scheduler_cls.__mro__:
        if cls.__module__.startswith("vllm.") and name in vars(cls):
            return vars(cls)[name]
    return None


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in (
        parameter.VAR_POSITIONAL,
        parameter.VAR_KEYWORD,
    )


def _nothing() -> None: ...
