import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import shapes
from vllm_penalty_sched.batch import BatchShape
from vllm_penalty_sched.errors import ConfigError
from vllm_penalty_sched.simulation.cost_profiles import PROFILES, find_profile
from vllm_penalty_sched.simulation.table_costs import largest_chunk

names = st.sampled_from(list(PROFILES))


@given(names, shapes(), st.integers(0, 8000))
def test_pricing_chunks_ahead_agrees_with_pricing_each_step(
    name: str, shape: BatchShape, cached: int
) -> None:
    costs = find_profile(name, overhead_s=1e-3)

    ahead_s = costs.chunk_steps_s(shape, cached, 600)

    few = [1, 2, 63, 128, 129, 256, 257, 600]
    one_by_one_s = [costs.step_s(shape.with_prefill(new, cached)) for new in few]
    assert [ahead_s[new - 1] for new in few] == pytest.approx(one_by_one_s)


@given(names, shapes(), st.integers(0, 8000), st.floats(0.005, 0.5))
def test_the_largest_chunk_is_within_the_limit_and_one_more_token_is_not(
    name: str, shape: BatchShape, cached: int, limit_s: float
) -> None:
    costs = find_profile(name)

    most = 16_384
    found = largest_chunk(costs, shape, cached=cached, limit_s=limit_s, most=most)

    if found:
        assert costs.step_s(shape.with_prefill(found, cached)) <= limit_s * (1 + 1e-9)
    if found < most:
        assert costs.step_s(shape.with_prefill(found + 1, cached)) > limit_s * (1 - 1e-9)


def test_overhead_and_a_mixed_decode_factor_are_added_where_they_belong() -> None:
    plain = find_profile("a100-llama3-8b")
    dearer = find_profile("a100-llama3-8b", mixed_decode_factor=2.0, overhead_s=1e-3)
    alone = BatchShape(decode_seqs=8, decode_tokens=8, decode_context=10_000)
    mixed = alone.with_prefill(64, 0)

    assert dearer.step_s(alone) - plain.step_s(alone) == pytest.approx(1e-3)
    extra_s = dearer.step_s(mixed) - plain.step_s(mixed)
    assert extra_s == pytest.approx(1e-3 + 10_000 * plain.decode_context_s)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("b200", {}, r"b200 is no cost profile \(known: a100-llama2-7b, "),
        ("rtx4090-llama31-8b", {"mixed_decode_factor": 1.5}, "measured mixed steps"),
        ("a100-llama3-8b", {"mixed_decode_factor": 0.9}, "must be >= 1"),
        ("a100-llama3-8b", {"mixed_decode_factor": np.nan}, "must be >= 1"),
    ],
)
def test_what_no_profile_can_answer_is_refused(
    name: str, options: dict[str, float], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        find_profile(name, **options)
