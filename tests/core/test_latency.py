import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import shapes, with_more
from vllm_penalty_sched import BatchShape, ConfigError, NotFittedError, StepTimeModel
from vllm_penalty_sched.learning.latency import MAX_PREFILL_TOKENS


def gpu_like_s(shape: BatchShape) -> float:
    """A made-up machine: a memory-bound floor, a knee at 200 tokens, attention, mixed kernels."""
    work = sum(new * (cached + new / 2) for new, cached in shape.prefills)
    context = shape.decode_context * (1.4 if shape.prefills else 1.0)
    return 9e-3 + 6e-5 * max(0, shape.tokens - 200) + 1.6e-8 * context + 4e-9 * work


def encoder_s(shape: BatchShape) -> float:
    """Such a machine's time for images: 20 ms for one of a thousand tokens."""
    return 2e-5 * shape.encoder_tokens


def with_images(rng: np.random.Generator, shape: BatchShape) -> BatchShape:
    is_there = shape.prefills and rng.random() < 0.3
    return replace(shape, encoder_tokens=int(rng.integers(1, 5)) * 500 if is_there else 0)


def random_shape(rng: np.random.Generator) -> BatchShape:
    seqs = int(rng.integers(1, 200))
    return BatchShape(
        prefills=tuple(
            (int(rng.integers(1, 1000)), int(rng.integers(0, 8000)))
            for _ in range(rng.integers(0, 3))
        ),
        decode_seqs=seqs,
        decode_tokens=seqs,
        decode_context=seqs * int(rng.integers(64, 4096)),
    )


def learned(steps: int, *, seed: int = 0, factor: float = 1.0) -> StepTimeModel:
    rng = np.random.default_rng(seed)
    model = StepTimeModel()
    for _ in range(steps):
        shape = random_shape(rng)
        model.observe(shape, factor * gpu_like_s(shape))
    return model


def mape(model: StepTimeModel, *, factor: float = 1.0, seed: int = 99) -> float:
    rng = np.random.default_rng(seed)
    tries = [random_shape(rng) for _ in range(300)]
    return float(np.mean([abs(model.predict_s(s) / (factor * gpu_like_s(s)) - 1) for s in tries]))


FITTED = learned(400)


def test_two_hundred_steps_are_enough_to_predict_the_others_within_two_percent() -> None:
    assert mape(learned(200)) < 0.02


def test_fitting_at_once_is_as_good_as_learning_online() -> None:
    rng = np.random.default_rng(0)
    samples = [random_shape(rng) for _ in range(400)]

    model = StepTimeModel().fit(samples, [gpu_like_s(shape) for shape in samples])

    assert mape(model) < 0.02
    assert model.samples == 400


def test_steps_ten_times_too_long_hardly_move_the_model() -> None:
    rng = np.random.default_rng(1)
    model = StepTimeModel()
    for step in range(600):
        shape = random_shape(rng)
        model.observe(shape, gpu_like_s(shape) * (10.0 if step % 100 == 50 else 1.0))

    assert mape(model) < mape(learned(600, seed=1)) + 0.005


def learned_with_images(steps: int) -> StepTimeModel:
    rng = np.random.default_rng(5)
    model = StepTimeModel()
    for _ in range(steps):
        shape = with_images(rng, random_shape(rng))
        model.observe(shape, gpu_like_s(shape) + encoder_s(shape))
    return model


SEES_IMAGES = learned_with_images(400)


def test_what_an_encoder_takes_is_learned_beside_what_tokens_take() -> None:
    rng = np.random.default_rng(6)
    tries = [with_images(rng, random_shape(rng)) for _ in range(300)]
    errors = [
        abs(SEES_IMAGES.predict_s(shape) / (gpu_like_s(shape) + encoder_s(shape)) - 1)
        for shape in tries
    ]

    assert mape(SEES_IMAGES) < 0.02
    assert np.mean(errors) < 0.02
    assert SEES_IMAGES.coefficients()["encoder_tokens"] == pytest.approx(2e-5, rel=0.05)


def test_the_first_image_is_no_slow_machine() -> None:
    model = learned(200)
    text = BatchShape(prefills=((300, 0),), decode_seqs=8, decode_tokens=8, decode_context=8192)
    image = replace(text, encoder_tokens=1000)
    before_s = model.predict_s(text)

    for _ in range(3):
        model.observe(image, gpu_like_s(image) + 5e-4 * 1000)

    assert model.predict_s(text) == pytest.approx(before_s, rel=0.02)


def test_what_an_early_fit_took_for_an_outlier_is_weighed_again_by_a_later_one() -> None:
    rng = np.random.default_rng(3)
    model = StepTimeModel()
    for step in range(200):
        shape = random_shape(rng)
        model.observe(shape, gpu_like_s(shape) * (10.0 if step in (3, 9, 27) else 1.0))

    assert mape(model) < mape(learned(200, seed=3)) + 0.005


def test_a_short_chunk_that_is_cheaper_than_a_long_one_is_learned_as_such() -> None:
    rng = np.random.default_rng(4)
    model = StepTimeModel()
    for _ in range(400):
        seqs, new = int(rng.integers(1, 200)), int(rng.integers(1, 64))
        shape = BatchShape(decode_seqs=seqs, decode_tokens=seqs, decode_context=seqs * 2000)
        dearer = 1.0 + min(new, 16) / 16
        model.observe(shape.with_prefill(new, 0), 9e-3 + 1.6e-8 * dearer * shape.decode_context)

    decodes = BatchShape(decode_seqs=100, decode_tokens=100, decode_context=200_000)
    assert model.predict_s(decodes.with_prefill(4, 0)) == pytest.approx(13.0e-3, rel=0.03)
    assert model.predict_s(decodes.with_prefill(40, 0)) == pytest.approx(15.4e-3, rel=0.03)


