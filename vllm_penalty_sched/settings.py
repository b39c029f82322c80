"""The plugin's settings and the SLOs of single requests, checked where they come in."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from vllm_penalty_sched.errors import ConfigError

KEY = "penalty_sched"
"""Name of the settings inside vLLM's ``additional_config``."""

MAX_SLO_MS = 3_600_000.0

# In a settings file, which needs one object in another.
_MOST_BRACKETS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What an operator can set.

    Attributes:
        tbt_slo_ms: Longest time between two tokens of a running request, ms; None: derived from
            ``tbt_slo_scale``.
        ttft_slo_ms: Longest time to the first token, ms; None: none.
        tbt_slo_scale: Without ``tbt_slo_ms``, the SLO as a multiple of the learned decode-only
            time; above 1, at most 100.
        miss_rate: Share of the planned steps that may overrun the SLO, in (0, 0.5].
        max_defer_s: Longest time that prefills make no progress for the SLO's sake, seconds.
        order: Which prefill goes first: ``slack``, as many as possible meet their TTFT SLO (it does
            nothing where there is none); ``fcfs``, vLLM's own order.
        pacing: What the SLO binds: ``gap``, every single time between tokens; ``deadline``, token
            k by k SLOs after the first one, so that time saved earlier may be spent on a larger
            chunk.
        model: Path of a saved step-time model to start from; None: a cold start.
        state_path: File that keeps what was learned across restarts; None: none. Each
            data-parallel rank adds its number to the name.
        trace_path: File that gets one JSON line for each step; None: none. Each data-parallel
            rank adds its number to the name.
        least_request_tbt_slo_ms: Tightest TBT SLO that a request may bring along, ms: a tighter one
            counts as this, so that no client can stop the prefills of the others; None: any.
        mode: ``enforce`` steers; ``observe`` schedules like stock vLLM and only measures.
    """

    tbt_slo_ms: float | None = None
    ttft_slo_ms: float | None = None
    tbt_slo_scale: float = 2.0
    miss_rate: float = 0.0001
    max_defer_s: float = 1.0
    order: Literal["fcfs", "slack"] = "slack"
    pacing: Literal["gap", "deadline"] = "gap"
    model: str | None = None
    state_path: str | None = None
    trace_path: str | None = None
    least_request_tbt_slo_ms: float | None = None
    mode: Literal["enforce", "observe"] = "enforce"

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be {rule.words}, got {getattr(self, name)!r}"
            for name, rule in _RULES.items()
            if not rule.holds(getattr(self, name))
        ]
        if problems:
            raise ConfigError("; ".join(problems))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Settings:
        """Check and take over settings.

        Raises:
            ConfigError: With every unknown key and every wrong value in one message.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(f"{KEY} must be an object or a file's path, got {values!r}")
        names = [field.name for field in fields(cls)]
        problems = [
            f"{name} is not a setting (known: {', '.join(names)})"
            for name in map(str, values)
            if name not in names
        ]
        known = {name: value for name, value in values.items() if name in names}
        try:
            settings = cls(**known)
        except ConfigError as error:
            problems.append(str(error))
        if problems:
            raise ConfigError(f"{KEY} settings: " + "; ".join(problems))
        return settings

    @classmethod
    def from_json(cls, text: str, *, source: str) -> Settings:
        """Check and take over a settings file's contents.

        Args:
            text: A JSON object of settings, or one that holds it under ``penalty_sched``.
            source: The file's name, for messages.

        Raises:
            ConfigError: If it is no such object, or any setting is wrong.
        """
        values = settings_in_json(text, source=source)
        try:
            return cls.from_mapping(values)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from error


def settings_in_json(text: str, *, source: str) -> dict[str, Any]:
    """Return the settings that a file's contents give, not checked yet.

    Args:
        text: As for ``Settings.from_json``.
        source: The file's name, for messages.

    Raises:
        ConfigError: If it is no such object.
    """
    if text.count("[") + text.count("{") > _MOST_BRACKETS:  # deep ones overflow the stack
        raise ConfigError(f"{source} is no settings file: it holds too many lists and objects")
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{source} is not JSON: {error}") from error
    if isinstance(values, dict) and set(values) == {KEY}:
        values = values[KEY]
    if not isinstance(values, dict):
        raise ConfigError(f"{source} must hold a JSON object, got {type(values).__name__}")
    return values


