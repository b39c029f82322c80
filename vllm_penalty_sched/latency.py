"""The step-time model: learns what a step costs from the steps that ran."""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from operator import mul
from pathlib import Path
from statistics import fmean, pvariance

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from vllm_penalty_sched.batch import BatchShape
from vllm_penalty_sched.errors import ConfigError, ModelFileError, NotFittedError
from vllm_penalty_sched.features import (
    ATTENTION_WORK,
    RIDGE_WEIGHTS,
    SCALES,
    TERMS,
    TOKEN_TERMS,
    shape_terms,
    term_vector,
    token_segments,
)
from vllm_penalty_sched.files import write_json
from vllm_penalty_sched.machine_speed import MachineSpeed
from vllm_penalty_sched.model_state import (
    LearnedSums,
    ModelState,
    Provenance,
    state_from_json,
    state_to_json,
)

MAX_PREFILL_TOKENS = 1 << 20
"""The most that ``largest_prefill`` returns: a model that has seen no slope cannot bound it."""

# Older steps of a kind fade with this factor for each new one: a memory of about 2,000 steps.
_FADE = 1.0 - 1.0 / 2000
# Strength of the pull towards "all time is the floor", in samples: few steps must not be read as
# a steep slope.
_RIDGE = 2e-3
# Every step of a kind is solved for at first, then one in so many: a solve takes 0.1-0.3 ms.
_SOLVE_EACH, _SOLVE_EVERY = 48, 8
# After this many steps of a kind, one in so many is taken into the sums; the speed follows all.
_TAKE_ALL, _TAKE_EVERY = 1000, 4
# Latest predictions that the figures of merit are about.
_JUDGED_STEPS = 500


class _NormalEquations:
    """Fading sums of one kind of steps, for least squares on relative errors."""

    __slots__ = ("gram", "moment", "offered", "samples")

    def __init__(self, learned: LearnedSums | None = None) -> None:
        self.gram = learned.gram if learned else np.zeros((len(TERMS), len(TERMS)))
        self.moment = learned.moment if learned else np.zeros(len(TERMS))
        self.samples = learned.samples if learned else 0
        self.offered = 0

    def add(self, terms: NDArray[np.float64], target: float, *, fade: float) -> None:
        if fade != 1.0:
            self.gram *= fade
            self.moment *= fade
        self.gram += np.multiply.outer(terms, terms)
        self.moment += target * terms
        self.samples += 1

    def learned(self) -> LearnedSums:
        return LearnedSums(gram=self.gram.copy(), moment=self.moment.copy(), samples=self.samples)


