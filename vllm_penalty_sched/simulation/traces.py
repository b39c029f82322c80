"""Requests that a real service once received, or that are drawn like them."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from vllm_penalty_sched.errors import ConfigError
from vllm_penalty_sched.files import csv_rows
from vllm_penalty_sched.workload import MOST_REQUESTS, MOST_TOKENS

if TYPE_CHECKING:
    import numpy as np

HASH_BLOCK_TOKENS = 512
"""Prompt tokens behind one id of ``TraceRequest.hash_ids`` (Mooncake's block size)."""

# Arrivals on a grid at least this wide are the recording's doing, not the users'.
_LEAST_TICK_S, _TICK_TOLERANCE_S = 1.0, 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        arrival_s: Seconds after the start of the trace, or of the window cut from it.
        prompt_tokens: Length of the prompt, >= 1.
        output_tokens: Tokens that it generated, >= 1.
        hash_ids: Ids of the prompt's blocks of ``HASH_BLOCK_TOKENS`` in order, the last one
            possibly not full; equal ids stand for equal tokens. Empty if the trace has none.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens of the request at its end."""
        return self.prompt_tokens + self.output_tokens


def parse_trace(text: str, *, source: str) -> list[TraceRequest]:
    """Read a trace.

    Three forms are told apart by the first line: CSV with the columns ``arrival_s``,
    ``prompt_tokens``, ``output_tokens`` and possibly ``hash_ids`` (runs written ``a-b``); Azure's
    CSV (``TIMESTAMP``, ``ContextTokens``, ``GeneratedTokens``); Mooncake's JSON lines
    (``timestamp`` in ms, ``input_length``, ``output_length``, ``hash_ids``).

    Args:
        text: The file's contents.
        source: The file's name, for messages.

    Returns:
        The requests by arrival, the first at 0 s; at least one.

    Raises:
        ConfigError: If it is none of these, or a line breaks a rule; names the line and the rule.
    """
    lines = text.splitlines()
    head = lines[0].strip() if lines else ""
    if head.startswith("{"):
        requests = _parse_lines(_json_lines(lines), _from_mooncake, source)
    else:
        _, columns = next(csv_rows([head], source=source), (1, []))
        parse = _csv_form(columns, source)
        requests = _parse_lines(_csv_lines(lines, columns, source), parse, source)
    if not requests:
        raise ConfigError(f"{source} holds no request")
    first_s = min(request.arrival_s for request in requests)
    return sorted(_moved(requests, -first_s), key=_by_arrival)


def draw_poisson(spec: str, rng: np.random.Generator, *, duration_s: float) -> list[TraceRequest]:
    """Draw requests of equal lengths with exponential times between them.

    Args:
        spec: ``poisson:RATE:PROMPT:OUTPUT``: requests a second, tokens, tokens.
        rng: Source of the arrival times.
        duration_s: Arrivals are in [0, duration_s).

    Raises:
        ConfigError: If the spec or the duration breaks its rule, or nothing or far too much
            arrives.
    """
    rate, prompt_tokens, output_tokens = _poisson_numbers(spec)
    if not rate * duration_s <= MOST_REQUESTS:
        raise ConfigError(
            f"a synthetic load must be of at most {MOST_REQUESTS} requests, got {rate:g} a second "
            f"for {duration_s:g} s"
        )
    requests = []
    arrival_s = float(rng.exponential(1.0 / rate))
    while arrival_s < duration_s:
        requests.append(
            TraceRequest(
                arrival_s=arrival_s, prompt_tokens=prompt_tokens, output_tokens=output_tokens
            )
        )
        arrival_s += float(rng.exponential(1.0 / rate))
    if not requests:
        raise ConfigError(f"{spec} gives no request within {duration_s:g} s")
    return requests


def _poisson_numbers(spec: str) -> tuple[float, int, int]:
    kind, *values = spec.split(":")
    try:
        rate, prompt_tokens, output_tokens = float(values[0]), int(values[1]), int(values[2])
    except (ValueError, IndexError):
        rate, prompt_tokens, output_tokens = 0.0, 0, 0
    is_valid = kind == "poisson" and len(values) == 3 and 0.0 < rate < math.inf
    least, most = min(prompt_tokens, output_tokens), max(prompt_tokens, output_tokens)
    if not is_valid or not 1 <= least <= most <= MOST_TOKENS:
        raise ConfigError(
            "a synthetic load must be poisson:RATE:PROMPT:OUTPUT with a rate > 0 a second and "
            f"whole numbers of tokens from 1 to {MOST_TOKENS}, got {spec}"
        )
    return rate, prompt_tokens, output_tokens


def cut_window(
    requests: Iterable[TraceRequest], *, start_s: float, duration_s: float
) -> list[TraceRequest]:
    """Return the requests that arrive in a window, their times counted from its start.

    Args:
        requests: A trace.
        start_s: Start of the window, >= 0.
        duration_s: Length of the window, > 0.

    Raises:
        ConfigError: If a bound breaks its rule or nothing arrives in the window.
    """
    if not (start_s >= 0.0 and duration_s > 0.0):
        raise ConfigError(
            f"a window must have start >= 0 and duration > 0, got {start_s:g} and {duration_s:g} s"
        )
    inside = [r for r in requests if start_s <= r.arrival_s < start_s + duration_s]
    if not inside:
        raise ConfigError(
            f"no request arrives from {start_s:g} s to {start_s + duration_s:g} s of the trace"
        )
    return list(_moved(inside, -start_s))


def scale_rate(requests: Iterable[TraceRequest], rate: float) -> list[TraceRequest]:
    """Return the same requests arriving ``rate`` times as fast.

    Raises:
        ConfigError: If ``rate`` is not a positive number, or so small that time overflows.
    """
    if not 0.0 < rate < math.inf:
        raise ConfigError(f"rate must be a number > 0, got {rate}")
    scaled = [replace(request, arrival_s=request.arrival_s / rate) for request in requests]
    if not all(math.isfinite(request.arrival_s) for request in scaled):
        raise ConfigError(
            f"rate must be a number > 0 that moves no arrival to infinity, got {rate}"
        )
    return scaled


def drop_too_long(
    requests: Sequence[TraceRequest], max_model_len: int
) -> tuple[list[TraceRequest], int]:
    """Return the requests that fit ``max_model_len`` tokens, and how many do not."""
    fitting = [request for request in requests if request.tokens <= max_model_len]
    return fitting, len(requests) - len(fitting)


def tick_of(requests: Sequence[TraceRequest]) -> float | None:
    """Return the width of the grid that a recording put the arrivals on.

    Returns:
        Seconds, at least 1; None if the arrivals are on no grid or fewer than two share a tick
        on average.
    """
    times_s = sorted({request.arrival_s for request in requests})
    if len(times_s) < 3 or len(requests) < 2 * len(times_s):
        return None
    gaps_s = [later - earlier for earlier, later in pairwise(times_s)]
    tick_s = median(gaps_s)
    is_grid = tick_s >= _LEAST_TICK_S and all(
        round(gap_s / tick_s) >= 1
        and abs(gap_s - tick_s * round(gap_s / tick_s)) <= _TICK_TOLERANCE_S
        for gap_s in gaps_s
    )
    return tick_s if is_grid else None


def spread_ticks(
    requests: Iterable[TraceRequest], tick_s: float, rng: np.random.Generator
) -> list[TraceRequest]:
    """Return the requests spread evenly at random over the tick that follows each arrival."""
    spread = [
        replace(request, arrival_s=request.arrival_s + float(rng.uniform(0.0, tick_s)))
        for request in requests
    ]
    return sorted(spread, key=_by_arrival)


def _by_arrival(request: TraceRequest) -> float:
    return request.arrival_s


def _moved(requests: Iterable[TraceRequest], by_s: float) -> Iterator[TraceRequest]:
    return (replace(request, arrival_s=request.arrival_s + by_s) for request in requests)


_Numbered = Iterator[tuple[int, Any]]
_Parse = Callable[[Any], TraceRequest]


def _parse_lines(lines: _Numbered, parse: _Parse, source: str) -> list[TraceRequest]:
    requests = []
    for number, line in lines:
        try:
            requests.append(parse(line))
        except ConfigError as error:
            raise ConfigError(f"{source} line {number}: {error}") from error
    return requests


def _csv_form(columns: Sequence[str], source: str) -> _Parse:
    if {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= set(columns):
        return _from_azure
    if {"arrival_s", "prompt_tokens", "output_tokens"} <= set(columns):
        return _from_own
    raise ConfigError(
        f"{source} line 1: a trace must be JSON lines or have the columns arrival_s, "
        f"prompt_tokens, output_tokens or TIMESTAMP, ContextTokens, GeneratedTokens; "
        f"got {','.join(columns)[:80]!r}"
    )


def _csv_lines(lines: Sequence[str], columns: Sequence[str], source: str) -> _Numbered:
    for number, values in csv_rows(lines[1:], source=source, first_line=2):
        if values:
            yield number, dict(zip(columns, values, strict=False))


def _json_lines(lines: Sequence[str]) -> _Numbered:
    return ((number, line) for number, line in enumerate(lines, start=1) if line.strip())


def _from_own(row: Mapping[str, str]) -> TraceRequest:
    prompt_tokens = _count(row, "prompt_tokens")
    return TraceRequest(
        arrival_s=_seconds(row, "arrival_s"),
        prompt_tokens=prompt_tokens,
        output_tokens=_count(row, "output_tokens"),
        hash_ids=_hash_runs(row.get("hash_ids", ""), most=prompt_tokens),
    )


def _from_azure(row: Mapping[str, str]) -> TraceRequest:
    return TraceRequest(
        arrival_s=_timestamp_s(row.get("TIMESTAMP", "")),
        prompt_tokens=_count(row, "ContextTokens"),
        output_tokens=_count(row, "GeneratedTokens"),
    )


def _from_mooncake(line: str) -> TraceRequest:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"must be a JSON object ({error})") from error
    if not isinstance(row, dict):
        raise ConfigError(f"must be a JSON object, got {line[:80]}")
    hash_ids = row.get("hash_ids", [])
    if not isinstance(hash_ids, list) or not all(isinstance(value, int) for value in hash_ids):
        raise ConfigError(f"hash_ids must be a list of whole numbers, got {reprlib.repr(hash_ids)}")
    return TraceRequest(
        arrival_s=_seconds(row, "timestamp") / 1e3,
        prompt_tokens=_count(row, "input_length"),
        output_tokens=_count(row, "output_length"),
        hash_ids=tuple(hash_ids),
    )


def _seconds(row: Mapping[str, Any], name: str) -> float:
    try:
        seconds = float(row.get(name, ""))
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if not 0.0 <= seconds < math.inf:
        raise ConfigError(f"{name} must be a number >= 0, got {reprlib.repr(row.get(name))}")
    return seconds


def _timestamp_s(text: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError) as error:
        raise ConfigError(
            "TIMESTAMP must be a date and time such as 2023-11-16 18:17:03.979, "
            f"got {reprlib.repr(text)}"
        ) from error


def _count(row: Mapping[str, Any], name: str) -> int:
    value = row.get(name)
    try:
        count = int(value) if isinstance(value, (int, str)) else 0
    except ValueError:
        count = 0
    if count < 1:
        raise ConfigError(f"{name} must be a whole number >= 1, got {reprlib.repr(value)}")
    if count > MOST_TOKENS:
        raise ConfigError(f"{name} must be <= {MOST_TOKENS}, got {reprlib.repr(value)}")
    return count


def _hash_runs(text: str, *, most: int) -> tuple[int, ...]:
    """Return the ids in runs such as ``3 7-9``, at most one for each token of the prompt."""
    ids: list[int] = []
    for run in text.split():
        first, _, last = run.partition("-")
        try:
            start, end = int(first), int(last or first) + 1
        except ValueError as error:
            raise ConfigError(
                f"hash_ids must be ids and runs such as 3 7-9, got {reprlib.repr(run)}"
            ) from error
        if end - start > most - len(ids):
            raise ConfigError(
                f"hash_ids must be at most one a prompt token ({most}), got {reprlib.repr(run)}"
            )
        ids.extend(range(start, end))
    return tuple(ids)
