import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import shapes, with_more
from vllm_penalty_sched import BatchShape
from vllm_penalty_sched.learning.features import SCALES, TERMS, term_matrix
from vllm_penalty_sched.learning.step_cost import MAX_PREFILL_TOKENS, StepCost


@st.composite
def step_costs(draw: st.DrawFn) -> StepCost:
    """Any coefficients >= 0, most of them 0; each term costs milliseconds in a typical step."""
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    present = rng.random(len(TERMS)) < draw(st.sampled_from([0.1, 0.3, 1.0]))
    return StepCost((present * rng.random(len(TERMS)) * 1e-2 / SCALES).tolist())


@given(step_costs(), shapes())
def test_it_predicts_the_sum_of_the_terms(cost: StepCost, shape: BatchShape) -> None:
    terms = term_matrix([shape])[0] * SCALES

    expected_s = float(terms @ np.array(cost.coefficients_s))

    # Seconds: a time of 0 is raised to a nanosecond.
    assert cost.seconds(shape) == pytest.approx(expected_s, rel=1e-9, abs=1.1e-9)


@given(step_costs(), shapes(), st.integers(0, 8192), st.floats(0.5, 20.0))
def test_the_largest_prefill_fits_and_one_more_token_does_not(
    cost: StepCost, shape: BatchShape, cached: int, slack: float
) -> None:
    limit_s = slack * cost.seconds(shape)

    tokens = cost.largest_prefill(shape, cached, limit_s)

    # Relative, of rounding; seconds: a time of 0 is raised to a nanosecond.
    if tokens:
        assert cost.seconds(shape.with_prefill(tokens, cached)) <= limit_s * (1 + 1e-9) + 1e-9
    if tokens < MAX_PREFILL_TOKENS:
        assert cost.seconds(shape.with_prefill(tokens + 1, cached)) > limit_s * (1 - 1e-9)


@given(step_costs(), shapes(), st.integers(0, 8192), st.integers(1, 3000))
def test_a_chunk_fits_into_the_time_that_it_takes(
    cost: StepCost, shape: BatchShape, cached: int, new: int
) -> None:
    limit_s = cost.seconds(shape.with_prefill(new, cached)) * (1 + 1e-9)

    assert cost.largest_prefill(shape, cached, limit_s) >= new


@given(step_costs(), shapes(), shapes(with_prefill=True), st.integers(0, 9), st.integers(0, 9999))
def test_no_time_falls_when_tokens_are_added(
    cost: StepCost, shape: BatchShape, other: BatchShape, more_seqs: int, more_context: int
) -> None:
    larger = with_more(shape, other, more_seqs, more_context)

    assert cost.seconds(larger) >= cost.seconds(shape) * (1 - 1e-12)


@given(step_costs(), shapes(), st.sampled_from([0.0, -1.0, -math.inf, math.nan]))
def test_nothing_fits_under_an_impossible_limit(
    cost: StepCost, shape: BatchShape, limit_s: float
) -> None:
    fits = cost.largest_prefill(shape, 0, limit_s)

    assert fits == 0 or cost.seconds(shape.with_prefill(fits, 0)) <= 1e-9


def test_a_machine_without_any_cost_bounds_nothing() -> None:
    cost = StepCost([0.0] * len(TERMS))
    decodes = BatchShape(decode_seqs=1, decode_tokens=1, decode_context=10)

    assert cost.largest_prefill(decodes, 0, 1.0) == MAX_PREFILL_TOKENS
    assert cost.seconds(decodes) > 0.0
