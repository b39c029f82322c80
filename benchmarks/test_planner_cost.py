"""What does planning and learning cost in one engine step?

python -m pytest benchmarks/test_planner_cost.py [--benchmark-json=FILE]

Targets for medians on an idle core: 50 us for each of largest_prefill, predict_s and observe,
1 ms for an observe that solves. The assertions allow ten times that, for a busy machine.
"""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np
import pytest

from vllm_penalty_sched import BatchShape, Settings, StepTimeModel
from vllm_penalty_sched.planner import Planner, StepLoad
from vllm_penalty_sched.policy import PrefillDemand

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

CALL_TARGET_S, SOLVE_TARGET_S, BUSY_FACTOR = 50e-6, 1e-3, 10
ROUNDS = 4000
DECODES = BatchShape(decode_seqs=64, decode_tokens=64, decode_context=64 * 1500)


def step_time_s(shape: BatchShape) -> float:
    work = sum(new * (cached + new / 2) for new, cached in shape.prefills)
    return 9e-3 + 6e-5 * max(0, shape.tokens - 200) + 1.6e-8 * shape.decode_context + 4e-9 * work


def random_shapes(count: int, seed: int) -> list[BatchShape]:
    rng = np.random.default_rng(seed)
    seqs = rng.integers(1, 257, count)
    return [
        BatchShape(
            prefills=tuple(
                (int(rng.integers(1, 700)), int(rng.integers(0, 8000)))
                for _ in range(rng.integers(0, 4))
            ),
            decode_seqs=int(d),
            decode_tokens=int(d),
            decode_context=int(d * rng.integers(64, 8192)),
        )
        for d in seqs
    ]


def learned(steps: int) -> StepTimeModel:
    model = StepTimeModel()
    for shape in random_shapes(steps, seed=0):
        model.observe(shape, step_time_s(shape))
    return model


@pytest.fixture(scope="module")
def model() -> StepTimeModel:
    return learned(2000)


def check_median(benchmark: BenchmarkFixture, target_s: float) -> None:
    assert benchmark.stats.stats.median <= BUSY_FACTOR * target_s


def test_predict_s(benchmark: BenchmarkFixture, model: StepTimeModel) -> None:
    shapes = cycle(random_shapes(500, seed=1))

    benchmark.pedantic(lambda: model.predict_s(next(shapes)), rounds=ROUNDS)

    check_median(benchmark, CALL_TARGET_S)


def test_largest_prefill(benchmark: BenchmarkFixture, model: StepTimeModel) -> None:
    limit_s = 2.0 * model.predict_s(DECODES)
    cached = cycle(range(0, 8192, 256))

    benchmark.pedantic(lambda: model.largest_prefill(DECODES, next(cached), limit_s), rounds=ROUNDS)

    check_median(benchmark, CALL_TARGET_S)


def test_observe_as_it_comes_with_a_solve_every_few_steps(benchmark: BenchmarkFixture) -> None:
    model = learned(2000)
    steps = cycle([(shape, step_time_s(shape)) for shape in random_shapes(500, seed=2)])

    benchmark.pedantic(lambda: model.observe(*next(steps)), rounds=ROUNDS)

    check_median(benchmark, CALL_TARGET_S)


def test_observe_of_a_step_that_solves(benchmark: BenchmarkFixture) -> None:
    # From 48 steps on every eighth one solves: the next after 399.
    state = learned(399).state()
    steps = cycle([(shape, step_time_s(shape)) for shape in random_shapes(500, seed=3)])

    benchmark.pedantic(
        lambda model, step: model.observe(*step),
        setup=lambda: ((StepTimeModel.from_state(state), next(steps)), {}),
        rounds=500,
    )

    check_median(benchmark, SOLVE_TARGET_S)


@pytest.mark.parametrize("waiting", [1, 8])
def test_plan(benchmark: BenchmarkFixture, model: StepTimeModel, waiting: int) -> None:
    planner = Planner(Settings(tbt_slo_ms=3e3 * model.predict_s(DECODES)), model)
    load = StepLoad(
        decodes=DECODES,
        demands=tuple(PrefillDemand(remaining=100, cached=128 * k) for k in range(waiting)),
        demands_could_use_tokens=True,
        own_slo_s=None,
        base_tokens=8192,
    )

    benchmark.pedantic(lambda: planner.plan(load, 0.0), rounds=ROUNDS)

    check_median(benchmark, (1 + 2 * waiting) * CALL_TARGET_S)
