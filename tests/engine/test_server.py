"""The real thing: ``vllm serve`` with our scheduler, the stock OpenAI client, vLLM's own benchmark.

One server serves most tests of this file; the last one kills it.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from vllm_penalty_sched.errors import ServerError  # noqa: E402
from vllm_penalty_sched.serving.client import StreamRequest, stream_load  # noqa: E402
from vllm_penalty_sched.serving.server import (  # noqa: E402
    CPU_ENGINE_ARGS,
    ServerSpec,
    serve,
    serves_on_cpu,
)
from vllm_penalty_sched.serving.tiny_model import make_tiny_model  # noqa: E402

EXAMPLES = Path(__file__).parents[2] / "examples"
SLO_MS = 150.0
ENGINE_ARGS = CPU_ENGINE_ARGS if serves_on_cpu() else ()


@dataclass(frozen=True)
class Served:
    url: str
    model: str
    log: Path
    state: Path
    spec: ServerSpec
    group: int


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder)
    return str(folder)


@pytest.fixture(scope="module")
def served(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("server")
    settings, state = folder / "settings.json", folder / "state.json"
    settings.write_text(json.dumps({"tbt_slo_ms": SLO_MS, "state_path": str(state)}))
    spec = ServerSpec(
        model=model,
        log_path=folder / "server.log",
        engine_args=ENGINE_ARGS,
        scheduler_cls="vllm_penalty_sched.Scheduler",
        additional_config={"penalty_sched": str(settings)},
    )
    with serve(spec) as server:
        yield Served(server.url, server.model, spec.log_path, state, spec, server.process.pid)


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(10, 2000, length).tolist()


def example(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def decode_only_ms(served: Served) -> float:
    load = [
        StreamRequest(prompt_token_ids=prompt(32, seed), output_tokens=100) for seed in range(5)
    ]
    traces = stream_load(served.url, load, model=served.model)
    return 1e3 * max(np.ptp(trace.arrivals_s) / (trace.output_tokens - 1) for trace in traces)


def test_the_tightest_requests_slo_rules_and_the_budget_widens_when_it_ends(
    served: Served,
) -> None:
    # The SLOs follow from the machine's own decode speed. The prompts come right behind the
    # requests that decode, so that only numbers of tokens say which of them outlives which.
    alone_ms = float(np.median([decode_only_ms(served) for _ in range(3)]))
    tight_slo_ms, slo_ms = 4.0 * alone_ms, 10.0 * alone_ms
    steady = [
        StreamRequest(
            prompt_token_ids=prompt(32, seed), output_tokens=700, xargs={"tbt_slo_ms": slo_ms}
        )
        for seed in range(4)
    ]
    tight = StreamRequest(
        prompt_token_ids=prompt(16, 50), output_tokens=300, xargs={"tbt_slo_ms": tight_slo_ms}
    )
    long = [
        StreamRequest(prompt_token_ids=prompt(3000, 100 + i), output_tokens=2, send_at_s=0.05)
        for i in range(16)
    ]

    traces = stream_load(served.url, [*steady, tight, *long], model=served.model)

    assert [trace.error for trace in traces] == [None] * len(traces)
    steady_s = np.array(traces[0].arrivals_s)
    gaps_ms = 1e3 * np.diff(steady_s)
    first_long_s = min(trace.sent_s for trace in traces[5:])
    last_long_s = max(trace.arrivals_s[0] for trace in traces[5:])
    tight_ended_s = traces[4].arrivals_s[-1]
    while_tight = gaps_ms[(steady_s[:-1] > first_long_s) & (steady_s[1:] < tight_ended_s)][10:]
    after_tight = gaps_ms[(steady_s[:-1] > tight_ended_s) & (steady_s[1:] < last_long_s)][5:]
    assert len(while_tight) > 20
    assert len(after_tight) > 20
    assert np.median(while_tight) <= tight_slo_ms
    assert np.median(after_tight) > 1.25 * np.median(while_tight)
    assert np.median(after_tight) <= slo_ms


def test_the_stock_openai_client_sends_an_slo_on_completions_and_chat(served: Served) -> None:
    printed = example("request_slo.py", served.url)

    assert len(re.findall(r"longest gap [\d.]+ ms", printed)) == 2


@pytest.mark.parametrize("value", ["soon", -5, 0, [1]])
def test_a_nonsense_slo_is_ignored_and_hurts_nobody_else(served: Served, value: object) -> None:
    bad = StreamRequest(
        prompt_token_ids=prompt(16, 1), output_tokens=20, xargs={"tbt_slo_ms": value}
    )
    good = StreamRequest(prompt_token_ids=prompt(16, 2), output_tokens=20)

    traces = stream_load(served.url, [bad, good], model=served.model)

    assert [trace.error for trace in traces] == [None, None]
    assert [trace.output_tokens for trace in traces] == [20, 20]
    warnings = re.findall(r"WARNING.*tbt_slo_ms must be", served.log.read_text())
    assert len(warnings) == 1


def test_vllms_own_benchmark_runs_against_it(served: Served, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve",
            "--backend", "openai", "--base-url", served.url, "--model", served.model,
            "--dataset-name", "random", "--random-input-len", "256",
            "--random-output-len", "32", "--num-prompts", "16", "--request-rate", "8",
            "--ignore-eos", "--goodput", f"tpot:{SLO_MS}",
        ],
        capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip

    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"Successful requests:\s+16\b", done.stdout)
    assert re.search(r"P99 ITL \(ms\):", done.stdout)


def scraped(url: str) -> dict[str, dict[str, float]]:
    """Values of every sample without ``le``, by name, then by reason or engine index."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        text = response.read().decode()
    values: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if "le" not in sample.labels:
                key = sample.labels.get("reason", sample.labels.get("engine", ""))
                values.setdefault(sample.name, {})[key] = sample.value
    return values


