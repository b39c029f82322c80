"""What do the dashboard's queries answer while a real server runs under load?

python benchmarks/dashboard_picture.py [--out benchmarks/results/dashboard.png] [options]

Needs the ``prometheus`` program. It scrapes a server of ours on this machine; every query of
examples/grafana/dashboard.json is then put to Prometheus as Grafana would, and drawn.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).parent))
from bench_client import run_bench

from vllm_penalty_sched.files import write_json
from vllm_penalty_sched.serving.run_record import record_run
from vllm_penalty_sched.serving.server import CPU_ENGINE_ARGS, ServerSpec, serve, serves_on_cpu
from vllm_penalty_sched.serving.tiny_model import DEMO_MODEL, make_tiny_model

DASHBOARD = Path(__file__).parents[1] / "examples" / "grafana" / "dashboard.json"
STEP_S, COLUMNS = 2, 3
# What Grafana would put in for its variables.
VARIABLES = {"$__rate_interval": "10s", "$engine": ".*"}


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/dashboard.png"))
    parser.add_argument("--json", type=Path, metavar="FILE", help="the answers")
    parser.add_argument("--port", type=int, default=19090, help="of Prometheus (%(default)s)")
    parser.add_argument("--prompts", type=int, default=60, help="requests (%(default)s)")
    parser.add_argument("--rate", type=float, default=0.8, help="requests/s (%(default)s)")
    parser.add_argument("--tbt-slo-ms", type=float, default=130.0, help="(%(default)s)")
    return parser.parse_args()


@contextmanager
def scraping(url: str, folder: Path, port: int) -> Iterator[str]:
    """Run Prometheus on a server's metrics, and yield its address."""
    config = {
        "scrape_configs": [
            {
                "job_name": "vllm",
                "scrape_interval": "1s",
                "static_configs": [{"targets": [url.removeprefix("http://")]}],
            }
        ]
    }
    path = folder / "prometheus.yml"
    path.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            [
                "prometheus", "--config.file", str(path),
                "--storage.tsdb.path", str(folder / "series"),
                "--web.listen-address", f"127.0.0.1:{port}",
            ],
            stdout=log, stderr=log,
        )  # fmt: skip
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


def load(url: str, model: str, arguments: argparse.Namespace) -> None:
    run_bench(
        url,
        model,
        *("--num-prompts", str(arguments.prompts), "--request-rate", str(arguments.rate)),
        input_tokens=600,
        output_tokens=64,
        range_ratio=0.8,
    )


def ask(prometheus: str, expression: str, *, start_s: float, end_s: float) -> list[dict[str, Any]]:
    """Return the series that answer a query: ``metric`` and ``values``, as Prometheus has them."""
    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    query = {"query": expression, "start": start_s, "end": end_s, "step": STEP_S}
    with urlopen(f"{prometheus}/api/v1/query_range?{urlencode(query)}") as answer:
        found = json.load(answer)
    series: list[dict[str, Any]] = found["data"]["result"]
    return series


def ask_all(prometheus: str, *, start_s: float, end_s: float) -> list[dict[str, Any]]:
    answers = []
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        lines = {}
        for target in panel["targets"]:
            for series in ask(prometheus, target["expr"], start_s=start_s, end_s=end_s):
                label = target["legendFormat"]
                for name, value in series["metric"].items():
                    label = label.replace(f"{{{{{name}}}}}", value)
                lines[label] = [(at_s - start_s, float(value)) for at_s, value in series["values"]]
        unit = panel["fieldConfig"]["defaults"]["unit"]
        answers.append({"title": panel["title"], "unit": unit, "lines": lines})
    return answers


def draw(answers: list[dict[str, Any]], path: Path) -> None:
    rows = -(-len(answers) // COLUMNS)
    figure, axes = plt.subplots(rows, COLUMNS, figsize=(15, 3 * rows), sharex=True)
    for axis, answer in zip(axes.flat, answers, strict=False):
        axis.set_title(answer["title"], fontsize=10)
        for label, points in answer["lines"].items():
            if any(value for _, value in points) or len(answer["lines"]) <= 4:
                axis.plot(*zip(*points, strict=True), linewidth=1, label=label)
        if answer["lines"]:
            axis.legend(fontsize=7, loc="upper right")
            axis.set_ylim(bottom=0)
        else:
            axis.text(0.5, 0.5, "no such metric here", ha="center", transform=axis.transAxes)
        axis.set_ylabel({"s": "s", "percentunit": "share", "ops": "1/s"}.get(answer["unit"], ""))
    for axis in axes[-1]:
        axis.set_xlabel("s")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)


def main() -> None:
    arguments = read_arguments()
    with TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny_model(folder / "model", DEMO_MODEL)
        spec = ServerSpec(
            model=str(folder / "model"),
            log_path=folder / "server.log",
            engine_args=CPU_ENGINE_ARGS if serves_on_cpu() else (),
            scheduler_cls="vllm_penalty_sched.Scheduler",
            additional_config={"penalty_sched": {"tbt_slo_ms": arguments.tbt_slo_ms}},
        )
        with serve(spec) as server, scraping(server.url, folder, arguments.port) as prometheus:
            start_s = time.time()
            load(server.url, server.model, arguments)
            time.sleep(2 * STEP_S)
            answers = ask_all(prometheus, start_s=start_s, end_s=time.time())
    draw(answers, arguments.out)
    if arguments.json:
        run = record_run("python " + " ".join(sys.argv), seed=0)
        write_json(arguments.json, {"run": run, "panels": answers})


if __name__ == "__main__":
    main()
