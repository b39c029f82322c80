"""How a decode instance asks a prefill instance, checked when the engine starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from vllm_penalty_sched.errors import ConfigError

READ_SAFETY_S = 5.0
"""A KV cache is not read in the last seconds of its lease: handshake and read take time too."""

VLLM_LEASE_S = 30.0
"""How long a prefill instance keeps a KV cache that nobody reads, unless told (vLLM 0.32)."""

_TIMEOUT_S = 10.0
_OURS = ("prefill_url", "prefill_timeout_s", "allow_client_kv_params")


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverSettings:
    """What ``kv_connector_extra_config`` says about hand-overs.

    Attributes:
        prefill_url: The prefill instance's own address; None: none is ever asked.
        prefill_timeout_s: Longest wait for its answer, seconds; then the prompt is prefilled here.
        lease_s: How long it keeps a KV cache for us, seconds (vLLM's ``kv_lease_duration``, which
            must be the same on both instances).
        allow_client_kv_params: Whether requests may say themselves where their KV cache lies, for a
            router in front. Whoever can send requests then names the addresses to read from.
    """

    prefill_url: str | None = None
    prefill_timeout_s: float = _TIMEOUT_S
    lease_s: float = VLLM_LEASE_S
    allow_client_kv_params: bool = False

    @property
    def read_within_s(self) -> float:
        """Time from asking during which a read is sure to find the KV cache, seconds.

        The lease begins at some time after we ask: counted from there it cannot be over.
        """
        return self.lease_s - READ_SAFETY_S

    @classmethod
    def from_extra_config(
        cls, extra: Mapping[str, Any], *, kv_role: str, load_failure_policy: str
    ) -> HandoverSettings:
        """Check and take over vLLM's ``kv_connector_extra_config``; foreign names are vLLM's.

        Args:
            extra: The mapping.
            kv_role: The instance's role.
            load_failure_policy: vLLM's ``kv_load_failure_policy``.

        Raises:
            ConfigError: With every wrong value in one message.
        """
        timeout_s = extra.get("prefill_timeout_s", _TIMEOUT_S)
        lease_s = extra.get("kv_lease_duration", VLLM_LEASE_S)
        url = extra.get("prefill_url")
        allow = extra.get("allow_client_kv_params", False)
        rules: list[tuple[str, object, bool, str]] = [
            ("prefill_url", url, url is None or _is_url(url), "an http or https address"),
            ("kv_lease_duration", lease_s, _is_above(lease_s, READ_SAFETY_S), "seconds above 5"),
            ("prefill_timeout_s", timeout_s, _is_above(timeout_s, 0), "seconds above 0"),
            ("allow_client_kv_params", allow, isinstance(allow, bool), "true or false"),
        ]
        problems = [
            f"{name} is not a setting (known: {', '.join(_OURS)})"
            for name in map(str, extra)
            if name.startswith("prefill_") and name not in _OURS
        ]
        problems += [
            f"{name} must be {rule}, got {got!r}" for name, got, ok, rule in rules if not ok
        ]
        if not problems:
            problems += _clashes(url, timeout_s, lease_s, kv_role, load_failure_policy)
        if problems:
            raise ConfigError("kv_connector_extra_config: " + "; ".join(problems))
        return cls(
            prefill_url=url.rstrip("/") if url else None,
            prefill_timeout_s=float(timeout_s),
            lease_s=float(lease_s),
            allow_client_kv_params=allow,
        )


def _clashes(
    url: str | None, timeout_s: float, lease_s: float, kv_role: str, load_failure_policy: str
) -> list[str]:
    if url is None:
        return []
    problems = []
    if kv_role != "kv_consumer":
        problems.append(f"prefill_url needs kv_role kv_consumer, got {kv_role}")
    if load_failure_policy != "recompute":
        problems.append(
            "prefill_url needs kv_load_failure_policy recompute (under any other a lost prefill "
            f"instance fails requests), got {load_failure_policy}"
        )
    if timeout_s > lease_s - READ_SAFETY_S:
        problems.append(
            f"prefill_timeout_s must be at most kv_lease_duration - {READ_SAFETY_S:.0f} "
            f"({lease_s - READ_SAFETY_S:g}), got {timeout_s!r}"
        )
    return problems


def _is_above(value: object, bound: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and bound < value < 1e6


def _is_url(value: object) -> bool:
    try:
        return isinstance(value, str) and _names_a_server(value)
    except ValueError:  # such as a port that is no number
        return False


def _names_a_server(value: str) -> bool:
    parts = urlsplit(value)
    return (
        parts.scheme in ("http", "https")
        and bool(parts.hostname)
        and parts.port != 0
        and parts.path in ("", "/")
        and not (parts.query or parts.fragment or parts.username)
    )
