"""What arrives at a service, as an estimate of its capacity needs it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from vllm_penalty_sched.errors import ConfigError

# Lengths are thinned to so many: an estimate needs their distribution only.
_MOST_LENGTHS = 120
_FEWEST_WINDOWS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests as a flow.

    Attributes:
        requests_per_s: Arrivals, > 0.
        prompt_tokens: Prompt lengths, ascending, each as likely as the others, shape (n,).
        output_tokens: Mean tokens that a request generates.
        decode_context: Mean context of a running decode, tokens.
        burst_tokens: Prompt tokens that come together: half the variance over the mean of those
            that arrive within one window, for windows as long as the TTFT SLO.
    """

    requests_per_s: float
    prompt_tokens: NDArray[np.float64]
    output_tokens: float
    decode_context: float
    burst_tokens: float

    @property
    def mean_prompt_tokens(self) -> float:
        """Mean prompt length."""
        return float(np.mean(self.prompt_tokens))

    def shortest(self, share: float) -> Traffic:
        """Return the same flow with that share of the prompts, the longest left out."""
        prompts = self.prompt_tokens[: max(1, round(share * self.prompt_tokens.size))]
        ratio = _poisson_burst_tokens(prompts) / _poisson_burst_tokens(self.prompt_tokens)
        return replace(
            self,
            requests_per_s=share * self.requests_per_s,
            prompt_tokens=prompts,
            decode_context=(
                self.decode_context - self.mean_prompt_tokens + float(np.mean(prompts))
            ),
            burst_tokens=self.burst_tokens * ratio,
        )

    @classmethod
    def of_requests(
        cls,
        arrivals_s: Sequence[float],
        *,
        prompt_tokens: Sequence[int],
        output_tokens: Sequence[int],
        window_s: float,
    ) -> Traffic:
        """Return the flow of recorded requests.

        Args:
            arrivals_s: Ascending times, shape (n,), seconds.
            prompt_tokens: Shape (n,), each >= 1.
            output_tokens: Shape (n,), each >= 1.
            window_s: The TTFT SLO.

        Raises:
            ConfigError: If there are fewer than two arrival times.
        """
        times_s = np.asarray(arrivals_s, dtype=np.float64)
        prompts, outputs = np.asarray(prompt_tokens, float), np.asarray(output_tokens, float)
        span_s = float(times_s[-1] - times_s[0]) if times_s.size else 0.0
        if not span_s > 0.0:
            raise ConfigError("the trace must hold requests of at least two arrival times")
        return cls(
            requests_per_s=(times_s.size - 1) / span_s,
            prompt_tokens=_thinned(prompts),
            output_tokens=float(np.mean(outputs)),
            decode_context=float(np.sum(outputs * (prompts + outputs / 2)) / np.sum(outputs)),
            burst_tokens=_burst_tokens(times_s, prompts, window_s),
        )

    @classmethod
    def of_lengths(
        cls, requests_per_s: float, *, prompt_tokens: Sequence[float], output_tokens: float
    ) -> Traffic:
        """Return a flow without bursts (Poisson) of prompts of these lengths."""
        prompts = np.asarray(prompt_tokens, float)
        return cls(
            requests_per_s=requests_per_s,
            prompt_tokens=_thinned(prompts),
            output_tokens=output_tokens,
            decode_context=float(np.mean(prompts)) + output_tokens / 2,
            burst_tokens=_poisson_burst_tokens(prompts),
        )


def _thinned(lengths: NDArray[np.float64]) -> NDArray[np.float64]:
    count = min(_MOST_LENGTHS, lengths.size)
    places = (np.arange(count) + 0.5) / count * lengths.size
    return np.asarray(np.sort(lengths)[places.astype(int)])


def _poisson_burst_tokens(prompts: NDArray[np.float64]) -> float:
    return float(np.mean(prompts**2) / (2 * np.mean(prompts)))


def _burst_tokens(
    times_s: NDArray[np.float64], prompts: NDArray[np.float64], window_s: float
) -> float:
    span_s = float(times_s[-1] - times_s[0])
    windows = math.ceil(span_s / window_s)
    if windows < _FEWEST_WINDOWS:
        return _poisson_burst_tokens(prompts)
    edges = np.linspace(times_s[0], times_s[-1], windows + 1)
    tokens, _ = np.histogram(times_s, bins=edges, weights=prompts)
    return max(_poisson_burst_tokens(prompts), float(np.var(tokens) / (2 * np.mean(tokens))))
