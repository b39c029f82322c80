"""Measure a real engine's steps over a grid of compositions, into a file that grows by points."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from tqdm import tqdm

from vllm_penalty_sched.calibration.grid import (
    CURVE_SERIES,
    GridPoint,
    GridSpec,
    estimate_work,
    plan_grid,
)
from vllm_penalty_sched.calibration.samples import (
    Sample,
    SamplesOrigin,
    read_samples,
    write_origin,
    write_sample,
)
from vllm_penalty_sched.engine.point_measurer import PointMeasurer
from vllm_penalty_sched.engine.stepped_engine import (
    SteppedEngine,
    make_stepped_config,
    start_engine,
)

# Time to measure that an engine gets whose start takes most of the grid's longest time.
_LEAST_MEASURING_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationResult:
    """What came of a calibration.

    Attributes:
        points: Compositions in the grid.
        earlier: Of these, measured by an earlier call.
        measured: Measured by this call.
        not_run: Points that this engine did not run as planned, for lack of KV blocks or by a
            rule of its own; they are in no sample.
        left_out: Points left when the grid's longest time was over.
        never_measured: Compositions of these of which no repetition was measured either.
        seconds: How long it took, without the start of the engine.
    """

    points: int
    earlier: int
    measured: int
    not_run: tuple[str, ...]
    left_out: tuple[str, ...]
    never_measured: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        there, now_s = self.earlier + self.measured, f"{self.seconds:.0f} s"
        text = f"{there} of {self.points} points, {self.measured} of them measured now in {now_s}"
        if self.not_run:
            text += f"\nnot run as planned by this engine: {', '.join(self.not_run)}"
        if self.left_out:
            text += (
                f"\nleft out for lack of time: {len(self.left_out)} points (the same command goes "
                "on with them); of these were never measured: "
                f"{', '.join(self.never_measured) or 'none'}"
            )
        return text


def calibrate(
    path: Path, origin: SamplesOrigin, spec: GridSpec, *, began_s: float
) -> CalibrationResult:
    """Measure every point of a grid that is not yet in the file, as far as its time allows.

    Each finished point is one line of the file at once; after an interruption the same call goes
    on with the points that are missing.

    Args:
        path: The CSV file, begun if absent when the engine has started.
        origin: Names the model and the engine's arguments; stands at the top of the file.
        spec: The grid's axes and its longest time.
        began_s: When that time began, on the clock ``time.perf_counter``.

    Raises:
        ConfigError: If the file holds something else, or steps measured elsewhere or otherwise,
            or vLLM refuses the model or the arguments.
        OSError: If the file cannot be read or written.
    """
    earlier = _read_earlier(path, origin)
    config = make_stepped_config(origin.model, origin.engine_args)
    _say(f"starting vLLM on {origin.model} ...")
    with start_engine(config) as engine:
        end_s = math.inf
        if spec.longest_s is not None:
            least_end_s = time.perf_counter() + _LEAST_MEASURING_S
            end_s = max(began_s + spec.longest_s, least_end_s)
        points = plan_grid(spec, engine.limits, concurrency=origin.concurrency)
        if not earlier:
            path.write_text(write_origin(origin), encoding="utf-8")
        try:
            return measure_points(engine, points, path, earlier=earlier, end_s=end_s)
        except KeyboardInterrupt:
            _say(f"stopped: the finished points are in {path}, the same command goes on from there")
            raise


def measure_points(
    engine: SteppedEngine,
    points: Sequence[GridPoint],
    path: Path,
    *,
    earlier: Sequence[Sample] = (),
    end_s: float = math.inf,
) -> CalibrationResult:
    """Measure the points of which there is no sample yet, and append each to a file at once.

    Args:
        engine: To measure.
        points: The whole grid, in the order in which to measure.
        path: A file that holds at least its origin.
        earlier: The samples that it holds.
        end_s: When to leave out what is left, on the clock ``time.perf_counter``.
    """
    start_s = time.perf_counter()
    known = {(sample.series, sample.point) for sample in earlier}
    missing = [point for point in points if (point.series, point.name) not in known]
    if len(missing) < len(points):
        _say(f"{len(points) - len(missing)} of {len(points)} points are in {path} already")
    measurer = PointMeasurer(engine, end_s=end_s)
    not_run, left_out = _measure_all(path, points, missing, measurer)
    return _result(points, missing, not_run, left_out, time.perf_counter() - start_s)


def _result(
    points: Sequence[GridPoint],
    missing: Sequence[GridPoint],
    not_run: Sequence[GridPoint],
    left_out: Sequence[GridPoint],
    seconds: float,
) -> CalibrationResult:
    without_sample = {*not_run, *left_out}
    compositions = {
        (point.series, point.composition) for point in points if point not in without_sample
    }
    never = [p for p in left_out if (p.series, p.composition) not in compositions]
    return CalibrationResult(
        points=len(points),
        earlier=len(points) - len(missing),
        measured=len(missing) - len(without_sample),
        not_run=tuple(f"{point.series} {point.name}" for point in not_run),
        left_out=tuple(f"{point.series} {point.name}" for point in left_out),
        never_measured=tuple(dict.fromkeys(f"{p.series} {p.composition}" for p in never)),
        seconds=seconds,
    )


def _read_earlier(path: Path, origin: SamplesOrigin) -> list[Sample]:
    """Return what the file holds already; check that more can be written, and belongs there.

    A line that an earlier call did not finish is cut off. A file that is not there yet is begun
    when the engine has started: a call that is refused leaves none.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open("a+", encoding="utf-8", errors="replace") as file:
        file.seek(0)
        text = file.read()
    if is_new:
        path.unlink()
    if not text:
        return []
    whole = text[: text.rfind("\n") + 1]
    earlier, samples = read_samples(whole, source=str(path))
    if samples:
        origin.check_continues(earlier, source=str(path))
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    return samples


