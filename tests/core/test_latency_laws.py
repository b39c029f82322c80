import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.test_latency import FITTED, gpu_like_s, random_shape
from tests.strategies import shapes
from vllm_penalty_sched import BatchShape, StepTimeModel

pytestmark = pytest.mark.slow

SEEN = [random_shape(np.random.default_rng(seed)) for seed in range(60)]
TIMES_S = [gpu_like_s(shape) for shape in SEEN]
FITTED_AT_ONCE = StepTimeModel().fit(SEEN, TIMES_S)

any_counts = st.integers(0, 10**7)
any_shapes = st.builds(
    BatchShape,
    prefills=st.lists(st.tuples(st.integers(1, 10**6), any_counts), max_size=6).map(tuple),
    decode_seqs=any_counts,
    decode_tokens=any_counts,
    decode_context=any_counts,
)


@given(st.sampled_from([1e-3, 0.1, 1.7, 1e3]) | st.floats(1e-4, 1e4), shapes())
def test_times_k_times_as_long_are_predicted_k_times_as_long(k: float, shape: BatchShape) -> None:
    scaled = StepTimeModel().fit(SEEN, [k * time_s for time_s in TIMES_S])

    # Relative, of rounding in the solver.
    assert scaled.predict_s(shape) == pytest.approx(k * FITTED_AT_ONCE.predict_s(shape), rel=1e-6)


@given(shapes(), st.randoms(use_true_random=False))
def test_the_order_of_the_chunks_changes_no_prediction(
    shape: BatchShape, rng: random.Random
) -> None:
    chunks = list(shape.prefills)
    rng.shuffle(chunks)
    shuffled = BatchShape(
        prefills=tuple(chunks),
        decode_seqs=shape.decode_seqs,
        decode_tokens=shape.decode_tokens,
        decode_context=shape.decode_context,
    )

    # Relative: sums of floats in another order.
    assert FITTED.predict_s(shuffled) == pytest.approx(FITTED.predict_s(shape), rel=1e-12)


@given(any_shapes)
def test_any_shape_has_a_finite_prediction_and_a_penalty_that_is_not_negative(
    shape: BatchShape,
) -> None:
    predicted_s = FITTED.predict_s(shape)

    assert 0.0 <= predicted_s < float("inf")
    assert (predicted_s > 0.0) == (shape.tokens > 0)
    assert FITTED.penalty_s(shape) >= 0.0


@given(any_shapes.filter(lambda shape: shape.tokens > 0), st.floats(1e-6, 1e3))
def test_any_step_can_be_learned_from(shape: BatchShape, seconds: float) -> None:
    model = StepTimeModel()

    assert model.observe(shape, seconds) is None
    assert np.isfinite(model.predict_s(shape))
