"""Which prompts to prefill first, so that as many as possible get their first token in time."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Protocol


class Job(Protocol):
    """A prompt that waits to be prefilled.

    Attributes:
        tokens: Tokens left to compute, cached ones not counted, >= 1.
        deadline_s: When its first token is due, seconds.
    """

    tokens: int
    deadline_s: float


def split_by_deadline(
    jobs: Sequence[Job], *, now_s: float, tokens_per_s: float
) -> tuple[list[int], list[int]]:
    """Choose the most jobs that can all be in time, one after the other.

    The earliest deadline goes first; whenever that makes a job late, the longest one so far is
    given up. No other choice has more jobs in time (Moore and Hodgson). Against shortest-first,
    which under overload is nearly as good, it also gives up nobody while all can be in time.

    Args:
        jobs: By deadline, ascending.
        now_s: When the first of them starts.
        tokens_per_s: Prefill speed; infinite if unknown.

    Returns:
        ``(in_time, given_up)``: indices into ``jobs``, each ascending.

    References:
        Moore, "An n Job, One Machine Sequencing Algorithm for Minimizing the Number of Late Jobs",
        Management Science 15(1), 1968.
    """
    longest: list[tuple[float, int]] = []
    given_up: list[int] = []
    ends_s = now_s
    for index, job in enumerate(jobs):
        duration_s = job.tokens / tokens_per_s
        ends_s += duration_s
        heapq.heappush(longest, (-duration_s, index))
        while longest and ends_s > job.deadline_s:
            negative_s, late = heapq.heappop(longest)
            ends_s += negative_s
            given_up.append(late)
    return sorted(index for _, index in longest), sorted(given_up)