def test_the_metrics_endpoint_tells_every_step_that_ran(served: Served) -> None:
    load = [
        StreamRequest(prompt_token_ids=prompt(400, 200 + i), output_tokens=40, send_at_s=0.1 * i)
        for i in range(12)
    ]
    before = scraped(served.url)

    stream_load(served.url, load, model=served.model)

    after = scraped(served.url)
    name = "penalty_sched_observed_step_seconds_count"
    steps = after[name]["0"] - before.get(name, {"0": 0.0})["0"]
    decisions = sum(after["penalty_sched_decisions_total"].values())
    assert 12 * 40 / len(load) < steps <= 12 * (40 + 400)
    assert decisions == after[name]["0"] == after["penalty_sched_prefill_ratio_count"]["0"]
    assert after["penalty_sched_penalty_seconds_total"]["0"] > 0.0
    assert after["penalty_sched_slo_seconds"]["0"] == SLO_MS / 1e3
    assert 0.0 < after["penalty_sched_decode_only_seconds"]["0"] < 1.0
    assert 0.0 < after["penalty_sched_model_error"]["0"] < 1.0
    assert after["penalty_sched_prefill_headroom_tokens_per_second"]["0"] > 100.0
    assert after["penalty_sched_faults_total"]["0"] == 0.0
    assert after["vllm:generation_tokens_total"]["0"] >= 12 * 40


def test_wrong_settings_stop_the_server_with_every_mistake_in_one_message(
    model: str, tmp_path: Path
) -> None:
    spec = ServerSpec(
        model=model,
        log_path=tmp_path / "server.log",
        engine_args=ENGINE_ARGS,
        scheduler_cls="vllm_penalty_sched.Scheduler",
        additional_config={"penalty_sched": {"tbt_slo_ms": -1, "mode": "fast", "speed": 9}},
    )

    with pytest.raises(ServerError), serve(spec):
        pass

    told = re.findall(r"ConfigError: .*", spec.log_path.read_text())
    assert told
    for part in ("tbt_slo_ms", "got -1", "mode", "got 'fast'", "speed"):
        assert part in told[0]


