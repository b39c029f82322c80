"""A light streaming client that stamps every token's arrival."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_penalty_sched.errors import MissingDependencyError
from vllm_penalty_sched.metrics import RequestTrace

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from aiohttp import ClientSession

END_OF_EVENT = b"\n\n"
JSON_EVENT = b"data: {"  # the last event, "data: [DONE]", is none


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRequest:
    """One completion to stream.

    Attributes:
        prompt_token_ids: The prompt, already tokenized.
        output_tokens: Tokens to generate; the end token does not stop it.
        send_at_s: When to send it, seconds after the start of the load.
        xargs: The body's ``vllm_xargs``, such as ``{"tbt_slo_ms": 50}``; left out if empty.
    """

    prompt_token_ids: Sequence[int]
    output_tokens: int
    send_at_s: float = 0.0
    xargs: Mapping[str, float] | None = None

    def body(self, model: str) -> dict[str, object]:
        """Return the body to post to ``/v1/completions`` for the model served as ``model``."""
        body: dict[str, object] = {
            "model": model,
            "prompt": list(self.prompt_token_ids),
            "max_tokens": self.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return body | ({"vllm_xargs": dict(self.xargs)} if self.xargs else {})


def stream_load(
    base_url: str,
    requests: Sequence[StreamRequest],
    *,
    model: str,
    timeout_s: float = 600.0,
    core: int | None = None,
) -> list[RequestTrace]:
    """Send every request at its time and wait for all of them.

    Args:
        base_url: The server, such as ``http://127.0.0.1:8000``.
        requests: Sent open loop: a late answer delays no other request.
        model: Name under which the server serves the model.
        timeout_s: Longest life of one request.
        core: Core to run on, one that the server's workers leave free; any if None.

    Returns:
        One trace for each request, in their order, times counted from the start of the load.
        A failed request is a trace with an error, not an exception.

    Raises:
        MissingDependencyError: If ``aiohttp`` is not installed.
    """
    with _garbage_collection_paused(), _on_core(core):
        return asyncio.run(_stream_all(base_url, requests, model, timeout_s))


@contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    # A collection stops the client for milliseconds, which would be booked as the server's gap.
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def _on_core(core: int | None) -> Iterator[None]:
    # On a core where a worker computes, the client wakes milliseconds late and disturbs the step.
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


async def _stream_all(
    base_url: str, requests: Sequence[StreamRequest], model: str, timeout_s: float
) -> list[RequestTrace]:
    try:
        import aiohttp
    except ImportError as error:
        raise MissingDependencyError(
            "streaming needs aiohttp: pip install 'vllm-penalty-sched[vllm]'"
        ) from error
    # A kept-alive connection may be closed by the server just when it is used again.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(base_url, connector=connector, timeout=timeout) as session:
        start_s = time.perf_counter()
        streams = [_Stream(request=request) for request in requests]
        await asyncio.gather(*(_read(session, stream, model, start_s) for stream in streams))
    # Parsed only now: parsing a long stream takes milliseconds, a gap for all the others.
    return [
        trace_of_reads(
            stream.reads,
            stream.request.output_tokens,
            sent_s=stream.sent_s,
            failure=stream.failure,
        )
        for stream in streams
    ]


@dataclass(slots=True, kw_only=True)
class _Stream:
    request: StreamRequest
    sent_s: float = 0.0
    reads: list[tuple[float, bytes]] = field(default_factory=list)
    failure: str | None = None


async def _read(session: ClientSession, stream: _Stream, model: str, start_s: float) -> None:
    from aiohttp import ClientError

    request = stream.request
    body = json.dumps(request.body(model)).encode()
    await asyncio.sleep(start_s + request.send_at_s - time.perf_counter())
    stream.sent_s = time.perf_counter() - start_s
    try:
        headers = {"Content-Type": "application/json"}
        async with session.post("/v1/completions", data=body, headers=headers) as response:
            async for read in response.content.iter_any():
                stream.reads.append((time.perf_counter() - start_s, read))
            if response.status != 200:
                message = b"".join(read for _, read in stream.reads).decode(errors="replace")
                stream.failure = f"HTTP {response.status}: {message[:300]}"
                stream.reads.clear()
    except (ClientError, TimeoutError) as error:
        stream.failure = f"{type(error).__name__}: {error}"


def trace_of_reads(
    reads: Sequence[tuple[float, bytes]],
    asked_tokens: int,
    *,
    sent_s: float,
    failure: str | None = None,
) -> RequestTrace:
    """Turn the raw reads of one server-sent event stream into a trace.

    Args:
        reads: Time and bytes of each read; events may be split or joined by the reads.
        asked_tokens: Tokens that a complete stream carries.
        sent_s: When the request was sent, same clock.
        failure: An error that ended the stream, if one did.

    Returns:
        An event counts at the read that completes it, and all events of one read are one
        arrival. The number of tokens is the server's own usage count if it came, else one
        for each event.
    """
    arrivals_s: list[float] = []
    events = 0
    usage_tokens = None
    for read_s, payloads in _payloads_by_read(reads):
        carried = sum(bool(payload.get("choices")) for payload in payloads)
        events += carried
        if carried:
            arrivals_s.append(read_s)
        for payload in payloads:
            usage_tokens = (payload.get("usage") or {}).get("completion_tokens", usage_tokens)
            if "error" in payload:
                failure = f"the server said: {payload['error']}"
    tokens = events if usage_tokens is None else usage_tokens
    if failure is None and tokens != asked_tokens:
        failure = f"asked for {asked_tokens} tokens, got {tokens}"
    return RequestTrace(
        sent_s=sent_s, arrivals_s=tuple(arrivals_s), output_tokens=tokens, error=failure
    )


def _payloads_by_read(
    reads: Sequence[tuple[float, bytes]],
) -> Iterator[tuple[float, list[dict[str, Any]]]]:
    pending = b""
    for read_s, read in reads:
        *events, pending = (pending + read).split(END_OF_EVENT)
        yield (
            read_s,
            [
                json.loads(event[len(JSON_EVENT) - 1 :])
                for event in events
                if event.startswith(JSON_EVENT)
            ],
        )
