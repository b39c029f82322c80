"""How large a chunk may be before enough steps were seen to predict one."""

from __future__ import annotations

from collections import deque
from statistics import median

from vllm_penalty_sched.learning.curve import PenaltyCurve

# The published curve is trusted up to this many prefill tokens.
FIRST_CHUNK_TOKENS = 64
_DECODE_ONLY_STEPS = 4
_MIXED_STEPS = 8


class ColdStart:
    """A chunk size that doubles while steps stay well under the SLO.

    Until it ``is_over``, chunks follow the probe alone; afterwards the model decides.
    """

    def __init__(self, *, is_over: bool = False) -> None:
        self._mixed_left = 0 if is_over else _MIXED_STEPS
        self._probe_tokens: int | None = None
        self._decode_only_s: deque[float] = deque(maxlen=2 * _DECODE_ONLY_STEPS)

    @property
    def is_over(self) -> bool:
        """Whether the model has seen enough mixed steps to decide."""
        return self._mixed_left <= 0

    @property
    def decode_only_s(self) -> float | None:
        """Median time of the latest decode-only steps, seconds; None before the first few."""
        if len(self._decode_only_s) < _DECODE_ONLY_STEPS:
            return None
        return median(self._decode_only_s)

    def probe_tokens(self, *, decode_seqs: int, slo_s: float) -> int:
        """Return the prefill tokens to try next, 0 while the decode-only time is unknown."""
        decode_only_s = self.decode_only_s
        if decode_only_s is None:
            return 0
        if self._probe_tokens is None:
            self._probe_tokens = _first_chunk(decode_only_s, decode_seqs, slo_s)
        return self._probe_tokens

    def observe(
        self, *, decode_seqs: int, prefill_tokens: int, seconds: float, slo_s: float | None
    ) -> None:
        """Take in one step that ran; ``slo_s`` is the SLO it was planned under, if any."""
        if not decode_seqs:
            return
        if not prefill_tokens:
            self._decode_only_s.append(seconds)
        elif not self.is_over:
            self._mixed_left -= 1
            if slo_s is not None and self._probe_tokens is not None:
                self._probe_tokens = _next_probe(
                    self._probe_tokens, prefill_tokens, seconds / slo_s
                )


def _next_probe(probe_tokens: int, prefill_tokens: int, slo_share: float) -> int:
    if slo_share > 1.0:
        return max(1, min(probe_tokens, prefill_tokens) // 2)
    # Time grows at most in proportion to the chunk: half the SLO is safe to double.
    if slo_share <= 0.5 and 2 * prefill_tokens > probe_tokens:
        return 2 * probe_tokens
    return probe_tokens


def _first_chunk(decode_only_s: float, decode_seqs: int, slo_s: float) -> int:
    curve = PenaltyCurve.published().scaled_to(decode_only_s)
    tokens = FIRST_CHUNK_TOKENS
    while tokens > 1 and curve.predict_s(tokens / (tokens + decode_seqs)) > slo_s:
        tokens //= 2
    return tokens
