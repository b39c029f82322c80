"""Estimates of capacity and the advice made of them, against laws that hold for any machine."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_penalty_sched.batch import BatchShape
from vllm_penalty_sched.disaggregation.advice import (
    advise,
    break_even_tokens,
    curve_penalty_s,
    penalty_at,
)
from vllm_penalty_sched.disaggregation.fluid import (
    Service,
    Split,
    capacity_per_s,
    possible_steps_s,
    prefill_alone_s,
    shares_in_time,
)
from vllm_penalty_sched.disaggregation.traffic import Traffic
from vllm_penalty_sched.errors import ConfigError
from vllm_penalty_sched.simulation.cost_profiles import find_profile
from vllm_penalty_sched.simulation.device import DeviceSpec, TrueStepTimes

pytestmark = pytest.mark.slow

TIMES = TrueStepTimes(DeviceSpec(costs=find_profile("a100-llama3-8b")), lambda: 0.0)
SERVICE = Service(
    ttft_slo_s=2.0,
    tbt_slo_s=0.05,
    max_num_seqs=256,
    kv_tokens=320_000,
    kv_bytes_per_s=25e9,
    kv_bytes_per_token=131_072,
)
TRAFFIC = Traffic.of_lengths(4.0, prompt_tokens=[500, 1000, 3000], output_tokens=100.0)
ONE, TWO = Split(prefill=0, decode=1), Split(prefill=0, decode=2)
PAIR = Split(prefill=1, decode=1)


def share(split: Split, rate: float, service: Service = SERVICE) -> float:
    alone_s = np.array([prefill_alone_s(TIMES, int(n)) for n in TRAFFIC.prompt_tokens])
    shares = shares_in_time(TIMES, TRAFFIC, service, split, rate, alone_s=alone_s)
    return max(shares, default=0.0)


def test_a_prompt_alone_takes_the_time_of_its_steps() -> None:
    first, second = BatchShape(prefills=((2048, 0),)), BatchShape(prefills=((952, 2048),))

    assert prefill_alone_s(TIMES, 3000) == TIMES.predict_s(first) + TIMES.predict_s(second)


@settings(max_examples=15)
@given(rate=st.floats(0.5, 60.0), more=st.floats(1.1, 3.0))
def test_more_requests_leave_a_smaller_share_in_time(rate: float, more: float) -> None:
    for split in (ONE, PAIR):
        assert 0.0 <= share(split, more * rate) <= share(split, rate) <= 1.0


def test_engines_beside_each_other_carry_at_least_as_much_as_each_alone() -> None:
    one = capacity_per_s(TIMES, TRAFFIC, SERVICE, ONE)
    two = capacity_per_s(TIMES, TRAFFIC, SERVICE, TWO)

    # More than twice, since they share one queue.
    assert 2.0 * one <= two * 1.001 <= 2.5 * one


def test_beyond_what_seats_or_blocks_hold_nothing_is_carried() -> None:
    few_seats = replace(SERVICE, max_num_seqs=4)
    few_blocks = replace(SERVICE, kv_tokens=8000)

    for service in (few_seats, few_blocks):
        assert possible_steps_s(TIMES, TRAFFIC, service, 30.0) == []
        assert share(ONE, 30.0, service) == 0.0
        assert capacity_per_s(TIMES, TRAFFIC, service, ONE) < 15.0


@settings(max_examples=5)
@given(
    tight_s=st.sampled_from([0.015, 0.025, 0.05, 0.1, 0.5, 1.0]),
    looser=st.floats(1.0, 50.0),
    seats=st.sampled_from([16, 256]),
)
def test_a_looser_tbt_slo_never_lowers_the_capacity(
    tight_s: float, looser: float, seats: int
) -> None:
    tight = replace(SERVICE, tbt_slo_s=tight_s, max_num_seqs=seats)
    loose = replace(tight, tbt_slo_s=looser * tight_s)

    for split in (ONE, PAIR):
        least_per_s = capacity_per_s(TIMES, TRAFFIC, tight, split)
        assert 0.0 < least_per_s <= capacity_per_s(TIMES, TRAFFIC, loose, split)


def test_a_tbt_slo_as_loose_as_that_of_the_ttft_carries_as_much_as_one_of_100_ms() -> None:
    tight, loose = replace(SERVICE, tbt_slo_s=0.1), replace(SERVICE, tbt_slo_s=SERVICE.ttft_slo_s)

    for split in (ONE, PAIR):
        tight_per_s = capacity_per_s(TIMES, TRAFFIC, tight, split)
        # Chunks cost little besides their tokens by then: a tenth more at most.
        assert tight_per_s <= capacity_per_s(TIMES, TRAFFIC, loose, split) <= 1.1 * tight_per_s


def test_a_slow_link_makes_a_prefill_instance_worthless() -> None:
    slow = replace(SERVICE, kv_bytes_per_s=1e7)
    pair = capacity_per_s(TIMES, TRAFFIC, slow, PAIR)

    assert pair == pytest.approx(capacity_per_s(TIMES, TRAFFIC, SERVICE, ONE))
    assert not advise(TIMES, TRAFFIC, slow, gpus=2).disaggregate


def test_a_tbt_slo_that_leaves_prefills_no_room_asks_for_prefill_instances() -> None:
    tight = replace(SERVICE, tbt_slo_s=0.0125)

    advice = advise(TIMES, TRAFFIC, tight, gpus=2)

    assert advice.disaggregate
    assert advice.apart_per_s > 2.0 * advice.together_per_s
    assert advice.prefill_gpus == 1


def test_the_best_of_all_splits_is_taken() -> None:
    advice = advise(TIMES, TRAFFIC, replace(SERVICE, tbt_slo_s=0.02), gpus=4)

    capacities = {
        count: capacity_per_s(
            TIMES, TRAFFIC, replace(SERVICE, tbt_slo_s=0.02), Split(prefill=count, decode=4 - count)
        )
        for count in (1, 2, 3)
    }
    assert advice.apart_per_s == max(capacities.values())
    assert capacities[advice.prefill_gpus] == advice.apart_per_s


def test_one_gpu_cannot_be_disaggregated() -> None:
    with pytest.raises(ConfigError, match="at least 2 GPUs"):
        advise(TIMES, TRAFFIC, SERVICE, gpus=1)


def test_the_penalty_grows_with_the_rate_and_its_parts_fit_together() -> None:
    slow, busy = (penalty_at(TIMES, TRAFFIC, SERVICE, rate=rate) for rate in (0.1, 4.0))

    assert 0.0 < slow.delayed_share < busy.delayed_share <= 1.0
    assert 0.0 < slow.mean_s < busy.mean_s < busy.mixed_s - busy.decode_only_s
    assert busy.mixed_s <= SERVICE.tbt_slo_s
    assert slow.decodes <= busy.decodes


def test_the_curves_penalty_is_that_of_prefills_in_place_of_decodes() -> None:
    prefills = BatchShape(prefills=((8, 256),) * 8)
    decodes = BatchShape(decode_seqs=8, decode_tokens=8, decode_context=8 * 256)

    difference_s = TIMES.predict_s(prefills) - TIMES.predict_s(decodes)

    assert curve_penalty_s(TIMES) == pytest.approx(difference_s, rel=0.2)


def test_longer_prompts_than_the_break_even_are_cheaper_away_and_shorter_ones_here() -> None:
    penalty = penalty_at(TIMES, TRAFFIC, SERVICE, rate=4.0)
    far = replace(SERVICE, handover_s=0.3)

    near_tokens = break_even_tokens(TIMES, TRAFFIC, SERVICE, penalty)
    far_tokens = break_even_tokens(TIMES, TRAFFIC, far, penalty)

    assert near_tokens is not None
    assert far_tokens is not None
    assert near_tokens < far_tokens
    assert break_even_tokens(TIMES, TRAFFIC, replace(SERVICE, handover_s=1e3), penalty) is None


def test_bursts_are_told_from_the_arrivals_and_cost_capacity() -> None:
    times_s = np.arange(0.0, 600.0, 0.25)
    steady = Traffic.of_requests(
        times_s.tolist(),
        prompt_tokens=[1000] * times_s.size,
        output_tokens=[50] * times_s.size,
        window_s=2.0,
    )
    bursty = Traffic.of_requests(
        np.repeat(times_s[::40], 40).tolist(),
        prompt_tokens=[1000] * times_s.size,
        output_tokens=[50] * times_s.size,
        window_s=2.0,
    )

    assert steady.requests_per_s == pytest.approx(4.0, rel=0.01)
    assert steady.burst_tokens == 500.0
    assert bursty.burst_tokens > 10 * steady.burst_tokens
    assert capacity_per_s(TIMES, bursty, SERVICE, ONE) < capacity_per_s(TIMES, steady, SERVICE, ONE)


def test_a_trace_without_a_span_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least two arrival times"):
        Traffic.of_requests([1.0], prompt_tokens=[5], output_tokens=[5], window_s=1.0)
