from dataclasses import dataclass
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_penalty_sched.ordering import split_by_deadline

SPEED = 100.0


@dataclass(kw_only=True)
class Job:
    tokens: int
    deadline_s: float


jobs_by_deadline = st.lists(
    st.builds(
        Job,
        tokens=st.integers(1, 1000),
        deadline_s=st.floats(-1.0, 30.0, allow_nan=False),
    ),
    max_size=8,
).map(lambda jobs: sorted(jobs, key=lambda job: job.deadline_s))


def are_in_time(jobs: list[Job], now_s: float) -> bool:
    for job in jobs:
        now_s += job.tokens / SPEED
        if now_s > job.deadline_s + 1e-9:
            return False
    return True


@given(jobs_by_deadline, st.floats(0.0, 5.0))
def test_those_chosen_are_in_time_and_no_larger_choice_is(jobs: list[Job], now_s: float) -> None:
    in_time, given_up = split_by_deadline(jobs, now_s=now_s, tokens_per_s=SPEED)

    assert sorted([*in_time, *given_up]) == list(range(len(jobs)))
    assert are_in_time([jobs[index] for index in in_time], now_s)
    assert not any(
        are_in_time([jobs[index] for index in larger], now_s + 1e-6)
        for larger in combinations(range(len(jobs)), len(in_time) + 1)
    )


@given(jobs_by_deadline)
def test_at_unknown_speed_only_what_is_late_already_is_given_up(jobs: list[Job]) -> None:
    _, given_up = split_by_deadline(jobs, now_s=0.0, tokens_per_s=float("inf"))

    assert given_up == [index for index, job in enumerate(jobs) if job.deadline_s < 0.0]


def test_the_longest_is_given_up_for_two_short_ones() -> None:
    jobs = [
        Job(tokens=300, deadline_s=4.0),
        Job(tokens=50, deadline_s=4.2),
        Job(tokens=80, deadline_s=4.2),
    ]

    assert split_by_deadline(jobs, now_s=0.0, tokens_per_s=SPEED) == ([1, 2], [0])


@pytest.mark.parametrize("speed", [SPEED, float("inf")])
def test_nothing_waits(speed: float) -> None:
    assert split_by_deadline([], now_s=0.0, tokens_per_s=speed) == ([], [])
