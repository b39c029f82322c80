"""What to simulate: schedulers, requests, engine, device and SLOs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from vllm_penalty_sched.errors import ConfigError
from vllm_penalty_sched.settings import Settings

if TYPE_CHECKING:
    from vllm_penalty_sched.simulation.device import DeviceSpec
    from vllm_penalty_sched.simulation.traces import TraceRequest

BLOCK_TOKENS = 16
DEFAULT_BUDGET_TOKENS = 8192


class SchedulerKind(StrEnum):
    """Whose decisions are simulated.

    vLLM's; ours; ours with the true costs; and two that show what a part of ours is worth: ours
    without its admission guard, and ours with vLLM's fixed budget, so that only the order is ours.
    """

    STOCK = "stock"
    PENALTY = "penalty"
    ORACLE = "oracle"
    UNGUARDED = "unguarded"
    STATIC = "static"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSpec:
    """One scheduler to simulate.

    Attributes:
        name: The spec as it was written.
        kind: Whose decisions.
        budget_tokens: vLLM's ``max_num_batched_tokens``.
        long_prefill_threshold: vLLM's ``long_prefill_token_threshold``; 0: none.
        overrides: Our settings that differ from those of the plan, by name.
    """

    name: str
    kind: SchedulerKind
    budget_tokens: int = DEFAULT_BUDGET_TOKENS
    long_prefill_threshold: int = 0
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> SchedulerSpec:
        """Read ``stock:N``, ``stock:N:T``, ``static:N``, ``penalty[:N]`` and the like.

        All but stock may be followed by settings: ``penalty,order=fcfs,miss_rate=0.01``.

        Raises:
            ConfigError: If it is none of these, or a setting is wrong.
        """
        head, *settings = text.split(",")
        kind, *numbers = head.split(":")
        is_stock = kind == SchedulerKind.STOCK
        least_numbers = int(is_stock or kind == SchedulerKind.STATIC)
        if (
            kind not in set(SchedulerKind)
            or not all(number.isdecimal() and int(number) > 0 for number in numbers)
            or not least_numbers <= len(numbers) <= 1 + is_stock
            or (is_stock and settings)
        ):
            raise ConfigError(
                "a scheduler must be stock:BUDGET, stock:BUDGET:THRESHOLD, static:BUDGET, "
                "penalty[:BUDGET], oracle[:BUDGET] or unguarded[:BUDGET], all but stock with "
                f"settings such as ,miss_rate=0.01; got {text}"
            )
        budget, threshold, *_ = [*map(int, numbers), 0, 0]
        overrides = dict(_parse_setting(setting, text) for setting in settings)
        Settings.from_mapping(overrides)
        return cls(
            name=text,
            kind=SchedulerKind(kind),
            budget_tokens=budget or DEFAULT_BUDGET_TOKENS,
            long_prefill_threshold=threshold,
            overrides=overrides,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSize:
    """The engine around every scheduler.

    Attributes:
        max_model_len: Most tokens of a request.
        max_num_seqs: Most running requests.
        kv_blocks: Blocks of ``BLOCK_TOKENS`` in the KV cache.
        async_scheduling: Whether a step is scheduled while the one before runs.
        prefix_caching: Whether requests share the blocks of equal prefixes.

    Raises:
        ConfigError: If a number breaks its rule.
    """

    max_model_len: int = 8192
    max_num_seqs: int = 256
    kv_blocks: int = 20_000
    async_scheduling: bool = True
    prefix_caching: bool = False

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be >= 1, got {getattr(self, name)}")
        # vLLM keeps one block for itself, and refuses to start if one request does not fit.
        least = -(-self.max_model_len // BLOCK_TOKENS) + 1
        if self.kv_blocks < least:
            raise ConfigError(
                f"kv_blocks must be >= {least} to hold one request of max_model_len "
                f"{self.max_model_len}, got {self.kv_blocks}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationPlan:
    """Everything that two simulated schedulers have in common.

    Attributes:
        requests: By arrival, at least one; none longer than the engine's ``max_model_len``.
        device: What computes the steps.
        engine: What the schedulers work in.
        ttft_slo_s: SLO of the time to the first token, > 0.
        tbt_slo_s: SLO of the time between tokens, > 0.
        settings: Our schedulers' further settings, by name.
        seed: Seed of the noise.
        drain_s: How long after the last arrival the run ends at the latest; None: until a
            request that arrived last and met both SLOs would have finished.

    Raises:
        ConfigError: If an SLO or ``drain_s`` breaks its rule.
    """

    requests: tuple[TraceRequest, ...]
    device: DeviceSpec
    engine: EngineSize
    ttft_slo_s: float = 2.0
    tbt_slo_s: float = 0.05
    settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    drain_s: float | None = None

    def __post_init__(self) -> None:
        self.penalty_settings()
        if self.drain_s is not None and not self.drain_s >= 0.0:
            raise ConfigError(f"drain must be >= 0 s, got {self.drain_s}")

    @property
    def end_s(self) -> float:
        """Virtual time at which the run ends at the latest."""
        drain_s = self.drain_s
        if drain_s is None:
            longest = max(request.output_tokens for request in self.requests)
            drain_s = self.ttft_slo_s + longest * self.tbt_slo_s
        return self.requests[-1].arrival_s + drain_s

    def penalty_settings(self, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the settings of one of our schedulers.

        Raises:
            ConfigError: If one of them is wrong.
        """
        settings = {
            "tbt_slo_ms": self.tbt_slo_s * 1e3,
            "ttft_slo_ms": self.ttft_slo_s * 1e3,
            **self.settings,
            **(overrides or {}),
        }
        Settings.from_mapping(settings)
        return settings

    def check(self, spec: SchedulerSpec) -> None:
        """Raise now what vLLM would refuse when the simulation starts.

        Raises:
            ConfigError: If the scheduler cannot run in this engine or with these settings.
        """
        if spec.budget_tokens < self.engine.max_num_seqs:
            raise ConfigError(
                f"{spec.name}: the budget must be at least max_num_seqs "
                f"({self.engine.max_num_seqs}): vLLM refuses less"
            )
        if spec.kind is not SchedulerKind.STOCK:
            self.penalty_settings(spec.overrides)


def _parse_setting(text: str, spec: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator:
        raise ConfigError(f"{spec}: a setting must be NAME=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
