"""Requests of every kind for a server that runs for long: good, bad, and given up half-way."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import httpx

VOCABULARY = 1000
MOST_PROMPT, MOST_OUTPUT = 1500, 96
TIMEOUT_S = 180.0
# (share, kind); a kind is a function of this module that makes a request's body.
Body = dict[str, Any]


def plain(rng: random.Random, model: str) -> Body:
    prompt = [rng.randrange(3, VOCABULARY) for _ in range(int(rng.triangular(8, MOST_PROMPT, 64)))]
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": rng.randint(1, MOST_OUTPUT),
        "ignore_eos": True,
        "stream": rng.random() < 0.7,
        "temperature": rng.choice([0.0, 0.8]),
    }


def repeated(rng: random.Random, model: str) -> Body:
    body = plain(rng, model)
    return body | {"prompt": list(range(3, 3 + len(body["prompt"]) % VOCABULARY + 1))}


def with_slos(rng: random.Random, model: str) -> Body:
    slos = {"tbt_slo_ms": rng.choice([80, 200, "300"]), "ttft_slo_ms": rng.choice([500, 5000])}
    return plain(rng, model) | {"vllm_xargs": slos}


def with_wrong_slos(rng: random.Random, model: str) -> Body:
    wrong = rng.choice([-1, 0, "soon", "nan", 1e300, [1], "", True])
    return plain(rng, model) | {"vllm_xargs": {"tbt_slo_ms": wrong, "ttft_slo_ms": wrong}}


def prioritized(rng: random.Random, model: str) -> Body:
    return plain(rng, model) | {"n": rng.choice([1, 2]), "priority": 0}


def too_long(rng: random.Random, model: str) -> Body:
    return plain(rng, model) | {"prompt": [5] * 100_000}


def malformed(rng: random.Random, model: str) -> Body:
    spoiled: list[Body] = [
        {"max_tokens": -5},
        {"temperature": "hot"},
        {"prompt": [-7, 10**9]},
        {"model": "another"},
        {"vllm_xargs": {"tbt_slo_ms": {"a": 1}}},
        {"n": -1},
    ]
    return plain(rng, model) | rng.choice(spoiled)


KINDS: Mapping[Callable[[random.Random, str], Body], float] = {
    plain: 0.5,
    repeated: 0.12,
    with_slos: 0.14,
    with_wrong_slos: 0.06,
    prioritized: 0.06,
    too_long: 0.06,
    malformed: 0.06,
}
ABORTED_SHARE = 0.1


class MixedLoad:
    """A few clients that each send one request after the other.

    Attributes:
        seen: Answers by kind and what came: ``plain 200``, ``malformed 400``, ``plain aborted``.
        gaps: When each gap between tokens ended, seconds of the load, and how long it was, of
            streams without an SLO of their own.
    """

    def __init__(self, url: str, model: str, *, clients: int, pause_s: float, seed: int) -> None:
        self.seen: Counter[str] = Counter()
        self.gaps: list[tuple[float, float]] = []
        self._url, self._model = url, model
        self._clients, self._pause_s, self._seed = clients, pause_s, seed

    async def run(self, seconds: float, watch: Callable[[float], None], period_s: float) -> None:
        """Send requests for so long, and call ``watch`` with the time once a period."""
        loop = asyncio.get_running_loop()
        self._began_s = began_s = loop.time()
        async with httpx.AsyncClient(base_url=self._url, timeout=TIMEOUT_S) as client:
            tasks = [
                asyncio.create_task(self._client(client, random.Random(f"{self._seed} {number}")))
                for number in range(self._clients)
            ]
            while loop.time() - began_s < seconds:
                await asyncio.sleep(period_s)
                watch(loop.time() - began_s)
            self._is_over = True
            await asyncio.gather(*tasks)

    _is_over = False
    _began_s = 0.0

    async def _client(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        while not self._is_over:
            (make,) = rng.choices(list(KINDS), list(KINDS.values()))
            body = make(rng, self._model)
            gives_up = rng.random() < ABORTED_SHARE
            patience_s = rng.expovariate(1.0) if gives_up else TIMEOUT_S
            outcome = "aborted" if gives_up else "no answer"
            with suppress(asyncio.TimeoutError):
                async with asyncio.timeout(patience_s):
                    outcome = await self._send(client, body)
            self.seen[f"{make.__name__} {outcome}"] += 1
            await asyncio.sleep(rng.expovariate(1.0 / self._pause_s))

    async def _send(self, client: httpx.AsyncClient, body: Body) -> str:
        try:
            if not body.get("stream"):
                answer = await client.post("/v1/completions", json=body)
                return _judge(answer.status_code, answer.text, body)
            async with client.stream("POST", "/v1/completions", json=body) as streamed:
                return _judge(streamed.status_code, await self._read(streamed, body), body)
        except httpx.HTTPError as error:
            return type(error).__name__

    async def _read(self, streamed: httpx.Response, body: Body) -> str:
        loop = asyncio.get_running_loop()
        chunks: list[str] = []
        before_s = None
        async for chunk in streamed.aiter_text():
            chunks.append(chunk)
            if "vllm_xargs" in body or not chunk.startswith("data: {"):
                continue
            now_s = loop.time() - self._began_s
            if before_s is not None:
                self.gaps.append((now_s, now_s - before_s))
            before_s = now_s
        return "".join(chunks)


def _judge(status: int, text: str, body: Body) -> str:
    if status != 200:
        return str(status)
    if body.get("stream"):
        whole = text.rstrip().endswith("[DONE]") and '"error"' not in text
        return "200" if whole else "cut short"
    tokens = json.loads(text)["usage"]["completion_tokens"]
    return "200" if tokens == body["max_tokens"] * body.get("n", 1) else "too few tokens"
