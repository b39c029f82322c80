"""The penalty curve f(r): a step's time as a polynomial in its prefill ratio."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_penalty_sched.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class PenaltyCurve:
    """f(r), the time between tokens against the prefill ratio r.

    It describes steps with few prefill tokens: r saturates (at 8 decodes, 512 and 8,192 prefill
    tokens give 0.985 and 0.999), so that chunks are sized with ``StepTimeModel`` instead.

    Attributes:
        coefficients_s: From the constant term upwards, seconds.
        r_squared: Share of the variance that the fit explains; at most 1.
    """

    coefficients_s: tuple[float, ...]
    r_squared: float

    @classmethod
    def published(cls) -> PenaltyCurve:
        """Return f(r) = 1.63 r^2 + 1.39 r + 14.52 ms: one GPU, 8 concurrent requests, R^2 0.90."""
        return cls(coefficients_s=(14.52e-3, 1.39e-3, 1.63e-3), r_squared=0.90)

    @classmethod
    def fit(
        cls, ratios: Sequence[float], seconds: Sequence[float], *, degree: int = 2
    ) -> PenaltyCurve:
        """Fit by ordinary least squares (scikit-learn).

        Args:
            ratios: Prefill ratios, shape (n,), each in [0, 1].
            seconds: Step times, shape (n,), each finite and positive.
            degree: Degree of the polynomial, >= 1.

        Raises:
            ConfigError: If the samples are not n > degree valid pairs.
        """
        r, times_s = _checked_samples(ratios, seconds, degree)
        from sklearn.linear_model import LinearRegression

        powers = r[:, None] ** np.arange(1, degree + 1)
        line = LinearRegression().fit(powers, times_s)
        return cls(
            coefficients_s=(float(line.intercept_), *map(float, line.coef_)),
            r_squared=float(line.score(powers, times_s)),
        )

    def predict_s(self, r: float) -> float:
        """Return f(r), seconds.

        Raises:
            ConfigError: If ``r`` is outside [0, 1].
        """
        if not 0.0 <= r <= 1.0:
            raise ConfigError(f"a prefill ratio must be in [0, 1], got {r}")
        total = 0.0
        for coefficient in reversed(self.coefficients_s):
            total = total * r + coefficient
        return total

    @property
    def penalty_s(self) -> float:
        """f(1) - f(0): what disaggregating prefill from decode would give back, seconds."""
        return self.predict_s(1.0) - self.predict_s(0.0)

    def scaled_to(self, decode_only_s: float) -> PenaltyCurve:
        """Return the same form with f(0) = ``decode_only_s``, seconds."""
        factor = decode_only_s / self.predict_s(0.0)
        return PenaltyCurve(
            coefficients_s=tuple(factor * c for c in self.coefficients_s),
            r_squared=self.r_squared,
        )


def _checked_samples(
    ratios: Sequence[float], seconds: Sequence[float], degree: int
) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], ...]:
    r = np.asarray(ratios, dtype=np.float64)
    times_s = np.asarray(seconds, dtype=np.float64)
    if degree < 1:
        raise ConfigError(f"degree must be >= 1, got {degree}")
    if r.ndim != 1 or r.shape != times_s.shape or len(r) <= degree:
        raise ConfigError(
            f"a curve of degree {degree} needs more than {degree} pairs, got shapes "
            f"{r.shape} and {times_s.shape}"
        )
    if not np.all((r >= 0.0) & (r <= 1.0)):
        raise ConfigError("every prefill ratio must be in [0, 1]")
    if not np.all(np.isfinite(times_s) & (times_s > 0.0)):
        raise ConfigError("every step time must be finite and > 0 seconds")
    return r, times_s
