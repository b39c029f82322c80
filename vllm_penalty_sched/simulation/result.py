"""What came of a simulated run: for a file and for the eye."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from vllm_penalty_sched.simulation.goodput import Goodput, ServedRequest, pooled_gaps_s, ttfts_s

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

# Upper ends of the ranges of prompt lengths that times to first token are told for, tokens.
PROMPT_RANGE_ENDS = (256, 1024, 4096, 16_384, 1 << 30)
_TTFT_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
_TBT_QUANTILES = {"p50": 0.5, "p99": 0.99, "p999": 0.999, "max": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """One scheduler's run.

    Attributes:
        scheduler: The spec as it was written.
        served: What each request experienced, in the order of arrival.
        prompt_tokens: Its prompt's length, in the same order.
        goodput: Of all requests that arrived.
        steps: Steps with tokens.
        virtual_s: Virtual time at the end.
        wall_s: Real time that it took, without starting vLLM.
        overrun_share: Share of the steps with running decodes that took longer than the TBT SLO.
        longest_defer_s: Longest virtual time in a row in which decodes ran, a request that could
            have been given prefill tokens was there, and none got any.
        preemptions: Requests that lost their blocks, counted each time.
        reasons: How often each reason set the prefill budget; empty for vLLM's own scheduler.
        choices: Of a pair with priced choices: prompts by side and reason.
    """

    scheduler: str
    served: tuple[ServedRequest, ...]
    prompt_tokens: tuple[int, ...]
    goodput: Goodput
    steps: int
    virtual_s: float
    wall_s: float
    overrun_share: float
    longest_defer_s: float
    preemptions: int
    reasons: Mapping[str, int]
    choices: Mapping[str, int] = field(default_factory=dict)

    @property
    def finished(self) -> int:
        """Requests that got all their tokens."""
        return sum(request.is_finished for request in self.served)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over virtual time."""
        tokens = sum(len(request.token_times_s) for request in self.served)
        return tokens / self.virtual_s if self.virtual_s else 0.0

    def to_json(self) -> dict[str, object]:
        """Return the figures, times in seconds; null for what is unknown."""
        goodput = self.goodput
        return {
            "scheduler": self.scheduler,
            "requests": len(self.served),
            "finished": self.finished,
            "steps": self.steps,
            "virtual_s": round(self.virtual_s, 3),
            "ttft_s": _quantiles(ttfts_s(self.served), _TTFT_QUANTILES),
            "tbt_s": _quantiles(pooled_gaps_s(self.served), _TBT_QUANTILES),
            "goodput": {
                "tpot": round(goodput.tpot, 5),
                "own_p99_gap": round(goodput.own_p99_gap, 5),
                "deadline": round(goodput.deadline, 5),
            },
            "tokens_per_s": round(self.tokens_per_s, 2),
            "overrun_share": round(self.overrun_share, 6),
            "wall_s": round(self.wall_s, 2),
            "reasons": dict(self.reasons),
            **({"choices": dict(self.choices)} if self.choices else {}),
            "longest_defer_s": round(self.longest_defer_s, 4),
            "preemptions": self.preemptions,
            "ttft_by_prompt_length": self._ttft_by_prompt_length(),
        }

    def _ttft_by_prompt_length(self) -> list[dict[str, object]]:
        rows: list[dict[str, object]] = []
        least = 1
        for most in PROMPT_RANGE_ENDS:
            inside = [
                request
                for request, tokens in zip(self.served, self.prompt_tokens, strict=True)
                if least <= tokens <= most
            ]
            least = most + 1
            if inside:
                quantiles = _quantiles(ttfts_s(inside), _TTFT_QUANTILES)
                rows.append({"most_prompt_tokens": most, "requests": len(inside), **quantiles})
        return rows


def format_results(results: Sequence[SimulationResult]) -> str:
    """Return a table with one run a line."""
    header = (
        f"{'':<24}{'goodput':^24}{'TTFT, s':^16}{'TBT, ms':^24}{'over':>8}{'tokens':>8}{'done':>12}"
    )
    columns = (
        f"{'scheduler':<24}{'tpot':>8}{'own p99':>8}{'deadl.':>8}{'p50':>8}{'p99':>8}"
        f"{'p50':>8}{'p99':>8}{'max':>8}{'SLO':>8}{'/s':>8}{'':>12}"
    )
    return "\n".join([header, columns, *map(_line, results)])


def _line(result: SimulationResult) -> str:
    ttft_s, gaps_s = ttfts_s(result.served), pooled_gaps_s(result.served)
    goodput = result.goodput
    cells = [
        f"{result.scheduler:<24}",
        *(f"{s:>8.3f}" for s in (goodput.tpot, goodput.own_p99_gap, goodput.deadline)),
        *(f"{_quantile(ttft_s, q):>8.3f}" for q in (0.5, 0.99)),
        *(f"{1e3 * _quantile(gaps_s, q):>8.1f}" for q in (0.5, 0.99, 1.0)),
        f"{result.overrun_share:>8.2%}",
        f"{result.tokens_per_s:>8.0f}",
        f"{result.finished:>6}/{len(result.served):<5}",
    ]
    return "".join(cells)


def _quantiles(
    durations_s: NDArray[np.float64], shares: Mapping[str, float]
) -> dict[str, float | None]:
    quantiles_s = {name: _quantile(durations_s, share) for name, share in shares.items()}
    return {
        name: round(value_s, 5) if math.isfinite(value_s) else None
        for name, value_s in quantiles_s.items()
    }


def _quantile(durations_s: NDArray[np.float64], share: float) -> float:
    return float(np.quantile(durations_s, share)) if durations_s.size else math.nan
