"""What a client saw of a load: gaps between tokens, time to the first one, errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTrace:
    """When one request was sent and when its tokens arrived, on one clock for the whole load.

    Attributes:
        sent_s: Time of sending.
        arrivals_s: Ascending times at which tokens arrived. Tokens that arrive together (one
            chunk of the stream) are one arrival: counting them one by one would add gaps of
            zero and flatter every quantile.
        output_tokens: Tokens received, at least as many as arrivals.
        error: What went wrong; None if all tokens came.
    """

    sent_s: float
    arrivals_s: tuple[float, ...]
    output_tokens: int
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """Quantiles of a set of durations, linearly interpolated; NaN if the set is empty."""

    p50_s: float
    p99_s: float
    p999_s: float
    max_s: float

    @classmethod
    def of(cls, durations_s: NDArray[np.float64]) -> Quantiles:
        """Return the quantiles of ``durations_s``, shape (n,), n >= 0."""
        if not durations_s.size:
            return cls(p50_s=np.nan, p99_s=np.nan, p999_s=np.nan, max_s=np.nan)
        p50, p99, p999, maximum = np.quantile(durations_s, (0.5, 0.99, 0.999, 1.0))
        return cls(p50_s=float(p50), p99_s=float(p99), p999_s=float(p999), max_s=float(maximum))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSummary:
    """One load on one server.

    Attributes:
        tbt: Time between tokens, the gaps of all requests pooled.
        ttft: Time to first token of all requests.
        within_slo: Share of the gaps that are at most the SLO, 0 to 1; NaN without a gap.
        duration_s: From the first request sent to the last token received.
        requests: Requests sent.
        errors: Requests that did not get all their tokens.
        output_tokens: Tokens received by all requests.
    """

    tbt: Quantiles
    ttft: Quantiles
    within_slo: float
    duration_s: float
    requests: int
    errors: int
    output_tokens: int


def summarize(traces: Sequence[RequestTrace], *, tbt_slo_s: float) -> LoadSummary:
    """Summarize a load.

    Args:
        traces: One for each request, at least one.
        tbt_slo_s: Limit that ``within_slo`` counts against.

    Returns:
        The summary. A failed request counts under errors; what it received before failing
        counts like the rest.
    """
    _, gaps_s = pooled_gaps(traces)
    ttfts_s = [trace.arrivals_s[0] - trace.sent_s for trace in traces if trace.arrivals_s]
    start_s = min(trace.sent_s for trace in traces)
    end_s = max((trace.arrivals_s[-1] for trace in traces if trace.arrivals_s), default=start_s)
    return LoadSummary(
        tbt=Quantiles.of(gaps_s),
        ttft=Quantiles.of(np.asarray(ttfts_s, dtype=np.float64)),
        within_slo=1.0 - share_over(traces, tbt_slo_s),
        duration_s=end_s - start_s,
        requests=len(traces),
        errors=sum(trace.error is not None for trace in traces),
        output_tokens=sum(trace.output_tokens for trace in traces),
    )


def pooled_gaps(
    traces: Iterable[RequestTrace],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the gaps between successive arrivals of the same request, all requests pooled.

    The time to the first token is no gap.

    Returns:
        The time at which each gap ended and its length, both seconds, shape (gaps,).
    """
    arrivals_s = [np.asarray(trace.arrivals_s, dtype=np.float64) for trace in traces]
    empty = np.empty(0)
    ends_s = np.concatenate([empty, *(times_s[1:] for times_s in arrivals_s)])
    gaps_s = np.concatenate([empty, *(np.diff(times_s) for times_s in arrivals_s)])
    return ends_s, gaps_s


def share_over(
    traces: Iterable[RequestTrace], limit_s: float, *, after_s: float = -np.inf
) -> float:
    """Return the share of gaps longer than a limit.

    Args:
        traces: The requests whose gaps are pooled.
        limit_s: Longest gap that does not count.
        after_s: Only gaps that end later than this are looked at.

    Returns:
        Share between 0 and 1; NaN if there is no gap to look at.
    """
    ends_s, gaps_s = pooled_gaps(traces)
    considered_s = gaps_s[ends_s > after_s]
    return float(np.mean(considered_s > limit_s)) if considered_s.size else np.nan


def time_of_arrival(traces: Sequence[RequestTrace], arrival: int) -> float:
    """Return when every request had at least ``arrival`` arrivals.

    For requests that decode from the start this is the end of that engine step.

    Args:
        traces: At least one, each with an arrival.
        arrival: Count from 1; a request with fewer arrivals gives its last one.

    Returns:
        Seconds on the clock of the traces.
    """
    return max(trace.arrivals_s[: max(1, arrival)][-1] for trace in traces)
