"""Measure a real engine's steps over a grid of compositions, into a file that grows by points."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from vllm_penalty_sched.calibration_grid import GridPoint, GridSpec, estimate_work, plan_grid
from vllm_penalty_sched.engine.stepped_engine import (
    SteppedEngine,
    TimedShape,
    make_stepped_config,
    start_engine,
)
from vllm_penalty_sched.samples import (
    Sample,
    SamplesOrigin,
    read_samples,
    write_origin,
    write_sample,
)

# A point is measured at least so often, then until its times agree or enough time has passed, an
# odd number of times for the median. Less than 0.15 s may lie within one stall of the machine.
_LEAST_STEPS, _MOST_STEPS = 3, 31
_LEAST_S, _ENOUGH_S = 0.15, 0.4
# The middle half of the times within this share of the median: they agree.
_AGREEING_SPREAD = 0.03
# The first steps of a new composition compile, allocate and fill caches.
_WARM_UP_STEPS = 1
# Set-up steps beyond what the tokens need, before a point is given up.
_SPARE_STEPS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationResult:
    """What came of a calibration.

    Attributes:
        points: Compositions in the grid.
        earlier: Of these, measured by an earlier call.
        measured: Measured by this call.
        not_run: Points that this engine did not run as planned, for lack of KV blocks or by a
            rule of its own; they are in no sample.
        seconds: How long it took, without the start of the engine.
    """

    points: int
    earlier: int
    measured: int
    not_run: tuple[str, ...]
    seconds: float


def calibrate(path: Path, origin: SamplesOrigin, spec: GridSpec) -> CalibrationResult:
    """Measure every point of a grid that is not yet in the file.

    Each finished point is one line of the file at once; after an interruption the same call goes
    on with the points that are missing.

    Args:
        path: The CSV file, begun if absent.
        origin: Names the model and the engine's arguments; stands at the top of the file.
        spec: The grid's axes.

    Raises:
        ConfigError: If the file holds something else, or steps measured elsewhere or otherwise,
            or vLLM refuses the model or the arguments.
        OSError: If the file cannot be read or written.
    """
    earlier = _read_earlier(path, origin)
    config = make_stepped_config(origin.model, origin.engine_args)
    _say(f"starting vLLM on {origin.model} ...")
    with start_engine(config) as engine:
        start_s = time.perf_counter()
        points = plan_grid(spec, engine.limits, concurrency=origin.concurrency)
        known = {(sample.series, sample.point) for sample in earlier}
        missing = [point for point in points if (point.series, point.name) not in known]
        if len(missing) < len(points):
            _say(f"{len(points) - len(missing)} of {len(points)} points are in {path} already")
        if not earlier:
            path.write_text(write_origin(origin), encoding="utf-8")
        try:
            not_run = _measure_all(path, points, missing, PointMeasurer(engine))
        except KeyboardInterrupt:
            _say(f"stopped: the finished points are in {path}, the same command goes on from there")
            raise
        return CalibrationResult(
            points=len(points),
            earlier=len(points) - len(missing),
            measured=len(missing) - len(not_run),
            not_run=tuple(f"{point.series} {point.name}" for point in not_run),
            seconds=time.perf_counter() - start_s,
        )


def _read_earlier(path: Path, origin: SamplesOrigin) -> list[Sample]:
    """Return what the file holds already; check that more can be written, and belongs there.

    A line that an earlier call did not finish is cut off.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8", errors="replace") as file:
        file.seek(0)
        text = file.read()
    if not text:
        return []
    whole = text[: text.rfind("\n") + 1]
    earlier, samples = read_samples(whole, source=str(path))
    if samples:
        origin.check_continues(earlier, source=str(path))
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    return samples


