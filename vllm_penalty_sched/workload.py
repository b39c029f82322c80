"""A planned load: which requests are sent, when, and how long they are."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from vllm_penalty_sched.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

MOST_REQUESTS = 10_000_000
"""More requests than this would fill the memory: they are taken for a slip."""

MOST_TOKENS = 10_000_000
"""A longer prompt or output is taken for a slip: the contexts of served models end below."""

# Valid ids of ordinary tokens in every vocabulary of 2000 or more.
FIRST_PROMPT_TOKEN_ID, LAST_PROMPT_TOKEN_ID = 260, 1999


class RequestKind(StrEnum):
    """What a request is there for."""

    STEADY = "steady"
    INJECTED = "injected"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One request of an open-loop load: it is sent at its time whatever became of the others.

    Attributes:
        kind: Steady decode, whose token gaps are watched, or injected long prompt.
        arrival_s: Seconds after the start of the load.
        prompt_tokens: Length of the prompt.
        output_tokens: Tokens to generate, all of them (no end token stops it).
    """

    kind: RequestKind
    arrival_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSpec:
    """Steady decodes that all start at once, and long prompts injected while they run.

    The set of requests is fixed, so two schedulers do the same work and their total times
    compare.

    Attributes:
        steady_requests: Requests with a short prompt and a long output.
        steady_prompt_tokens: Prompt length of each.
        steady_output_tokens: Output length of each.
        injected_requests: Requests with a long prompt and a short output.
        injected_prompt_tokens: Mean prompt length.
        injected_output_tokens: Output length of each.
        length_jitter: Injected prompts are uniform within this share of their mean, 0 to 1.

    Raises:
        ConfigError: If a number breaks its rule.
    """

    steady_requests: int = 8
    steady_prompt_tokens: int = 32
    steady_output_tokens: int = 700
    injected_requests: int = 16
    injected_prompt_tokens: int = 2000
    injected_output_tokens: int = 16
    length_jitter: float = 0.25

    def __post_init__(self) -> None:
        for name, least, most in (
            ("steady_requests", 1, MOST_REQUESTS),
            ("steady_prompt_tokens", 1, MOST_TOKENS),
            ("steady_output_tokens", 1, MOST_TOKENS),
            ("injected_prompt_tokens", 1, MOST_TOKENS),
            ("injected_output_tokens", 1, MOST_TOKENS),
            ("injected_requests", 0, MOST_REQUESTS),
        ):
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f"{name} must be >= {least}, got {value}")
            if value > most:
                raise ConfigError(f"{name} must be <= {most}, got {value}")
        if not 0.0 <= self.length_jitter < 1.0:
            raise ConfigError(f"length_jitter must be in [0, 1), got {self.length_jitter}")


def plan_load(
    rng: np.random.Generator, spec: LoadSpec, *, injection_start_s: float, injection_end_s: float
) -> list[PlannedRequest]:
    """Plan the steady decodes at time 0 and the injected prompts at random times.

    Args:
        rng: Source of the arrival times and the prompt lengths.
        spec: Counts and lengths.
        injection_start_s: Earliest injection, >= 0.
        injection_end_s: Latest injection, >= ``injection_start_s``.

    Returns:
        The requests by arrival time; the times are uniform over the injection window.

    Raises:
        ConfigError: If the window is negative or reversed.
    """
    if not 0.0 <= injection_start_s <= injection_end_s:
        raise ConfigError(
            "the injection window must satisfy 0 <= start <= end, "
            f"got {injection_start_s} to {injection_end_s} s"
        )
    steady = PlannedRequest(
        kind=RequestKind.STEADY,
        arrival_s=0.0,
        prompt_tokens=spec.steady_prompt_tokens,
        output_tokens=spec.steady_output_tokens,
    )
    arrivals_s = rng.uniform(injection_start_s, injection_end_s, spec.injected_requests)
    scales = rng.uniform(1 - spec.length_jitter, 1 + spec.length_jitter, spec.injected_requests)
    injected = [
        PlannedRequest(
            kind=RequestKind.INJECTED,
            arrival_s=float(arrival_s),
            prompt_tokens=max(1, round(spec.injected_prompt_tokens * float(scale))),
            output_tokens=spec.injected_output_tokens,
        )
        for arrival_s, scale in zip(sorted(arrivals_s), scales, strict=True)
    ]
    return [steady] * spec.steady_requests + injected


def estimate_busy_s(spec: LoadSpec, *, decode_step_s: float, prompt_s: float) -> float:
    """Return how long an engine that never idles is busy with the whole load.

    Args:
        spec: Counts and lengths.
        decode_step_s: Time of a step that decodes all steady requests and nothing else.
        prompt_s: Time to prefill one injected prompt of the mean length, alone.

    Returns:
        Seconds: the steady decodes alone plus the prefills alone. Until then the steady
        decodes run, under any scheduler that gives both a share.
    """
    return spec.steady_output_tokens * decode_step_s + spec.injected_requests * prompt_s


def draw_prompt(rng: np.random.Generator, tokens: int) -> list[int]:
    """Return random token ids, so that no two prompts share a cached prefix.

    Args:
        rng: Source of the ids.
        tokens: Length, >= 1.

    Returns:
        Ids between 260 and 1999: ordinary tokens of any vocabulary of 2000 or more.
    """
    ids = rng.integers(FIRST_PROMPT_TOKEN_ID, LAST_PROMPT_TOKEN_ID, tokens, endpoint=True)
    return [int(token_id) for token_id in ids]
