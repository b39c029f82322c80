import numpy as np
import pytest

from vllm_penalty_sched.batch import BatchShape
from vllm_penalty_sched.errors import ConfigError
from vllm_penalty_sched.simulation.cost_profiles import find_profile
from vllm_penalty_sched.simulation.device import DeviceSpec, NoMargin, TrueStepTimes, VirtualDevice

COSTS = find_profile("a100-llama3-8b")
DECODES = BatchShape(decode_seqs=32, decode_tokens=32, decode_context=32_000)


def test_without_noise_a_step_takes_its_cost_and_the_drift_sets_in_at_its_time() -> None:
    spec = DeviceSpec(costs=COSTS, drift_start_s=10.0, drift_factor=1.5)
    device = VirtualDevice(spec, np.random.default_rng(0))

    assert device.step_s(DECODES, 9.99) == COSTS.step_s(DECODES)
    assert device.step_s(DECODES, 10.0) == pytest.approx(1.5 * COSTS.step_s(DECODES))


def test_noise_has_mean_one_and_the_given_spread_and_repeats_with_the_seed() -> None:
    spec = DeviceSpec(costs=COSTS, noise_cv=0.2)

    def draw() -> np.ndarray:
        device = VirtualDevice(spec, np.random.default_rng(3))
        return np.array([device.step_s(DECODES, 0.0) for _ in range(20_000)])

    factors = draw() / COSTS.step_s(DECODES)
    assert np.mean(factors) == pytest.approx(1.0, abs=0.005)
    assert np.std(factors) == pytest.approx(0.2, abs=0.005)
    assert np.array_equal(draw() / COSTS.step_s(DECODES), factors)


def test_the_true_times_follow_the_drift_and_its_clock() -> None:
    now_s = 0.0
    spec = DeviceSpec(costs=COSTS, drift_start_s=10.0, drift_factor=2.0)
    times = TrueStepTimes(spec, lambda: now_s)
    before_s, before_tokens = times.predict_s(DECODES), times.largest_prefill(DECODES, 0, 0.05)
    now_s = 10.0

    assert times.predict_s(DECODES) == pytest.approx(2.0 * before_s)
    assert times.largest_prefill(DECODES, 0, 0.1) == before_tokens
    assert times.largest_prefill(DECODES, 0, 0.05) < before_tokens
    assert times.observe(DECODES, 1.0) == times.predict_s(DECODES)


def test_the_true_times_give_no_more_tokens_than_can_be_used() -> None:
    times = TrueStepTimes(DeviceSpec(costs=COSTS), lambda: 0.0)

    assert times.largest_prefill(DECODES, 0, 0.05, 100) == 100


def test_no_margin_stays_zero_whatever_it_observes() -> None:
    margin = NoMargin(0.01)
    for _ in range(200):
        margin.observe(0.5, overran=True)

    assert margin.relative == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise_cv": -0.1}, "noise must be a coefficient of variation >= 0"),
        ({"noise_cv": np.nan}, "noise must be"),
        ({"drift_factor": 0.0}, "drift must be a time >= 0 s and a factor > 0, got 0:0"),
        ({"drift_start_s": -1.0}, "drift must be"),
    ],
)
def test_a_device_that_makes_no_sense_is_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DeviceSpec(costs=COSTS, **options)
