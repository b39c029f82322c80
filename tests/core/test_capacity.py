from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_penalty_sched.errors import ConfigError
from vllm_penalty_sched.simulation.capacity import LEAST_RATE, MOST_RATE, find_capacity


def falling_to_zero_at(border: float) -> Callable[[float], float]:
    return lambda rate: max(0.0, 1.0 - 0.1 * rate / border)


@given(st.floats(2 * LEAST_RATE, 0.5 * MOST_RATE), st.floats(0.005, 0.5))
def test_the_highest_rate_that_meets_the_target_is_found_to_the_tolerance(
    border: float, tolerance: float
) -> None:
    found = find_capacity(falling_to_zero_at(border), target=0.9, tolerance=tolerance)

    assert found.rate <= border * (1 + 1e-9)
    assert found.rate * (1 + tolerance) >= border * (1 - 1e-9)
    assert found.share == falling_to_zero_at(border)(found.rate)


def test_every_probe_is_told_with_what_it_found() -> None:
    found = find_capacity(falling_to_zero_at(1.6), target=0.9, tolerance=0.3)

    assert [(probe.rate, probe.is_met) for probe in found.probes] == [
        (1.0, True),
        (2.0, False),
        (pytest.approx(2**0.5), True),
        (pytest.approx(2**0.75), False),
    ]
    assert found.rate == pytest.approx(2**0.5)


def test_a_target_that_no_rate_meets_gives_zero_after_the_least_rate() -> None:
    found = find_capacity(lambda _: 0.5, target=0.9, tolerance=0.1)

    assert (found.rate, found.share) == (0.0, 0.0)
    assert found.probes[-1].rate == LEAST_RATE


def test_a_target_that_every_rate_meets_gives_the_most_rate() -> None:
    found = find_capacity(lambda _: 1.0, target=0.9, tolerance=0.1)

    assert found.rate == MOST_RATE


def test_below_a_rate_that_does_not_matter_nothing_is_searched() -> None:
    found = find_capacity(falling_to_zero_at(0.7), target=0.9, tolerance=0.1, least_rate=0.8)

    assert found.rate == 0.0
    assert [probe.rate for probe in found.probes] == [0.8]


@given(st.floats(0.5, 20.0))
def test_from_a_rate_that_matters_the_search_goes_up(border: float) -> None:
    found = find_capacity(falling_to_zero_at(border), target=0.9, tolerance=0.1, least_rate=0.4)

    assert found.rate <= border * (1 + 1e-9) <= found.rate * 1.1 * (1 + 2e-9)
    assert len({probe.rate for probe in found.probes}) == len(found.probes)


def test_a_search_that_begins_near_the_border_needs_few_probes() -> None:
    found = find_capacity(falling_to_zero_at(0.15), target=0.9, tolerance=0.1, first_rate=0.12)

    assert [probe.rate for probe in found.probes][:2] == [0.12, 0.24]
    assert found.rate <= 0.15 <= found.rate * 1.1


@pytest.mark.parametrize("first_rate", [0.0, -1.0, 1e9, float("nan")])
def test_a_search_cannot_begin_at_a_rate_beyond_its_bounds(first_rate: float) -> None:
    with pytest.raises(ConfigError, match="first_rate must be between"):
        find_capacity(lambda _: 1.0, target=0.9, tolerance=0.1, first_rate=first_rate)


@pytest.mark.parametrize(
    ("target", "tolerance", "message"),
    [(0.0, 0.1, "target"), (1.1, 0.1, "target"), (0.9, 0.0, "tolerance"), (0.9, 2.0, "tolerance")],
)
def test_a_search_that_cannot_end_well_is_refused(
    target: float, tolerance: float, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"{message} must be a share in"):
        find_capacity(lambda _: 1.0, target=target, tolerance=tolerance)
