import numpy as np
import pytest

from tests.core.test_latency import gpu_like_s, random_shape
from vllm_penalty_sched import BatchShape, ConfigError, PenaltyCurve
from vllm_penalty_sched.calibration.fitting import fit_curve, fit_step_time
from vllm_penalty_sched.calibration.samples import Sample


def curve_sample(ratio: float, seconds: float, *, series: str = "curve") -> Sample:
    new = round(1000 * ratio)
    chunks = ((new, 0),) if new else ()
    decodes = 1000 - new
    shape = BatchShape(
        prefills=chunks, decode_seqs=decodes, decode_tokens=decodes, decode_context=9 * decodes
    )
    return Sample(shape=shape, seconds=seconds, series=series)


def on_the_published_curve() -> list[Sample]:
    curve = PenaltyCurve.published()
    return [curve_sample(r, curve.predict_s(r)) for r in np.linspace(0.0, 1.0, 21)]


def random_samples(count: int, *, seed: int = 0, noise: float = 0.0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        shape = random_shape(rng)
        seconds = gpu_like_s(shape) * float(np.exp(noise * rng.standard_normal()))
        samples.append(Sample(shape=shape, seconds=seconds, series="grid"))
    return samples


def test_the_published_curve_is_found_in_samples_that_lie_on_it() -> None:
    fit = fit_curve(on_the_published_curve())

    assert fit.curve.coefficients_s == pytest.approx(PenaltyCurve.published().coefficients_s)
    assert fit.to_json()["penalty_ms"] == pytest.approx(3.02)
    assert str(fit).startswith("f(r) = 1.630 r^2 + 1.390 r + 14.520 ms\n")
    assert "f(1) - f(0) = 3.020 ms" in str(fit)
    assert "extrapolated" not in str(fit)


def test_a_machine_that_is_slow_for_a_while_and_stalls_do_not_bend_the_curve() -> None:
    curve = PenaltyCurve.published()
    rounds = [
        [curve_sample(s.shape.prefill_ratio, factor * s.seconds) for s in on_the_published_curve()]
        for factor in (1.0, 1.0, 1.0, 1.0, 1.5)
    ]
    for number, one in enumerate(rounds[:4]):
        stalled = one[3 * number]
        one[3 * number] = curve_sample(stalled.shape.prefill_ratio, stalled.seconds + 0.07)

    fit = fit_curve([sample for one in rounds for sample in one])

    assert fit.curve.coefficients_s == pytest.approx(curve.coefficients_s)
    assert fit.curve.r_squared == pytest.approx(1.0)
    # A fifth of the steps at 1.5 times the time leaves little of the variance to f(r).
    assert fit.r_squared_all is not None
    assert fit.r_squared_all < 0.2
    assert "over the medians of 21 compositions" in str(fit)
    assert "over all 105 measurements" in str(fit)


def test_the_text_and_the_figures_say_up_to_how_many_prefill_tokens_a_curve_was_measured() -> None:
    fit = fit_curve(on_the_published_curve()[:10])

    assert "at most 450 prefill tokens" in str(fit)
    assert fit.to_json()["most_prefill_tokens"] == 450


def test_only_the_steps_of_the_published_set_up_make_the_curve() -> None:
    others = [curve_sample(r, 1.0, series="grid") for r in (0.1, 0.5, 0.9)]

    fit = fit_curve([*on_the_published_curve(), *others])

    assert fit.curve.r_squared == pytest.approx(1.0)
    assert len(fit.ratios) == 21


def test_a_curve_over_part_of_the_range_says_that_its_penalty_is_extrapolated() -> None:
    fit = fit_curve(on_the_published_curve()[:10])

    assert "extrapolated" in str(fit)


def test_a_curve_needs_more_different_ratios_than_its_degree() -> None:
    repeated = [curve_sample(r, 1.0) for r in (0.0, 0.5) for _ in range(10)]

    assert fit_curve(repeated, degree=1).curve.penalty_s == pytest.approx(0.0)
    with pytest.raises(ConfigError, match=r"more than 2 different prefill ratios.*got 2"):
        fit_curve(repeated)


def test_the_errors_are_those_of_steps_that_were_not_fitted() -> None:
    fit = fit_step_time(random_samples(400, noise=0.03))

    # 3% of noise is a mean absolute error of 2.4%: no held-out error can be below it.
    assert 0.022 < fit.mape < 0.045
    assert fit.r_squared is not None
    assert fit.r_squared > 0.98
    assert abs(fit.bias) < 0.01
    assert fit.model.samples == 400


def test_repetitions_of_a_step_stay_in_one_fold() -> None:
    # Each composition takes a time of its own that the others say nothing about.
    rng = np.random.default_rng(4)
    decodes = BatchShape(decode_seqs=8, decode_tokens=8, decode_context=4000)
    shapes = [decodes.with_prefill(int(n), 0) for n in rng.integers(1, 2000, 20)]
    times_s = np.exp(rng.standard_normal(20))
    samples = [
        Sample(shape=shape, seconds=float(time_s), series="grid")
        for shape, time_s in zip(shapes, times_s, strict=True)
        for _ in range(20)
    ]

    assert fit_step_time(samples).mape > 0.3


def test_each_table_of_errors_counts_every_step_that_it_is_about() -> None:
    samples = random_samples(200)

    fit = fit_step_time(samples)

    counted = {row.of: 0 for row in fit.errors}
    for row in fit.errors:
        counted[row.of] += row.samples
        assert row.mape >= abs(row.bias)
    mixed = sum(bool(sample.shape.prefills) for sample in samples)
    assert counted == {"prefill tokens": 200, "decodes": 200, "cached tokens": mixed}
    assert str(fit).count("\n") == 3 + len(fit.errors)


def test_ranges_meet_without_a_gap() -> None:
    decodes = BatchShape(decode_seqs=8, decode_tokens=8, decode_context=4000)
    tokens = (0, 1, 64, 65, 2048, 2049)
    samples = [
        Sample(shape=decodes.with_prefill(n, 0), seconds=0.01 + 1e-5 * n, series="grid")
        for n in tokens
    ]

    rows = [row for row in fit_step_time(samples).errors if row.of == "prefill tokens"]

    assert [(row.within, row.samples) for row in rows] == [
        ("0", 1),
        ("1-64", 2),
        ("65-256", 1),
        ("1025-2048", 1),
        ("over 2048", 1),
    ]


def test_too_few_compositions_for_cross_validation_are_refused() -> None:
    repeated = random_samples(4) * 10

    with pytest.raises(ConfigError, match=r"at least 5 different compositions, got 4"):
        fit_step_time(repeated)
    with pytest.raises(ConfigError, match="got 0"):
        fit_step_time([])


@pytest.mark.parametrize("seed", [0, 1])
def test_the_same_samples_and_seed_give_the_same_figures(seed: int) -> None:
    samples = random_samples(30, seed=seed)

    assert (
        fit_step_time(samples, seed=seed).to_json() == fit_step_time(samples, seed=seed).to_json()
    )


def test_the_model_carries_the_figures_of_the_cross_validation() -> None:
    fit = fit_step_time(random_samples(600, noise=0.03))

    assert fit.model.mape == pytest.approx(fit.mape)
    assert fit.model.r_squared == pytest.approx(fit.r_squared)
