"""Start a prefill and a decode instance on this machine's CPUs, and talk to them."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

START_LIMIT_S = 400.0
BLOCK_SIZE = 32
CONNECTOR = {
    "kv_connector": "PenaltyConnector",
    "kv_connector_module_path": "vllm_penalty_sched",
    "kv_buffer_device": "cpu",
}
_SCRIPT = Path(__file__).with_name("one_process.py")


def free_port() -> int:
    """Return a port that the kernel gives to no connection: it is bound half a minute later."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng([length, seed]).integers(10, 2000, length).tolist()


def kv_transfer(role: str, policy: str = "recompute", **extra: Any) -> dict[str, Any]:
    return {
        **CONNECTOR,
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": extra,
    }


def post(url: str, body: Mapping[str, Any], timeout_s: float = 120.0) -> Any:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        return json.loads(response.read())


def metrics_of(url: str) -> dict[str, float]:
    """Return the samples whose labels say more than the engine, by name and other labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        text = response.read().decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [
                value
                for label, value in sample.labels.items()
                if label not in ("engine", "model_name", "le")
            ]
            if "le" not in sample.labels:
                found[":".join([sample.name.removeprefix("vllm:"), *labels])] = sample.value
    return found


@dataclass
class Running:
    """A request on its way in a thread of its own."""

    thread: threading.Thread
    result: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def tokens(self, timeout_s: float = 120.0) -> list[int]:
        self.thread.join(timeout_s)
        assert not self.thread.is_alive(), "the request is not served"
        assert "choices" in self.result, self.result
        found: list[int] = self.result["choices"][0]["token_ids"]
        return found


@dataclass
class One:
    """One instance: the process, and where it answers."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait(self) -> None:
        deadline_s = time.monotonic() + START_LIMIT_S
        while True:
            tail = self.log.read_text(errors="replace")[-3000:]
            assert self.process.poll() is None, f"it died: {self.log}\n{tail}"
            assert time.monotonic() < deadline_s, f"it does not answer: {self.log}\n{tail}"
            with suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return
            time.sleep(0.2)

    def tokens(self, tokens: list[int], output: int, **body: Any) -> list[int]:
        return self.start(tokens, output, **body).tokens()

    def start(self, tokens: list[int], output: int, **body: Any) -> Running:
        content = {
            "prompt": tokens,
            "max_tokens": output,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **body,
        }

        def send() -> None:
            started_s = time.monotonic()
            try:
                running.result.update(post(f"{self.url}/v1/completions", content))
            except OSError as error:
                running.result["error"] = repr(error)
            running.seconds = time.monotonic() - started_s

        running = Running(threading.Thread(target=send, daemon=True))
        running.thread.start()
        return running

    def metrics(self) -> dict[str, float]:
        return metrics_of(self.url)

    @contextmanager
    def forced(self, side: str) -> Iterator[None]:
        """Let every prompt be prefilled on one side while the block runs."""
        post(f"{self.url}/side", {"side": side})
        try:
            yield
        finally:
            post(f"{self.url}/side", {"side": None})

    def blocks_in_use(self) -> int:
        with urllib.request.urlopen(f"{self.url}/blocks", timeout=60) as response:
            blocks = json.loads(response.read())
        return int(blocks["all"] - blocks["free"])

    def signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self.process.wait()


def launch(
    log: Path,
    model: str,
    *,
    core: int,
    port: int | None = None,
    settings: Mapping[str, Any] | None = None,
    side_port: int | None = None,
    **engine_args: Any,
) -> One:
    """Start an instance and return at once."""
    port = port or free_port()
    args: dict[str, Any] = {
        "model": model,
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 4096,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 32,
        "scheduler_cls": "vllm_penalty_sched.Scheduler",
        "additional_config": {"penalty_sched": dict(settings or {})},
        **engine_args,
    }
    env = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port or free_port()),
        "PENALTY_SCHED_STRICT": "1",
        "OMP_NUM_THREADS": "1",
    }
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, str(_SCRIPT), str(port), json.dumps(args)],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return One(process, port, log)


def increase(before: Mapping[str, float], after: Mapping[str, float], name: str) -> float:
    return after.get(name, 0.0) - before.get(name, 0.0)


@dataclass
class Pair:
    """A prefill and a decode instance that knows the other's address."""

    prefill: One
    decode: One
    trace: Path

    def choices(self) -> list[dict[str, Any]]:
        """Return what the decode instance's trace says about its choices so far."""
        time.sleep(1.0)  # it is written twice a second
        lines = self.trace.read_text().splitlines() if self.trace.exists() else []
        return [choice for line in lines for choice in json.loads(line).get("choices", ())]


@contextmanager
def started_pair(
    folder: Path,
    model: str,
    *,
    settings: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
    prefill_extra: Mapping[str, Any] | None = None,
    **engine_args: Any,
) -> Iterator[Pair]:
    """Run both while the block runs."""
    trace = folder / "steps.jsonl"
    prefill = launch(
        folder / "prefill.log",
        model,
        core=0,
        kv_transfer_config=kv_transfer("kv_producer", **(prefill_extra or {})),
    )
    decode = launch(
        folder / "decode.log",
        model,
        core=1,
        settings={"trace_path": str(trace), **(settings or {})},
        kv_transfer_config=kv_transfer(
            "kv_consumer", **{"prefill_url": prefill.url, **(extra or {})}
        ),
        **engine_args,
    )
    try:
        prefill.wait()
        decode.wait()
        yield Pair(prefill, decode, trace)
    finally:
        decode.kill()
        prefill.kill()
