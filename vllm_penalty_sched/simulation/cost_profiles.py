"""Step costs of known GPUs and models in a few constants, for simulations without a table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from vllm_penalty_sched.errors import ConfigError
from vllm_penalty_sched.simulation.cost_grids import MOST_CHUNK_TOKENS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vllm_penalty_sched.batch import BatchShape

KNOTS = (128, 256)
_VIDUR = "Vidur (microsoft/vidur 7d47513363): linear layers"
_AICONFIGURATOR = "AIConfigurator (ai-dynamo/aiconfigurator 095f58a51c): attention"
_LLMSERVINGSIM = (
    "LLMServingSim (casys-kaist/LLMServingSim 5daddb21a5): a vLLM 0.19 engine's kernels"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileCosts:
    """Step costs as a sum of non-negative terms, each a constant times a count of the step.

    It is smooth where measured steps jump, and of a form that the plugin's own model contains: a
    plugin that learns it looks more accurate than one that learns a measured table.

    Attributes:
        floor_s: Any step.
        token_s: Each token.
        token_over_128_s: Each token above 128.
        token_over_256_s: Each token above 256.
        decode_context_s: Each token of the decodes' context.
        mixed_context_s: The same once more in a step with prefill.
        attention_work_s: Each pair of a new token of a chunk and a token that it attends to.
        cached_token_s: Each cached token of a chunk.
        chunk_s: Each prefill chunk.
        mape: Mean absolute relative error against the table, over steps of up to 256 decodes and
            three chunks, 0 to 1.
        source: Where the table comes from.
        mixed_decode_factor: How much dearer a decode's attention is in a step with prefill, >= 1.
        overhead_s: Added to every step, seconds.
    """

    floor_s: float
    token_s: float
    token_over_128_s: float
    token_over_256_s: float
    decode_context_s: float
    mixed_context_s: float
    attention_work_s: float
    cached_token_s: float
    chunk_s: float
    mape: float
    source: str
    mixed_decode_factor: float = 1.0
    overhead_s: float = 0.0

    def step_s(self, shape: BatchShape) -> float:
        """Return the time of a step, seconds; 0 for a step without tokens."""
        tokens = shape.tokens
        if not tokens:
            return 0.0
        over_128, over_256 = max(0, tokens - KNOTS[0]), max(0, tokens - KNOTS[1])
        seconds = self.overhead_s + self.floor_s + self.token_s * tokens
        seconds += self.token_over_128_s * over_128 + self.token_over_256_s * over_256
        context_s = self.decode_context_s
        for new, cached in shape.prefills:
            seconds += self.chunk_s + self.cached_token_s * cached
            seconds += self.attention_work_s * new * (cached + 0.5 * new)
        if shape.prefills:
            context_s = self.decode_context_s * self.mixed_decode_factor + self.mixed_context_s
        return seconds + context_s * shape.decode_context

    def chunk_steps_s(self, shape: BatchShape, cached: int, most: int) -> NDArray[np.float64]:
        """Return the times of a step with one more chunk; see ``StepCosts``."""
        new = np.arange(1, most + 1)
        tokens = shape.tokens + new
        linear_s = self.token_s * tokens
        linear_s += self.token_over_128_s * np.maximum(0, tokens - KNOTS[0])
        linear_s += self.token_over_256_s * np.maximum(0, tokens - KNOTS[1])
        work_s = self.attention_work_s * new * (cached + 0.5 * new)
        one = shape.with_prefill(1, cached)
        fixed_s = self.step_s(one) - float(linear_s[0] + work_s[0])
        return np.asarray(linear_s + work_s + fixed_s)

    def most_tokens_within(self, limit_s: float) -> int:
        """Return a number of tokens such that every step of more costs more than the limit."""
        slope_s = self.token_s + self.token_over_128_s + self.token_over_256_s
        knots_s = self.token_over_128_s * KNOTS[0] + self.token_over_256_s * KNOTS[1]
        left_s = limit_s - self.overhead_s - self.floor_s + knots_s
        # The line of the last piece runs below the others, the cost being convex.
        return min(2 * MOST_CHUNK_TOKENS, max(0, int(left_s / slope_s)))


def find_profile(
    name: str, *, mixed_decode_factor: float = 1.0, overhead_s: float = 0.0
) -> ProfileCosts:
    """Return a built-in profile.

    Args:
        name: One of ``PROFILES``.
        mixed_decode_factor: See ``ProfileCosts``.
        overhead_s: See ``ProfileCosts``.

    Raises:
        ConfigError: If there is no such profile, the factor is below 1, or it is above 1 and the
            profile has measured mixed steps.
    """
    if not mixed_decode_factor >= 1.0:
        raise ConfigError(f"the mixed-decode factor must be >= 1, got {mixed_decode_factor}")
    if name not in PROFILES:
        raise ConfigError(f"{name} is no cost profile (known: {', '.join(PROFILES)})")
    profile = PROFILES[name]
    if mixed_decode_factor > 1.0 and profile.mixed_context_s:
        raise ConfigError(
            f"profile {name} comes from measured mixed steps: a mixed-decode factor "
            f"({mixed_decode_factor}) is for those without them"
        )
    return replace(profile, mixed_decode_factor=mixed_decode_factor, overhead_s=overhead_s)


PROFILES = {
    "a100-llama2-7b": ProfileCosts(
        floor_s=0.009166,
        token_s=4.69e-05,
        token_over_128_s=0.0,
        token_over_256_s=1.861e-05,
        decode_context_s=3.158e-07,
        mixed_context_s=0.0,
        attention_work_s=2.518e-09,
        cached_token_s=3.89e-07,
        chunk_s=0.0001679,
        mape=0.026,
        source=f"{_VIDUR}; {_AICONFIGURATOR}",
    ),
    "a100-llama3-70b-tp4": ProfileCosts(
        floor_s=0.03137,
        token_s=0.0001258,
        token_over_128_s=4.7e-05,
        token_over_256_s=1.767e-05,
        decode_context_s=6.153e-08,
        mixed_context_s=0.0,
        attention_work_s=2.273e-09,
        cached_token_s=1.369e-06,
        chunk_s=0.001111,
        mape=0.025,
        source=f"{_VIDUR}; {_AICONFIGURATOR}",
    ),
    "a100-llama3-8b": ProfileCosts(
        floor_s=0.01089,
        token_s=4.11e-05,
        token_over_128_s=1.564e-05,
        token_over_256_s=1.399e-05,
        decode_context_s=8.196e-08,
        mixed_context_s=0.0,
        attention_work_s=2.449e-09,
        cached_token_s=4.073e-07,
        chunk_s=0.0004267,
        mape=0.028,
        source=f"{_VIDUR}; {_AICONFIGURATOR}",
    ),
    "a40-llama2-7b": ProfileCosts(
        floor_s=0.02637,
        token_s=5.32e-05,
        token_over_128_s=4.434e-05,
        token_over_256_s=3.157e-05,
        decode_context_s=8.14e-07,
        mixed_context_s=0.0,
        attention_work_s=1.001e-08,
        cached_token_s=0.0,
        chunk_s=0.0005331,
        mape=0.020,
        source=f"{_VIDUR} and attention",
    ),
    "h100-llama2-70b-tp4": ProfileCosts(
        floor_s=0.0213,
        token_s=1.457e-05,
        token_over_128_s=4.184e-05,
        token_over_256_s=6.502e-06,
        decode_context_s=2.982e-08,
        mixed_context_s=0.0,
        attention_work_s=2.168e-10,
        cached_token_s=9.228e-07,
        chunk_s=0.001331,
        mape=0.031,
        source=f"{_VIDUR}; {_AICONFIGURATOR}",
    ),
    "h100-llama2-7b": ProfileCosts(
        floor_s=0.006073,
        token_s=1.942e-05,
        token_over_128_s=0.0,
        token_over_256_s=0.0,
        decode_context_s=1.727e-07,
        mixed_context_s=0.0,
        attention_work_s=2.956e-10,
        cached_token_s=3.714e-07,
        chunk_s=5.864e-05,
        mape=0.030,
        source=f"{_VIDUR}; {_AICONFIGURATOR}",
    ),
    "rtx4090-llama31-8b": ProfileCosts(
        floor_s=0.01733,
        token_s=3.129e-05,
        token_over_128_s=2.369e-05,
        token_over_256_s=3.827e-05,
        decode_context_s=1.414e-07,
        mixed_context_s=2.833e-07,
        attention_work_s=3.996e-09,
        cached_token_s=2.617e-07,
        chunk_s=0.0,
        mape=0.064,
        source=_LLMSERVINGSIM,
    ),
    "rtxpro6000-llama31-8b": ProfileCosts(
        floor_s=0.01126,
        token_s=1.815e-05,
        token_over_128_s=0.0,
        token_over_256_s=1.881e-05,
        decode_context_s=8.97e-08,
        mixed_context_s=1.102e-07,
        attention_work_s=2.013e-09,
        cached_token_s=2.058e-07,
        chunk_s=0.0,
        mape=0.063,
        source=_LLMSERVINGSIM,
    ),
}
