"""Calibration with little time, of vLLM's real scheduler over a device that only takes time."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

from vllm.v1.request import Request, RequestStatus  # noqa: E402

from tests.core.test_samples import ORIGIN  # noqa: E402
from vllm_penalty_sched.batch import BatchShape  # noqa: E402
from vllm_penalty_sched.calibration.grid import CURVE_SERIES, QUICK, GridPoint, plan_grid  # noqa: E402
from vllm_penalty_sched.calibration.samples import Sample, read_samples, write_origin  # noqa: E402
from vllm_penalty_sched.engine.calibrator import measure_points  # noqa: E402
from vllm_penalty_sched.engine.stepped_engine import SteppedEngine, SteppedScheduler  # noqa: E402
from vllm_penalty_sched.engine.virtual_config import make_scheduler, make_vllm_config  # noqa: E402
from vllm_penalty_sched.engine.virtual_engine import VirtualEngine  # noqa: E402

SMALL = replace(QUICK, decode_counts=(1, 8), curve_passes=2)


class SleepingCore:
    """The part of vLLM's EngineCore that calibration uses, over a device that sleeps."""

    def __init__(self, step_s: float) -> None:
        self.vllm_config = make_vllm_config(prefix_caching=False)
        self.scheduler = make_scheduler(SteppedScheduler, self.vllm_config)
        self._engine = VirtualEngine(self.scheduler, self._sleep)
        self._step_s = step_s
        self.shapes: list[BatchShape] = []

    def _sleep(self, shape: BatchShape) -> float:
        self.shapes.append(shape)
        time.sleep(self._step_s)
        return self._step_s

    def add_request(self, request: Request) -> None:
        self.scheduler.add_request(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def step_fn(self) -> tuple[dict[int, Any], bool]:
        return {}, self._engine.step() is not None

    def post_step(self, model_executed: bool) -> None:
        """Nothing to do without speculative decoding."""


def start(step_s: float) -> tuple[SteppedEngine, list[GridPoint]]:
    engine = SteppedEngine(SleepingCore(step_s))
    return engine, plan_grid(SMALL, engine.limits, concurrency=8)


def begin_file(folder: Path) -> Path:
    path = folder / "samples.csv"
    path.write_text(write_origin(ORIGIN))
    return path


def read(path: Path) -> list[Sample]:
    return read_samples(path.read_text(), source=str(path))[1]


def test_without_time_for_all_the_curve_comes_first_and_the_rest_is_named_and_measured_next_time(
    tmp_path: Path,
) -> None:
    path = begin_file(tmp_path)
    engine, points = start(0.0)
    cut = measure_points(engine, points, path, end_s=time.perf_counter() + 1.5)
    measured = read(path)

    next_engine, _ = start(0.0)
    resumed = measure_points(next_engine, points, path, earlier=measured)

    names = [f"{point.series} {point.name}" for point in points]
    compositions = {f"{point.series} {point.composition}" for point in points}
    there = {f"{sample.series} {sample.point.split(':')[-1]}" for sample in measured}
    assert 0 < cut.measured == len(measured) < len(points)
    assert list(cut.left_out) == names[len(measured) :]
    assert set(cut.never_measured) == compositions - there
    assert {sample.series for sample in measured[:10]} == {"curve"}
    assert f"left out for lack of time: {len(cut.left_out)} points" in str(cut)
    assert (resumed.earlier, resumed.left_out) == (cut.measured, ())
    assert len(read(path)) == len(points)


@pytest.mark.parametrize("step_s", [0.02, 0.3])
def test_the_time_is_kept_however_slow_the_machine_is(step_s: float, tmp_path: Path) -> None:
    path = begin_file(tmp_path)
    engine, points = start(step_s)
    start_s = time.perf_counter()

    result = measure_points(engine, points, path, end_s=start_s + 1.0)

    # Ten steps' worth of slack: those begun in time, and the warm-up before it.
    assert time.perf_counter() - start_s < 1.5 + 10 * step_s
    assert result.left_out
    assert len(read(path)) == result.measured


def test_the_compositions_of_the_curve_are_measured_in_turns(tmp_path: Path) -> None:
    path = begin_file(tmp_path)
    core = SleepingCore(0.0)
    engine = SteppedEngine(core)
    points = plan_grid(SMALL, engine.limits, concurrency=8)
    curve = [p for p in points if p.series == CURVE_SERIES and not p.repetition and p.prefills]

    result = measure_points(engine, curve, path)

    # Behind the warm-up of the first of them, which runs it and the largest on their own.
    planned = {point.prefills for point in curve}
    ran = [shape.prefills for shape in core.shapes if shape.prefills in planned][3:]
    turns = [set(ran[start : start + len(planned)]) for start in range(0, len(ran), len(planned))]
    assert result.measured == len(planned) == 14
    assert len(turns) >= 1 + 9
    assert all(turn == planned for turn in turns)
