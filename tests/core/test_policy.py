from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.core.test_latency import FITTED, SEES_IMAGES
from tests.strategies import shapes
from vllm_penalty_sched import BatchShape, StepTimeModel
from vllm_penalty_sched.policy import (
    USEFUL_TOKENS,
    Decision,
    PrefillDemand,
    Reason,
    StepState,
    decide,
)

DECODES = BatchShape(decode_seqs=32, decode_tokens=32, decode_context=32 * 1024)
DECODE_ONLY_S = FITTED.predict_s(DECODES)
STATE = StepState(
    decodes=DECODES,
    demands=(PrefillDemand(remaining=5000, cached=0),),
    decode_only_s=DECODE_ONLY_S,
    slo_s=3 * DECODE_ONLY_S,
    slo_is_fixed=True,
    margin=0.1,
    slowdown=1.0,
    most_tokens=10_000,
    seen_tokens=10_000,
    base_tokens=8192,
    starved_s=0.0,
    held_s=0.0,
    max_defer_s=1.0,
)


images = st.tuples(st.integers(0, 100_000), st.integers(1, 4000))


@st.composite
def demands(draw: st.DrawFn) -> PrefillDemand:
    remaining = draw(st.integers(1, 100_000))
    return PrefillDemand(
        remaining=remaining,
        cached=draw(st.integers(0, 100_000)),
        minimum=draw(st.integers(1, remaining)),
        is_waiting=draw(st.booleans()),
        to_encode=tuple(sorted(draw(st.lists(images, max_size=3)))),
    )


@st.composite
def states(draw: st.DrawFn) -> StepState:
    decodes = draw(shapes(with_prefill=False) | st.just(BatchShape()))
    seconds = st.floats(1e-6, 1e3)
    return StepState(
        decodes=decodes,
        demands=tuple(draw(st.lists(demands(), max_size=8))),
        decode_only_s=draw(st.none() | seconds | st.just(FITTED.predict_s(decodes))),
        slo_s=draw(st.none() | seconds),
        slo_is_fixed=draw(st.booleans()),
        margin=draw(st.floats(-0.5, 1.0)),
        slowdown=draw(st.floats(1.0, 5.0)),
        most_tokens=draw(st.integers(0, 20_000)),
        seen_tokens=draw(st.integers(1, 20_000)),
        base_tokens=draw(st.integers(decodes.decode_tokens, 20_000)),
        starved_s=draw(st.floats(0.0, 10.0)),
        held_s=draw(st.floats(0.0, 10.0)),
        max_defer_s=draw(st.floats(0.001, 5.0)),
    )


def predicted_s(state: StepState, decision: Decision, model: StepTimeModel = SEES_IMAGES) -> float:
    shape = state.decodes
    left = decision.prefill_tokens or 0
    for demand in state.demands:
        new = min(left, demand.remaining)
        shape = shape.with_prefill(new, demand.cached, demand.encoder_tokens(new))
        left -= new
    return model.predict_s(shape)


@given(states(), st.booleans())
def test_there_is_an_answer_for_every_state_and_it_is_within_bounds(
    state: StepState, is_cold: bool
) -> None:
    decision = decide(state, None if is_cold else SEES_IMAGES)

    if state.decodes.decode_seqs:
        assert decision.prefill_tokens is not None
        assert 0 <= decision.prefill_tokens <= sum(d.remaining for d in state.demands)
        if decision.reason is not Reason.AGED:
            assert decision.prefill_tokens <= max(0, state.base_tokens)
            assert decision.prefill_tokens <= state.most_tokens
    else:
        assert decision.prefill_tokens is None


@given(states())
def test_a_budget_set_by_the_slo_is_predicted_to_hold_it(state: StepState) -> None:
    decision = decide(state, SEES_IMAGES)

    if decision.reason in (Reason.SLO, Reason.FITS):
        assert state.slo_s is not None
        assert state.decode_only_s is not None
        least_room_s = state.decode_only_s + (state.slo_s - state.decode_only_s) / 3
        limit_s = max(least_room_s, state.slo_s / (1 + state.margin)) / state.slowdown
        assert predicted_s(state, decision) <= limit_s * (1 + 1e-9)