class PointMeasurer:
    """Brings an engine to a composition, and measures it until the times agree."""

    def __init__(self, engine: SteppedEngine) -> None:
        self._engine = engine
        self._decodes: list[str] = []

    def measure(self, point: GridPoint) -> Sample | None:
        """Return the step of median time; None if the engine did not run the composition.

        The sample is one step that ran, with its own shape: the decodes' contexts grow by a token
        a step.
        """
        steps: list[TimedShape] = []
        start_s = time.perf_counter()
        for turn in range(_WARM_UP_STEPS + _MOST_STEPS):
            step = self.run_once(point)
            if step is None:
                self._abort_all()
                return None
            if turn < _WARM_UP_STEPS:
                start_s = time.perf_counter()
                continue
            steps.append(step)
            if _is_enough([step.seconds for step in steps], time.perf_counter() - start_s):
                break
        middle = sorted(steps, key=lambda step: step.seconds)[len(steps) // 2]
        return Sample(
            series=point.series, point=point.name, shape=middle.shape, seconds=middle.seconds
        )

    def run_once(self, point: GridPoint) -> TimedShape | None:
        """Run the composition in one step; return it, None if the engine ran something else."""
        if not self._bring_decodes(point):
            return None
        prompts = self._bring_prompts(point)
        if prompts is None:
            return None
        step = self._engine.step()
        self._engine.abort(prompts)
        shape = step.shape
        as_planned = (
            sorted(shape.prefills) == sorted(point.prefills)
            and shape.decode_seqs == shape.decode_tokens == point.decode_seqs
        )
        return step if as_planned else None

    def _bring_decodes(self, point: GridPoint) -> bool:
        engine, wanted = self._engine, point.decode_seqs
        running = len(self._decodes)
        context = sum(map(engine.computed_tokens, self._decodes))
        if not running * point.decode_context <= context <= running * point.allowed_context:
            self._abort_all()
        engine.abort(self._decodes[wanted:])
        del self._decodes[wanted:]
        added = wanted - len(self._decodes)
        room = engine.limits.max_model_len - point.decode_context
        self._decodes += [engine.add(point.decode_context, room) for _ in range(added)]
        return self._decode_all(added, added * point.decode_context)

    def _decode_all(self, added: int, prompt_tokens: int) -> bool:
        budget = max(1, self._engine.limits.max_num_batched_tokens - len(self._decodes))
        for _ in range(prompt_tokens // budget + added + _SPARE_STEPS):
            if all(map(self._engine.is_decoding, self._decodes)):
                return True
            self._engine.step()
        return False

    def _bring_prompts(self, point: GridPoint) -> list[str] | None:
        """Queue the prompts, the first one computed up to its cached tokens.

        A prompt ends with its chunk, so that the next step computes exactly the chunks.
        """
        engine = self._engine
        if not point.prefills:
            return []
        # vLLM cleans up after ended requests in the step that follows: not in the measured one.
        engine.step()
        prompts = []
        for new, cached in point.prefills:
            prompts.append(engine.add(new + cached, 1))
            if cached and not self._compute(prompts[-1], cached):
                return None
        return prompts

    def _compute(self, request_id: str, tokens: int) -> bool:
        budget = max(1, self._engine.limits.max_num_batched_tokens - len(self._decodes))
        for _ in range(tokens // budget + _SPARE_STEPS):
            left = tokens - self._engine.computed_tokens(request_id)
            if left <= 0:
                return left == 0
            self._engine.step(prefill_limit=left)
        return False

    def _abort_all(self) -> None:
        self._engine.abort_all()
        self._decodes.clear()


def _measure_all(
    path: Path, points: Sequence[GridPoint], missing: Sequence[GridPoint], measurer: PointMeasurer
) -> list[GridPoint]:
    """Measure the missing points, each into the file at once; return those that did not run."""
    _warm_up(missing, measurer)
    work = estimate_work(missing)
    not_run = []
    with (
        path.open("a", encoding="utf-8") as file,
        tqdm(
            total=sum(work),
            smoothing=0.05,
            bar_format="{desc} {percentage:3.0f}% |{bar}| {elapsed} passed, {remaining} left",
            mininterval=0.5 if sys.stderr.isatty() else 10.0,
        ) as bar,
    ):
        for number, (point, amount) in enumerate(zip(missing, work, strict=True), 1):
            sample = measurer.measure(point)
            if sample is None:
                not_run.append(point)
            else:
                file.write(write_sample(sample))
                file.flush()
            done = len(points) - len(missing) + number
            bar.set_description_str(f"{done}/{len(points)} points", refresh=False)
            bar.update(amount)
    return not_run


def _warm_up(points: Sequence[GridPoint], measurer: PointMeasurer) -> None:
    """Run the first and the largest composition, unrecorded: the machine gets up to speed."""
    if points:
        largest = max(points, key=lambda point: sum(new for new, _ in point.prefills))
        for point in (largest, points[0], points[0]):
            measurer.run_once(point)


def _is_enough(seconds: Sequence[float], passed_s: float) -> bool:
    measured = len(seconds)
    if measured < _LEAST_STEPS or measured % 2 == 0:
        return False
    if passed_s >= _ENOUGH_S:
        return True
    ordered = sorted(seconds)
    quarter = measured // 4
    spread = ordered[-1 - quarter] - ordered[quarter]
    return passed_s >= _LEAST_S and spread <= _AGREEING_SPREAD * ordered[measured // 2]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
