"""Estimate in milliseconds what rate GPUs can carry, with and without prefill instances."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_penalty_sched.batch import BatchShape
from vllm_penalty_sched.disaggregation.traffic import Traffic
from vllm_penalty_sched.policy import AGED_TOKENS, LEAST_ROOM_SHARE, USEFUL_TOKENS, StepTimes

# Steps that are tried besides the longest allowed, 1 ms to 9 s. They are no shares of the TBT SLO:
# what a tight SLO allows must be tried under a looser one as well, or that seems to carry less.
_STEP_DIGITS = (*range(10, 17), 18, 20, 22, 25, 28, 30, *range(35, 85, 5), 90)
_STEPS_S = tuple(float(f"{digits}e{power}") for power in range(-4, 0) for digits in _STEP_DIGITS)
PLANNED_SHARE = 0.95
"""Share of the TBT SLO that steps are planned for: the rest is left for noise."""
# Steps of a prefill instance have at most so many tokens.
_PREFILL_STEP_TOKENS = 2048
# Shares of the prompts that may be kept, from the target to all, of which the best is taken.
_KEPT_SHARES = 5
_BISECTIONS = 14
_MOST_GROWTH = 2.0**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What is promised, and on what.

    Attributes:
        ttft_slo_s: SLO of the time to the first token, > 0.
        tbt_slo_s: SLO of the time between tokens, > 0.
        max_num_seqs: Most running requests of an engine.
        kv_tokens: Tokens that an engine's KV cache holds.
        max_defer_s: Longest time that prefills may make no progress for the decodes' sake.
        kv_bytes_per_s: Bandwidth between two instances.
        kv_bytes_per_token: Size of a token's KV cache.
        handover_s: What every hand-over takes besides.
        target: Share of the requests that must meet both SLOs, in (0, 1).
    """

    ttft_slo_s: float
    tbt_slo_s: float
    max_num_seqs: int
    kv_tokens: int
    kv_bytes_per_s: float
    kv_bytes_per_token: float
    handover_s: float = 5e-3
    max_defer_s: float = 1.0
    target: float = 0.9

    def handover_time_s(self, tokens: float) -> float:
        """Return how long the KV cache of so many tokens takes to an instance, seconds."""
        return self.handover_s + tokens * self.kv_bytes_per_token / self.kv_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How many GPUs do what.

    Attributes:
        prefill: Those that only prefill; 0: not disaggregated.
        decode: Those that decode, and prefill beside it.
    """

    prefill: int
    decode: int


def capacity_per_s(times: StepTimes, traffic: Traffic, service: Service, split: Split) -> float:
    """Return the highest rate at which enough requests meet their SLOs, requests a second.

    Args:
        times: Predicts step times.
        traffic: Its lengths and bursts count, not its rate.
        service: The SLOs and the engines.
        split: The GPUs.
    """
    alone_s = np.array([prefill_alone_s(times, int(n)) for n in traffic.prompt_tokens])

    def is_enough(rate: float) -> bool:
        shares = shares_in_time(times, traffic, service, split, rate, alone_s=alone_s)
        return any(share >= service.target for share in shares)

    low, high = 0.0, 1e-3
    while is_enough(high) and high < _MOST_GROWTH:
        low, high = high, 2.0 * high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_enough(middle) else (low, middle)
    return low


def shares_in_time(
    times: StepTimes,
    traffic: Traffic,
    service: Service,
    split: Split,
    rate: float,
    *,
    alone_s: NDArray[np.float64],
) -> Iterator[float]:
    """Yield the estimated share of requests whose first token is in time, for ways to serve them.

    The best of them counts: a scheduler may give prompts up, and take shorter steps than it must.
    All prompts wait in one queue, which whoever prefills works off: as if each were sent where it
    is served soonest. The longest prompts are given up if that helps (as our scheduler does), and
    of the others those that would be late: an M/M/1 queue with deadlines, its bursts those of the
    traffic. Gaps between tokens hold as far as there is room for the decodes.

    Args:
        times: Predicts step times.
        traffic: Its lengths and bursts count, not its rate.
        service: The SLOs and the engines.
        split: The GPUs.
        rate: Requests a second, > 0.
        alone_s: What each of the traffic's prompts takes on an idle prefill instance, seconds.
    """
    for kept in np.linspace(service.target, 1.0, _KEPT_SHARES).tolist():
        of_kept, kept_rate = traffic.shortest(kept), kept * rate
        for step_s in possible_steps_s(times, of_kept, service, kept_rate / split.decode):
            share = _share_of_steps(times, of_kept, service, split, kept_rate, alone_s, step_s)
            yield kept * share


def _share_of_steps(
    times: StepTimes,
    traffic: Traffic,
    service: Service,
    split: Split,
    rate: float,
    alone_s: NDArray[np.float64],
    step_s: float,
) -> float:
    tokens, prompts = traffic.mean_prompt_tokens, traffic.prompt_tokens
    decodes = decodes_at(traffic, rate / split.decode, step_s)
    one_per_s = _chunk(times, traffic, service, decodes, step_s) / step_s
    speed = beside_per_s = split.decode * one_per_s
    own_s = prompts / one_per_s + step_s
    if split.prefill:
        alone_s = alone_s[: prompts.size]  # the shortest come first
        transfer_s = prompts * service.kv_bytes_per_token / service.kv_bytes_per_s
        # What a prompt finds in flight: a step of others there, and two here (async scheduling).
        found_s = prefill_alone_s(times, min(_PREFILL_STEP_TOKENS, round(tokens))) + 2.0 * step_s
        away_s = alone_s + transfer_s + service.handover_s + found_s
        may_go = away_s < service.ttft_slo_s
        if may_go.any():
            slower_s = np.maximum(alone_s, transfer_s)[may_go]
            speed += split.prefill * float(np.sum(prompts[may_go]) / np.sum(slower_s))
        if not may_go.all():
            must_stay = float(np.sum(prompts[~may_go]) / np.sum(prompts))
            speed = min(speed, beside_per_s / must_stay)
        own_s = np.minimum(own_s, away_s)
    spare_s = service.ttft_slo_s - own_s
    lost = _lost(rate * tokens / speed, np.maximum(spare_s, 0.0) * speed / traffic.burst_tokens)
    return float(np.mean(np.where(spare_s > 0.0, 1.0 - lost, 0.0)))


def possible_steps_s(
    times: StepTimes, traffic: Traffic, service: Service, rate: float
) -> list[float]:
    """Return how long the steps of one engine may take at a rate, seconds.

    Longer ones prefill more; in shorter ones fewer decodes run at once, and a prompt that arrives
    waits less for the step before it.

    Returns:
        The longest that keeps to the TBT SLO and for whose decodes there is room, and shorter ones;
        empty if the engine cannot even decode so much.
    """
    seqs = min(service.max_num_seqs, int(service.kv_tokens / traffic.decode_context))
    longest_s = min(service.tbt_slo_s, seqs / (rate * traffic.output_tokens))
    steps_s = [longest_s, *(step_s for step_s in _STEPS_S if step_s < longest_s)]
    return [s for s in steps_s if times.predict_s(decodes_at(traffic, rate, s)) <= s]


def decodes_at(traffic: Traffic, rate: float, step_s: float) -> BatchShape:
    """Return the decodes that run at a rate if every step takes so long."""
    seqs = max(1, round(rate * traffic.output_tokens * step_s))
    return BatchShape(
        decode_seqs=seqs, decode_tokens=seqs, decode_context=round(seqs * traffic.decode_context)
    )


def _chunk(
    times: StepTimes, traffic: Traffic, service: Service, decodes: BatchShape, step_s: float
) -> float:
    """Return the prefill tokens of a step, on average."""
    cached = int(np.sum(traffic.prompt_tokens**2) / np.sum(traffic.prompt_tokens) / 2)
    decode_only_s = times.predict_s(decodes)
    planned_s = max(
        decode_only_s + LEAST_ROOM_SHARE * (step_s - decode_only_s), PLANNED_SHARE * step_s
    )
    fits = times.largest_prefill(decodes, cached, planned_s)
    if fits >= USEFUL_TOKENS:
        return float(fits)
    return AGED_TOKENS * step_s / service.max_defer_s  # one chunk each time it may be deferred


def prefill_alone_s(times: StepTimes, tokens: int) -> float:
    """Return how long a prompt takes on an idle instance that only prefills, seconds."""
    seconds, cached = 0.0, 0
    while cached < tokens:
        new = min(_PREFILL_STEP_TOKENS, tokens - cached)
        seconds += times.predict_s(BatchShape(prefills=((new, cached),)))
        cached += new
    return seconds


def _lost(load: float, patience: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the share given up in an M/M/1 queue whose customers wait at most so long.

    Args:
        load: Arriving over served work.
        patience: In service times, shape (n,).
    """
    if abs(load - 1.0) < 1e-6:
        return np.asarray(1.0 / (2.0 + patience))
    # In logarithms, so that a long patience under overload does not overflow.
    exponent = np.clip(-(1.0 - load) * patience, -700.0, 700.0)
    grown = np.exp(exponent)
    return np.asarray((1.0 - load) * load * grown / (1.0 - load * load * grown))
