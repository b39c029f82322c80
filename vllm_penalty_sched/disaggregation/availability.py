"""Whether a prefill instance can be asked: it is left alone after a failure, and probed."""

from __future__ import annotations

# After a failure the instance is probed so soon, and each time it fails again later.
_FIRST_PROBE_S = 1.0
_LATEST_PROBE_S = 30.0


class Availability:
    """Up until a failure; then down until a probe succeeds. Has no clock of its own.

    Attributes:
        is_up: Whether to ask it.
    """

    def __init__(self) -> None:
        self.is_up = True
        self._wait_s = _FIRST_PROBE_S
        self._probe_at_s = 0.0

    def failed(self, now_s: float) -> None:
        """Take in that it refused, answered wrongly, or took longer than the limit."""
        self._wait_s = _FIRST_PROBE_S if self.is_up else min(_LATEST_PROBE_S, 2 * self._wait_s)
        self.is_up = False
        self._probe_at_s = now_s + self._wait_s

    def succeeded(self) -> None:
        """Take in that it answered."""
        self.is_up = True

    def should_probe(self, now_s: float) -> bool:
        """Return whether to probe it now; True once for each time that it is due."""
        if self.is_up or now_s < self._probe_at_s:
            return False
        self._probe_at_s = now_s + _LATEST_PROBE_S  # until the probe's own result comes
        return True
