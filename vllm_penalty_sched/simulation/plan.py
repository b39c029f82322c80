"""What to simulate: requests, engine, device and SLOs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_penalty_sched.errors import ConfigError
from vllm_penalty_sched.settings import Settings
from vllm_penalty_sched.simulation.scheduler_spec import SchedulerKind, SchedulerSpec

if TYPE_CHECKING:
    from vllm_penalty_sched.simulation.device import DeviceSpec
    from vllm_penalty_sched.simulation.link import LinkSpec
    from vllm_penalty_sched.simulation.traces import TraceRequest

BLOCK_TOKENS = 16


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
        prefill_device: What computes those of a pair's prefill instance; None: the same.
        link: Between a pair's two instances; None if the size of a KV cache is not known.
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
    prefill_device: DeviceSpec | None = None
    link: LinkSpec | None = None
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
        if spec.kind is SchedulerKind.PAIR and self.link is None:
            raise ConfigError(
                f"{spec.name}: give --kv-bytes-per-token, which the costs' name does not tell"
            )
        if spec.kind is not SchedulerKind.STOCK:
            self.penalty_settings(spec.overrides)
