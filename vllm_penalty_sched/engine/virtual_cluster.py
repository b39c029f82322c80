"""Several virtual engines on one virtual time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from itertools import count

from vllm_penalty_sched.engine.virtual_engine import VirtualEngine

_Act = Callable[[], None]


class VirtualCluster:
    """Lets the engine go on whose clock is furthest behind, so that causes precede effects.

    What is sent to an engine reaches it between two of its steps, as EngineCore takes it in.
    """

    def __init__(self, engines: Sequence[VirtualEngine]) -> None:
        self.engines = tuple(engines)
        self._inboxes: list[list[tuple[float, int, _Act]]] = [[] for _ in engines]
        self._sent = count()

    @property
    def now_s(self) -> float:
        """Virtual time of the engine that is furthest ahead, seconds."""
        return max(engine.now_s for engine in self.engines)

    @property
    def next_s(self) -> float:
        """Virtual time at which something happens next; infinite if nothing is left to do."""
        return min(self._next_s(place) for place in range(len(self.engines)))

    def undelivered(self, place: int) -> int:
        """Return how many things sent to an engine have not reached it yet."""
        return len(self._inboxes[place])

    def send(self, place: int, at_s: float, act: _Act) -> None:
        """Let something happen at an engine, at a time or as soon after as it can."""
        heapq.heappush(self._inboxes[place], (at_s, next(self._sent), act))

    def step(self) -> None:
        """Let the engine that is next take in what has arrived, and step once.

        ``next_s`` must be finite.
        """
        place = min(range(len(self.engines)), key=self._next_s)
        engine, inbox = self.engines[place], self._inboxes[place]
        engine.now_s = self._next_s(place)
        while inbox and inbox[0][0] <= engine.now_s:
            heapq.heappop(inbox)[2]()
        if engine.is_busy:
            engine.step()

    def _next_s(self, place: int) -> float:
        engine, inbox = self.engines[place], self._inboxes[place]
        if engine.is_busy:
            return engine.now_s
        return max(engine.now_s, inbox[0][0]) if inbox else math.inf
