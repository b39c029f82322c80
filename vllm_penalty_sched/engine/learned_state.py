"""Keep what was learned across restarts, without stopping the engine for it."""

from __future__ import annotations

import atexit
import logging
import threading
from pathlib import Path

from vllm_penalty_sched.errors import ModelFileError
from vllm_penalty_sched.files import write_json
from vllm_penalty_sched.learning.latency import StepTimeModel, load_model
from vllm_penalty_sched.learning.model_state import ModelState, Provenance, state_to_json

log = logging.getLogger("vllm.penalty_sched")

SAVE_PERIOD_S = 30.0
# A young engine learns most in its first seconds: the period starts with this and doubles.
_FIRST_PERIOD_S = 1.0
# A disk that hangs longer does not keep a process from ending.
_LONGEST_WRITE_S = 5.0


def load_state(path: str, provenance: Provenance) -> StepTimeModel | None:
    """Return the state saved earlier on this hardware with this model.

    Args:
        path: The state file; it need not exist.
        provenance: Hardware and model of this engine.

    Returns:
        None if there is no file, or it is of other hardware, another model or another vLLM
        version, or spoiled; with a warning in all cases but the first.
    """
    try:
        if not Path(path).exists():
            return None
        model = load_model(path)
    except (ModelFileError, OSError) as error:
        log.warning("learning starts afresh: %s", error)
        return None
    if model.provenance != provenance:
        log.warning(
            "learning starts afresh: %s was learned by %s, and this is %s",
            path,
            model.provenance,
            provenance,
        )
        return None
    log.info("going on from %s, learned from %d steps", path, model.samples)
    return model


class StateSaver:
    """Writes a model's state at least every ``SAVE_PERIOD_S``, on a thread of its own."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._saved_s = float("-inf")
        self._wait_s, self._period_s = 0.0, _FIRST_PERIOD_S
        self._pending: ModelState | None = None
        self._wake = threading.Event()
        self._writing = threading.Lock()
        self._has_failed = False
        threading.Thread(target=self._run, name="penalty-state", daemon=True).start()
        atexit.register(self.write)

    def offer(self, model: StepTimeModel, *, now_s: float) -> None:
        """Take a copy of the state if it is time to; a copy costs tens of microseconds."""
        # A clock that went back must not put the next save off until it has caught up.
        if not 0.0 <= now_s - self._saved_s < self._wait_s and model.is_fitted:
            self._wait_s = min(self._period_s, SAVE_PERIOD_S)
            self._saved_s, self._period_s = now_s, 2.0 * self._wait_s
            self.take(model)

    def take(self, model: StepTimeModel) -> None:
        """Take a copy of the state now, to be written soon."""
        self._pending = model.state()
        self._wake.set()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            self.write()

    def write(self) -> None:
        """Write the copy that was taken last, or wait until it is written; not for ever."""
        if not self._writing.acquire(timeout=_LONGEST_WRITE_S):
            return
        try:
            self._write_pending()
        finally:
            self._writing.release()

    def _write_pending(self) -> None:
        state, self._pending = self._pending, None
        if state is None or self._has_failed:
            return
        try:
            write_json(self._path, state_to_json(state))
        except (OSError, ValueError) as error:  # such as a full disk, or a state with NaN
            self._has_failed = True
            log.warning(
                "what is learned is no longer saved: cannot write %s: %s", self._path, error
            )
