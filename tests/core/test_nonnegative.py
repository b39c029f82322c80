import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from vllm_penalty_sched.learning.nonnegative import improve

ENOUGH_PIVOTS = 1000


def problem(seed: int, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Random rows, some unknowns of which want to be negative, with their normal equations."""
    rng = np.random.default_rng(seed)
    rows = rng.random((3 * size, size)) * 10.0 ** rng.uniform(-2, 2, size)
    target = rng.standard_normal(3 * size)
    return rows, target, rows.T @ rows, rows.T @ target


def cost(gram: np.ndarray, moment: np.ndarray, values: np.ndarray) -> float:
    return float(0.5 * values @ gram @ values - moment @ values)


problems = st.builds(problem, st.integers(0, 10**6), st.integers(1, 30))


@given(problems)
def test_with_enough_pivots_it_agrees_with_scipy(parts: tuple) -> None:
    rows, target, gram, moment = parts
    reference, _ = nnls(rows, target)

    found = improve(gram, moment, np.zeros(len(moment)), most_pivots=ENOUGH_PIVOTS)

    assert found.is_optimal
    assert (found.values >= 0.0).all()
    # Of what a unit of each unknown comes to in the rows.
    unit = np.linalg.norm(rows, axis=0)
    assert found.values * unit == pytest.approx(reference * unit, rel=1e-6, abs=1e-6)


@given(problems, st.integers(0, 10**6), st.integers(1, 5))
def test_stopped_anywhere_it_is_feasible_and_no_worse_than_its_start(
    parts: tuple, seed: int, most_pivots: int
) -> None:
    _, _, gram, moment = parts
    rng = np.random.default_rng(seed)
    start = rng.random(len(moment)) * rng.integers(0, 2, len(moment))

    found = improve(gram, moment, start, most_pivots=most_pivots)

    assert (found.values >= 0.0).all()
    before = cost(gram, moment, start)
    assert cost(gram, moment, found.values) <= before + 1e-9 * max(1.0, abs(before))


@given(problems, st.integers(0, 10**6), st.integers(2, 4))
def test_going_on_from_anywhere_a_few_pivots_at_a_time_comes_to_the_same_end(
    parts: tuple, seed: int, most_pivots: int
) -> None:
    _, _, gram, moment = parts
    at_once = improve(gram, moment, np.zeros(len(moment)), most_pivots=ENOUGH_PIVOTS)
    values = np.random.default_rng(seed).random(len(moment))
    for _ in range(ENOUGH_PIVOTS):
        found = improve(gram, moment, values, most_pivots=most_pivots)
        values = found.values
        if found.is_optimal:
            break

    assert found.is_optimal
    best = cost(gram, moment, at_once.values)
    assert cost(gram, moment, values) == pytest.approx(best, rel=1e-9, abs=1e-9)


def test_the_optimum_is_recognised_with_a_single_pivot() -> None:
    _, _, gram, moment = problem(7, 20)
    best = improve(gram, moment, np.zeros(20), most_pivots=ENOUGH_PIVOTS)

    again = improve(gram, moment, best.values, most_pivots=1)

    assert again.is_optimal
    assert again.values == pytest.approx(best.values, rel=1e-9)
