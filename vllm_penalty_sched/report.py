"""What the demo reports: numbers for a file, a table and targets for the eye."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_penalty_sched.metrics import (
    LoadSummary,
    Quantiles,
    share_over,
    summarize,
    time_of_arrival,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_penalty_sched.metrics import RequestTrace

NEAR_SLO_FACTOR, NEAR_SLO_RATE = 1.05, 0.99
FAR_OVER_FACTOR, FAR_OVER_RATE = 2.0, 0.001
SETTLING_STEPS = 50
DURATION_RATIO = 1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """One load on one server, with what the targets are judged by.

    Attributes:
        summary: The usual numbers.
        near_slo_rate: Share of all gaps within 1.05 times the SLO, 0 to 1.
        far_over_rate: Share of the gaps over 2 times the SLO, 0 to 1, without the first 50
            steps, in which a cold start may still be learning.
        error_messages: What failed requests failed with, each message once.
    """

    summary: LoadSummary
    near_slo_rate: float
    far_over_rate: float
    error_messages: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Return the numbers in milliseconds, seconds and shares; null for what is unknown."""
        ttft = self.summary.ttft
        return {
            "tbt_ms": quantiles_to_json(self.summary.tbt),
            "ttft_ms": {"p50": _ms(ttft.p50_s), "p99": _ms(ttft.p99_s)},
            "within_slo": _known(self.summary.within_slo, 5),
            "within_1.05_slo": _known(self.near_slo_rate, 5),
            "over_2_slo_after_50_steps": _known(self.far_over_rate, 5),
            "seconds": _known(self.summary.duration_s, 3),
            "requests": self.summary.requests,
            "errors": self.summary.errors,
            "error_messages": list(self.error_messages),
            "output_tokens": self.summary.output_tokens,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A bound that our run is held to.

    Attributes:
        rule: The bound in words.
        measured: What was measured, in words.
        is_met: Whether it is within the bound.
    """

    rule: str
    measured: str
    is_met: bool

    def __str__(self) -> str:
        return f"{'met   ' if self.is_met else 'MISSED'}  {self.rule}: {self.measured}"


def evaluate_load(
    traces: Sequence[RequestTrace],
    *,
    steady_traces: Sequence[RequestTrace],
    tbt_slo_s: float,
) -> LoadResult:
    """Hold a load against an SLO.

    Args:
        traces: Every request, at least one.
        steady_traces: Those that decode from the start: an arrival of theirs is a step.
        tbt_slo_s: The SLO, seconds.

    Returns:
        The result; both shares are NaN if no request received a second token.
    """
    answered = [trace for trace in steady_traces if trace.arrivals_s]
    settled_s = time_of_arrival(answered, SETTLING_STEPS) if answered else math.inf
    return LoadResult(
        summary=summarize(traces, tbt_slo_s=tbt_slo_s),
        near_slo_rate=1.0 - share_over(traces, NEAR_SLO_FACTOR * tbt_slo_s),
        far_over_rate=share_over(traces, FAR_OVER_FACTOR * tbt_slo_s, after_s=settled_s),
        error_messages=tuple(sorted({trace.error for trace in traces if trace.error})),
    )


def quantiles_to_json(quantiles: Quantiles) -> dict[str, float | None]:
    """Return the quantiles in milliseconds; null for what is unknown."""
    return {
        "p50": _ms(quantiles.p50_s),
        "p99": _ms(quantiles.p99_s),
        "p999": _ms(quantiles.p999_s),
        "max": _ms(quantiles.max_s),
    }


def judge(stock: LoadResult, penalty: LoadResult) -> list[Target]:
    """Return every target with whether our run met it; a number that is unknown meets none."""
    ratio = penalty.summary.duration_s / max(stock.summary.duration_s, 1e-9)
    return [
        Target(
            rule=f"at least {NEAR_SLO_RATE:.0%} of the gaps within {NEAR_SLO_FACTOR} x SLO",
            measured=f"{penalty.near_slo_rate:.3%}",
            is_met=penalty.near_slo_rate >= NEAR_SLO_RATE,
        ),
        Target(
            rule=f"at most {FAR_OVER_RATE:.1%} over {FAR_OVER_FACTOR:.0f} x SLO "
            f"after {SETTLING_STEPS} steps",
            measured=f"{penalty.far_over_rate:.3%}",
            is_met=penalty.far_over_rate <= FAR_OVER_RATE,
        ),
        Target(
            rule=f"total time at most {DURATION_RATIO} x stock",
            measured=f"{ratio:.2f} x",
            is_met=ratio <= DURATION_RATIO,
        ),
        Target(
            rule="no failed request",
            measured="; ".join([str(penalty.summary.errors), *penalty.error_messages]),
            is_met=penalty.summary.errors == 0,
        ),
    ]


def format_table(stock: LoadResult, penalty: LoadResult, *, tbt_slo_s: float) -> str:
    """Return the two results side by side, one number a line."""
    lines = [f"{'':<28}{'stock vLLM':>14}{'penalty_sched':>16}"]
    rows = zip(_rows(stock, tbt_slo_s), _rows(penalty, tbt_slo_s), strict=True)
    lines += [f"{label:<28}{left:>14}{right:>16}" for (label, left), (_, right) in rows]
    return "\n".join(lines)


def _rows(result: LoadResult, tbt_slo_s: float) -> list[tuple[str, str]]:
    summary = result.summary
    return [
        ("time between tokens p50", f"{summary.tbt.p50_s * 1e3:.1f} ms"),
        ("                    p99", f"{summary.tbt.p99_s * 1e3:.1f} ms"),
        ("                    p99.9", f"{summary.tbt.p999_s * 1e3:.1f} ms"),
        ("                    max", f"{summary.tbt.max_s * 1e3:.1f} ms"),
        (f"gaps within {tbt_slo_s * 1e3:.1f} ms (SLO)", f"{summary.within_slo:.2%}"),
        ("time to first token p50", f"{summary.ttft.p50_s * 1e3:.0f} ms"),
        ("                    p99", f"{summary.ttft.p99_s * 1e3:.0f} ms"),
        ("whole load", f"{summary.duration_s:.1f} s"),
        ("output tokens", str(summary.output_tokens)),
        ("failed requests", f"{summary.errors} of {summary.requests}"),
    ]


def _ms(value_s: float) -> float | None:
    return _known(value_s * 1e3, 3)


def _known(value: float, digits: int) -> float | None:
    return round(value, digits) if math.isfinite(value) else None
