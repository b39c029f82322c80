import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_penalty_sched.simulation.goodput import (
    ServedRequest,
    measure_goodput,
    pooled_gaps_s,
    ttfts_s,
)

SLO = {"ttft_slo_s": 2.0, "tbt_slo_s": 0.05}


def served(*times_s: float, asked: int | None = None, arrival_s: float = 0.0) -> ServedRequest:
    return ServedRequest(
        arrival_s=arrival_s, token_times_s=times_s, output_tokens=asked or len(times_s)
    )


def tokens_every(gaps_s: list[float], *, first_s: float = 1.0) -> ServedRequest:
    times_s = [first_s]
    for gap_s in gaps_s:
        times_s.append(times_s[-1] + gap_s)
    return served(*times_s)


def shares(*requests: ServedRequest) -> tuple[float, float, float]:
    goodput = measure_goodput(requests, **SLO)
    return goodput.tpot, goodput.own_p99_gap, goodput.deadline


@pytest.mark.parametrize(
    ("gaps_s", "expected"),
    [
        ([0.04] * 20, (1, 1, 1)),
        # One long gap that the gaps before it had earned: mean and deadlines hold, p99 does not.
        ([0.04] * 10 + [0.09] + [0.04] * 9, (1, 0, 1)),
        # The same gap first: its deadline is missed, the mean still holds.
        ([0.09] + [0.04] * 19, (1, 0, 0)),
        # Two of 300 gaps: the 99th percentile lies below both.
        ([0.01] * 100 + [0.2] * 2 + [0.01] * 198, (1, 1, 1)),
        ([0.06] * 20, (0, 0, 0)),
        ([], (1, 1, 1)),
    ],
)
def test_a_request_counts_by_each_measure_as_computed_by_hand(
    gaps_s: list[float], expected: tuple[int, int, int]
) -> None:
    assert shares(tokens_every(gaps_s)) == expected


def test_a_late_first_token_is_a_miss_by_every_measure() -> None:
    assert shares(tokens_every([0.01] * 5, first_s=2.001)) == (0, 0, 0)


def test_time_to_first_token_counts_from_the_arrival() -> None:
    late = served(10.0, 10.01, arrival_s=7.9)
    in_time = served(10.0, 10.01, arrival_s=8.0)

    assert shares(late, in_time) == (0.5, 0.5, 0.5)
    assert ttfts_s([late, in_time]) == pytest.approx([2.1, 2.0])


def test_requests_that_did_not_finish_are_misses_and_stay_in_the_denominator() -> None:
    good = tokens_every([0.01] * 9)
    cut_off = served(1.0, 1.01, asked=3)
    never_served = served(asked=3)

    assert shares(good, cut_off, never_served, good) == (0.5, 0.5, 0.5)


def test_gaps_are_pooled_over_requests_and_never_across_them() -> None:
    gaps_s = pooled_gaps_s([served(1.0, 1.5), served(9.0), served(asked=2), served(2.0, 2.25, 3.0)])

    assert gaps_s.tolist() == [0.5, 0.25, 0.75]


@given(st.lists(st.floats(1e-3, 0.2), max_size=50), st.floats(1.01, 4))
def test_a_looser_slo_never_lowers_the_goodput(gaps_s: list[float], factor: float) -> None:
    requests = [tokens_every(gaps_s), tokens_every(gaps_s[::-1], first_s=3.0)]

    tight = measure_goodput(requests, ttft_slo_s=2.0, tbt_slo_s=0.05)
    loose = measure_goodput(requests, ttft_slo_s=2.0 * factor, tbt_slo_s=0.05 * factor)

    assert loose.tpot >= tight.tpot
    assert loose.own_p99_gap >= tight.own_p99_gap
    assert loose.deadline >= tight.deadline


@given(st.lists(st.floats(1e-3, 0.1), min_size=1, max_size=50))
def test_who_meets_every_deadline_meets_the_mean(gaps_s: list[float]) -> None:
    # The last token's deadline is the bound on the mean; a hair of slack for rounding.
    request = tokens_every(gaps_s)

    by_deadline = measure_goodput([request], ttft_slo_s=2.0, tbt_slo_s=0.05).deadline
    by_mean = measure_goodput([request], ttft_slo_s=2.0, tbt_slo_s=0.05 * (1 + 1e-9)).tpot

    assert by_mean >= by_deadline
