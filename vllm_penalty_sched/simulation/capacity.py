"""Search for the highest arrival rate at which enough requests are served well."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_penalty_sched.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

# The search gives up beyond these multiples of the trace's own rate.
LEAST_RATE, MOST_RATE = 2.0**-6, 2.0**6


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One rate that was tried.

    Attributes:
        rate: Multiple of the trace's own rate.
        share: Share of the requests that were served well, 0 to 1; a lower bound if it was not
            enough.
        is_met: Whether it was enough.
    """

    rate: float
    share: float
    is_met: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What a search found.

    Attributes:
        rate: Highest rate that met the target; 0 if not even the lowest that was tried did.
        share: Share served well at that rate.
        probes: Every rate that was tried, in order.
    """

    rate: float
    share: float
    probes: tuple[Probe, ...]


def find_capacity(
    share_at: Callable[[float], float],
    *,
    target: float,
    tolerance: float,
    least_rate: float | None = None,
    first_rate: float = 1.0,
) -> Capacity:
    """Bisect for the highest rate at which a share meets a target.

    The rate is bracketed by doubling or halving from ``first_rate``, then bisected. The share is
    taken to fall with the rate; where it does not quite, the result is one of several rates at the
    border.

    Args:
        share_at: Returns the share served well at a rate.
        target: Share to meet, in (0, 1].
        tolerance: The search ends when the rate that failed is at most ``1 + tolerance`` times
            the one that did not, > 0.
        least_rate: A rate below which the result does not matter: it is tried first, and the
            search ends if it fails.
        first_rate: A rate to begin with, near what is to be found: rates far above cost most.

    Raises:
        ConfigError: If an argument breaks its rule.
    """
    if not 0.0 < target <= 1.0:
        raise ConfigError(f"target must be a share in (0, 1], got {target}")
    if not 0.0 < tolerance <= 1.0:
        raise ConfigError(f"tolerance must be a share in (0, 1], got {tolerance}")
    if not LEAST_RATE <= first_rate <= MOST_RATE:
        raise ConfigError(
            f"first_rate must be between {LEAST_RATE} and {MOST_RATE:.0f}, got {first_rate}"
        )
    probes: list[Probe] = []

    def is_met(rate: float) -> bool:
        share = share_at(rate)
        probes.append(Probe(rate=rate, share=share, is_met=share >= target))
        return probes[-1].is_met

    if least_rate is None:
        met, failed = _bracket(is_met, first_rate)
    elif is_met(least_rate):
        met, failed = _bracket_above(is_met, least_rate)
    else:
        return Capacity(rate=0.0, share=probes[0].share, probes=tuple(probes))
    met = _bisect(is_met, met, failed, tolerance=tolerance)
    share = next((probe.share for probe in probes if probe.rate == met), 0.0)
    return Capacity(rate=met, share=share, probes=tuple(probes))


def _bracket(is_met: Callable[[float], bool], rate: float) -> tuple[float, float]:
    """Return a rate that meets the target, 0 if none does, and one that fails, if any does."""
    if is_met(rate):
        return _bracket_above(is_met, rate)
    while rate > LEAST_RATE:
        rate /= 2.0
        if is_met(rate):
            return rate, 2.0 * rate
    return 0.0, rate


def _bisect(
    is_met: Callable[[float], bool], met: float, failed: float, *, tolerance: float
) -> float:
    while failed > met > 0.0 and failed > (1.0 + tolerance) * met:
        middle = (met * failed) ** 0.5
        if is_met(middle):
            met = middle
        else:
            failed = middle
    return met


def _bracket_above(is_met: Callable[[float], bool], met: float) -> tuple[float, float]:
    while met < MOST_RATE:
        if not is_met(2.0 * met):
            return met, 2.0 * met
        met *= 2.0
    return met, met
