"""What an error in the plugin's own logic comes to: it is counted, and never kills the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger("vllm.penalty_sched")

# So many steps in a row in which our own logic failed end the steering, for so long.
_MOST_FAULTY_STEPS, _SUSPENDED_S = 8, 60.0

STRICT_VARIABLE = "PENALTY_SCHED_STRICT"
"""Environment variable that makes the plugin's own errors fatal, for tests and debugging."""


class FaultGuard:
    """Runs the plugin's own logic; a scheduler built without ``__init__`` has its defaults too.

    Attributes:
        faults: Errors so far.
    """

    faults = 0
    _known_faults = _faulty_steps = 0
    _suspended_s = 0.0
    _is_strict = False

    @property
    def _is_suspended(self) -> bool:
        """Whether the scheduling is left to vLLM, as step after step failed."""
        return self._faulty_steps >= _MOST_FAULTY_STEPS

    def _guarded(self, call: Callable[..., Any], *args: Any) -> Any:
        """Run the plugin's own logic; an error of ours must not kill a serving engine."""
        try:
            return call(*args)
        except Exception:
            if self._is_strict:
                raise
            self.faults += 1
            if self.faults == 1:
                log.exception(
                    "penalty_sched failed; this step goes on as in stock vLLM. Further failures "
                    "are counted and not logged"
                )
            return None

    def _count_faulty_steps(self, now_s: float) -> None:
        """Leave the scheduling to vLLM for a while once every step fails.

        A plan that does not hear of what came of it would keep prefills waiting without end.
        """
        if self._is_suspended:
            if 0.0 <= now_s - self._suspended_s < _SUSPENDED_S:
                return
            self._faulty_steps = 0
        elif self.faults > self._known_faults:
            self._faulty_steps += 1
            if self._is_suspended:
                self._suspended_s = now_s
                log.error(
                    "penalty_sched failed in %d steps in a row (%d failures so far): requests are "
                    "scheduled as in stock vLLM for %.0f s",
                    self._faulty_steps,
                    self.faults,
                    _SUSPENDED_S,
                )
        else:
            self._faulty_steps = 0
        self._known_faults = self.faults
