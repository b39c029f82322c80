import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import shapes
from vllm_penalty_sched import BatchShape, ConfigError
from vllm_penalty_sched.learning.margin import ConformalMargin, Slowdown

pytestmark = pytest.mark.slow


def overrun_share(noise: list[float], miss_rate: float, *, skipped: int) -> tuple[float, float]:
    """Plan each step right at the SLO, and return the share that overran and the mean margin."""
    margin = ConformalMargin(miss_rate)
    overruns, margins = [], []
    for residual in noise:
        planned = 1.0 / (1.0 + margin.relative)
        overran = planned * (1.0 + residual) > 1.0
        overruns.append(overran)
        margins.append(margin.relative)
        margin.observe(residual, overran=overran)
    return float(np.mean(overruns[skipped:])), float(np.mean(margins[skipped:]))


@pytest.mark.parametrize("miss_rate", [0.0005, 0.001, 0.01, 0.05])
def test_the_share_of_overruns_comes_to_the_miss_rate(miss_rate: float) -> None:
    noise = list(0.03 * np.random.default_rng(0).standard_normal(int(max(20_000, 20 / miss_rate))))

    share, _ = overrun_share(noise, miss_rate, skipped=500)

    assert share == pytest.approx(miss_rate, abs=0.5 * miss_rate)


def test_the_margin_is_no_larger_than_the_noise_asks_for() -> None:
    noise = list(0.03 * np.random.default_rng(0).standard_normal(5_000))

    _, margin = overrun_share(noise, 0.01, skipped=500)

    # The 99th percentile of this noise is 7%.
    assert 0.06 < margin < 0.10


def test_more_noise_than_before_is_answered_with_a_larger_margin() -> None:
    rng = np.random.default_rng(1)
    noise = [*(0.02 * rng.standard_normal(3_000)), *(0.06 * rng.standard_normal(10_000))]

    share, _ = overrun_share(noise, 0.01, skipped=3_000)

    assert share < 0.02


def test_before_anything_is_known_the_margin_is_cautious() -> None:
    assert ConformalMargin(0.01).relative >= 0.1


def test_what_the_model_erred_while_it_was_learning_is_forgotten() -> None:
    margin = ConformalMargin(0.01)
    for residual in [0.9] * 20 + [0.01] * 200:
        margin.observe(residual, overran=None)

    assert margin.relative < 0.05


@given(
    st.lists(
        st.tuples(
            st.floats(-0.99, 1e6),
            st.sampled_from([True, False, None]),
            st.none() | shapes(with_prefill=True),
        ),
        max_size=300,
    ),
    st.sampled_from([1e-6, 0.01, 0.5, 0.999]),
    shapes(),
)
def test_the_margin_stays_within_its_bounds(
    steps: list, miss_rate: float, shape: BatchShape
) -> None:
    margin = ConformalMargin(miss_rate)
    for residual, overran, seen in steps:
        margin.observe(residual, overran=overran, shape=seen)

    assert -0.5 <= margin.relative <= 1.0
    assert -0.5 <= margin.relative_for(shape) <= 1.0


def test_a_kind_of_steps_that_is_predicted_well_keeps_a_small_margin() -> None:
    rng = np.random.default_rng(4)
    margin = ConformalMargin(0.01)
    calm = BatchShape(decode_seqs=4, decode_tokens=4, decode_context=400)
    noisy = BatchShape(decode_seqs=200, decode_tokens=200, decode_context=400_000)
    overran = {calm: 0, noisy: 0}
    for step in range(6000):
        shape, noise = (calm, 0.01) if step % 2 else (noisy, 0.08)
        residual = noise * rng.standard_normal()
        overran[shape] += step >= 1000 and residual > margin.relative_for(shape)
        margin.observe(residual, overran=residual > margin.relative_for(shape), shape=shape)

    # The 99th percentiles are 2.3% and 19%.
    assert margin.relative_for(calm) < 0.05
    assert 0.12 < margin.relative_for(noisy) < 0.3
    # Of 2500 steps each, 25 at the miss rate.
    assert max(overran.values()) < 50


def test_a_kind_of_steps_never_seen_gets_the_margin_of_all() -> None:
    rng = np.random.default_rng(5)
    margin = ConformalMargin(0.01)
    seen = BatchShape(decode_seqs=4, decode_tokens=4, decode_context=400)
    for _ in range(300):
        margin.observe(0.03 * rng.standard_normal(), overran=None, shape=seen)

    unseen = BatchShape(decode_seqs=250, decode_tokens=250, decode_context=10**6)
    assert margin.relative_for(unseen) == margin.relative


@pytest.mark.parametrize("miss_rate", [1e-4, 1e-6])
def test_a_miss_rate_below_what_was_ever_seen_is_answered_with_more_and_not_with_the_most(
    miss_rate: float,
) -> None:
    rng = np.random.default_rng(6)
    common, rare = ConformalMargin(0.01), ConformalMargin(miss_rate)
    for residual in 0.03 * rng.standard_normal(3000):
        common.observe(residual, overran=None)
        rare.observe(residual, overran=None)

    # Quantiles of this noise: 7%, and 11% at 1e-4, 14% at 1e-6.
    assert common.relative + 0.02 < rare.relative < 0.25


def test_each_overrun_raises_the_margin_and_steps_that_hold_the_slo_lower_it_again() -> None:
    rng = np.random.default_rng(7)
    margin = ConformalMargin(0.01)
    for residual in 0.03 * rng.standard_normal(500):
        margin.observe(residual, overran=None)
    before = margin.relative
    margin.observe(0.0, overran=True)
    after = margin.relative
    for _ in range(150):
        margin.observe(0.03 * rng.standard_normal(), overran=False)

    assert after > before
    assert margin.relative < after


@pytest.mark.parametrize("miss_rate", [0.0, 1.0, -0.1, float("nan")])
def test_an_impossible_miss_rate_is_refused(miss_rate: float) -> None:
    with pytest.raises(ConfigError, match="miss_rate"):
        ConformalMargin(miss_rate)


def test_a_stall_is_counted_and_not_answered_with_smaller_chunks() -> None:
    rng = np.random.default_rng(2)
    calm, stalling = ConformalMargin(0.01), ConformalMargin(0.01)
    for step in range(2000):
        residual = 0.03 * rng.standard_normal()
        calm.observe(residual, overran=None)
        stalling.observe(3.0 if step % 50 == 49 else residual, overran=None)

    assert stalling.stalls >= 35
    assert stalling.relative == pytest.approx(calm.relative, abs=0.02)


def test_a_tenth_of_the_steps_being_slow_is_noise_and_not_stalls() -> None:
    rng = np.random.default_rng(3)
    margin = ConformalMargin(0.01)
    for step in range(2000):
        margin.observe((0.5 if step % 10 == 9 else 0.0) + 0.02 * rng.random(), overran=None)

    assert margin.stalls == 0
    assert margin.relative > 0.45


def test_a_slow_step_is_taken_to_last_and_forgotten_a_few_steps_after_the_last() -> None:
    slowdown = Slowdown()
    for residual in (2.0, 2.0):
        slowdown.observe(residual)
    while_slow = slowdown.factor
    for _ in range(5):
        slowdown.observe(0.02)

    assert while_slow > 2.0
    assert slowdown.factor < 1.01


def test_ordinary_noise_is_no_slowdown() -> None:
    slowdown = Slowdown()
    for residual in (0.1, -0.5, 0.15, 0.0):
        slowdown.observe(residual)

    assert slowdown.factor == 1.0