class StepTimeModel:
    """Predicts a step's time from its shape, and how much prefill fits under a limit.

    The time is a non-negative combination of the terms in ``features``, fitted to relative errors
    (each step weighs 1 over its squared time), times a factor for the machine's present speed.
    Steps with and without prefill fade separately, so that a long decode-only stretch does not
    wear out what is known about mixed steps.

    Attributes:
        provenance: Where the steps ran; saved with the model.
        largest_prefill_tokens: Most prefill tokens of a step learned from.
    """

    def __init__(self) -> None:
        self.provenance = Provenance()
        self._decode_only = _NormalEquations()
        self._mixed = _NormalEquations()
        self.largest_prefill_tokens = 0
        self._speed = MachineSpeed()
        self._judged: deque[tuple[float, float]] = deque(maxlen=_JUDGED_STEPS)
        self._coefficients: list[float] = []
        self._bounds: list[float] = []
        self._intercepts: list[float] = []
        self._slopes: list[float] = []

    @property
    def samples(self) -> int:
        """Steps learned from."""
        return self._decode_only.samples + self._mixed.samples

    @property
    def mixed_samples(self) -> int:
        """Steps with prefill learned from."""
        return self._mixed.samples

    @property
    def is_fitted(self) -> bool:
        """Whether there is anything to predict from."""
        return bool(self._coefficients)

    def coefficients(self) -> dict[str, float]:
        """Return the coefficient of each term, seconds per unit, at the present speed."""
        return {
            name: value * self._speed.factor
            for name, value in zip(TERMS, self._coefficients, strict=bool(self._coefficients))
        }

    def observe(self, shape: BatchShape, seconds: float) -> float | None:
        """Learn from one step that ran; takes microseconds, and a solve every few steps.

        Returns:
            What was predicted for it before, seconds; None if it is the first.

        Raises:
            ConfigError: If the shape has no token, or ``seconds`` is not finite and positive.
        """
        _check_sample(shape, seconds)
        sums = self._sums_of(shape)
        predicted_s = None
        if self.is_fitted:
            predicted_s = self.predict_s(shape)
            self._judged.append((predicted_s, seconds))
            self._speed.observe(math.log(seconds / predicted_s), kind_samples=sums.samples)
        sums.offered += 1
        if sums.samples < _TAKE_ALL or sums.offered % _TAKE_EVERY == 0:
            self._add(shape, seconds / self._speed.factor, fade=_FADE)
            if sums.samples <= _SOLVE_EACH or sums.samples % _SOLVE_EVERY == 0:
                self._solve()
        return predicted_s

    def fit(self, shapes: Sequence[BatchShape], seconds: Sequence[float]) -> StepTimeModel:
        """Forget everything and fit all samples at once; ``observe`` may go on from there.

        Args:
            shapes: n steps, n >= 1.
            seconds: Their times, shape (n,), each finite and positive.

        Raises:
            ConfigError: If the lengths differ, there is no sample, or a sample is invalid.
        """
        if len(shapes) != len(seconds) or not len(shapes):
            raise ConfigError(f"fit needs n >= 1 pairs, got {len(shapes)} and {len(seconds)}")
        for shape, time_s in zip(shapes, seconds, strict=True):
            _check_sample(shape, time_s)
        self.__init__()  # type: ignore[misc]  # the one place that starts the state afresh
        for shape, time_s in zip(shapes, seconds, strict=True):
            self._add(shape, float(time_s), fade=1.0)
        self._solve()
        pairs = zip(shapes, seconds, strict=True)
        self._judged.extend((self.predict_s(shape), float(time_s)) for shape, time_s in pairs)
        return self

    @property
    def mape(self) -> float | None:
        """Mean absolute relative error of the latest predictions, each made before learning."""
        if not self._judged:
            return None
        return fmean(abs(predicted_s / time_s - 1.0) for predicted_s, time_s in self._judged)

    @property
    def r_squared(self) -> float | None:
        """Coefficient of determination of the latest predictions; None if all times were equal."""
        variance = pvariance([time_s for _, time_s in self._judged]) if self._judged else 0.0
        if not variance:
            return None
        squared = fmean((predicted_s - time_s) ** 2 for predicted_s, time_s in self._judged)
        return 1.0 - squared / variance

    def state(self) -> ModelState:
        """Return all that was learned.

        Raises:
            NotFittedError: If no step has been learned.
        """
        self._check_fitted()
        return ModelState(
            coefficients_s=tuple(self._coefficients),
            speed=self._speed.factor,
            largest_prefill_tokens=self.largest_prefill_tokens,
            decode_only=self._decode_only.learned(),
            mixed=self._mixed.learned(),
            mape=self.mape,
            r_squared=self.r_squared,
            provenance=self.provenance,
        )

    @classmethod
    def from_state(cls, state: ModelState) -> StepTimeModel:
        """Return a model that goes on from a state."""
        model = cls()
        model.provenance = state.provenance
        model._decode_only = _NormalEquations(state.decode_only)
        model._mixed = _NormalEquations(state.mixed)
        model._speed = MachineSpeed(state.speed)
        model.largest_prefill_tokens = state.largest_prefill_tokens
        model._take_coefficients(list(state.coefficients_s))
        return model

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model to a JSON file, atomically.

        Raises:
            NotFittedError: If no step has been learned.
            OSError: If the file cannot be written.
        """
        write_json(path, state_to_json(self.state()))

    def predict_s(self, shape: BatchShape) -> float:
        """Return the predicted time of a step, seconds; 0 for a step without tokens.

        Raises:
            NotFittedError: If no step has been learned.
        """
        self._check_fitted()
        if not shape.tokens:
            return 0.0
        rest = sum(map(mul, self._coefficients[TOKEN_TERMS:], shape_terms(shape)))
        return float(self._speed.factor * (self._token_part_s(shape.tokens) + rest))

    def penalty_s(self, shape: BatchShape) -> float:
        """Return what the step's prefill adds to it, seconds.

        Raises:
            NotFittedError: If no step has been learned.
        """
        return self.predict_s(shape) - self.predict_s(shape.without_prefill())

    def largest_prefill(self, shape: BatchShape, cached: int, limit_s: float) -> int:
        """Return the most new tokens of one more chunk that keep the step within a limit.

        Args:
            shape: The step without that chunk.
            cached: Tokens of the chunk's request computed before, >= 0.
            limit_s: Longest time the step may take, seconds.

        Returns:
            0 if not even one token fits, at most ``MAX_PREFILL_TOKENS``.

        Raises:
            NotFittedError: If no step has been learned.
            ConfigError: If ``cached`` is negative.
        """
        self._check_fitted()
        if cached < 0:
            raise ConfigError(f"cached must be >= 0, got {cached}")
        one = shape.with_prefill(1, cached)
        tokens = shape.tokens
        work_s = self._coefficients[ATTENTION_WORK]
        fixed_s = self.predict_s(one) / self._speed.factor - self._token_part_s(tokens + 1)
        left_s = limit_s / self._speed.factor - (fixed_s - work_s * (cached + 0.5))

        low, high = 0, len(self._bounds)
        while high - low > 1:  # the last piece whose first token fits
            middle = (low + high) // 2
            first = max(int(self._bounds[middle]) + 1 - tokens, 1)
            if self._chunk_s(middle, tokens, first, cached) <= left_s:
                low = middle
            else:
                high = middle
        return self._solve_piece(low, tokens, cached, left_s)

    def _solve_piece(self, piece: int, tokens: int, cached: int, left_s: float) -> int:
        last = piece + 1 == len(self._bounds)
        most = MAX_PREFILL_TOKENS if last else int(self._bounds[piece + 1]) - tokens
        if most < 1 or not self._chunk_s(piece, tokens, 1, cached) <= left_s:
            return 0
        half_work = 0.5 * self._coefficients[ATTENTION_WORK]
        slope = self._slopes[piece] + 2.0 * half_work * cached
        spare_s = left_s - self._intercepts[piece] - self._slopes[piece] * tokens
        # The stable root of half_work p^2 + slope p = spare_s.
        divisor = slope + math.sqrt(slope * slope + 4.0 * half_work * max(0.0, spare_s))
        if divisor * most <= 2.0 * spare_s:
            return min(most, MAX_PREFILL_TOKENS)
        fits = int(2.0 * spare_s / divisor)
        return max(0, min(fits, most))

    def _chunk_s(self, piece: int, tokens: int, new: int, cached: int) -> float:
        work = new * (cached + 0.5 * new)
        token_part_s = self._intercepts[piece] + self._slopes[piece] * (tokens + new)
        return token_part_s + self._coefficients[ATTENTION_WORK] * work

    def _token_part_s(self, tokens: int) -> float:
        piece = bisect_left(self._bounds, tokens) - 1
        return self._intercepts[piece] + self._slopes[piece] * tokens

    def _check_fitted(self) -> None:
        if not self._coefficients:
            raise NotFittedError("the step-time model has learned from no step yet")

    def _sums_of(self, shape: BatchShape) -> _NormalEquations:
        return self._mixed if shape.prefills else self._decode_only

    def _add(self, shape: BatchShape, seconds: float, *, fade: float) -> None:
        self.largest_prefill_tokens = max(self.largest_prefill_tokens, shape.prefill_tokens)
        # Relative error: a step ten times too long then weighs like one 9% off.
        self._sums_of(shape).add(term_vector(shape) / seconds, 1.0, fade=fade)

    def _solve(self) -> None:
        gram = self._decode_only.gram + self._mixed.gram
        moment = self._decode_only.moment + self._mixed.moment
        gram.flat[:: len(TERMS) + 1] += RIDGE_WEIGHTS * (_RIDGE * gram[0, 0] / self.samples)
        lower = np.linalg.cholesky(gram)
        scaled, _ = nnls(lower.T, np.linalg.solve(lower, moment))
        self._take_coefficients((scaled / SCALES).tolist())

    def _take_coefficients(self, coefficients: list[float]) -> None:
        self._coefficients = coefficients
        self._bounds, self._intercepts, self._slopes = token_segments(coefficients)


def load_model(path: str | os.PathLike[str]) -> StepTimeModel:
    """Return the model saved in a JSON file.

    Raises:
        ModelFileError: If it cannot be read, or a field is foreign, missing or invalid; the
            message names the file and the field.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFileError(f"cannot read the model {os.fspath(path)}: {error}") from error
    return StepTimeModel.from_state(state_from_json(text, source=os.fspath(path)))


def _check_sample(shape: BatchShape, seconds: float) -> None:
    if not shape.tokens:
        raise ConfigError("a step without tokens has no time to learn")
    if not (math.isfinite(seconds) and seconds > 0.0):
        raise ConfigError(f"a step's time must be finite and > 0 seconds, got {seconds}")
