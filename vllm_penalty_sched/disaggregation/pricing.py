"""Where to prefill a prompt: here, beside the running decodes, or on a prefill instance."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from vllm_penalty_sched.batch import BatchShape
from vllm_penalty_sched.policy import AGED_TOKENS, USEFUL_TOKENS, StepTimes

# While both sides' first tokens take at most this share of the time left to the deadline, the price
# decides; beyond it the sooner one: a queue grows faster than its predictions tell.
_EASY_SHARE = 0.25
_PIECE_TOKENS, _MOST_PIECES = 4096, 8


class Side(StrEnum):
    """Who prefills a prompt."""

    LOCAL = "local"
    REMOTE = "remote"


class ChoiceReason(StrEnum):
    """Why a prompt is prefilled where it is."""

    CHEAPER_HERE = "cheaper_here"
    CHEAPER_THERE = "cheaper_there"
    SOONER_HERE = "sooner_here"
    SOONER_THERE = "sooner_there"
    UNKNOWN = "unknown"
    UNAVAILABLE = "unavailable"
    UNSUPPORTED = "unsupported"
    TRIAL = "trial"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOffer:
    """What prefilling a prompt here would cost.

    Attributes:
        first_token_s: Time to its first token from now, seconds; infinite if it would never come.
        delay_s: By how much it would delay the running decodes, summed over them, seconds.
    """

    first_token_s: float
    delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Where a prompt is prefilled.

    Attributes:
        side: Who does it.
        reason: Why.
        local_s: Price here: its own wait and the delay of all decodes, seconds; None if unknown.
        remote_s: Price there: its own wait, seconds; None if unknown.
    """

    side: Side
    reason: ChoiceReason
    local_s: float | None = None
    remote_s: float | None = None


def choose(
    local: LocalOffer | None, remote_s: float | None, *, ttft_left_s: float | None = None
) -> Choice:
    """Return the cheaper side, in seconds that all requests together wait.

    Where the TTFT SLO is at stake, the side with the sooner first token is taken, whatever the
    price: the delay of the decodes stays within their SLO, so that only lateness costs goodput.

    Args:
        local: The offer here; None while the step times are not known.
        remote_s: Time to the first token from a prefill instance; None if unknown.
        ttft_left_s: Time left to the first token's deadline, seconds; None: there is none.
    """
    if local is None or remote_s is None:
        # Prefilling here is what is always possible.
        return Choice(side=Side.LOCAL, reason=ChoiceReason.UNKNOWN, remote_s=remote_s)
    local_s = local.first_token_s + local.delay_s
    is_easy = ttft_left_s is None or max(local.first_token_s, remote_s) <= _EASY_SHARE * ttft_left_s
    if is_easy:
        is_here = local_s <= remote_s
        reasons = ChoiceReason.CHEAPER_HERE, ChoiceReason.CHEAPER_THERE
    else:
        is_here = local.first_token_s <= remote_s
        reasons = ChoiceReason.SOONER_HERE, ChoiceReason.SOONER_THERE
    return Choice(
        side=Side.LOCAL if is_here else Side.REMOTE,
        reason=reasons[0] if is_here else reasons[1],
        local_s=local_s,
        remote_s=remote_s,
    )


def offer_here(
    times: StepTimes,
    *,
    decodes: BatchShape,
    tokens: int,
    cached: int,
    tokens_ahead: int,
    limit_s: float,
    most_tokens: int,
    max_defer_s: float,
) -> LocalOffer:
    """Return what prefilling a prompt here would cost.

    Args:
        times: Predicts step times.
        decodes: The running decodes, without prefill.
        tokens: Prompt tokens to compute, >= 1.
        cached: Prompt tokens found in the prefix cache.
        tokens_ahead: Prefill tokens that go before it.
        limit_s: Longest time a step may take, margin already taken off, seconds; infinite: none.
        most_tokens: The engine's own token budget for a step.
        max_defer_s: How long the policy defers a prefill of which no chunk fits, seconds.
    """
    seconds = delay_s = 0.0
    most_chunk = max(1, most_tokens - decodes.decode_tokens)
    for piece, before in _pieces(tokens, cached):
        chunk = min(piece, most_chunk)
        if decodes.decode_seqs and math.isfinite(limit_s):
            fits = times.largest_prefill(decodes, before + piece // 2, limit_s, chunk)
            # As the policy: a smaller chunk is not worth a mixed step.
            chunk = fits if fits >= min(chunk, USEFUL_TOKENS) else 0
        new = chunk or min(piece, AGED_TOKENS)
        # One chunk in the middle of a piece stands for all: attention work grows evenly.
        step_s = times.predict_s(decodes.with_prefill(new, before + (piece - new) // 2))
        steps = piece / new
        seconds += steps * (step_s if chunk else max(max_defer_s, step_s))
        delay_s += decodes.decode_seqs * steps * (step_s - times.predict_s(decodes))
    return LocalOffer(
        first_token_s=seconds * (tokens_ahead + tokens) / tokens, delay_s=max(0.0, delay_s)
    )


def _pieces(tokens: int, cached: int) -> Iterator[tuple[int, int]]:
    """Yield a prompt's pieces and what comes before each.

    A long one is looked at in several: at its end no chunk may fit any more.
    """
    count = min(_MOST_PIECES, -(-tokens // _PIECE_TOKENS))
    for place in range(count):
        start, end = tokens * place // count, tokens * (place + 1) // count
        yield end - start, cached + start
