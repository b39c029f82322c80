import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_penalty_sched import ConfigError, PenaltyCurve


@given(st.floats(0.0, 1.0))
def test_the_published_curve_is_the_published_polynomial_in_ms(r: float) -> None:
    seconds = PenaltyCurve.published().predict_s(r)

    assert 1e3 * seconds == pytest.approx(1.63 * r**2 + 1.39 * r + 14.52)


def test_the_published_penalty_is_three_milliseconds() -> None:
    assert PenaltyCurve.published().penalty_s == pytest.approx(3.02e-3)


def test_a_fit_finds_the_curve_that_the_samples_lie_on() -> None:
    curve = PenaltyCurve.published()
    ratios = np.linspace(0.0, 1.0, 30)

    fitted = PenaltyCurve.fit(ratios, [curve.predict_s(r) for r in ratios])

    assert fitted.coefficients_s == pytest.approx(curve.coefficients_s)
    assert fitted.r_squared == pytest.approx(1.0)


def test_noise_lowers_r_squared_and_a_degree_can_be_chosen() -> None:
    rng = np.random.default_rng(0)
    ratios = np.linspace(0.0, 1.0, 200)
    seconds = [PenaltyCurve.published().predict_s(r) + 5e-4 * rng.standard_normal() for r in ratios]

    fitted = PenaltyCurve.fit(ratios, seconds, degree=1)

    assert len(fitted.coefficients_s) == 2
    assert 0.5 < fitted.r_squared < 0.95


def test_scaling_keeps_the_form_and_moves_the_start() -> None:
    curve = PenaltyCurve.published()

    scaled = curve.scaled_to(2 * curve.predict_s(0.0))

    assert scaled.predict_s(0.7) == pytest.approx(2 * curve.predict_s(0.7))


@pytest.mark.parametrize(
    ("ratios", "seconds"),
    [
        ([0.0, 0.5], [1.0, 1.0]),
        ([0.0, 0.5, 1.0], [1.0, 1.0]),
        ([0.0, 0.5, 1.1], [1.0, 1.0, 1.0]),
        ([0.0, 0.5, 1.0], [1.0, 0.0, 1.0]),
        ([0.0, 0.5, float("nan")], [1.0, 1.0, 1.0]),
    ],
)
def test_samples_that_cannot_be_fitted_are_refused(ratios: list, seconds: list) -> None:
    with pytest.raises(ConfigError):
        PenaltyCurve.fit(ratios, seconds)


@pytest.mark.parametrize("r", [-0.1, 1.1, float("nan")])
def test_a_ratio_outside_its_range_is_refused(r: float) -> None:
    with pytest.raises(ConfigError, match="in \\[0, 1\\]"):
        PenaltyCurve.published().predict_s(r)
