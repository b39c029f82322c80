"""Fit measured steps: the penalty curve, and the step-time model with how far it can be trusted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from vllm_penalty_sched.calibration.grid import CURVE_SERIES
from vllm_penalty_sched.errors import ConfigError
from vllm_penalty_sched.learning.curve import PenaltyCurve
from vllm_penalty_sched.learning.latency import StepTimeModel

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vllm_penalty_sched.batch import BatchShape
    from vllm_penalty_sched.calibration.samples import Sample

FOLDS = 5

# Upper ends of the ranges in which errors are counted; one more range lies above the last.
_PREFILL_ENDS = (0, 64, 256, 512, 1024, 2048)
_DECODE_ENDS = (0, 8, 32, 128)
_CACHED_ENDS = (0, 1024, 4096, 16_384)


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveFit:
    """The penalty curve of one machine.

    Attributes:
        curve: Fitted to the median time of each composition; its R^2 is over these medians.
        median_ratios: Prefill ratio of each composition.
        medians_s: Its median time.
        ratios: Prefill ratio of each measurement.
        seconds: Its time.
        r_squared_all: Coefficient of determination of the curve over all measurements: what it
            leaves over is the machine's noise as well.
        most_prefill_tokens: Of a measured step; the curve says nothing about larger ones.
    """

    curve: PenaltyCurve
    median_ratios: tuple[float, ...]
    medians_s: tuple[float, ...]
    ratios: tuple[float, ...]
    seconds: tuple[float, ...]
    r_squared_all: float | None
    most_prefill_tokens: int

    def to_json(self) -> dict[str, object]:
        """Return the figures, times in milliseconds."""
        return {
            "form": "curve",
            "samples": len(self.ratios),
            "compositions": len(self.medians_s),
            "coefficients_ms": [1e3 * value for value in self.curve.coefficients_s],
            "r_squared": self.curve.r_squared,
            "r_squared_all": self.r_squared_all,
            "penalty_ms": 1e3 * self.curve.penalty_s,
            "ratio_range": [min(self.ratios), max(self.ratios)],
            "most_prefill_tokens": self.most_prefill_tokens,
        }

    def __str__(self) -> str:
        low, high = min(self.ratios), max(self.ratios)
        reaches_both = low == 0.0 and high == 1.0
        note = "" if reaches_both else " (extrapolated: no step at r = 0, or none at r = 1)"
        over_all = "unknown" if self.r_squared_all is None else f"{self.r_squared_all:.4f}"
        return (
            f"f(r) = {_polynomial_ms(self.curve.coefficients_s)} ms\n"
            f"R^2 = {self.curve.r_squared:.4f} over the medians of {len(self.medians_s)} "
            f"compositions, {over_all} over all {len(self.ratios)} measurements\n"
            f"f(1) - f(0) = {1e3 * self.curve.penalty_s:.3f} ms{note}\n"
            f"measured from r = {low:.3f} to {high:.3f} with at most {self.most_prefill_tokens} "
            "prefill tokens in a step; longer chunks have r near 1 too, and f(r) is not about them"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRow:
    """The errors in one range of steps.

    Attributes:
        of: What the range is about.
        within: The range.
        samples: Steps in it.
        mape: Mean absolute relative error.
        bias: Mean relative error, above 0 if the model predicts too long.
    """

    of: str
    within: str
    samples: int
    mape: float
    bias: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFit:
    """A step-time model of one machine, and its errors on steps that it was not fitted to.

    Attributes:
        model: Fitted to all steps; its figures of merit are those of ``predicted_s``.
        measured_s: Time of each step.
        predicted_s: What a model fitted without that step's composition predicts for it.
        r_squared: Coefficient of determination of ``predicted_s``; None if all times are equal.
        mape: Mean absolute relative error of ``predicted_s``.
        bias: Mean relative error of ``predicted_s``.
        errors: Where it errs.
    """

    model: StepTimeModel
    measured_s: tuple[float, ...] = field(repr=False)
    predicted_s: tuple[float, ...] = field(repr=False)
    r_squared: float | None
    mape: float
    bias: float
    errors: tuple[ErrorRow, ...]

    def to_json(self) -> dict[str, object]:
        """Return the figures; coefficients in milliseconds per unit of their term."""
        return {
            "form": "step",
            "samples": len(self.measured_s),
            "folds": FOLDS,
            "r_squared": self.r_squared,
            "mape": self.mape,
            "bias": self.bias,
            "coefficients_ms": {
                name: 1e3 * value for name, value in self.model.coefficients().items()
            },
            "errors": [
                {
                    "of": row.of,
                    "within": row.within,
                    "samples": row.samples,
                    "mape": row.mape,
                    "bias": row.bias,
                }
                for row in self.errors
            ],
        }

    def __str__(self) -> str:
        r_squared = "unknown" if self.r_squared is None else f"{self.r_squared:.4f}"
        lines = [
            f"step-time model over {len(self.measured_s)} steps, {FOLDS}-fold cross-validation:",
            f"R^2 = {r_squared}, MAPE {self.mape:.2%}, bias {self.bias:+.2%}",
            "",
            f"{'steps by':<16}{'range':>14}{'steps':>8}{'MAPE':>9}{'bias':>9}",
        ]
        lines += [
            f"{row.of:<16}{row.within:>14}{row.samples:>8}{row.mape:>9.2%}{row.bias:>+9.2%}"
            for row in self.errors
        ]
        return "\n".join(lines)


def fit_curve(samples: Sequence[Sample], *, degree: int = 2) -> CurveFit:
    """Fit f(r) to the steps of the published set-up, the series ``curve``.

    Each composition counts once, with the median of its measurements: these are rounds through
    all compositions, so that a machine that is slower for a while slows all of them down, and a
    stall none.

    Args:
        samples: Measured steps; those of other series are left out.
        degree: Degree of the polynomial, >= 1.

    Raises:
        ConfigError: If that series has not more than ``degree`` different prefill ratios.
    """
    chosen = [sample for sample in samples if sample.series == CURVE_SERIES]
    ratios = [sample.shape.prefill_ratio for sample in chosen]
    if len(set(ratios)) <= degree:
        raise ConfigError(
            f"a curve of degree {degree} needs more than {degree} different prefill ratios in the "
            f"series {CURVE_SERIES!r}, got {len(set(ratios))}"
        )
    times_s: dict[Hashable, list[float]] = defaultdict(list)
    ratio_of: dict[Hashable, float] = {}
    for sample in chosen:
        composition = sample.shape.prefills, sample.shape.decode_tokens
        times_s[composition].append(sample.seconds)
        ratio_of[composition] = sample.shape.prefill_ratio
    medians_s = [float(np.median(times_s[composition])) for composition in ratio_of]
    curve = PenaltyCurve.fit(list(ratio_of.values()), medians_s, degree=degree)
    seconds = np.array([sample.seconds for sample in chosen])
    predicted_s = np.array([curve.predict_s(ratio) for ratio in ratios])
    return CurveFit(
        curve=curve,
        median_ratios=tuple(ratio_of.values()),
        medians_s=tuple(medians_s),
        ratios=tuple(ratios),
        seconds=tuple(seconds.tolist()),
        r_squared_all=_r_squared(seconds, predicted_s),
        most_prefill_tokens=max(sample.shape.prefill_tokens for sample in chosen),
    )


def fit_step_time(samples: Sequence[Sample], *, seed: int = 0) -> StepFit:
    """Fit the step-time model to all steps, and judge it by cross-validation.

    Steps of the same composition (chunks, decodes, and their mean context to a factor of two)
    stay in one fold: a step is never predicted by a model that has seen its repetition.

    Args:
        samples: Measured steps of every series.
        seed: Of the division into folds.

    Raises:
        ConfigError: If there are fewer than ``FOLDS`` different compositions, or a sample is
            invalid.
    """
    shapes = [sample.shape for sample in samples]
    measured_s = np.array([sample.seconds for sample in samples], dtype=np.float64)
    folds = _folds([_composition(shape) for shape in shapes], seed=seed)
    model = StepTimeModel().fit(shapes, measured_s.tolist())
    predicted_s = np.empty_like(measured_s)
    for fold in range(FOLDS):
        inside, outside = np.flatnonzero(folds == fold), np.flatnonzero(folds != fold)
        judged = StepTimeModel().fit([shapes[i] for i in outside], measured_s[outside].tolist())
        predicted_s[inside] = [judged.predict_s(shapes[i]) for i in inside]
    model.judge_by(predicted_s.tolist(), measured_s.tolist())
    relative = predicted_s / measured_s - 1.0
    return StepFit(
        model=model,
        measured_s=tuple(measured_s.tolist()),
        predicted_s=tuple(predicted_s.tolist()),
        r_squared=_r_squared(measured_s, predicted_s),
        mape=float(np.mean(np.abs(relative))),
        bias=float(np.mean(relative)),
        errors=_error_rows(shapes, relative),
    )


def _r_squared(measured_s: NDArray[np.float64], predicted_s: NDArray[np.float64]) -> float | None:
    variance = float(np.var(measured_s))
    return 1.0 - float(np.mean((predicted_s - measured_s) ** 2)) / variance if variance else None


def _composition(shape: BatchShape) -> Hashable:
    mean_context = shape.decode_context // max(1, shape.decode_seqs)
    return shape.prefills, shape.decode_seqs, mean_context.bit_length()


def _folds(compositions: Sequence[Hashable], *, seed: int) -> NDArray[np.int64]:
    different = list(dict.fromkeys(compositions))
    if len(different) < FOLDS:
        raise ConfigError(
            f"{FOLDS}-fold cross-validation needs steps of at least {FOLDS} different "
            f"compositions, got {len(different)}"
        )
    shuffled = np.random.default_rng(seed).permutation(len(different))
    fold_of = {different[place]: turn % FOLDS for turn, place in enumerate(shuffled)}
    return np.array([fold_of[composition] for composition in compositions])


def _error_rows(
    shapes: Sequence[BatchShape], relative: NDArray[np.float64]
) -> tuple[ErrorRow, ...]:
    prefill = np.array([shape.prefill_tokens for shape in shapes])
    decodes = np.array([shape.decode_seqs for shape in shapes])
    cached = np.array([sum(tokens for _, tokens in shape.prefills) for shape in shapes])
    mixed = prefill > 0
    return (
        *_rows_by("prefill tokens", prefill, _PREFILL_ENDS, relative),
        *_rows_by("decodes", decodes, _DECODE_ENDS, relative),
        *_rows_by("cached tokens", cached[mixed], _CACHED_ENDS, relative[mixed]),
    )


def _rows_by(
    of: str,
    counts: NDArray[np.int64],
    ends: Sequence[int],
    relative: NDArray[np.float64],
) -> list[ErrorRow]:
    places = np.searchsorted(ends, counts)
    return [
        ErrorRow(
            of=of,
            within=_range_name(ends, place),
            samples=int(np.sum(places == place)),
            mape=float(np.mean(np.abs(relative[places == place]))),
            bias=float(np.mean(relative[places == place])),
        )
        for place in sorted(set(places.tolist()))
    ]


def _range_name(ends: Sequence[int], place: int) -> str:
    if place == 0:
        return str(ends[0])
    if place == len(ends):
        return f"over {ends[-1]}"
    return f"{ends[place - 1] + 1}-{ends[place]}"


def _polynomial_ms(coefficients_s: Sequence[float]) -> str:
    powers = ["", " r", *(f" r^{power}" for power in range(2, len(coefficients_s)))]
    terms = list(zip(coefficients_s, powers, strict=True))[::-1]
    text = f"{1e3 * terms[0][0]:.3f}{terms[0][1]}"
    for value, power in terms[1:]:
        text += f" {'-' if value < 0 else '+'} {1e3 * abs(value):.3f}{power}"
    return text
