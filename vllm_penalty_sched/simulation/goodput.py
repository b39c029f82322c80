"""How many of the requests that arrived got the service that was promised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRequest:
    """What one request experienced.

    Attributes:
        arrival_s: When it arrived.
        token_times_s: Ascending times at which its tokens came, on the clock of ``arrival_s``.
        output_tokens: Tokens that it asked for, >= 1.
    """

    arrival_s: float
    token_times_s: Sequence[float]
    output_tokens: int

    @property
    def is_finished(self) -> bool:
        """Whether it got all its tokens."""
        return len(self.token_times_s) >= self.output_tokens

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token, seconds; None if none came."""
        return self.token_times_s[0] - self.arrival_s if self.token_times_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Shares of all requests that arrived, 0 to 1; an unfinished one is a miss.

    A request counts if it met the TTFT SLO and, by

    Attributes:
        tpot: its mean time between tokens, the TBT SLO (what ``vllm bench serve --goodput tpot``
            counts).
        own_p99_gap: the 99th percentile of its own times between tokens, the TBT SLO.
        deadline: every token ``k`` after the first, the deadline of the first token's time plus
            ``k`` times the TBT SLO.
    """

    tpot: float
    own_p99_gap: float
    deadline: float


def measure_goodput(
    requests: Sequence[ServedRequest], *, ttft_slo_s: float, tbt_slo_s: float
) -> Goodput:
    """Return the goodput of a load, at least one request."""
    in_time = [
        np.diff(request.token_times_s)
        for request in requests
        if request.is_finished and request.ttft_s is not None and request.ttft_s <= ttft_slo_s
    ]
    total = len(requests)
    return Goodput(
        tpot=sum(_mean_holds(gaps_s, tbt_slo_s) for gaps_s in in_time) / total,
        own_p99_gap=sum(_p99_holds(gaps_s, tbt_slo_s) for gaps_s in in_time) / total,
        deadline=sum(_deadlines_hold(gaps_s, tbt_slo_s) for gaps_s in in_time) / total,
    )


def pooled_gaps_s(requests: Sequence[ServedRequest]) -> NDArray[np.float64]:
    """Return the times between tokens of all requests, shape (gaps,), seconds."""
    return np.concatenate([np.empty(0), *(np.diff(r.token_times_s) for r in requests)])


def ttfts_s(requests: Sequence[ServedRequest]) -> NDArray[np.float64]:
    """Return the times to first token of the requests that got one, seconds."""
    times_s = [request.ttft_s for request in requests if request.ttft_s is not None]
    return np.array(times_s, dtype=np.float64)


def _mean_holds(gaps_s: NDArray[np.float64], tbt_slo_s: float) -> bool:
    return not gaps_s.size or bool(np.mean(gaps_s) <= tbt_slo_s)


def _p99_holds(gaps_s: NDArray[np.float64], tbt_slo_s: float) -> bool:
    return not gaps_s.size or bool(np.quantile(gaps_s, 0.99) <= tbt_slo_s)


def _deadlines_hold(gaps_s: NDArray[np.float64], tbt_slo_s: float) -> bool:
    allowed_s = tbt_slo_s * np.arange(1, gaps_s.size + 1)
    return bool(np.all(np.cumsum(gaps_s) <= allowed_s))
