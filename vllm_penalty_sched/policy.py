"""Decide how many prefill tokens a step may carry, and say why."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from vllm_penalty_sched.batch import BatchShape

# Below this a chunk pays the price of a mixed step for next to nothing: wait and take more.
USEFUL_TOKENS = 8
# What a prefill gets after it was deferred for as long as allowed.
AGED_TOKENS = 32
# A budget grows at most by this factor over the largest that was seen to run.
MOST_GROWTH = 2.0
# The margin leaves prefills at least this share of the time between decode-only and SLO.
LEAST_ROOM_SHARE = 1 / 3
# A step of a size not seen yet may jump by this share over what its neighbours tell.
NEW_SIZE_MARGIN = 0.12
# When decode-only steps overrun by themselves, prefills may lengthen them by this share.
TRICKLE_SHARE = 0.25


class Reason(StrEnum):
    """Why a step got its prefill budget."""

    NO_DECODE = "no_decode"
    NO_PREFILL = "no_prefill"
    COLD = "cold"
    FITS = "fits"
    SLO = "slo"
    HELD = "held"
    DEFERRED = "deferred"
    AGED = "aged"
    INFEASIBLE = "infeasible"
    STALLED = "stalled"


class StepTimes(Protocol):
    """What the policy asks of a step-time model."""

    def predict_s(self, shape: BatchShape) -> float:
        """Return the predicted time of a step, seconds."""

    def largest_prefill(
        self, shape: BatchShape, cached: int, limit_s: float, most: int = ...
    ) -> int:
        """Return the most tokens of one more chunk, up to ``most``, that keep to the limit."""

    def knows_size(self, tokens: int) -> bool:
        """Return whether steps of about so many tokens have been seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillDemand:
    """A request that wants prefill tokens.

    Attributes:
        remaining: Tokens left to compute, >= 1.
        cached: Tokens computed before, or found in the prefix cache.
        minimum: The fewest tokens that vLLM can give it in one step, at most ``remaining``.
        is_waiting: Whether it is not admitted yet.
        to_encode: ``(position, tokens)`` of each image or sound that is not encoded yet, in order:
            a chunk that reaches beyond the position makes an encoder work on all of its tokens.
    """

    remaining: int
    cached: int
    minimum: int = 1
    is_waiting: bool = False
    to_encode: tuple[tuple[int, int], ...] = ()

    def encoder_tokens(self, new: int) -> int:
        """Return what the encoder works on for a chunk of so many tokens."""
        end = self.cached + new
        return sum(tokens for position, tokens in self.to_encode if position < end)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepState:
    """All that a decision depends on, besides the model.

    Attributes:
        decodes: The step without prefill.
        demands: Requests that want prefill, in the order in which vLLM will serve them.
        decode_only_s: Expected time of the step without prefill; None while unknown.
        slo_s: The SLO in force; None while it is not settled.
        earned_s: By how much the step may exceed the SLO, since earlier tokens came early.
        slo_is_fixed: Whether it was set by someone, and not derived from the decode-only time.
        margin: Share by which predictions are raised, for noise.
        slowdown: Factor by which steps take longer right now, at least 1.
        most_tokens: The most prefill tokens to dare.
        seen_tokens: Most prefill tokens of a step that the model has learned from.
        base_tokens: The engine's own token budget for a step.
        starved_s: How long prefills have made no progress.
        held_s: How long admission has been held.
        max_defer_s: When ``starved_s`` and ``held_s`` end it.
        guards_admission: Whether a request may be held back for the decodes' sake.
    """

    decodes: BatchShape
    demands: tuple[PrefillDemand, ...]
    decode_only_s: float | None
    slo_s: float | None
    earned_s: float = 0.0
    slo_is_fixed: bool
    margin: float
    slowdown: float
    most_tokens: int
    seen_tokens: int
    base_tokens: int
    starved_s: float
    held_s: float
    max_defer_s: float
    guards_admission: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A step's prefill budget.

    Attributes:
        reason: What set it.
        prefill_tokens: The most prefill tokens of the step; None: no limit.
        predicted_s: Predicted time if all of them are used; None without a model.
        slo_s: The SLO that it was made for, what was earned included; None if there was none.
        decode_only_s: Expected time of the step without prefill; None while unknown.
        holds_admission: Whether a waiting request was left waiting for the decodes' sake.
    """

    reason: Reason
    prefill_tokens: int | None = None
    predicted_s: float | None = None
    slo_s: float | None = None
    decode_only_s: float | None = None
    holds_admission: bool = False


@dataclass(frozen=True, slots=True)
class _Fill:
    tokens: int
    shape: BatchShape
    is_complete: bool
    holds_admission: bool


def decide(state: StepState, model: StepTimes | None) -> Decision:
    """Return the prefill budget of the next step.

    Args:
        state: The step, its SLO and who waits.
        model: Predicts step times; None during the cold start, when only ``most_tokens`` binds.

    Returns:
        A decision for every input; its budget never keeps a decode from its tokens.
    """
    if not state.decodes.decode_seqs:
        return Decision(reason=Reason.NO_DECODE)
    if not state.demands:
        return Decision(reason=Reason.NO_PREFILL, prefill_tokens=0, slo_s=state.slo_s)
    if state.slo_s is None or state.decode_only_s is None:
        return _aged_or(state, Reason.COLD, fill=None, model=None)
    infeasible = state.decode_only_s > state.slo_s
    if infeasible:
        limit_s = state.decode_only_s * (1.0 + TRICKLE_SHARE)
    else:
        limit_s = longest_planned_s(
            state.slo_s + state.earned_s,
            state.decode_only_s,
            margin=state.margin,
            slowdown=state.slowdown,
        )
    fill = _fill(state, model, limit_s, state.most_tokens, infeasible=infeasible)
    if model is not None and fill.tokens > state.seen_tokens:
        daring = min(state.most_tokens, _within_proportion(state, model, limit_s))
        fill = _fill(state, model, limit_s, daring, infeasible=infeasible)
    if model is not None and fill.tokens and not model.knows_size(fill.shape.tokens):
        fill = _fill(
            state, model, limit_s / (1.0 + NEW_SIZE_MARGIN), fill.tokens, infeasible=infeasible
        )
    return _aged_or(state, _reason(fill, model, infeasible=infeasible), fill=fill, model=model)


def longest_planned_s(
    slo_s: float, decode_only_s: float, *, margin: float, slowdown: float
) -> float:
    """Return the longest predicted time of a step that is expected to hold the SLO, seconds.

    Args:
        slo_s: The SLO, at least ``decode_only_s``.
        decode_only_s: Expected time of the step without prefill.
        margin: As in ``StepState``.
        slowdown: As in ``StepState``.
    """
    # However noisy the machine, some room stays: decode-only steps overrun from noise as well.
    least_s = decode_only_s + LEAST_ROOM_SHARE * (slo_s - decode_only_s)
    return max(least_s, slo_s / (1.0 + margin)) / slowdown


def _reason(fill: _Fill, model: StepTimes | None, *, infeasible: bool) -> Reason:
    if infeasible:
        return Reason.INFEASIBLE
    if not fill.tokens:
        return Reason.HELD if fill.holds_admission else Reason.DEFERRED
    if model is None:
        return Reason.COLD
    return Reason.FITS if fill.is_complete else Reason.SLO


def _fill(
    state: StepState,
    model: StepTimes | None,
    limit_s: float,
    most_tokens: int,
    *,
    infeasible: bool,
) -> _Fill:
    shape = state.decodes
    room = min(most_tokens, state.base_tokens - shape.decode_tokens)
    tokens = 0
    for demand in state.demands:
        if demand.is_waiting and _must_hold(state, shape, demand, model, infeasible=infeasible):
            return _Fill(tokens, shape, False, True)
        fits = max(0, min(demand.remaining, room - tokens))
        if model is not None:
            fits = _largest_chunk(model, shape, demand, limit_s, fits)
        if fits < _least(demand, fits):
            return _Fill(tokens, shape, False, False)
        tokens += fits
        shape = shape.with_prefill(fits, demand.cached, demand.encoder_tokens(fits))
        if fits < demand.remaining:
            return _Fill(tokens, shape, False, False)
    return _Fill(tokens, shape, True, False)


def _largest_chunk(
    model: StepTimes, shape: BatchShape, demand: PrefillDemand, limit_s: float, most: int
) -> int:
    """Return the most tokens of a demand, up to ``most``, that keep to the limit.

    A chunk ends before an image, or pays for the whole of it.
    """
    fits = encoder_tokens = 0
    ends = [(position - demand.cached, tokens) for position, tokens in demand.to_encode]
    for end, tokens in (*ends, (most, 0)):
        longest = min(end, most)
        if longest > fits:
            ahead = replace(shape, encoder_tokens=shape.encoder_tokens + encoder_tokens)
            within = model.largest_prefill(ahead, demand.cached, limit_s, longest)
            fits = max(fits, within)
            if within < longest:
                break
        encoder_tokens += tokens
    return fits


def _within_proportion(state: StepState, model: StepTimes, limit_s: float) -> int:
    """Return the tokens that hold the limit if time grows in proportion beyond what was seen."""
    decode_only_s = model.predict_s(state.decodes)
    seen_s = model.predict_s(state.decodes.with_prefill(state.seen_tokens, 0)) - decode_only_s
    spare_s = limit_s - decode_only_s
    if spare_s >= MOST_GROWTH * seen_s:
        return int(MOST_GROWTH * state.seen_tokens)
    return int(state.seen_tokens * max(1.0, spare_s / seen_s))


def _least(demand: PrefillDemand, new: int) -> int:
    # With an encoder's work done a chunk of any size was worth its step.
    useful = 1 if demand.encoder_tokens(new) else USEFUL_TOKENS
    return min(demand.remaining, max(demand.minimum, useful))


def _must_hold(
    state: StepState,
    shape: BatchShape,
    demand: PrefillDemand,
    model: StepTimes | None,
    *,
    infeasible: bool,
) -> bool:
    """Whether admitting this request would make later decode-only steps overrun the SLO."""
    if not state.guards_admission or state.held_s >= state.max_defer_s:
        return False
    if infeasible:
        return True
    if model is None or state.slo_s is None or not state.slo_is_fixed:
        return False
    joining = len(shape.prefills) + 1
    joining_context = sum(new + cached for new, cached in shape.prefills)
    later = BatchShape(
        decode_seqs=shape.decode_seqs + joining,
        decode_tokens=shape.decode_tokens + joining,
        decode_context=(shape.decode_context + joining_context + demand.cached + demand.remaining),
    )
    return model.predict_s(later) > state.slo_s


def _aged_or(
    state: StepState, reason: Reason, *, fill: _Fill | None, model: StepTimes | None
) -> Decision:
    """Return the filled budget, or the least useful one if prefills have starved too long."""
    tokens = fill.tokens if fill else 0
    shape = fill.shape if fill else state.decodes
    if not tokens and state.starved_s >= _longest_wait_s(state, model):
        head = state.demands[0]
        reason, tokens = Reason.AGED, _aged_tokens(state, head, model)
        shape = shape.with_prefill(tokens, head.cached, head.encoder_tokens(tokens))
    return Decision(
        reason=reason,
        prefill_tokens=tokens,
        predicted_s=model.predict_s(shape) if model else None,
        slo_s=None if state.slo_s is None else state.slo_s + state.earned_s,
        decode_only_s=state.decode_only_s,
        holds_admission=bool(fill and fill.holds_admission),
    )


def _longest_wait_s(state: StepState, model: StepTimes | None) -> float:
    """Return how long prefills may make no progress, seconds.

    Nobody can cut an image or a sound. Where one is due, waiting only spreads the steps that it
    lengthens: until it makes up no more of the time than prefills may under an infeasible SLO, and
    not at all for an SLO that nobody set.
    """
    head = state.demands[0]
    least = min(head.remaining, USEFUL_TOKENS)
    encoder_tokens = head.encoder_tokens(least)
    if model is None or not encoder_tokens:
        return state.max_defer_s
    if not state.slo_is_fixed:
        return 0.0
    shape = state.decodes.with_prefill(least, head.cached)
    encoding = replace(shape, encoder_tokens=encoder_tokens)
    encoder_s = model.predict_s(encoding) - model.predict_s(shape)
    return min(state.max_defer_s, encoder_s / TRICKLE_SHARE)


def _aged_tokens(state: StepState, head: PrefillDemand, model: StepTimes | None) -> int:
    """Return the least useful chunk, or more of it if the SLO has room without a margin."""
    tokens = max(head.minimum, AGED_TOKENS)
    if model is not None and state.slo_s is not None:
        room = min(state.most_tokens, state.base_tokens - state.decodes.decode_tokens)
        most = max(0, min(room, state.seen_tokens, head.remaining))
        limit_s = state.slo_s / state.slowdown
        tokens = max(tokens, _largest_chunk(model, state.decodes, head, limit_s, most))
    return min(tokens, head.remaining)
