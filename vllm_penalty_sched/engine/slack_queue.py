"""A waiting queue for vLLM that serves the prompts which can still be in time first."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, count, groupby
from operator import attrgetter
from typing import TYPE_CHECKING

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import RequestStatus

from vllm_penalty_sched.engine.kv_loads import READY
from vllm_penalty_sched.ordering import split_by_deadline

if TYPE_CHECKING:
    from vllm.v1.request import Request

# What is owed of the prompt tokens that go ahead of them: to late prompts, which bounds their wait,
# and to those without a deadline, which nobody's loose deadline is to outrank.
LATE_SHARE, FREE_SHARE = 0.01, 0.5
# So many prompts are ranked anew in every step, more of them every few steps, and of all that wait
# those that are due first: a step's share of the work is bounded.
_RANKED_EACH_STEP, _MOST_RANKED = 32, 256

_priority = attrgetter("priority")


@dataclass(slots=True, eq=False)
class _Entry:
    """A waiting request; its place in ``home`` is by priority, deadline and arrival."""

    priority: int
    deadline_s: float
    arrival: int
    request: Request
    tokens: int
    home: list[_Entry]
    is_free: bool


_place = attrgetter("priority", "deadline_s", "arrival")


class SlackQueue(RequestQueue):  # type: ignore[misc]  # vLLM is not type-checked here
    """Serves preempted requests first, then prompts with their deadline ahead, then the others.

    Within one priority (there is only one under the fcfs policy), prompts with their deadline ahead
    go like this: by deadline, the largest set that can be in time one after the other; then those
    given up for it. The others, late or without a deadline, go as they arrived. The oldest of the
    late ones goes first once many times its own tokens went ahead of it, so that it is served under
    any load, and the oldest of those that never had a deadline once twice its own tokens did.

    vLLM uses a waiting queue through ``RequestQueue`` alone (0.28-0.33): this one takes its place.
    """

    def __init__(
        self,
        *,
        deadline_s: Callable[[Request], float],
        tokens_left: Callable[[Request], int],
        by_priority: bool,
    ) -> None:
        """Set up an empty queue.

        Args:
            deadline_s: When a request that arrives now is to have its first token, seconds on the
                clock of ``rank``; infinite if it has no TTFT SLO.
            tokens_left: Prompt tokens that must be computed for it.
            by_priority: Whether vLLM's priority policy is in force; the order breaks its ties.
        """
        self._deadline_s = deadline_s
        self._tokens_left = tokens_left
        self._by_priority = by_priority
        self._arrivals = count()
        self._entries: dict[str, _Entry] = {}
        self._preempted: list[_Entry] = []
        self._ahead: list[_Entry] = []
        self._others: list[_Entry] = []
        self._ranked: deque[_Entry] = deque()  # those of _ahead, in the order of service
        self._popped: dict[str, _Entry] = {}
        self._free: deque[_Entry] = deque()  # those of _others that never had a deadline
        self._owed_tokens = {LATE_SHARE: 0.0, FREE_SHARE: 0.0}
        self._calls_until_ranked = 0

    def rank(
        self, now_s: float, tokens_per_s: float, *, started_tokens: int, latency_s: float
    ) -> None:
        """Bring the order up to date; to be called before each step.

        Args:
            now_s: The time.
            tokens_per_s: Present prefill speed; infinite if unknown.
            started_tokens: Tokens that admitted prompts, which go first, still have to prefill.
            latency_s: From scheduling a prompt's last token to the first token's arrival.
        """
        self._popped.clear()
        self._calls_until_ranked -= 1
        if self._calls_until_ranked > 0 or not self._ahead:
            return
        earliest_s = now_s + latency_s
        self._retire(earliest_s)
        nearest = self._ahead[:_MOST_RANKED]
        self._calls_until_ranked = len(nearest) // _RANKED_EACH_STEP
        ranked: list[_Entry] = []
        start_s = earliest_s + started_tokens / tokens_per_s
        for _, of_one_priority in groupby(nearest, key=_priority):
            entries = list(of_one_priority)
            in_time, given_up = split_by_deadline(entries, now_s=start_s, tokens_per_s=tokens_per_s)
            ranked += [entries[index] for index in chain(in_time, given_up)]
            start_s += sum(entries[index].tokens for index in in_time) / tokens_per_s
        self._ranked = deque(ranked + self._ahead[_MOST_RANKED:])

    @property
    def tokens_in_time(self) -> int:
        """Tokens of those that go before a prompt that arrives now, with a later deadline."""
        return sum(entry.tokens for queue in (self._preempted, self._ahead) for entry in queue)

    def add_request(self, request: Request) -> None:
        """Add a request that arrives now."""
        deadline_s = self._deadline_s(request)
        home = self._ahead if math.isfinite(deadline_s) else self._others
        self._add(request, deadline_s, next(self._arrivals), home)

    def prepend_request(self, request: Request) -> None:
        """Take back a request that was popped in this step, or take in a preempted one."""
        entry = self._popped.pop(request.request_id, None)
        is_preempted = request.status is RequestStatus.PREEMPTED
        if is_preempted and (entry is None or entry.home is not self._preempted):
            # vLLM preempts the youngest first and prepends each: the last one is the oldest.
            self._add(request, -math.inf, -next(self._arrivals), self._preempted)
        elif entry is not None:
            self._count(entry, is_back=True)
            self._insert(entry, is_first=True)
        else:
            self.add_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Prepend each; the last one is served first."""
        for request in requests:
            self.prepend_request(request)

    def peek_request(self) -> Request:
        """Return the request to serve next.

        Raises:
            IndexError: If the queue is empty.
        """
        return self._first().request

    def pop_request(self) -> Request:
        """Take out the request to serve next.

        Raises:
            IndexError: If the queue is empty.
        """
        entry = self._first()
        self._count(entry)
        self._remove(entry)
        self._popped[entry.request.request_id] = entry
        return entry.request

    def remove_request(self, request: Request) -> None:
        """Take out a request wherever it stands.

        Raises:
            ValueError: If it is not in the queue.
        """
        entry = self._entries.get(request.request_id)
        if entry is None:
            raise ValueError(f"request {request.request_id} is not in the queue")
        self._remove(entry)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Take out those of the requests that are in the queue."""
        gone = {
            id(entry)
            for request in requests
            if (entry := self._entries.pop(request.request_id, None)) is not None
        }
        for queue in (self._preempted, self._ahead, self._others):
            queue[:] = [entry for entry in queue if id(entry) not in gone]
        self._ranked = deque(entry for entry in self._ranked if id(entry) not in gone)
        self._free = deque(entry for entry in self._free if id(entry) not in gone)

    def __bool__(self) -> bool:
        """Return whether anything waits."""
        return bool(self._entries)

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests in the order of service."""
        if not self._entries:
            return
        first = self._first()
        yield first.request
        # Of equal priorities, merge takes from the earlier list first.
        for entry in heapq.merge(self._preempted, self._ranked, self._others, key=_priority):
            if entry is not first:
                yield entry.request

    def _first(self) -> _Entry:
        heads = [queue[0] for queue in (self._preempted, self._ranked, self._others) if queue]
        if not heads:
            raise IndexError("peek from an empty queue")
        first = min(heads, key=_priority)  # of equals the earliest
        if first.home is self._ahead and self._others:
            for share, oldest in self._oldest_of_the_others():
                if oldest.priority == first.priority and self._owed_tokens[share] >= oldest.tokens:
                    return oldest
        return first

    def _oldest_of_the_others(self) -> Iterator[tuple[float, _Entry]]:
        """Yield who goes first by what is owed, and of which share."""
        if self._free:
            yield FREE_SHARE, self._free[0]
        yield LATE_SHARE, self._others[0]

    def _count(self, entry: _Entry, *, is_back: bool = False) -> None:
        """Take in who went ahead of the others, was one of them, or did not go after all."""
        tokens = -entry.tokens if is_back else entry.tokens
        if entry.home is not self._others and not (self._others and entry.request.status in READY):
            return
        for share, owed in self._owed_tokens.items():
            more = -tokens if entry.home is self._others else share * tokens
            self._owed_tokens[share] = max(0.0, owed + more)

    def _retire(self, earliest_s: float) -> None:
        late = [entry for entry in self._ahead if entry.deadline_s < earliest_s]
        if not late:
            return
        # All at once, for bursts.
        self._ahead[:] = [entry for entry in self._ahead if entry.deadline_s >= earliest_s]
        self._ranked = deque(entry for entry in self._ranked if entry.deadline_s >= earliest_s)
        for entry in late:
            entry.deadline_s = math.inf
            entry.home = self._others
        self._others.extend(late)
        self._others.sort(key=_place)

    def _add(self, request: Request, deadline_s: float, arrival: int, home: list[_Entry]) -> None:
        priority = request.priority if self._by_priority else 0
        tokens = max(1, self._tokens_left(request))
        is_free = home is self._others
        self._insert(_Entry(priority, deadline_s, arrival, request, tokens, home, is_free))

    def _insert(self, entry: _Entry, *, is_first: bool = False) -> None:
        self._entries[entry.request.request_id] = entry
        insort(entry.home, entry, key=_place)
        queue = self._ranked if entry.home is self._ahead else self._free
        if entry.home is self._ahead or entry.is_free:
            (queue.appendleft if is_first else queue.append)(entry)

    def _remove(self, entry: _Entry) -> None:
        del self._entries[entry.request.request_id]
        del entry.home[bisect_left(entry.home, _place(entry), key=_place)]
        if entry.home is self._ahead:
            self._ranked.remove(entry)
        elif entry.is_free:
            self._free.remove(entry)
