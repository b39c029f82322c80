"""The step-time model: learns what a step costs from the steps that ran."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, pvariance

import numpy as np

from vllm_penalty_sched.batch import BatchShape
from vllm_penalty_sched.errors import ConfigError, ModelFileError, NotFittedError
from vllm_penalty_sched.files import write_json
from vllm_penalty_sched.learning.fading_sums import FadingSums
from vllm_penalty_sched.learning.features import RIDGE_WEIGHTS, SCALES, TERMS, term_matrix
from vllm_penalty_sched.learning.machine_speed import MachineSpeed
from vllm_penalty_sched.learning.model_state import (
    ModelState,
    Provenance,
    state_from_json,
    state_to_json,
)
from vllm_penalty_sched.learning.nonnegative import improve
from vllm_penalty_sched.learning.sizes_seen import SizesSeen
from vllm_penalty_sched.learning.step_cost import MAX_PREFILL_TOKENS, StepCost

__all__ = ["MAX_PREFILL_TOKENS", "StepTimeModel", "load_model"]

# Strength of the pull towards "all time is the floor", in samples: few steps must not be read as
# a steep slope.
_RIDGE = 2e-3
# The coefficients follow every step of a kind at first, then one in so many.
_SOLVE_EACH, _SOLVE_EVERY = 48, 8
# Systems solved within one step, 10-30 us each; what is left is for the next steps.
_MOST_PIVOTS = 2
# Enough for any offline fit to come to its end.
_MOST_PIVOTS_AT_ONCE = 20 * len(TERMS)
# After this many steps of a kind, one in so many is taken into the sums; the speed follows all.
_TAKE_ALL, _TAKE_EVERY = 1000, 4
# Fits in a row of the same steps, each with the outliers that the one before tells.
_REWEIGHTINGS = 4
# Latest predictions that the figures of merit are about.
_JUDGED_STEPS = 500
_NOT_FITTED = "the step-time model has learned from no step yet"


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
        self._decode_only = FadingSums()
        self._mixed = FadingSums()
        self.largest_prefill_tokens = 0
        self._sizes_seen = SizesSeen()
        self._speed = MachineSpeed()
        self._judged: deque[tuple[float, float]] = deque(maxlen=_JUDGED_STEPS)
        self._gram = np.zeros((len(TERMS), len(TERMS)))
        self._moment = np.zeros(len(TERMS))
        self._scaled = np.zeros(len(TERMS))
        self._is_solved = True
        self._cost: StepCost | None = None

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
        return self._cost is not None

    def coefficients(self) -> dict[str, float]:
        """Return the coefficient of each term, seconds per unit, at the present speed."""
        if self._cost is None:
            return {}
        speed, values = self._speed.factor, self._cost.coefficients_s
        return {name: speed * value for name, value in zip(TERMS, values, strict=True)}

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
        if self._cost is not None:
            predicted_s = self._speed.factor * self._cost.seconds(shape)
            self._judged.append((predicted_s, seconds))
            if not shape.encoder_tokens:  # of which the first comes as a surprise
                self._speed.observe(math.log(seconds / predicted_s), kind_samples=sums.samples)
        else:
            self._scaled[0] = seconds  # all time is the floor, until more is known
        if shape.prefills:
            self._sizes_seen.add(shape.tokens)
        sums.offered += 1
        is_summed = False
        if sums.samples < _TAKE_ALL or sums.offered % _TAKE_EVERY == 0:
            is_summed = self._take(sums, shape, seconds / self._speed.factor)
        # Later on the sums and the solve share no step: each may take a few hundred microseconds.
        if not self._is_solved and (sums.samples <= _SOLVE_EACH or not is_summed):
            self._solve(most_pivots=_MOST_PIVOTS)
        return predicted_s

    def _take(self, sums: FadingSums, shape: BatchShape, seconds: float) -> bool:
        """Take a step in, and return whether the sums were brought up to date for it."""
        self.largest_prefill_tokens = max(self.largest_prefill_tokens, shape.prefill_tokens)
        sums.add(shape, seconds)
        is_due = sums.samples <= _SOLVE_EACH or sums.samples % _SOLVE_EVERY == 0
        if is_due:
            self._sum_up()
        return is_due

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
        times_s = np.asarray(seconds, dtype=np.float64)
        relative = term_matrix(shapes) / times_s[:, np.newaxis]
        is_mixed = np.array([bool(shape.prefills) for shape in shapes])
        self.largest_prefill_tokens = max(shape.prefill_tokens for shape in shapes)
        for shape in shapes:
            if shape.prefills:
                self._sizes_seen.add(shape.tokens)
        scaled = None
        for _ in range(_REWEIGHTINGS):
            self._decode_only.replace(relative[~is_mixed], scaled)
            self._mixed.replace(relative[is_mixed], scaled)
            self._sum_up()
            self._solve(most_pivots=_MOST_PIVOTS_AT_ONCE)
            scaled = self._scaled
        self.judge_by((relative @ self._scaled * times_s).tolist(), times_s.tolist())
        return self

    def judge_by(self, predicted_s: Sequence[float], measured_s: Sequence[float]) -> None:
        """Let the figures of merit be about these predictions, such as a cross-validation's."""
        pairs = [(p, m) for p, m in zip(predicted_s, measured_s, strict=True)]
        self._judged = deque(pairs, maxlen=max(_JUDGED_STEPS, len(pairs)))

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
        if self._cost is None:
            raise NotFittedError(_NOT_FITTED)
        return ModelState(
            coefficients_s=self._cost.coefficients_s,
            speed=self._speed.factor,
            largest_prefill_tokens=self.largest_prefill_tokens,
            decode_only=self._decode_only.learned(self._scaled),
            mixed=self._mixed.learned(self._scaled),
            mape=self.mape,
            r_squared=self.r_squared,
            provenance=self.provenance,
        )

    @classmethod
    def from_state(cls, state: ModelState) -> StepTimeModel:
        """Return a model that goes on from a state."""
        model = cls()
        model.provenance = state.provenance
        model._decode_only = FadingSums(state.decode_only)
        model._mixed = FadingSums(state.mixed)
        model._speed = MachineSpeed(state.speed)
        model.largest_prefill_tokens = state.largest_prefill_tokens
        model._sizes_seen = SizesSeen.of_gram(state.mixed.gram)
        model._scaled = np.array(state.coefficients_s) * SCALES
        model._cost = StepCost(state.coefficients_s)
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
        if self._cost is None:
            raise NotFittedError(_NOT_FITTED)
        return self._speed.factor * self._cost.seconds(shape)

    def penalty_s(self, shape: BatchShape) -> float:
        """Return what the step's prefill adds to it, seconds.

        Raises:
            NotFittedError: If no step has been learned.
        """
        return self.predict_s(shape) - self.predict_s(shape.without_prefill())

    def largest_prefill(
        self, shape: BatchShape, cached: int, limit_s: float, most: int = MAX_PREFILL_TOKENS
    ) -> int:
        """Return the most new tokens of one more chunk that keep the step within a limit.

        Args:
            shape: The step without that chunk.
            cached: Tokens of the chunk's request computed before, >= 0.
            limit_s: Longest time the step may take, seconds.
            most: The most tokens to return.

        Returns:
            0 if not even one token fits, at most ``MAX_PREFILL_TOKENS``.

        Raises:
            NotFittedError: If no step has been learned.
            ConfigError: If ``cached`` is negative.
        """
        if self._cost is None:
            raise NotFittedError(_NOT_FITTED)
        if cached < 0:
            raise ConfigError(f"cached must be >= 0, got {cached}")
        fits = self._cost.largest_prefill(shape, cached, limit_s / self._speed.factor)
        return min(fits, most)

    def knows_size(self, tokens: int) -> bool:
        """Return whether mixed steps of about so many tokens were learned from.

        Between others it is a guess: time jumps where a kernel's tiles or a CUDA graph end.
        """
        return self._sizes_seen.knows(tokens)

    def _sums_of(self, shape: BatchShape) -> FadingSums:
        return self._mixed if shape.prefills else self._decode_only

    def _sum_up(self) -> None:
        decode_only = self._decode_only.learned(self._scaled)
        mixed = self._mixed.learned(self._scaled)
        gram = decode_only.gram + mixed.gram
        gram.flat[:: len(TERMS) + 1] += RIDGE_WEIGHTS * (_RIDGE * gram[0, 0] / self.samples)
        self._gram, self._moment = gram, decode_only.moment + mixed.moment
        self._is_solved = False

    def _solve(self, *, most_pivots: int) -> None:
        solution = improve(self._gram, self._moment, self._scaled, most_pivots=most_pivots)
        self._scaled, self._is_solved = solution.values, solution.is_optimal
        self._cost = StepCost((self._scaled / SCALES).tolist())


def load_model(path: str | os.PathLike[str]) -> StepTimeModel:
    """Return the model saved in a JSON file.

    Raises:
        ModelFileError: If it cannot be read, or a field is foreign, missing or invalid; the
            message names the file and the field.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # no text, or a null byte in the name
        raise ModelFileError(f"cannot read the model {os.fspath(path)}: {error}") from error
    return StepTimeModel.from_state(state_from_json(text, source=os.fspath(path)))


def _check_sample(shape: BatchShape, seconds: float) -> None:
    if not shape.tokens:
        raise ConfigError("a step without tokens has no time to learn")
    if not (math.isfinite(seconds) and seconds > 0.0):
        raise ConfigError(f"a step's time must be finite and > 0 seconds, got {seconds}")
