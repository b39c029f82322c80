"""Which scheduler to simulate, on which engines: what ``--scheduler`` names."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from vllm_penalty_sched.errors import ConfigError
from vllm_penalty_sched.settings import Settings

DEFAULT_BUDGET_TOKENS = 8192
PRICED = "priced"
# Named thresholds of a pair.
_THRESHOLDS = {"always": 0.0, "never": math.inf, PRICED: None}
_MOST_ENGINES = 8


class SchedulerKind(StrEnum):
    """Whose decisions are simulated.

    vLLM's; ours; ours with the true costs; and two that show what a part of ours is worth: ours
    without its admission guard, and ours with vLLM's fixed budget, so that only the order is ours.
    A pair is a prefill and a decode instance, both with ours.
    """

    STOCK = "stock"
    PENALTY = "penalty"
    ORACLE = "oracle"
    UNGUARDED = "unguarded"
    STATIC = "static"
    PAIR = "pair"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSpec:
    """One scheduler to simulate.

    Attributes:
        name: The spec as it was written.
        kind: Whose decisions.
        budget_tokens: vLLM's ``max_num_batched_tokens``.
        long_prefill_threshold: vLLM's ``long_prefill_token_threshold``; 0: none.
        overrides: Our settings that differ from those of the plan, by name.
        engines: Engines, each with this scheduler, among which the requests are divided.
        remote_from_tokens: Of a pair: prompts with so many tokens to compute or more go to the
            prefill instance; None: those that it serves cheaper.
    """

    name: str
    kind: SchedulerKind
    budget_tokens: int = DEFAULT_BUDGET_TOKENS
    long_prefill_threshold: int = 0
    overrides: Mapping[str, Any] = field(default_factory=dict)
    engines: int = 1
    remote_from_tokens: float | None = None

    @classmethod
    def parse(cls, text: str) -> SchedulerSpec:
        """Read ``stock:N``, ``stock:N:T``, ``static:N``, ``penalty[:N]``, ``pair:RULE`` and such.

        All but stock may be followed by settings: ``penalty,order=fcfs,miss_rate=0.01``. All but
        pairs may follow a number of engines: ``2x:penalty``.

        Raises:
            ConfigError: If it is none of these, or a setting is wrong.
        """
        head, *settings = text.split(",")
        engines, kind, words = _split_head(head)
        is_stock, is_pair = kind == SchedulerKind.STOCK, kind == SchedulerKind.PAIR
        rule = words.pop(0) if is_pair and words else PRICED
        least_numbers = int(is_stock or kind == SchedulerKind.STATIC)
        if (
            kind not in set(SchedulerKind)
            or not all(map(_is_count, words))
            or not least_numbers <= len(words) <= 1 + is_stock
            or not (rule in _THRESHOLDS or _is_count(rule))
            or (is_stock and settings)
            or not 1 <= engines <= (1 if is_pair else _MOST_ENGINES)
        ):
            raise ConfigError(
                "a scheduler must be stock:BUDGET, stock:BUDGET:THRESHOLD, static:BUDGET, "
                "penalty[:BUDGET], oracle[:BUDGET] or unguarded[:BUDGET], on several engines "
                "2x: and one of these, or pair:priced, pair:always, pair:never or pair:TOKENS; "
                f"all but stock with settings such as ,miss_rate=0.01; got {text}"
            )
        budget, threshold, *_ = [*map(int, words), 0, 0]
        overrides = dict(_parse_setting(setting, text) for setting in settings)
        Settings.from_mapping(overrides)
        return cls(
            name=text,
            kind=SchedulerKind(kind),
            budget_tokens=budget or DEFAULT_BUDGET_TOKENS,
            long_prefill_threshold=threshold,
            overrides=overrides,
            engines=engines,
            remote_from_tokens=_THRESHOLDS[rule] if rule in _THRESHOLDS else float(rule),
        )


def _split_head(head: str) -> tuple[int, str, list[str]]:
    """Return the engines, the kind and the words behind it."""
    match = re.fullmatch(r"(?:(\d{1,3})x:)?([^:]*)((?::[^:]*)*)", head)
    if match is None:
        return 0, "", []
    return int(match[1] or 1), match[2], match[3].split(":")[1:]


def _is_count(word: str) -> bool:
    return word.isdecimal() and int(word) > 0


def _parse_setting(text: str, spec: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator:
        raise ConfigError(f"{spec}: a setting must be NAME=VALUE, got {text!r}")
    if value.lstrip().startswith(
        ("[", "{")
    ):  # no setting's value, and deep ones overflow the stack
        return name, value
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
