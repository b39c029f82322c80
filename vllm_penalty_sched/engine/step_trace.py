"""Write one JSON line for each step that ran, off the engine's thread."""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from vllm_penalty_sched.engine.step_timer import TimedStep

log = logging.getLogger("vllm.penalty_sched")

MOST_BYTES = 64 * 1024 * 1024
"""A file of this size is renamed to ``<name>.1``, over an earlier one, and a new one begun."""

_WRITE_PERIOD_S = 0.5
# Of a disk that hangs; about 60 MB.
_MOST_WAITING = 100_000


class StepTrace:
    """A bounded log of steps; a disk that fails costs the trace and nothing else."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._steps: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self._stop = threading.Event()
        self._has_failed = False
        self._is_begun = False
        self._thread = threading.Thread(target=self._run, name="penalty-trace", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def add(
        self,
        step: TimedStep,
        *,
        done_s: float,
        predicted_s: float | None,
        margin: float,
        slo_s: float | None = None,
        choices: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Take in a step that ran.

        Args:
            step: What it computed and how long it took.
            done_s: When it completed, the scheduler's clock.
            predicted_s: What the model predicted for it before it learned from it.
            margin: The margin in force after it.
            slo_s: The SLO in force, of a step that was not planned.
            choices: Where prompts that came since the step before are prefilled, and why.
        """
        if self._has_failed or self._steps.qsize() >= _MOST_WAITING:
            return
        decision = step.decision
        self._steps.put(
            {
                "done_s": done_s,
                "decode_seqs": step.shape.decode_seqs,
                "decode_tokens": step.shape.decode_tokens,
                "decode_context": step.shape.decode_context,
                "prefills": step.shape.prefills,
                "encoder_tokens": step.shape.encoder_tokens,
                "prefill_ratio": round(step.shape.prefill_ratio, 6),
                "reason": decision.reason if decision else None,
                "budget_tokens": decision.prefill_tokens if decision else None,
                "slo_s": decision.slo_s if decision else slo_s,
                "decode_only_s": decision.decode_only_s if decision else None,
                "predicted_s": predicted_s,
                "observed_s": step.seconds,
                "margin": margin,
                **({"choices": choices} if choices else {}),
            }
        )

    def close(self) -> None:
        """Write what is left; further steps are lost."""
        self._stop.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while not self._stop.wait(_WRITE_PERIOD_S):
            self._write()
        self._write()

    def _write(self) -> None:
        steps = []
        with suppress(Empty):
            while True:
                steps.append(self._steps.get_nowait())
        if not steps or self._has_failed:
            return
        try:
            self._append("".join(json.dumps(step) + "\n" for step in steps))
        except Exception as error:  # noqa: BLE001  # a full disk, a path with a null byte, ...
            self._has_failed = True
            log.warning("the step trace ends here: cannot write %s: %s", self._path, error)

    def _append(self, text: str) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if not self._is_begun and self._ends_within_a_line():
            text = "\n\n" + text  # the empty line tells a reader that half of one is before it
        self._is_begun = True
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text)
            is_full = file.tell() >= MOST_BYTES
        if is_full:
            with suppress(FileNotFoundError):  # another engine writes here, and was first
                self._path.replace(self._path.with_name(f"{self._path.name}.1"))

    def _ends_within_a_line(self) -> bool:
        """Return whether a process that was killed left half a line behind."""
        if not self._path.is_file() or not self._path.stat().st_size:
            return False
        with self._path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read() != b"\n"