def _measure_all(
    path: Path, points: Sequence[GridPoint], missing: Sequence[GridPoint], measurer: PointMeasurer
) -> tuple[list[GridPoint], list[GridPoint]]:
    """Measure the missing points, each into the file at once.

    Returns:
        Those that did not run as planned, and those for which no time was left.
    """
    _warm_up(missing, measurer)
    work = estimate_work(missing)
    not_run: list[GridPoint] = []
    with (
        path.open("a", encoding="utf-8") as file,
        tqdm(
            total=sum(work),
            smoothing=0.05,
            bar_format="{desc} {percentage:3.0f}% |{bar}| {elapsed} passed, {remaining} left",
            mininterval=0.5 if sys.stderr.isatty() else 10.0,
        ) as bar,
    ):
        done = 0
        for turn in _turns(missing):
            samples = (
                measurer.measure_in_turns(turn) if len(turn) > 1 else [measurer.measure(turn[0])]
            )
            without = [point for point, sample in zip(turn, samples, strict=True) if sample is None]
            file.writelines(write_sample(sample) for sample in samples if sample is not None)
            file.flush()
            if without and measurer.is_late:
                return not_run, [*without, *missing[done + len(turn) :]]
            not_run += without
            bar.update(sum(work[done : done + len(turn)]))
            done += len(turn)
            reached = len(points) - len(missing) + done
            bar.set_description_str(f"{reached}/{len(points)} points", refresh=False)
    return not_run, []


def _turns(points: Sequence[GridPoint]) -> Iterator[list[GridPoint]]:
    """Yield the points of each pass of the curve together, the others one by one."""
    for (series, _), group in groupby(points, key=lambda point: (point.series, point.repetition)):
        if series == CURVE_SERIES:
            yield list(group)
        else:
            yield from ([point] for point in group)


def _warm_up(points: Sequence[GridPoint], measurer: PointMeasurer) -> None:
    """Run the first and the largest composition, unrecorded: the machine gets up to speed."""
    if points:
        largest = max(points, key=lambda point: sum(new for new, _ in point.prefills))
        for point in (largest, points[0], points[0]):
            measurer.run_once(point)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
