"""The device of a simulation: true step costs, drift and noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_penalty_sched.errors import ConfigError
from vllm_penalty_sched.learning.margin import ConformalMargin
from vllm_penalty_sched.simulation.cost_grids import MOST_CHUNK_TOKENS
from vllm_penalty_sched.simulation.table_costs import StepCosts, largest_chunk

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from vllm_penalty_sched.batch import BatchShape


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """How a device's steps differ from their costs.

    Attributes:
        costs: Noise-free step times.
        noise_cv: Coefficient of variation of a lognormal factor of mean 1 on each step, >= 0.
        drift_start_s: Time from which steps take ``drift_factor`` times as long, seconds >= 0.
        drift_factor: Above 0.

    Raises:
        ConfigError: If a number breaks its rule.
    """

    costs: StepCosts
    noise_cv: float = 0.0
    drift_start_s: float = 0.0
    drift_factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.noise_cv < math.inf:
            raise ConfigError(f"noise must be a coefficient of variation >= 0, got {self.noise_cv}")
        if not (self.drift_start_s >= 0.0 and 0.0 < self.drift_factor < math.inf):
            raise ConfigError(
                "drift must be a time >= 0 s and a factor > 0, "
                f"got {self.drift_start_s:g}:{self.drift_factor:g}"
            )

    def factor(self, now_s: float) -> float:
        """Return how many times their cost steps take at a time, without noise."""
        return self.drift_factor if now_s >= self.drift_start_s else 1.0


class VirtualDevice:
    """Draws the time of each step."""

    def __init__(self, spec: DeviceSpec, rng: np.random.Generator) -> None:
        self._spec = spec
        self._rng = rng
        self._sigma = math.sqrt(math.log1p(spec.noise_cv**2))

    def step_s(self, shape: BatchShape, now_s: float) -> float:
        """Return how long a step takes, seconds.

        Args:
            shape: What it computes, at least one token.
            now_s: When it is scheduled, on the clock of the drift.
        """
        true_s = self._spec.factor(now_s) * self._spec.costs.step_s(shape)
        if not self._sigma:
            return true_s
        drawn = self._sigma * self._rng.standard_normal() - self._sigma**2 / 2
        return true_s * math.exp(drawn)


class TrueStepTimes:
    """What a planner asks of its step-time model, answered with the true costs.

    Attributes:
        is_fitted: True.
        mixed_samples: As of a model that has long left its cold start.
        largest_prefill_tokens: Largest chunk that the costs are known for.
    """

    is_fitted = True
    mixed_samples = 1 << 30
    largest_prefill_tokens = MOST_CHUNK_TOKENS

    def __init__(self, spec: DeviceSpec, clock: Callable[[], float]) -> None:
        """Take over the device and the clock of its drift."""
        self._spec = spec
        self._clock = clock

    def observe(self, shape: BatchShape, seconds: float) -> float:  # noqa: ARG002
        """Return what was predicted for a step that ran; there is nothing to learn."""
        return self.predict_s(shape)

    def predict_s(self, shape: BatchShape) -> float:
        """Return the noise-free time of a step, seconds; 0 for a step without tokens."""
        return self._spec.factor(self._clock()) * self._spec.costs.step_s(shape)

    def largest_prefill(
        self, shape: BatchShape, cached: int, limit_s: float, most: int = MOST_CHUNK_TOKENS
    ) -> int:
        """Return the most new tokens of one more chunk that keep the step within the limit.

        Fewer tokens may take longer, so that whoever can use only ``most`` must say so.
        """
        limit_s /= self._spec.factor(self._clock())
        return largest_chunk(self._spec.costs, shape, cached=cached, limit_s=limit_s, most=most)

    def knows_size(self, tokens: int) -> bool:  # noqa: ARG002
        """Return True: all sizes are known."""
        return True


class NoMargin(ConformalMargin):
    """The margin of a planner that knows the times of steps without noise."""

    @property
    def relative(self) -> float:
        """Return 0: nothing is added to a prediction."""
        return 0.0

    def relative_for(self, decodes: BatchShape) -> float:  # noqa: ARG002
        """Return 0, whatever decodes."""
        return 0.0

    def observe(self, *_: Any, **__: Any) -> None:
        """Learn nothing."""