@given(states())
def test_a_demand_that_starved_for_too_long_always_gets_tokens(state: StepState) -> None:
    starved = replace(state, starved_s=state.max_defer_s, held_s=state.max_defer_s)

    decision = decide(starved, SEES_IMAGES)

    if starved.demands and starved.decodes.decode_seqs:
        head = starved.demands[0]
        assert decision.prefill_tokens is not None
        assert decision.prefill_tokens >= min(head.minimum, head.remaining)


@given(states(), st.floats(0.0, 1.0))
def test_a_larger_margin_never_gives_a_larger_budget(state: StepState, more: float) -> None:
    loose = decide(state, SEES_IMAGES)
    careful = decide(replace(state, margin=state.margin + more), SEES_IMAGES)

    if loose.prefill_tokens is not None and careful.reason is not Reason.AGED:
        assert careful.prefill_tokens is not None
        assert careful.prefill_tokens <= loose.prefill_tokens


def test_with_nobody_decoding_there_is_no_limit() -> None:
    decision = decide(replace(STATE, decodes=BatchShape()), FITTED)

    assert decision == Decision(reason=Reason.NO_DECODE)


def test_a_prompt_that_fits_is_taken_whole() -> None:
    decision = decide(replace(STATE, demands=(PrefillDemand(remaining=40, cached=0),)), FITTED)

    assert (decision.reason, decision.prefill_tokens) == (Reason.FITS, 40)


def test_a_long_prompt_is_cut_where_the_slo_ends() -> None:
    decision = decide(STATE, FITTED)

    assert decision.reason is Reason.SLO
    assert decision.prefill_tokens is not None
    one_more = DECODES.with_prefill(decision.prefill_tokens + 1, 0)
    assert FITTED.predict_s(one_more) * 1.1 > STATE.slo_s


def test_what_a_short_prompt_leaves_goes_to_the_next() -> None:
    short_then_long = (
        PrefillDemand(remaining=40, cached=0),
        PrefillDemand(remaining=5000, cached=0, is_waiting=True),
    )

    decision = decide(replace(STATE, demands=short_then_long), FITTED)

    assert decision.prefill_tokens is not None
    assert decision.prefill_tokens > 40


def test_a_chunk_too_small_to_be_useful_waits() -> None:
    one_token_s = FITTED.predict_s(DECODES.with_prefill(USEFUL_TOKENS - 1, 0))
    tight = replace(STATE, slo_s=one_token_s, margin=0.0, most_tokens=USEFUL_TOKENS - 1)

    assert decide(tight, FITTED).reason is Reason.DEFERRED
    assert decide(replace(tight, starved_s=1.0), FITTED).reason is Reason.AGED


def test_a_chunk_below_what_vllm_can_schedule_waits_and_then_gets_exactly_that() -> None:
    whole_only = (PrefillDemand(remaining=5000, cached=0, minimum=5000),)
    state = replace(STATE, demands=whole_only)

    assert decide(state, FITTED).prefill_tokens == 0
    assert decide(replace(state, starved_s=1.0), FITTED).prefill_tokens == 5000


def test_a_chunk_ends_before_an_image_that_does_not_fit_and_pays_for_one_that_does() -> None:
    spare_s = STATE.slo_s / (1.0 + STATE.margin) - SEES_IMAGES.predict_s(DECODES)
    per_token_s = SEES_IMAGES.coefficients()["encoder_tokens"]
    small, large = int(0.3 * spare_s / per_token_s), int(2.0 * spare_s / per_token_s)

    def planned(*to_encode: tuple[int, int]) -> Decision:
        demand = PrefillDemand(remaining=5000, cached=1000, to_encode=to_encode)
        return decide(replace(STATE, demands=(demand,)), SEES_IMAGES)

    without = planned().prefill_tokens
    assert planned((1050, large)).prefill_tokens == 50
    assert 50 < planned((1050, small)).prefill_tokens < without
    assert planned((1050, small), (1051, large)).prefill_tokens == 51
    assert planned((1000 + without, large)).prefill_tokens == without
    assert planned((900, large)).reason is Reason.DEFERRED