def test_the_memory_that_learning_takes_is_bounded() -> None:
    model = learned(1500)
    before = len(pickle.dumps(model))
    rng = np.random.default_rng(6)
    for _ in range(1500):
        shape = random_shape(rng)
        model.observe(shape, gpu_like_s(shape))

    # Bytes: the steps that wait for the next solve come and go, and with them two sums.
    assert len(pickle.dumps(model)) < before + 60_000


def test_a_machine_that_slows_down_is_followed_within_a_hundred_steps() -> None:
    model = learned(500)
    rng = np.random.default_rng(2)
    for _ in range(100):
        shape = random_shape(rng)
        model.observe(shape, 1.3 * gpu_like_s(shape))

    assert mape(model, factor=1.3) < 0.05


def test_a_long_decode_only_stretch_does_not_wear_out_what_mixed_steps_cost() -> None:
    model = learned(300)
    decodes = BatchShape(decode_seqs=8, decode_tokens=8, decode_context=8000)
    for _ in range(5000):
        model.observe(decodes, gpu_like_s(decodes))

    mixed = decodes.with_prefill(512, 1000)
    assert model.predict_s(mixed) == pytest.approx(gpu_like_s(mixed), rel=0.05)


def test_the_first_mixed_steps_count_at_once_however_many_decode_only_steps_went_before() -> None:
    model = StepTimeModel()
    decodes = BatchShape(decode_seqs=8, decode_tokens=8, decode_context=800)
    for _ in range(101):
        model.observe(decodes, 8e-3)
    mixed = decodes.with_prefill(256, 0)

    model.observe(mixed, 32e-3)

    assert model.predict_s(mixed) == pytest.approx(32e-3, rel=0.1)


def test_a_few_small_steps_are_not_read_as_a_flat_machine() -> None:
    model = StepTimeModel()
    decodes = BatchShape(decode_seqs=8, decode_tokens=8, decode_context=800)
    for tokens in (0, 0, 0, 0, 64, 64, 128, 128, 128):
        model.observe(decodes.with_prefill(tokens, 0), 14e-3 + 3.5e-4 * tokens)

    # Linear growth was seen: 512 tokens must be expected to take about 193 ms, not 60.
    assert model.predict_s(decodes.with_prefill(512, 0)) == pytest.approx(0.193, rel=0.15)


@given(shapes(), shapes(with_prefill=True), st.integers(0, 100), st.integers(0, 10_000))
def test_a_prediction_never_falls_when_tokens_are_added(
    shape: BatchShape, other: BatchShape, more_seqs: int, more_context: int
) -> None:
    larger = with_more(shape, other, more_seqs, more_context)

    assert FITTED.predict_s(larger) >= FITTED.predict_s(shape) * (1 - 1e-12)
    assert FITTED.penalty_s(larger) >= 0.0


@given(shapes(with_prefill=False), st.integers(0, 8192), st.floats(0.5, 20.0))
def test_the_largest_prefill_fits_and_one_more_token_does_not(
    decodes: BatchShape, cached: int, slack: float
) -> None:
    limit_s = slack * FITTED.predict_s(decodes)

    tokens = FITTED.largest_prefill(decodes, cached, limit_s)

    if tokens:
        assert FITTED.predict_s(decodes.with_prefill(tokens, cached)) <= limit_s * (1 + 1e-9)
    if tokens < MAX_PREFILL_TOKENS:
        assert FITTED.predict_s(decodes.with_prefill(tokens + 1, cached)) > limit_s * (1 - 1e-9)


@given(shapes(with_prefill=False), st.sampled_from([0.0, -1.0, float("nan"), 1e-9]))
def test_no_prefill_fits_under_an_impossible_limit(decodes: BatchShape, limit_s: float) -> None:
    assert FITTED.largest_prefill(decodes, 0, limit_s) == 0


def test_without_a_limit_the_answer_is_bounded() -> None:
    decodes = BatchShape(decode_seqs=1, decode_tokens=1, decode_context=1)

    assert FITTED.largest_prefill(decodes, 0, math.inf) == MAX_PREFILL_TOKENS


def test_a_model_that_has_seen_nothing_says_so() -> None:
    model = StepTimeModel()
    shape = BatchShape(decode_seqs=1, decode_tokens=1, decode_context=1)

    for ask in (
        lambda: model.predict_s(shape),
        lambda: model.penalty_s(shape),
        lambda: model.largest_prefill(shape, 0, 1.0),
        lambda: model.save("never-written.json"),
    ):
        with pytest.raises(NotFittedError):
            ask()


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_time_is_refused(seconds: float) -> None:
    shape = BatchShape(decode_seqs=1, decode_tokens=1, decode_context=1)

    with pytest.raises(ConfigError, match="finite and > 0"):
        StepTimeModel().observe(shape, seconds)
    with pytest.raises(ConfigError):
        StepTimeModel().fit([shape], [seconds])


def test_fit_refuses_pairs_that_do_not_match() -> None:
    with pytest.raises(ConfigError, match="pairs"):
        StepTimeModel().fit([], [])


def test_figures_of_merit_can_be_about_predictions_made_elsewhere() -> None:
    model = learned(100)

    model.judge_by([1.1, 1.8], [1.0, 2.0])

    assert model.mape == pytest.approx(0.1)
    assert model.r_squared == pytest.approx(1.0 - 0.025 / 0.25)


def test_figures_of_merit_are_about_predictions_made_before_learning() -> None:
    model = learned(400)

    assert model.mape is not None
    assert 0.0 < model.mape < 0.2
    assert model.r_squared is not None
    assert 0.9 < model.r_squared <= 1.0