def inert_settings(given: Mapping[str, Any]) -> list[str]:
    """Return one line for each setting that does nothing beside the others.

    Args:
        given: Valid settings, those left at their defaults not among them.
    """
    observes = given.get("mode") == "observe"
    orders_nothing = "it only orders waiting prompts, and order is fcfs"
    cases = (
        ("tbt_slo_scale", given.get("tbt_slo_ms") is not None, "tbt_slo_ms is set"),
        ("ttft_slo_ms", given.get("order") == "fcfs", orders_nothing),
        ("ttft_slo_ms", observes, _OBSERVES),
        ("order", observes and given.get("order") == "slack", _OBSERVES),
        ("pacing", observes and given.get("pacing") == "deadline", _OBSERVES),
        ("max_defer_s", observes, _OBSERVES),
    )
    reasons: dict[str, list[str]] = {}
    for name, is_inert, why in cases:
        if is_inert and given.get(name) is not None:
            reasons.setdefault(name, []).append(why)
    return [
        f"{name} ({given[name]}) has no effect: {'; '.join(why)}" for name, why in reasons.items()
    ]


_OBSERVES = "mode observe schedules like stock vLLM"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSlo:
    """One request's own SLOs, seconds; None where the settings' value rules."""

    tbt_slo_s: float | None = None
    ttft_slo_s: float | None = None

    @classmethod
    def from_extra_args(cls, extra_args: Mapping[str, Any] | None) -> tuple[RequestSlo, list[str]]:
        """Read a request's ``vllm_xargs``.

        Returns:
            The SLOs, and one line for each value that was ignored because it is no valid SLO.
        """
        if not extra_args:
            return _NO_SLO, []
        found: dict[str, float] = {}
        problems = []
        for name in ("tbt_slo_ms", "ttft_slo_ms"):
            if name not in extra_args:
                continue
            value_ms = _as_ms(extra_args[name])
            if value_ms is None:
                got = repr(extra_args[name])[:80]
                problems.append(f"{name} must be {_SLO_WORDS}, got {got}")
            else:
                found[name.removesuffix("_ms") + "_s"] = value_ms / 1e3
        return (cls(**found) if found else _NO_SLO), problems


_NO_SLO = RequestSlo()


@dataclass(frozen=True, slots=True)
class _Rule:
    words: str
    holds: Callable[[Any], bool]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _within(low: float, high: float, *, or_none: bool = False) -> Callable[[Any], bool]:
    def holds(value: Any) -> bool:
        return (value is None and or_none) or (_is_number(value) and low < value <= high)

    return holds


def _one_of(*choices: str) -> _Rule:
    def holds(value: Any) -> bool:
        return isinstance(value, str) and value in choices

    return _Rule(f"one of {', '.join(choices)}", holds)


def _is_path_or_none(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value != "")


def _as_ms(value: object) -> float | None:
    # vLLM passes strings through as they are, and turns true into 1 (0.32).
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    return float(value) if _within(0, MAX_SLO_MS)(value) else None  # type: ignore[arg-type]


_SLO_WORDS = f"a number of ms in (0, {MAX_SLO_MS:.0f}]"
_SLO_RULE = _Rule(f"{_SLO_WORDS} or null", _within(0, MAX_SLO_MS, or_none=True))
_RULES = {
    "tbt_slo_ms": _SLO_RULE,
    "ttft_slo_ms": _SLO_RULE,
    "least_request_tbt_slo_ms": _SLO_RULE,
    "tbt_slo_scale": _Rule("a number in (1, 100]", _within(1, 100)),
    "miss_rate": _Rule("a share in (0, 0.5]", _within(0, 0.5)),
    "max_defer_s": _Rule("a number of seconds in (0, 3600]", _within(0, 3600)),
    "order": _one_of("fcfs", "slack"),
    "pacing": _one_of("gap", "deadline"),
    "model": _Rule("a file's path or null", _is_path_or_none),
    "state_path": _Rule("a file's path or null", _is_path_or_none),
    "trace_path": _Rule("a file's path or null", _is_path_or_none),
    "mode": _one_of("enforce", "observe"),
}
