"""What does vLLM's own benchmark client see of stock vLLM and of us, on a real server?

python benchmarks/bench_serve.py [--json benchmarks/results/bench_serve.json] [options]

Serves the demo's model with each scheduler in turn, several rounds, so that a machine that changes
its speed hits both. Each server runs the same load of ``vllm bench serve``, same seeds.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from bench_client import run_bench

from vllm_penalty_sched.files import write_json
from vllm_penalty_sched.serving.run_record import record_run
from vllm_penalty_sched.serving.server import CPU_ENGINE_ARGS, ServerSpec, serve, serves_on_cpu
from vllm_penalty_sched.serving.tiny_model import DEMO_MODEL, make_tiny_model

FIGURES = (
    "completed", "duration", "output_throughput", "request_goodput", "mean_ttft_ms",
    "median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms", "max_itl_ms", "mean_tpot_ms",
)  # fmt: skip


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=3, help="of both schedulers (%(default)s)")
    parser.add_argument("--prompts", type=int, default=48, help="requests (%(default)s)")
    parser.add_argument("--rate", type=float, default=1.2, help="requests/s (%(default)s)")
    parser.add_argument("--input-tokens", type=int, default=800, help="mean (%(default)s)")
    parser.add_argument("--output-tokens", type=int, default=64, help="mean (%(default)s)")
    parser.add_argument("--tbt-slo-ms", type=float, default=130.0, help="(%(default)s)")
    parser.add_argument("--ttft-slo-ms", type=float, default=5000.0, help="(%(default)s)")
    return parser.parse_args()


def bench(url: str, model: str, arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        run_bench(
            url,
            model,
            *("--seed", str(seed), "--num-prompts", str(arguments.prompts)),
            *("--request-rate", str(arguments.rate)),
            *("--save-result", "--save-detailed", "--result-dir", folder),
            *("--goodput", f"tpot:{arguments.tbt_slo_ms}", f"ttft:{arguments.ttft_slo_ms}"),
            input_tokens=arguments.input_tokens,
            output_tokens=arguments.output_tokens,
            range_ratio=0.5,
        )
        (path,) = Path(folder).glob("*.json")
        found = json.loads(path.read_text(encoding="utf-8"))
    gaps_ms = 1e3 * np.concatenate([np.asarray(gaps) for gaps in found["itls"]])
    figures = {name: found[name] for name in FIGURES if name in found}
    return figures | {
        "max_itl_ms": float(gaps_ms.max()),
        "within_tbt_slo": float(np.mean(gaps_ms <= arguments.tbt_slo_ms)),
        "seed": seed,
    }


def main() -> None:
    arguments = read_arguments()
    settings = {"tbt_slo_ms": arguments.tbt_slo_ms, "ttft_slo_ms": arguments.ttft_slo_ms}
    runs: dict[str, list[dict[str, Any]]] = {"stock": [], "penalty": []}
    with TemporaryDirectory() as folder:
        make_tiny_model(Path(folder) / "model", DEMO_MODEL)
        for seed in range(arguments.rounds):
            for name, figures in runs.items():
                spec = ServerSpec(
                    model=str(Path(folder) / "model"),
                    log_path=Path(folder) / f"{name}.log",
                    engine_args=CPU_ENGINE_ARGS if serves_on_cpu() else (),
                    scheduler_cls="vllm_penalty_sched.Scheduler" if name == "penalty" else None,
                    additional_config={"penalty_sched": settings} if name == "penalty" else None,
                )
                with serve(spec) as server:
                    figures.append(bench(server.url, server.model, arguments, seed))
                print(name, json.dumps(figures[-1]), flush=True)
    if arguments.json:
        options = vars(arguments) | {"json": None}
        write_json(
            arguments.json,
            {
                "question": (__doc__ or "").partition("\n")[0],
                "run": record_run("python " + " ".join(sys.argv), seed=0),
                "options": options,
                "runs": runs,
            },
        )


if __name__ == "__main__":
    main()
