"""Read off a running server's metrics what arrives and what prefills cost the decodes."""

from __future__ import annotations

import http.client
import math
import re
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from vllm_penalty_sched.disaggregation.traffic import Traffic
from vllm_penalty_sched.errors import ConfigError

PROMPTS, OUTPUTS = "vllm:request_prompt_tokens", "vllm:request_generation_tokens"
PENALTY, STEPS = "penalty_sched_penalty_seconds_total", "penalty_sched_observed_step_seconds_sum"
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_BOUND = re.compile(r'\ble="([^"]*)"')
_TIMEOUT_S = 10.0
_LONGEST_WATCH_S = 1e6
# Lengths that a histogram stands for.
_LENGTHS = 200

_Sums = Mapping[tuple[str, str], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTraffic:
    """What a server saw.

    Attributes:
        traffic: Rate of the requests that finished while it was watched; lengths since its start.
        penalty_share: Share of the steps' time that prefills added for decodes while it was
            watched, by the plugin's own metrics; None if it does not run there.
    """

    traffic: Traffic
    penalty_share: float | None


def watch_server(
    url: str, seconds: float, *, sleep: Callable[[float], None] = time.sleep
) -> LiveTraffic:
    """Scrape a server twice.

    Args:
        url: Its address, with or without ``/metrics``.
        seconds: Time between the two, > 0 and at most a million.
        sleep: Waits.

    Raises:
        ConfigError: If it cannot be read, is no vLLM server, or nothing finished in that time.
    """
    if not 0.0 < seconds <= _LONGEST_WATCH_S:
        raise ConfigError(
            f"the time to watch a server must be > 0 s and <= {_LONGEST_WATCH_S:g} s, got {seconds}"
        )
    address = url.rstrip("/").removesuffix("/metrics") + "/metrics"
    before, begun_s = _scrape(address), time.monotonic()
    sleep(seconds)
    return compare_scrapes(before, _scrape(address), time.monotonic() - begun_s, source=address)


def compare_scrapes(before: str, after: str, seconds: float, *, source: str) -> LiveTraffic:
    """Return what happened between two texts in Prometheus' format.

    Raises:
        ConfigError: If they are not those of a vLLM server, or no request finished.
    """
    earlier, later = _sums(before), _sums(after)
    count = (f"{PROMPTS}_count", "")
    for name in (PROMPTS, OUTPUTS):
        if not {(f"{name}_count", ""), (f"{name}_sum", "")} <= set(later):
            raise ConfigError(f"{source} shows no {name}: is it a vLLM server's?")
    finished = later[count] - earlier.get(count, 0.0)
    if not finished > 0.0:
        raise ConfigError(f"{source}: no request finished within {seconds:.0f} s")
    outputs = later[f"{OUTPUTS}_sum", ""] / max(1.0, later[f"{OUTPUTS}_count", ""])
    traffic = Traffic.of_lengths(
        finished / seconds,
        prompt_tokens=_lengths(later, PROMPTS),
        output_tokens=max(1.0, outputs),
    )
    steps_s = later.get((STEPS, ""), 0.0) - earlier.get((STEPS, ""), 0.0)
    penalty_s = later.get((PENALTY, ""), 0.0) - earlier.get((PENALTY, ""), 0.0)
    return LiveTraffic(
        traffic=traffic, penalty_share=penalty_s / steps_s if steps_s > 0.0 else None
    )


def _scrape(address: str) -> str:
    if not address.startswith(("http://", "https://")):
        raise ConfigError(f"a server's address must begin with http:// or https://, got {address}")
    # No proxy between this and a server of one's own.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(address, timeout=_TIMEOUT_S) as answer:
            return str(answer.read().decode("utf-8", errors="replace"))
    except (http.client.HTTPException, OSError, ValueError) as error:
        raise ConfigError(f"cannot read {address}: {error}") from error


def _sums(text: str) -> _Sums:
    """Return each metric's value by name and bucket, summed over its other labels."""
    sums: dict[tuple[str, str], float] = {}
    for match in filter(None, map(_SAMPLE.match, text.splitlines())):
        bound = _BOUND.search(match[2] or "")
        value, most = _number(match[3]), _number(bound[1]) if bound else 0.0
        if math.isfinite(value) and not math.isnan(most):
            key = match[1], bound[1] if bound else ""
            sums[key] = sums.get(key, 0.0) + value
    return sums


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _lengths(sums: _Sums, name: str) -> list[float]:
    """Return lengths as a histogram tells them: evenly spread within each bucket."""
    buckets = sorted(
        (float(bound), count)
        for (metric, bound), count in sums.items()
        if metric == f"{name}_bucket"
    )
    total = buckets[-1][1] if buckets else 0.0
    lengths: list[float] = []
    for (low, below), (high, up_to) in pairwise([(0.0, 0.0), *buckets]):
        prompts = round(_LENGTHS * up_to / max(total, 1.0)) - round(
            _LENGTHS * below / max(total, 1.0)
        )
        top = high if high < float("inf") else low
        lengths += [
            max(1.0, low + (top - low) * (place + 0.5) / prompts) for place in range(prompts)
        ]
    return lengths or [max(1.0, sums[f"{name}_sum", ""] / max(1.0, sums[f"{name}_count", ""]))]
