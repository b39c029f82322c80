"""A real vLLM engine that is run one step at a time and says what each step computed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.request import Request

try:
    from vllm.utils.argparse_utils import FlexibleArgumentParser
except ImportError:  # before it moved
    from vllm.utils import FlexibleArgumentParser

from vllm_penalty_sched.batch import BatchShape
from vllm_penalty_sched.calibration.grid import EngineLimits
from vllm_penalty_sched.engine.composition import (
    read_composition,
    read_prefilling,
    read_scheduled,
)
from vllm_penalty_sched.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput

_MESSAGE_CHARACTERS = 400


class SteppedScheduler(VllmScheduler):  # type: ignore[misc]  # vLLM is not type-checked here
    """vLLM's own scheduler with an optional limit on prefill tokens; it notes what a step ran.

    Attributes:
        prefill_limit: Most prefill tokens of the next steps; None: vLLM's own budget.
        ran: What the latest step computed.
    """

    prefill_limit: int | None = None
    ran = BatchShape()
    max_num_scheduled_tokens: int

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule one step as vLLM does, within the limit."""
        prefilling = read_prefilling(self)
        decodes = read_composition(self).decodes
        base_tokens = self.max_num_scheduled_tokens
        if self.prefill_limit is not None:
            self.max_num_scheduled_tokens = min(
                base_tokens, decodes.decode_tokens + self.prefill_limit
            )
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            self.max_num_scheduled_tokens = base_tokens
        self.ran = read_scheduled(self, output, prefilling)
        return output


@dataclass(frozen=True, slots=True)
class TimedShape:
    """A step that ran and its time: scheduling, model, sampling and the output's processing."""

    shape: BatchShape
    seconds: float


class SteppedEngine:
    """The core of a vLLM engine under ``SteppedScheduler``.

    Attributes:
        limits: What it can run at once.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._scheduler: SteppedScheduler = core.scheduler
        self._ids = count()
        config = core.vllm_config
        kv = self._scheduler.kv_cache_config
        # The layers of a hybrid model share the blocks, group by group.
        kv_blocks = kv.num_blocks // max(1, len(kv.kv_cache_groups))
        self.limits = EngineLimits(
            max_model_len=config.model_config.max_model_len,
            max_num_seqs=config.scheduler_config.max_num_seqs,
            max_num_batched_tokens=self._scheduler.max_num_scheduled_tokens,
            kv_tokens=kv_blocks * self._scheduler.block_size,
        )
        vocabulary = config.model_config.get_vocab_size()
        # Ordinary tokens: the special ones stand at either end.
        lowest, highest = vocabulary // 8, vocabulary // 2
        rng = np.random.default_rng(0)
        self._tokens = rng.integers(lowest, highest, 2 * self.limits.max_model_len).tolist()

    def add(self, prompt_tokens: int, output_tokens: int) -> str:
        """Queue a request with a random prompt that no end token stops; return its id."""
        number = next(self._ids)
        start = (number * 7919) % self.limits.max_model_len
        request = Request(
            request_id=f"calibration-{number}",
            prompt_token_ids=self._tokens[start : start + prompt_tokens],
            sampling_params=SamplingParams(max_tokens=output_tokens, ignore_eos=True),
            pooling_params=None,
            arrival_time=time.time(),
        )
        self._core.add_request(request)
        return str(request.request_id)

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; those that have ended already are left alone."""
        self._core.abort_requests(list(request_ids))

    def abort_all(self) -> None:
        """End every request."""
        self.abort(list(self._scheduler.requests))

    def step(self, prefill_limit: int | None = None) -> TimedShape:
        """Run one step with at most so many prefill tokens; one without tokens if idle."""
        self._scheduler.prefill_limit = prefill_limit
        self._scheduler.ran = BatchShape()
        start_s = time.perf_counter()
        _, has_executed = self._core.step_fn()
        seconds = time.perf_counter() - start_s
        self._core.post_step(has_executed)
        return TimedShape(self._scheduler.ran, seconds)

    def computed_tokens(self, request_id: str) -> int:
        """Return how many tokens of a request are computed; 0 if it has ended."""
        request = self._scheduler.requests.get(request_id)
        return request.num_computed_tokens if request is not None else 0

    def is_decoding(self, request_id: str) -> bool:
        """Say whether a request's prompt is done and it has not ended."""
        request = self._scheduler.requests.get(request_id)
        return (
            request is not None
            and request.num_output_tokens > 0
            and request.num_computed_tokens >= request.num_prompt_tokens
        )


@contextmanager
def start_engine(config: VllmConfig) -> Iterator[SteppedEngine]:
    """Start an engine and shut it down afterwards.

    Args:
        config: From ``make_stepped_config``.
    """
    core = EngineCore(
        vllm_config=config, executor_class=Executor.get_class(config), log_stats=False
    )
    try:
        yield SteppedEngine(core)
    finally:
        core.shutdown()


class _EngineArgumentParser(FlexibleArgumentParser):  # type: ignore[misc]  # as above
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"vLLM's engine arguments: {message}")


def make_stepped_config(model: str, engine_args: Sequence[str]) -> VllmConfig:
    """Return what ``vllm serve`` would run, to be stepped.

    Prefix caching is off, so that no prompt gets cheaper, and scheduling is synchronous, so that a
    step has ended when its call has: its time includes the scheduling that async scheduling hides.

    Args:
        model: Folder or hub name.
        engine_args: Further arguments as on vLLM's command line.

    Raises:
        ConfigError: If vLLM refuses them, or cannot be stepped with them.
    """
    parser = EngineArgs.add_cli_args(_EngineArgumentParser())
    parsed = parser.parse_args(["--model", model, *engine_args])
    if parsed.model != model:
        raise ConfigError(f"the model is given twice: {model} and {parsed.model}")
    for name in ("async_scheduling", "enable_prefix_caching", "scheduler_cls"):
        if getattr(parsed, name):
            raise ConfigError(f"calibration sets {name} itself: leave it out")
    parsed.async_scheduling = parsed.enable_prefix_caching = False
    parsed.scheduler_cls = SteppedScheduler
    try:
        # The context decides the default token budget: that of a server.
        config = EngineArgs.from_cli_args(parsed).create_engine_config(
            UsageContext.OPENAI_API_SERVER
        )
    except (ValueError, OSError) as error:
        message = " ".join(str(error).split())
        raise ConfigError(f"vLLM refuses {model}: {message[:_MESSAGE_CHARACTERS]}") from error
    _check_config(config)
    return config


def _check_config(config: VllmConfig) -> None:
    model, parallel = config.model_config, config.parallel_config
    refused = {
        "models that generate nothing": model.runner_type != "generate",
        "encoder-decoder models": model.is_encoder_decoder,
        "speculative decoding": config.speculative_config is not None,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "data parallelism": parallel.data_parallel_size > 1,
        "engines without chunked prefill": not config.scheduler_config.enable_chunked_prefill,
    }
    reasons = [name for name, applies in refused.items() if applies]
    if reasons:
        raise ConfigError(f"calibration does not support {', '.join(reasons)}")
