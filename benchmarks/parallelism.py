"""Does the SLO hold on each engine with vLLM's data, tensor and pipeline parallelism?

python benchmarks/parallelism.py [--mode data] [--json benchmarks/results/parallelism.json]

Serves a small random model in each mode, runs one load, and reads the step trace that each
scheduler wrote. The SLO is a multiple of the decode-only time that each learns itself.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from bench_client import run_bench

from vllm_penalty_sched.errors import ServerError
from vllm_penalty_sched.files import write_json
from vllm_penalty_sched.serving.run_record import record_run
from vllm_penalty_sched.serving.server import CPU_ENGINE_ARGS, ServerSpec, serve, serves_on_cpu
from vllm_penalty_sched.serving.tiny_model import TinyModelSpec, make_tiny_model
from vllm_penalty_sched.step_log.records import TraceText, read_step_log
from vllm_penalty_sched.step_log.summary import summarize_steps

MODES = {
    "none": (),
    "data": ("--data-parallel-size", "2"),
    "tensor": ("--tensor-parallel-size", "2"),
    "pipeline": ("--pipeline-parallel-size", "2"),
}
# On CPUs with one NUMA node vLLM leaves it to the user which core computes for which worker.
ONE_CORE_EACH = {
    "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}
# The last line of a traceback in the server's log.
CAUSE = re.compile(r"(?m)^.*?((?:\w+Error|Exception): .{1,160})")
SLO_SCALE, START_TIMEOUT_S = 4.0, 240.0


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--mode", action="append", choices=list(MODES), help="default: all")
    parser.add_argument("--prompts", type=int, default=32, help="requests (%(default)s)")
    parser.add_argument("--rate", type=float, default=1.0, help="requests/s (%(default)s)")
    return parser.parse_args()


def load(url: str, model: str, arguments: argparse.Namespace) -> None:
    run_bench(
        url,
        model,
        *("--num-prompts", str(arguments.prompts), "--request-rate", str(arguments.rate)),
        input_tokens=500,
        output_tokens=48,
        range_ratio=0.5,
    )


def figures_of(trace: Path) -> dict[str, Any]:
    text = trace.read_text(encoding="utf-8")
    summary = summarize_steps(read_step_log([TraceText(source=trace.name, text=text)]))
    slo = summary.slo
    return {
        "trace": trace.name,
        "steps": summary.steps,
        "prefill_tokens": summary.prefill_tokens,
        "slo_ms": round(1e3 * slo.most_s, 2) if slo else None,
        "held_share": round(slo.held_share, 5) if slo else None,
        "mixed_held_share": slo.mixed_held_share if slo else None,
        "prediction_error": summary.mixed_error.mape if summary.mixed_error else None,
    }


def run(mode: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    place = folder / mode
    place.mkdir()
    settings = {
        "tbt_slo_scale": SLO_SCALE,
        "trace_path": str(place / "steps.jsonl"),
        "state_path": str(place / "state.json"),
    }
    spec = ServerSpec(
        model=str(folder / "model"),
        log_path=place / "server.log",
        engine_args=(*(CPU_ENGINE_ARGS if serves_on_cpu() else ()), *MODES[mode]),
        scheduler_cls="vllm_penalty_sched.Scheduler",
        additional_config={"penalty_sched": settings},
        start_timeout_s=START_TIMEOUT_S,
    )
    os.environ.update(ONE_CORE_EACH if mode in ("tensor", "pipeline") and serves_on_cpu() else {})
    started_s = time.monotonic()
    try:
        with serve(spec) as server:
            start_s = time.monotonic() - started_s
            load(server.url, server.model, arguments)
    except ServerError as error:
        causes = CAUSE.findall(spec.log_path.read_text(encoding="utf-8", errors="replace"))
        reason = str(error).partition("\n")[0].partition(";")[0]
        return {"mode": mode, "arguments": MODES[mode], "error": reason, "causes": causes[:5]}
    files = sorted(path.name for path in place.iterdir())
    schedulers = [figures_of(place / name) for name in files if name.endswith(".jsonl")]
    return {
        "mode": mode,
        "arguments": MODES[mode],
        "start_s": round(start_s, 1),
        "files": files,
        "schedulers": schedulers,
    }


def main() -> None:
    arguments = read_arguments()
    with TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny_model(folder / "model", TinyModelSpec())
        runs = []
        for mode in arguments.mode or MODES:
            runs.append(run(mode, folder, arguments))
            print(runs[-1], flush=True)
    if arguments.json:
        write_json(
            arguments.json,
            {
                "question": (__doc__ or "").partition("\n")[0],
                "slo_scale": SLO_SCALE,
                "runs": runs,
                "run": record_run("python " + " ".join(sys.argv), seed=0),
            },
        )


if __name__ == "__main__":
    main()
