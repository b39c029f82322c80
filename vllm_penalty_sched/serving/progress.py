"""Say on standard error what is going on and for how long."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

TERMINAL_PERIOD_S, LOG_PERIOD_S = 1.0, 10.0


@contextmanager
def elapsed_time(label: str) -> Iterator[None]:
    """Print ``label`` with the seconds that the block has been running, until it ends.

    One line that is rewritten each second on a terminal, one line every 10 s elsewhere.
    """
    on_terminal = sys.stderr.isatty()
    end = "\r" if on_terminal else "\n"
    start_s = time.monotonic()
    is_over = threading.Event()

    def show(suffix: str, line_end: str) -> None:
        passed_s = time.monotonic() - start_s
        print(f"{label}: {passed_s:.0f} s{suffix}", end=line_end, file=sys.stderr, flush=True)

    def repeat() -> None:
        while not is_over.wait(TERMINAL_PERIOD_S if on_terminal else LOG_PERIOD_S):
            show(" ...", end)

    ticker = threading.Thread(target=repeat, daemon=True)
    print(f"{label} ...", end=end, file=sys.stderr, flush=True)
    ticker.start()
    outcome = " (failed)"
    try:
        yield
        outcome = "    "
    finally:
        is_over.set()
        ticker.join()
        show(outcome, "\n")
