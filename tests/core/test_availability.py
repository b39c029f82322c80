from __future__ import annotations

from vllm_penalty_sched.disaggregation.availability import Availability


def probe_times_s(availability: Availability, until_s: int) -> list[int]:
    found = []
    for now_s in range(until_s):
        if availability.should_probe(now_s):
            found.append(now_s)
            availability.failed(now_s)
    return found


def test_it_is_up_until_it_fails_and_up_again_once_it_answers() -> None:
    availability = Availability()
    assert availability.is_up
    assert not availability.should_probe(1e9)

    availability.failed(0.0)
    assert not availability.is_up

    availability.succeeded()
    assert availability.is_up
    assert not availability.should_probe(1e9)


def test_it_is_probed_ever_more_seldom_while_it_fails() -> None:
    availability = Availability()
    availability.failed(0.0)

    assert probe_times_s(availability, 130) == [1, 3, 7, 15, 31, 61, 91, 121]


def test_a_probe_that_is_under_way_is_not_repeated() -> None:
    availability = Availability()
    availability.failed(0.0)

    assert [availability.should_probe(now_s) for now_s in (0.5, 1.5, 2.5, 5.0)] == [
        False,
        True,
        False,
        False,
    ]


def test_after_a_recovery_the_wait_starts_afresh() -> None:
    availability = Availability()
    availability.failed(0.0)
    probe_times_s(availability, 20)
    availability.succeeded()

    availability.failed(100.0)

    assert availability.should_probe(101.0)
