"""The example: two real `vllm serve`, the stock OpenAI API, and vLLM's own router in front of them.

Two servers take two minutes to start on two cores: `make disagg` runs this.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.disagg]
pytest.importorskip("vllm")

from tests.disaggregation.instances import (  # noqa: E402
    free_port,
    increase,
    kv_transfer,
    metrics_of,
    post,
    prompt,
)

ROOT = Path(__file__).parents[2]
START_LIMIT_S = 400.0
PATH = f"{sys.prefix}/bin:{os.environ['PATH']}"
LENGTHS = (8, 31, 100, 512, 1000)
LOCAL = "prompt_tokens_by_source_total:local_compute"
REMOTE = "prompt_tokens_by_source_total:external_kv_transfer"
CHOICES = "penalty_sched_prefill_choices_total"


@contextmanager
def group(command: list[str], log: Path, env: dict[str, str]) -> Iterator[None]:
    """Run a program and all that it starts while the block runs."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["env", *command],
            cwd=log.parent,
            env=os.environ | {"PATH": PATH} | env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(15)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def await_answer(url: str, log: Path) -> None:
    deadline_s = time.monotonic() + START_LIMIT_S
    while True:
        assert time.monotonic() < deadline_s, log.read_text(errors="replace")[-3000:]
        with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(0.5)


def tokens_of(url: str, tokens: list[int], output: int = 16, **body: Any) -> list[int]:
    content = {
        "prompt": tokens,
        "max_tokens": output,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **body,
    }
    answer = post(f"{url}/v1/completions", content)
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


@pytest.fixture
def folder(tmp_path: Path, model: str) -> Path:
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "tiny-llama").symlink_to(model)
    return tmp_path


def test_the_example_serves_and_prefills_on_either_side(
    folder: Path, findings: dict[str, Any]
) -> None:
    port, prefill_port, log = free_port(), free_port(), folder / "example.log"
    decode, prefill = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{prefill_port}"
    env = {"PORT": str(port), "PREFILL_PORT": str(prefill_port), "TBT_SLO_MS": "25"}
    started_s = time.monotonic()
    with group(["bash", str(ROOT / "examples/disaggregated.sh")], log, env):
        await_answer(prefill, log)
        await_answer(decode, log)
        start_s = time.monotonic() - started_s
        pool = ThreadPoolExecutor(8)
        streams = [pool.submit(tokens_of, decode, prompt(24, seed), 2500) for seed in range(8)]
        for seed in range(20):  # until the decode instance knows what its steps cost
            tokens_of(decode, prompt(100 + 30 * seed, 100 + seed), 4)
        found = [tokens_of(decode, prompt(length, 1)) for length in LENGTHS]
        busy = metrics_of(decode)
        assert {len(stream.result()) for stream in streams} == {2500}
        time.sleep(2.0)
        before = metrics_of(decode)
        idle_found = [tokens_of(decode, prompt(length, 2)) for length in LENGTHS[:3]]
        time.sleep(2.0)
        idle = metrics_of(decode)
        expected = [tokens_of(prefill, prompt(length, 1)) for length in LENGTHS]
        idle_expected = [tokens_of(prefill, prompt(length, 2)) for length in LENGTHS[:3]]

    assert found == expected
    assert idle_found == idle_expected
    assert busy[REMOTE] > 0
    assert busy["nixl_bytes_transferred_sum"] > 0
    assert increase(before, idle, LOCAL) == sum(LENGTHS[:3])
    assert increase(before, idle, REMOTE) == 0
    assert increase(before, idle, f"{CHOICES}:cheaper_here:local") == 3
    findings["example, vllm serve twice"] = {
        "start_s": start_s,
        "prompt tokens computed locally": busy[LOCAL],
        "prompt tokens over the connector": busy[REMOTE],
        "equal tokens for prompts of": list(LENGTHS),
        "choices": {name: count for name, count in busy.items() if CHOICES in name and count},
    }


@pytest.mark.skipif(shutil.which("vllm-router", path=PATH) is None, reason="needs vllm-router")
def test_vllms_own_router_works_in_front_of_our_schedulers(
    folder: Path, model: str, findings: dict[str, Any]
) -> None:
    router_port, prefill_port, decode_port = free_port(), free_port(), free_port()
    urls = [f"http://127.0.0.1:{port}" for port in (router_port, prefill_port, decode_port)]
    router, prefill, decode = urls
    with (
        group(*serve_command(model, prefill_port, 0, "kv_producer", folder / "prefill.log")),
        group(*serve_command(model, decode_port, 1, "kv_consumer", folder / "decode.log")),
    ):
        await_answer(prefill, folder / "prefill.log")
        await_answer(decode, folder / "decode.log")
        command = ["vllm-router", "--host", "127.0.0.1", "--port", str(router_port)]
        command += ["--vllm-pd-disaggregation", "--kv-connector", "nixl", "--prefill", prefill]
        command += ["--decode", decode, "--policy", "round_robin", "--prometheus-port"]
        with group([*command, str(free_port())], folder / "router.log", {}):
            await_answer(router, folder / "router.log")
            served = {"model": str(model)}
            found = [tokens_of(router, prompt(length, 1), **served) for length in LENGTHS]
        after = metrics_of(decode)
        expected = [tokens_of(prefill, prompt(length, 1)) for length in LENGTHS]

    assert found == expected
    assert after[REMOTE] == sum(LENGTHS)
    assert after[LOCAL] == 0
    findings["vllm-router in front"] = {
        "equal tokens for prompts of": list(LENGTHS),
        "prompt tokens over the connector": after[REMOTE],
    }


def serve_command(
    model: str, port: int, core: int, role: str, log: Path
) -> tuple[list[str], Path, dict[str, str]]:
    transfer = kv_transfer(role, allow_client_kv_params=role == "kv_consumer")
    command = ["vllm", "serve", model, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--enforce-eager", "--block-size", "32"]
    command += ["--kv-transfer-config", json.dumps(transfer)]
    command += ["--scheduler-cls", "vllm_penalty_sched.Scheduler"]
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
    }
    return command, log, env
