from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_penalty_sched.calibration.grid import (
    CURVE_SERIES,
    FULL,
    QUICK,
    STEP_SERIES,
    EngineLimits,
    GridPoint,
    GridSpec,
    estimate_work,
    plan_grid,
)
from vllm_penalty_sched.errors import ConfigError

ROOMY = EngineLimits(
    max_model_len=8192, max_num_seqs=256, max_num_batched_tokens=2048, kv_tokens=400_000
)
limits = st.builds(
    EngineLimits,
    max_model_len=st.integers(512, 100_000),
    max_num_seqs=st.integers(8, 1024),
    max_num_batched_tokens=st.integers(64, 16_384),
    kv_tokens=st.integers(4096, 4_000_000),
)


def ratio(point: GridPoint) -> float:
    new = sum(tokens for tokens, _ in point.prefills)
    return new / (new + point.decode_seqs)


@given(limits, st.sampled_from([QUICK, FULL]), st.integers(2, 8))
def test_every_point_fits_the_engine(most: EngineLimits, spec: GridSpec, concurrency: int) -> None:
    points = plan_grid(spec, most, concurrency=concurrency)

    assert points
    for point in points:
        prompts = [new + cached for new, cached in point.prefills]
        tokens = point.decode_seqs + sum(new for new, _ in point.prefills)
        assert 0 < tokens <= most.max_num_batched_tokens
        assert point.decode_seqs + len(prompts) <= most.max_num_seqs
        context = point.allowed_context if point.decode_seqs else 0
        assert max([context, *prompts]) < most.max_model_len
        assert point.decode_seqs * context + sum(prompts) < most.kv_tokens


@pytest.mark.parametrize("spec", [QUICK, FULL])
def test_a_point_is_named_once_in_its_series(spec: GridSpec) -> None:
    points = plan_grid(spec, ROOMY, concurrency=8)

    assert len({(point.series, point.name) for point in points}) == len(points)


@pytest.mark.parametrize("concurrency", [2, 8, 32])
def test_a_pass_of_the_curve_goes_from_decodes_to_prefills_with_the_same_requests(
    concurrency: int,
) -> None:
    points = plan_grid(QUICK, ROOMY, concurrency=concurrency)

    passes = [
        [point for point in points if point.series == CURVE_SERIES and point.repetition == number]
        for number in range(QUICK.curve_passes)
    ]
    ratios = [ratio(point) for point in passes[0]]
    assert ratios == sorted(set(ratios))
    assert (ratios[0], ratios[-1]) == (0.0, 1.0)
    for one in passes:
        assert {ratio(point) for point in one} == set(ratios)
        assert {point.decode_seqs + len(point.prefills) for point in one} == {concurrency}


@pytest.mark.parametrize("spec", [QUICK, FULL])
def test_the_steps_vary_decodes_contexts_chunks_and_cached_tokens(spec: GridSpec) -> None:
    points = [p for p in plan_grid(spec, ROOMY, concurrency=8) if p.series == STEP_SERIES]

    assert {point.decode_seqs for point in points} == {0, *spec.decode_counts}
    assert len({point.decode_context for point in points}) >= 3
    assert len({point.prefills for point in points}) >= 7
    assert {cached for p in points for _, cached in p.prefills} >= {0, 1024}
    assert any(len(point.prefills) > 1 for point in points)
    fullest = max(point.decode_seqs + sum(n for n, _ in point.prefills) for point in points)
    assert fullest == ROOMY.max_num_batched_tokens


@pytest.mark.parametrize("spec", [QUICK, FULL])
def test_a_grid_that_is_cut_short_loses_repetitions_before_compositions(spec: GridSpec) -> None:
    points = plan_grid(spec, ROOMY, concurrency=8)

    first = [index for index, point in enumerate(points) if not point.repetition]
    passes = [point for point in points if point.series == STEP_SERIES]
    half = passes[: len([p for p in passes if not p.repetition]) * 6 // 10]
    assert first[-1] < 0.6 * len(points)
    assert {point.series for point in points[: first[0] + 10]} == {CURVE_SERIES}
    # The second half of a pass lies between what the first half has covered.
    assert {p.decode_context for p in half} == {p.decode_context for p in passes}
    assert max(p.decode_seqs for p in half) >= max(p.decode_seqs for p in passes) / 2
    assert {p.prefills for p in half if sum(new for new, _ in p.prefills) < 1984} == {
        p.prefills for p in passes if sum(new for new, _ in p.prefills) < 1984
    }


def test_long_prompts_are_measured_beside_some_decodes_only_others_in_each_pass() -> None:
    points = [p for p in plan_grid(QUICK, ROOMY, concurrency=8) if p.series == STEP_SERIES]
    beside = [
        {
            (p.decode_seqs, p.decode_context)
            for p in points
            if p.repetition == repetition and sum(map(sum, p.prefills)) >= 1024
        }
        for repetition in range(QUICK.step_passes)
    ]

    groups = {(p.decode_seqs, p.decode_context) for p in points}
    assert len(beside[0]) == len(beside[1]) == len(groups) / QUICK.long_prompt_every
    assert not beside[0] & beside[1]


def test_points_of_the_same_decodes_follow_each_other() -> None:
    planned = plan_grid(FULL, ROOMY, concurrency=8)
    points = [p for p in planned if p.series == STEP_SERIES and p.repetition == 0]

    groups = [(point.decode_seqs, point.decode_context) for point in points]
    changes = sum(one != following for one, following in pairwise(groups))
    assert changes == len(set(groups)) - 1


@pytest.mark.parametrize("concurrency", [-1, 0, 1, 300])
def test_an_impossible_concurrency_is_refused(concurrency: int) -> None:
    with pytest.raises(ConfigError, match="concurren"):
        plan_grid(QUICK, ROOMY, concurrency=concurrency)


def test_work_grows_with_prompts_and_with_decodes_to_start() -> None:
    small = GridPoint(prefills=((16, 0),))
    large = GridPoint(prefills=((1024, 1024),))
    first = GridPoint(decode_seqs=8, decode_context=1024)

    works = estimate_work([small, large, first, first])

    assert works[1] > works[0] > 0
    assert works[2] - works[3] == 8 * 1024


def test_only_the_first_chunk_may_have_cached_tokens() -> None:
    with pytest.raises(ConfigError, match="first chunk"):
        GridPoint(prefills=((16, 0), (16, 32)))
