"""Does a prefill and a decode instance serve the demo's load better than one that does both?

python benchmarks/real_pair.py [--rounds N] [--json benchmarks/results/real_pair.json]

Real servers, our scheduler on all of them, the same cores: one engine on all of them, then two
with half of them each, NIXL between them and the priced choice. Both are warm: each serves the
decodes alone and a prompt alone before the load.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import urlopen

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from vllm_penalty_sched.files import write_json
from vllm_penalty_sched.report import evaluate_load
from vllm_penalty_sched.serving.load import draw_load, measure_baseline, warm_up
from vllm_penalty_sched.serving.run_record import record_run
from vllm_penalty_sched.serving.server import CPU_ENGINE_ARGS, RunningServer, ServerSpec, serve
from vllm_penalty_sched.serving.tiny_model import DEMO_MODEL, make_tiny_model
from vllm_penalty_sched.workload import LoadSpec, RequestKind

SIDE_PORT = 5620


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=1, help="of both (%(default)s)")
    parser.add_argument("--tbt-slo-ms", type=float, default=130.0, help="(%(default)g)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


@contextmanager
def environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def spec_of(folder: Path, name: str, slo_ms: float) -> ServerSpec:
    return ServerSpec(
        model=str(folder / "model"),
        log_path=folder / f"{name}.log",
        engine_args=(*CPU_ENGINE_ARGS, "--block-size", "32"),
        scheduler_cls="vllm_penalty_sched.Scheduler",
        additional_config={"penalty_sched": {"tbt_slo_ms": slo_ms}},
    )


def with_transfer(spec: ServerSpec, role: str, **extra: str) -> ServerSpec:
    transfer = {
        "kv_connector": "PenaltyConnector",
        "kv_connector_module_path": "vllm_penalty_sched",
        "kv_role": role,
        "kv_load_failure_policy": "recompute" if extra else "fail",
        "kv_connector_extra_config": extra,
    }
    return replace(
        spec, engine_args=(*spec.engine_args, "--kv-transfer-config", json.dumps(transfer))
    )


@contextmanager
def one_engine(folder: Path, slo_ms: float) -> Iterator[RunningServer]:
    with serve(spec_of(folder, "one", slo_ms)) as server:
        yield server


@contextmanager
def pair(folder: Path, slo_ms: float) -> Iterator[RunningServer]:
    half = (os.cpu_count() or 2) // 2
    with ExitStack() as stack:
        with environment(
            VLLM_CPU_OMP_THREADS_BIND=f"0-{half - 1}", VLLM_NIXL_SIDE_CHANNEL_PORT=str(SIDE_PORT)
        ):
            prefill = stack.enter_context(
                serve(with_transfer(spec_of(folder, "prefill", slo_ms), "kv_producer"))
            )
        with environment(
            VLLM_CPU_OMP_THREADS_BIND=f"{half}-{2 * half - 1}",
            VLLM_NIXL_SIDE_CHANNEL_PORT=str(SIDE_PORT + 1),
        ):
            decode = spec_of(folder, "decode", slo_ms)
            decode = with_transfer(decode, "kv_consumer", prefill_url=prefill.url)
            # No core is spare here: a client bound to the decode instance's would starve.
            yield replace(stack.enter_context(serve(decode)), spare_core=None)


def choices_of(server: RunningServer) -> Mapping[str, float]:
    with urlopen(f"{server.url}/metrics") as answer:
        text = answer.read().decode()
    return {
        f"{sample.labels['side']}: {sample.labels['reason']}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "penalty_sched_prefill_choices_total" and sample.value
    }


def main() -> None:
    arguments = read_arguments()
    load, runs = None, []
    with TemporaryDirectory() as name, environment(VLLM_CPU_KVCACHE_SPACE="1"):
        folder = Path(name)
        make_tiny_model(folder / "model", DEMO_MODEL)
        for _ in range(arguments.rounds):
            for title, start in (("one engine", one_engine), ("pair", pair)):
                with start(folder, arguments.tbt_slo_ms) as server:
                    warm_up(server, np.random.default_rng(0))
                    rng = np.random.default_rng(arguments.seed)
                    baseline = measure_baseline(server, LoadSpec(), rng)
                    load = load or draw_load(rng, LoadSpec(), baseline)
                    before = choices_of(server)
                    traces = load.send(server)
                    chosen = choices_of(server)
                steady = load.select(traces, RequestKind.STEADY)
                result = evaluate_load(
                    traces, steady_traces=steady, tbt_slo_s=arguments.tbt_slo_ms / 1e3
                )
                runs.append(
                    {
                        "servers": title,
                        "decode_only_ms": round(1e3 * baseline.decode_only.p50_s, 2),
                        "prompt_alone_ms": round(1e3 * baseline.prompt_s, 1),
                        **result.to_json(),
                        "choices": {
                            key: value - before.get(key, 0.0) for key, value in chosen.items()
                        },
                    }
                )
                print(json.dumps(runs[-1]), flush=True)
    if arguments.json:
        record: dict[str, Any] = record_run("python " + " ".join(sys.argv), seed=arguments.seed)
        write_json(arguments.json, {"tbt_slo_ms": arguments.tbt_slo_ms, "runs": runs, **record})


if __name__ == "__main__":
    main()
