"""Follow how fast the machine is, apart from what the steps cost in proportion to each other."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

# Drift is followed by this share of each step's error, clipped so that an outlier counts little.
_DRIFT_RATE, _DRIFT_CLIP_LOG = 0.01, 0.1
# A jump is believed when so many steps in a row agree on more than this.
_JUMP_STEPS, _JUMP_LOG = 24, 0.08


class MachineSpeed:
    """A factor on all step times: slow drift is followed slowly, a jump at once."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor
        self._recent: deque[tuple[float, bool]] = deque(maxlen=_JUMP_STEPS)

    def observe(self, log_ratio: float, *, kind_samples: int) -> None:
        """Take in one step.

        Args:
            log_ratio: Logarithm of its measured over its predicted time.
            kind_samples: How many steps of its kind the model has learned from. A kind that is
                new is off because it is new, not because the machine changed its speed.
        """
        if kind_samples < 2 * _JUMP_STEPS:
            return
        self._recent.append((log_ratio, kind_samples > 3 * _JUMP_STEPS))
        self.factor *= math.exp(
            _DRIFT_RATE * min(_DRIFT_CLIP_LOG, max(-_DRIFT_CLIP_LOG, log_ratio))
        )
        if len(self._recent) == _JUMP_STEPS and all(known for _, known in self._recent):
            self._follow_jump()

    def _follow_jump(self) -> None:
        ratios = sorted(ratio for ratio, _ in self._recent)
        middle = median(ratios)
        quarter = _JUMP_STEPS // 4
        agree = ratios[-1 - quarter] - ratios[quarter] < 0.5 * abs(middle)
        if abs(middle) > _JUMP_LOG and agree:
            self.factor *= math.exp(middle)
            self._recent.clear()
