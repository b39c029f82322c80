"""The link between a prefill and a decode instance: how long a KV cache takes to cross it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vllm_penalty_sched.errors import ConfigError

DEFAULT_BANDWIDTH_BYTES_PER_S = 25e9
"""A 200 Gbit/s network card."""

# 2 (K and V) x layers x KV heads x 128 x 2 bytes (bf16), for names that contain these.
_KV_BYTES_PER_TOKEN = {
    "70b": 2 * 80 * 8 * 128 * 2,
    "llama2-7b": 2 * 32 * 32 * 128 * 2,
    "8b": 2 * 32 * 8 * 128 * 2,
}


def kv_bytes_per_token(name: str) -> int | None:
    """Return the KV-cache bytes of a token of the model in a cost table's name; None if unknown."""
    known = (size for part, size in _KV_BYTES_PER_TOKEN.items() if part in name)
    return next(known, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """A link that carries one KV cache after the other.

    Attributes:
        kv_bytes_per_token: Size of a token's KV cache, over all GPUs of an instance.
        bandwidth_bytes_per_s: Of all GPUs of an instance together.
        latency_s: Added to every transfer: the router's and the connector's hand-shakes.

    Raises:
        ConfigError: If a number breaks its rule.
    """

    kv_bytes_per_token: int
    bandwidth_bytes_per_s: float = DEFAULT_BANDWIDTH_BYTES_PER_S
    latency_s: float = 5e-3

    def __post_init__(self) -> None:
        if self.kv_bytes_per_token < 1:
            raise ConfigError(f"kv_bytes_per_token must be >= 1, got {self.kv_bytes_per_token}")
        if not self.bandwidth_bytes_per_s > 0.0:
            raise ConfigError(f"bandwidth must be > 0 bytes/s, got {self.bandwidth_bytes_per_s}")
        if not 0.0 <= self.latency_s < math.inf:
            raise ConfigError(f"a transfer's latency must be >= 0 s, got {self.latency_s}")

    def transfer_s(self, tokens: int) -> float:
        """Return how long the KV cache of so many tokens takes on an idle link, seconds."""
        return self.latency_s + self._busy_s(tokens)

    def _busy_s(self, tokens: int) -> float:
        return tokens * self.kv_bytes_per_token / self.bandwidth_bytes_per_s


class Link:
    """A link in use."""

    def __init__(self, spec: LinkSpec) -> None:
        self._spec = spec
        self._free_s = 0.0

    def send(self, tokens: int, now_s: float) -> float:
        """Return when a KV cache that is sent off now has arrived, seconds."""
        waits_s = max(0.0, self._free_s - now_s)
        arrival_s = now_s + waits_s + self._spec.transfer_s(tokens)
        self._free_s = arrival_s - self._spec.latency_s
        return arrival_s
