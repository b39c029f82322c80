"""Say whether separate prefill instances would pay, and what prefill costs the decodes."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from vllm_penalty_sched.batch import BatchShape
from vllm_penalty_sched.disaggregation.fluid import (
    PLANNED_SHARE,
    Service,
    Split,
    capacity_per_s,
    decodes_at,
    prefill_alone_s,
)
from vllm_penalty_sched.disaggregation.pricing import Side, choose, offer_here
from vllm_penalty_sched.disaggregation.traffic import Traffic
from vllm_penalty_sched.errors import ConfigError
from vllm_penalty_sched.learning.curve import PenaltyCurve
from vllm_penalty_sched.policy import StepTimes

# The penalty curve's set-up: so many requests at once, chunks and contexts of so many tokens.
_CURVE_REQUESTS, _CURVE_CHUNK_TOKENS, _CURVE_CONTEXT = 8, 8, 256
# The number of running decodes depends on the step time and the other way round.
_ROUNDS = 20
_SHORTEST, _LENGTH_FACTOR = 16, 1.5
_STEP_TOKENS = 8192
# Less is within the error of the estimate, and not worth a second kind of instance. Chosen on half
# of the cases of benchmarks/advice_cases.py.
_WORTH = 1.1
LEAST_PER_S = 1e-3
"""A capacity below this is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalty:
    """What prefills cost the decodes of an engine at a rate.

    Attributes:
        decodes: Decodes that run at once, on average.
        decode_only_s: Time between tokens without prefill.
        mixed_s: The same in a step with prefill.
        delayed_share: Share of the time in which decodes wait for a prefill, 0 to 1.
        mean_s: What a token is delayed by on average.
    """

    decodes: int
    decode_only_s: float
    mixed_s: float
    delayed_share: float
    mean_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Whether to disaggregate, and why.

    Attributes:
        disaggregate: Whether it carries at least a tenth more requests.
        gpus: GPUs, in both cases.
        prefill_gpus: Those that would only prefill, in the best split.
        together_per_s: Capacity if all do both, requests a second.
        apart_per_s: Capacity of the best split.
        requests_per_s: What arrives.
        curve_penalty_s: f(1) - f(0) of the penalty curve, 8 requests at once.
        penalty: What this traffic's prefills cost the decodes if all GPUs do both.
        break_even_tokens: Shortest prompt that is cheaper on an idle prefill instance; None if
            none of this traffic's is.
    """

    disaggregate: bool
    gpus: int
    prefill_gpus: int
    together_per_s: float
    apart_per_s: float
    requests_per_s: float
    curve_penalty_s: float
    penalty: Penalty
    break_even_tokens: int | None

    def to_json(self) -> dict[str, object]:
        """Return the figures: seconds, tokens, requests a second."""
        return asdict(self)


def advise(times: StepTimes, traffic: Traffic, service: Service, *, gpus: int) -> Advice:
    """Compare ``gpus`` engines that do both with every split of them.

    Raises:
        ConfigError: If there are fewer than two GPUs.
    """
    if gpus < 2:
        raise ConfigError(f"disaggregating needs at least 2 GPUs (instances), got {gpus}")
    together_per_s = capacity_per_s(times, traffic, service, Split(prefill=0, decode=gpus))
    splits = [Split(prefill=count, decode=gpus - count) for count in range(1, gpus)]
    apart = {split: capacity_per_s(times, traffic, service, split) for split in splits}
    best = max(splits, key=lambda split: apart[split])
    penalty = penalty_at(times, traffic, service, rate=traffic.requests_per_s / gpus)
    return Advice(
        disaggregate=apart[best] >= max(_WORTH * together_per_s, LEAST_PER_S),
        gpus=gpus,
        prefill_gpus=best.prefill,
        together_per_s=together_per_s,
        apart_per_s=apart[best],
        requests_per_s=traffic.requests_per_s,
        curve_penalty_s=curve_penalty_s(times),
        penalty=penalty,
        break_even_tokens=break_even_tokens(times, traffic, service, penalty),
    )


def curve_penalty_s(times: StepTimes) -> float:
    """Return f(1) - f(0) of the penalty curve that a model tells."""
    ratios, seconds = [], []
    for decodes in range(_CURVE_REQUESTS + 1):
        shape = BatchShape(
            prefills=((_CURVE_CHUNK_TOKENS, _CURVE_CONTEXT),) * (_CURVE_REQUESTS - decodes),
            decode_seqs=decodes,
            decode_tokens=decodes,
            decode_context=decodes * _CURVE_CONTEXT,
        )
        ratios.append(shape.prefill_ratio)
        seconds.append(times.predict_s(shape))
    return PenaltyCurve.fit(ratios, seconds).penalty_s


def penalty_at(times: StepTimes, traffic: Traffic, service: Service, *, rate: float) -> Penalty:
    """Return what prefills cost the decodes of one engine at a rate, requests a second."""
    step_s = service.tbt_slo_s
    for _ in range(_ROUNDS):
        decodes = decodes_at(traffic, rate, step_s)
        decode_only_s = times.predict_s(decodes)
        tokens = traffic.mean_prompt_tokens
        limit_s = PLANNED_SHARE * service.tbt_slo_s
        chunk = times.largest_prefill(decodes, int(tokens / 2), limit_s, int(tokens))
        chunk = max(1, chunk)
        mixed_s = times.predict_s(decodes.with_prefill(chunk, int((tokens - chunk) / 2)))
        delayed_share = min(1.0, rate * tokens / chunk * mixed_s)
        mixed, alone = delayed_share / mixed_s, (1.0 - delayed_share) / decode_only_s
        mean_s = (mixed_s - decode_only_s) * mixed / (mixed + alone)
        step_s = (step_s + decode_only_s + mean_s) / 2
    return Penalty(
        decodes=decodes.decode_seqs,
        decode_only_s=decode_only_s,
        mixed_s=mixed_s,
        delayed_share=delayed_share,
        mean_s=mean_s,
    )


def break_even_tokens(
    times: StepTimes, traffic: Traffic, service: Service, penalty: Penalty
) -> int | None:
    """Return the shortest prompt that is cheaper on an idle prefill instance; None: none is."""
    decodes = BatchShape(
        decode_seqs=penalty.decodes,
        decode_tokens=penalty.decodes,
        decode_context=round(penalty.decodes * traffic.decode_context),
    )
    lengths = [_SHORTEST]
    while lengths[-1] < traffic.prompt_tokens[-1]:
        lengths.append(round(_LENGTH_FACTOR * lengths[-1]))
    cheaper = [_is_cheaper_away(times, service, decodes, tokens) for tokens in lengths]
    if not any(cheaper):
        return None
    place = cheaper.index(True)
    low, high = (lengths[place - 1] if place else 0), lengths[place]
    while high - low > 1:
        middle = (low + high) // 2
        if _is_cheaper_away(times, service, decodes, middle):
            high = middle
        else:
            low = middle
    return high


def _is_cheaper_away(times: StepTimes, service: Service, decodes: BatchShape, tokens: int) -> bool:
    here = offer_here(
        times,
        decodes=decodes,
        tokens=tokens,
        cached=0,
        tokens_ahead=0,
        limit_s=PLANNED_SHARE * service.tbt_slo_s,
        most_tokens=_STEP_TOKENS,
        max_defer_s=service.max_defer_s,
    )
    away_s = prefill_alone_s(times, tokens) + service.handover_time_s(tokens)
    away_s += times.predict_s(decodes)
    return choose(here, away_s).side is Side.REMOTE
