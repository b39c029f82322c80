import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_penalty_sched.metrics import (
    Quantiles,
    RequestTrace,
    pooled_gaps,
    share_over,
    summarize,
    time_of_arrival,
)

GAPS_S = st.lists(st.floats(0, 5), max_size=20)


@st.composite
def traces(draw: st.DrawFn) -> RequestTrace:
    sent_s = draw(st.floats(0, 100))
    arrivals_s = tuple(float(time_s) for time_s in sent_s + np.cumsum(draw(GAPS_S)))
    return RequestTrace(sent_s=sent_s, arrivals_s=arrivals_s, output_tokens=len(arrivals_s))


LOADS = st.lists(traces(), min_size=1, max_size=6)


def trace(*arrivals_s: float, sent_s: float = 0.0, error: str | None = None) -> RequestTrace:
    return RequestTrace(
        sent_s=sent_s, arrivals_s=arrivals_s, output_tokens=len(arrivals_s), error=error
    )


def test_the_time_to_the_first_token_is_no_gap() -> None:
    summary = summarize([trace(5.0, 5.1, 5.3)], tbt_slo_s=0.15)

    assert summary.ttft.p50_s == pytest.approx(5.0)
    assert summary.tbt.max_s == pytest.approx(0.2)
    assert summary.within_slo == pytest.approx(0.5)


def test_gaps_never_span_two_requests() -> None:
    _, gaps_s = pooled_gaps([trace(1.0, 2.0), trace(50.0, 51.5)])

    assert gaps_s == pytest.approx([1.0, 1.5])


def test_tokens_that_arrive_together_are_one_arrival() -> None:
    merged = RequestTrace(sent_s=0.0, arrivals_s=(1.0, 2.0), output_tokens=5)

    summary = summarize([merged], tbt_slo_s=0.5)

    assert summary.output_tokens == 5
    assert summary.tbt.p50_s == pytest.approx(1.0)
    assert summary.within_slo == 0.0


def test_the_duration_runs_from_the_first_request_to_the_last_token() -> None:
    summary = summarize([trace(3.0, 9.0, sent_s=2.0), trace(7.0, sent_s=4.0)], tbt_slo_s=1.0)

    assert summary.duration_s == pytest.approx(7.0)


def test_a_failed_request_is_counted_and_its_gaps_remain() -> None:
    summary = summarize([trace(1.0, 2.0, error="lost"), trace(error="refused")], tbt_slo_s=3.0)

    assert (summary.requests, summary.errors, summary.output_tokens) == (2, 2, 2)
    assert summary.within_slo == 1.0


def test_a_load_without_any_token_has_unknown_quantiles() -> None:
    summary = summarize([trace(error="refused")], tbt_slo_s=1.0)

    assert math.isnan(summary.tbt.p50_s)
    assert math.isnan(summary.within_slo)
    assert summary.duration_s == 0.0


@given(load=LOADS)
def test_quantiles_are_ordered(load: list[RequestTrace]) -> None:
    _, gaps_s = pooled_gaps(load)
    quantiles = Quantiles.of(gaps_s)

    if gaps_s.size:
        assert quantiles.p50_s <= quantiles.p99_s <= quantiles.p999_s <= quantiles.max_s
        assert quantiles.max_s == gaps_s.max()


@given(load=LOADS, slo_s=st.floats(0.001, 10), factor=st.floats(1, 3))
def test_the_share_within_is_a_share_and_grows_with_the_slo(
    load: list[RequestTrace], slo_s: float, factor: float
) -> None:
    tight = summarize(load, tbt_slo_s=slo_s).within_slo
    loose = summarize(load, tbt_slo_s=slo_s * factor).within_slo

    if pooled_gaps(load)[1].size:
        assert 0.0 <= tight <= loose <= 1.0


@given(load=LOADS)
def test_every_arrival_but_the_first_of_each_request_ends_a_gap(load: list[RequestTrace]) -> None:
    ends_s, gaps_s = pooled_gaps(load)

    assert ends_s.size == gaps_s.size == sum(max(0, len(t.arrivals_s) - 1) for t in load)


@given(load=LOADS)
def test_the_order_of_the_requests_does_not_matter(load: list[RequestTrace]) -> None:
    there, back = (summarize(part, tbt_slo_s=1.0) for part in (load, load[::-1]))

    assert repr(there) == repr(back)


def test_the_share_over_a_limit_can_leave_the_beginning_out() -> None:
    load = [trace(0.0, 5.0, 6.0, 7.0, 11.0)]

    assert share_over(load, 2.0) == pytest.approx(0.5)
    assert share_over(load, 2.0, after_s=5.0) == pytest.approx(1 / 3)


def test_a_step_is_over_when_the_slowest_request_has_its_token() -> None:
    load = [trace(1.0, 2.0, 3.0), trace(1.5, 4.0, 9.0)]

    assert time_of_arrival(load, 2) == 4.0
    assert time_of_arrival(load, 50) == 9.0