def test_an_image_that_never_fits_waits_and_is_then_encoded() -> None:
    image = (PrefillDemand(remaining=5000, cached=1000, to_encode=((1000, 1_000_000),)),)
    state = replace(STATE, demands=image)

    aged = decide(replace(state, starved_s=1.0), SEES_IMAGES)

    assert decide(replace(state, starved_s=0.99), SEES_IMAGES).prefill_tokens == 0
    assert aged.reason is Reason.AGED
    assert aged.prefill_tokens
    shape = DECODES.with_prefill(aged.prefill_tokens, 1000, 1_000_000)
    assert aged.predicted_s == SEES_IMAGES.predict_s(shape)


def test_images_that_never_fit_make_up_a_fifth_of_the_time() -> None:
    encoder_s = 5000 * SEES_IMAGES.coefficients()["encoder_tokens"]
    image = (PrefillDemand(remaining=5000, cached=1000, to_encode=((1000, 5000),)),)
    state = replace(STATE, demands=image)

    def reason_after(share: float, **changes: bool) -> Reason:
        return decide(replace(state, starved_s=share * encoder_s, **changes), SEES_IMAGES).reason

    assert encoder_s > STATE.slo_s
    assert reason_after(3.9) is Reason.DEFERRED
    assert reason_after(4.1) is Reason.AGED
    assert reason_after(0.0, slo_is_fixed=False) is Reason.AGED


def test_an_infeasible_slo_lets_prefills_trickle_and_holds_newcomers() -> None:
    running = PrefillDemand(remaining=5000, cached=100)
    waiting = PrefillDemand(remaining=5000, cached=0, is_waiting=True)
    state = replace(STATE, slo_s=0.5 * DECODE_ONLY_S, demands=(running, waiting))

    decision = decide(state, FITTED)

    assert decision.reason is Reason.INFEASIBLE
    assert predicted_s(state, decision, FITTED) <= 1.25 * DECODE_ONLY_S * (1 + 1e-9)
    assert decide(replace(state, demands=(waiting,)), FITTED).holds_admission


def test_a_newcomer_whose_decode_would_break_the_slo_is_held_but_not_for_ever() -> None:
    crowd = BatchShape(decode_seqs=100, decode_tokens=100, decode_context=100 * 4000)
    long_prompt = PrefillDemand(remaining=100_000, cached=0, is_waiting=True)
    later = BatchShape(decode_seqs=101, decode_tokens=101, decode_context=500_000)
    state = replace(
        STATE,
        decodes=crowd,
        demands=(long_prompt,),
        decode_only_s=FITTED.predict_s(crowd),
        slo_s=0.99 * FITTED.predict_s(later),
    )

    held = decide(state, FITTED)

    assert (held.reason, held.holds_admission, held.prefill_tokens) == (Reason.HELD, True, 0)
    assert not decide(replace(state, held_s=1.0), FITTED).holds_admission
    assert not decide(replace(state, slo_is_fixed=False), FITTED).holds_admission


def test_beyond_what_was_seen_a_budget_grows_at_most_in_proportion() -> None:
    generous = replace(STATE, slo_s=1.0)

    assert decide(replace(generous, seen_tokens=100), FITTED).prefill_tokens == 200
    assert decide(replace(generous, seen_tokens=5000), FITTED).prefill_tokens == 5000


def test_a_slow_machine_gets_smaller_chunks_and_a_noisy_one_keeps_some_room() -> None:
    slow = decide(replace(STATE, slowdown=1.5), FITTED)
    noisy = decide(replace(STATE, margin=50.0), FITTED)

    assert slow.prefill_tokens < decide(STATE, FITTED).prefill_tokens
    assert noisy.reason is Reason.SLO
    assert noisy.predicted_s > 1.5 * DECODE_ONLY_S


class _OneNewSize:
    """Times of a model that has not seen steps above so many tokens."""

    def __init__(self, known_tokens: int) -> None:
        self._known_tokens = known_tokens
        self.predict_s = FITTED.predict_s
        self.largest_prefill = FITTED.largest_prefill

    def knows_size(self, tokens: int) -> bool:
        return tokens <= self._known_tokens


def test_a_size_never_seen_gets_a_wider_margin() -> None:
    known = decide(STATE, _OneNewSize(1 << 20))
    fresh = decide(STATE, _OneNewSize(DECODES.decode_tokens))

    assert known.prefill_tokens > fresh.prefill_tokens > 0
    assert fresh.predicted_s <= known.predicted_s / 1.1