def test_the_serve_example_serves_a_model_of_its_own(tmp_path: Path) -> None:
    log = tmp_path / "log"
    port = "18173"
    env = os.environ | {"PORT": port, "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}"}
    with log.open("w") as out:
        process = subprocess.Popen(
            [str(EXAMPLES / "serve.sh")],
            cwd=tmp_path, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        printed = wait_for_answer(process, f"http://127.0.0.1:{port}")
    finally:
        os.killpg(process.pid, 15)
        process.wait(30)

    assert "asked for 30 ms" in printed, log.read_text()[-3000:]


def wait_for_answer(process: subprocess.Popen, url: str) -> str:
    deadline_s = time.monotonic() + 240
    stop = threading.Event()
    while process.poll() is None and time.monotonic() < deadline_s:
        try:
            return example("request_slo.py", url)
        except AssertionError:
            stop.wait(5.0)
    return ""


def test_the_offline_example_generates_and_tells_what_it_learned(model: str) -> None:
    printed = example("offline.py", model)

    assert "1600 tokens generated" in printed
    assert re.search(r"learned from \d+ steps", printed)


def test_two_engines_behind_two_api_servers_show_each_engines_sums(
    model: str, tmp_path: Path
) -> None:
    settings = {"tbt_slo_ms": SLO_MS, "state_path": str(tmp_path / "state.json")}
    spec = ServerSpec(
        model=model,
        log_path=tmp_path / "server.log",
        engine_args=(*ENGINE_ARGS, "--data-parallel-size", "2", "--api-server-count", "2"),
        scheduler_cls="vllm_penalty_sched.Scheduler",
        additional_config={"penalty_sched": settings},
        start_timeout_s=400.0,
    )
    name, requests = "penalty_sched_observed_step_seconds_count", 0
    with serve(spec) as server:
        # Each API server prefers an engine, and the kernel spreads connections over the servers.
        while requests < 40 and not all(scraped(server.url).get(name, {}).get(e) for e in "01"):
            one = StreamRequest(prompt_token_ids=prompt(100, requests), output_tokens=20)
            stream_load(server.url, [one], model=server.model)
            requests += 1
        seen = [scraped(server.url) for _ in range(4)]

    steps = [values[name] for values in seen]
    assert steps == 4 * steps[:1]
    assert steps[0].keys() == {"0", "1"}
    assert sum(steps[0].values()) == 20 * requests
    assert {tuple(values["penalty_sched_slo_seconds"].values()) for values in seen} == {
        (SLO_MS / 1e3, SLO_MS / 1e3)
    }
    assert {path.name for path in tmp_path.glob("state*")} == {"state.json", "state.1.json"}


# Last: it takes the server away from the tests above.
def test_the_successor_of_a_killed_server_goes_on_from_what_that_one_had_learned(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    load = [
        StreamRequest(prompt_token_ids=prompt(500, seed), output_tokens=100) for seed in range(8)
    ]
    deadline_s = time.monotonic() + 60.0
    while saved_steps(served.state) < 20:
        assert time.monotonic() < deadline_s, f"{served.state} holds too few steps"
        stream_load(served.url, load, model=served.model)
    os.killpg(served.group, signal.SIGKILL)

    with serve(replace(served.spec, log_path=tmp_path / "successor.log")) as successor:
        traces = stream_load(successor.url, load, model=successor.model)

    told = re.findall(
        r"going on from (\S+), learned from (\d+) steps", (tmp_path / "successor.log").read_text()
    )
    assert [trace.error for trace in traces] == [None] * len(traces)
    assert [path for path, _ in told] == [str(served.state)]
    assert saved_steps(served.state) > int(told[0][1]) >= 20


def saved_steps(state: Path) -> int:
    return json.loads(state.read_text())["samples"] if state.exists() else 0
