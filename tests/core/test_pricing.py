from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_penalty_sched import BatchShape, StepTimeModel
from vllm_penalty_sched.disaggregation.pricing import (
    ChoiceReason,
    LocalOffer,
    Side,
    choose,
    offer_here,
)
from vllm_penalty_sched.policy import USEFUL_TOKENS

IDLE = BatchShape()
EIGHT = BatchShape(decode_seqs=8, decode_tokens=8, decode_context=8192)


def learned_times() -> StepTimeModel:
    shapes = [
        BatchShape(
            prefills=((new, cached),) if new else (),
            decode_seqs=seqs,
            decode_tokens=seqs,
            decode_context=1024 * seqs,
        )
        for new in (0, 16, 64, 128, 256, 512, 1024, 2048, 4096)
        for cached in (0, 2048)
        for seqs in (0, 1, 8, 32)
        if new or seqs
    ]
    seconds = [
        0.010 + 5e-5 * shape.tokens + 1e-8 * sum(n * (c + n / 2) for n, c in shape.prefills)
        for shape in shapes
    ]
    return StepTimeModel().fit(shapes, seconds)


TIMES = learned_times()


def offer(
    decodes: BatchShape, tokens: int, *, limit_s: float = 0.03, ahead: int = 0, cached: int = 0
) -> LocalOffer:
    return offer_here(
        TIMES,
        decodes=decodes,
        tokens=tokens,
        cached=cached,
        tokens_ahead=ahead,
        limit_s=limit_s,
        most_tokens=8192,
        max_defer_s=1.0,
    )


def test_a_prompt_beside_nobody_delays_nobody_and_takes_one_step() -> None:
    found = offer(IDLE, 1000)

    assert found.delay_s == 0.0
    assert found.first_token_s == pytest.approx(
        TIMES.predict_s(BatchShape(prefills=((1000, 0),))), rel=1e-9
    )


def test_a_chunked_prompt_delays_each_decode_by_the_penalty_of_each_chunk() -> None:
    limit_s = 0.03
    chunk = TIMES.largest_prefill(EIGHT, 1000, limit_s)

    found = offer(EIGHT, 2000, limit_s=limit_s)

    steps = 2000 / chunk
    assert 4 < steps < 10
    assert found.first_token_s == pytest.approx(steps * limit_s, rel=0.05)
    penalty_s = limit_s - TIMES.predict_s(EIGHT)
    assert found.delay_s == pytest.approx(8 * steps * penalty_s, rel=0.05)


def test_without_room_under_the_slo_a_prompt_gets_an_aged_chunk_each_time_it_may_be_deferred() -> (
    None
):
    found = offer(EIGHT, 320, limit_s=0.005)

    assert found.first_token_s == 10.0
    assert found.delay_s > 0.0


def test_a_long_prompt_whose_end_leaves_room_for_no_chunk_is_late_here() -> None:
    limit_s = 0.012
    assert TIMES.largest_prefill(EIGHT, 0, limit_s) >= USEFUL_TOKENS
    assert TIMES.largest_prefill(EIGHT, 120_000, limit_s) < USEFUL_TOKENS

    whole = offer(EIGHT, 128_000, limit_s=limit_s)
    start = offer(EIGHT, 16_000, limit_s=limit_s)

    assert whole.first_token_s > 1000.0
    assert start.first_token_s < 20.0


@given(
    tokens=st.integers(1, 8000),
    ahead=st.integers(0, 20_000),
    seqs=st.integers(0, 64),
    cached=st.integers(0, 4000),
    limit_s=st.one_of(st.floats(0.001, 0.5), st.just(math.inf)),
)
def test_an_offer_is_never_negative_and_never_better_behind_a_longer_queue(
    tokens: int, ahead: int, seqs: int, cached: int, limit_s: float
) -> None:
    decodes = BatchShape(decode_seqs=seqs, decode_tokens=seqs, decode_context=512 * seqs)

    alone = offer(decodes, tokens, limit_s=limit_s, cached=cached)
    behind = offer(decodes, tokens, limit_s=limit_s, cached=cached, ahead=ahead)

    assert 0.0 <= alone.delay_s < math.inf
    assert 0.0 < alone.first_token_s <= behind.first_token_s < math.inf
    assert behind.delay_s == alone.delay_s


def test_the_delay_of_the_decodes_is_part_of_the_price_here() -> None:
    here = LocalOffer(first_token_s=0.1, delay_s=0.0)
    beside_decodes = LocalOffer(first_token_s=0.1, delay_s=0.2)

    assert choose(here, 0.2).side is Side.LOCAL
    assert choose(beside_decodes, 0.2).side is Side.REMOTE


@pytest.mark.parametrize(
    ("local", "remote_s"),
    [(None, 0.1), (LocalOffer(first_token_s=9.0, delay_s=9.0), None), (None, None)],
)
def test_what_is_not_known_is_prefilled_here(
    local: LocalOffer | None, remote_s: float | None
) -> None:
    choice = choose(local, remote_s)

    assert choice.side is Side.LOCAL
    assert choice.reason is ChoiceReason.UNKNOWN


def test_while_the_ttft_slo_is_easily_met_the_price_decides() -> None:
    dear_here = LocalOffer(first_token_s=0.1, delay_s=5.0)

    choice = choose(dear_here, 0.4, ttft_left_s=2.0)

    assert choice.side is Side.REMOTE
    assert choice.reason is ChoiceReason.CHEAPER_THERE


@pytest.mark.parametrize(
    ("first_token_s", "remote_s", "side", "reason"),
    [
        (0.5, 0.6, Side.LOCAL, ChoiceReason.SOONER_HERE),
        (0.6, 0.5, Side.REMOTE, ChoiceReason.SOONER_THERE),
        (0.1, 3.0, Side.LOCAL, ChoiceReason.SOONER_HERE),
        (9.0, 8.0, Side.REMOTE, ChoiceReason.SOONER_THERE),
    ],
)
def test_where_the_ttft_slo_is_at_stake_the_sooner_side_is_taken_whatever_the_price(
    first_token_s: float, remote_s: float, side: Side, reason: ChoiceReason
) -> None:
    dear_here = LocalOffer(first_token_s=first_token_s, delay_s=50.0)

    choice = choose(dear_here, remote_s, ttft_left_s=2.0)

    assert (choice.side, choice.reason) == (side, reason)
    assert choice.local_s == first_token_s + 50.0
