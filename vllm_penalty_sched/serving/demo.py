"""The same load on stock vLLM and on ours: a table, a report and a picture."""

from __future__ import annotations

import shlex
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vllm_penalty_sched.errors import ConfigError
from vllm_penalty_sched.files import write_json
from vllm_penalty_sched.plot import GapPanel, draw_gaps, require_matplotlib
from vllm_penalty_sched.report import (
    LoadResult,
    evaluate_load,
    format_table,
    judge,
    quantiles_to_json,
)
from vllm_penalty_sched.serving.load import Baseline, Load, draw_load, measure_baseline, warm_up
from vllm_penalty_sched.serving.progress import elapsed_time
from vllm_penalty_sched.serving.run_record import describe_hardware, record_run, vllm_version
from vllm_penalty_sched.serving.server import CPU_ENGINE_ARGS, ServerSpec, serve, serves_on_cpu
from vllm_penalty_sched.serving.tiny_model import DEMO_MODEL, make_tiny_model
from vllm_penalty_sched.settings import KEY
from vllm_penalty_sched.workload import LoadSpec, RequestKind

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from vllm_penalty_sched.metrics import RequestTrace
    from vllm_penalty_sched.serving.server import RunningServer

SCHEDULER_CLS = "vllm_penalty_sched.Scheduler"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """What the demo runs.

    Attributes:
        out: Folder for the model, the logs, the settings file, the report and the picture.
        report_path: The report; ``report.json`` in ``out`` if None.
        model: A model folder or hub name; a random 18M-parameter Llama if None.
        seed: Seed of the weights, the load and the prompts.
        slo_factor: SLO as a multiple of the decode-only p50 measured on stock; above 1.
        load: The requests, the same for both servers.
        engine_args: Arguments of both servers, after the ones for CPUs.
        command: The command line, for the report.

    Raises:
        ConfigError: If ``slo_factor`` is not above 1, or ``model`` is a path to no folder.
    """

    out: Path
    report_path: Path | None = None
    model: str | None = None
    seed: int = 0
    slo_factor: float = 4.0
    load: LoadSpec = field(default_factory=LoadSpec)
    engine_args: tuple[str, ...] = ()
    command: str = ""

    def __post_init__(self) -> None:
        if not self.slo_factor > 1:
            raise ConfigError(f"slo_factor must be > 1, got {self.slo_factor}")
        if self.model and self.model[0] in "./~" and not Path(self.model).is_dir():
            raise ConfigError(f"model must be a folder or a hub name, got {self.model}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options to ``parser``."""
    load = LoadSpec()
    add = parser.add_argument
    add("--out", type=Path, default=Path("build/demo"), help="folder to write (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="report (OUT/report.json)")
    add("--model", help="model folder or hub name (a random 18M-parameter Llama)")
    add("--seed", type=int, default=0, help="of weights, load and prompts (%(default)s)")
    add("--slo-factor", type=float, default=4.0, help="SLO / decode-only p50 (%(default)s)")
    add("--steady", type=int, default=load.steady_requests, help="steady decodes (%(default)s)")
    add(
        "--output-tokens",
        type=int,
        default=load.steady_output_tokens,
        help="tokens of each steady decode (%(default)s)",
    )
    add("--prompts", type=int, default=load.injected_requests, help="long prompts (%(default)s)")
    add(
        "--prompt-tokens",
        type=int,
        default=load.injected_prompt_tokens,
        help="mean length of a long prompt (%(default)s)",
    )
    add(
        "--serve-args",
        default="",
        metavar="ARGS",
        help="further arguments of both servers, such as --serve-args='--max-num-seqs 32'",
    )


def settings_from_arguments(arguments: argparse.Namespace, *, command: str) -> DemoSettings:
    """Return the settings that the parsed options of ``add_arguments`` stand for.

    Raises:
        ConfigError: If an option breaks its rule.
    """
    return DemoSettings(
        out=arguments.out,
        report_path=arguments.json,
        model=arguments.model,
        seed=arguments.seed,
        slo_factor=arguments.slo_factor,
        load=LoadSpec(
            steady_requests=arguments.steady,
            steady_output_tokens=arguments.output_tokens,
            injected_requests=arguments.prompts,
            injected_prompt_tokens=arguments.prompt_tokens,
        ),
        engine_args=tuple(shlex.split(arguments.serve_args)),
        command=command,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Everything that was measured.

    Attributes:
        baseline: Stock, with nothing competing.
        tbt_slo_s: The SLO that follows from it.
        load: What was sent to both servers.
        stock: Stock's traces, in the order of the load.
        penalty: Ours.
    """

    baseline: Baseline
    tbt_slo_s: float
    load: Load
    stock: Sequence[RequestTrace]
    penalty: Sequence[RequestTrace]

    def result(self, traces: Sequence[RequestTrace]) -> LoadResult:
        """Hold one server's traces against the SLO."""
        steady = self.load.select(traces, RequestKind.STEADY)
        return evaluate_load(traces, steady_traces=steady, tbt_slo_s=self.tbt_slo_s)


def run_demo(settings: DemoSettings) -> dict[str, object]:
    """Run the load on both servers, print the table, write report and picture.

    Args:
        settings: What to run.

    Returns:
        The report as written.

    Raises:
        MissingDependencyError: If vLLM, aiohttp or matplotlib is not installed.
        ServerError: If a server does not start or dies.
    """
    require_matplotlib()
    engine_args = (CPU_ENGINE_ARGS if serves_on_cpu() else ()) + settings.engine_args
    measured = _measure(settings, settings.model or _make_model(settings), engine_args)
    stock, penalty = measured.result(measured.stock), measured.result(measured.penalty)
    targets = judge(stock, penalty)
    print(format_table(stock, penalty, tbt_slo_s=measured.tbt_slo_s))
    print(*targets, sep="\n")
    report = {
        "slo_ms": round(measured.tbt_slo_s * 1e3, 3),
        "decode_only_ms": round(measured.baseline.decode_only.p50_s * 1e3, 3),
        "stock": stock.to_json(),
        "penalty": penalty.to_json(),
        "decode_only_tbt_ms": quantiles_to_json(measured.baseline.decode_only),
        "prompt_alone_ms": round(measured.baseline.prompt_s * 1e3, 3),
        "targets": [asdict(target) for target in targets],
        **_provenance(settings, engine_args),
    }
    report_path = settings.report_path or settings.out / "report.json"
    picture_path = settings.out / "gaps.png"
    write_json(report_path, report)
    _draw(picture_path, settings, measured)
    print(f"wrote {report_path} and {picture_path}")
    return report


def _provenance(settings: DemoSettings, engine_args: tuple[str, ...]) -> dict[str, object]:
    return {
        "slo_factor": settings.slo_factor,
        "load": asdict(settings.load),
        "model": settings.model or "random Llama, 18M parameters",
        "engine_args": list(engine_args),
        **record_run(settings.command, seed=settings.seed),
    }


def _measure(settings: DemoSettings, model: str, engine_args: tuple[str, ...]) -> Measured:
    rng = np.random.default_rng(settings.seed)
    spec = ServerSpec(model=model, log_path=settings.out / "stock.log", engine_args=engine_args)
    with _started(spec, "stock vLLM") as server:
        with elapsed_time("decodes alone, then one prompt alone"):
            baseline = measure_baseline(server, settings.load, rng)
        tbt_slo_s = settings.slo_factor * baseline.decode_only.p50_s
        _say(
            f"decode-only p50 {baseline.decode_only.p50_s * 1e3:.1f} ms, "
            f"SLO {tbt_slo_s * 1e3:.1f} ms, one prompt {baseline.prompt_s * 1e3:.0f} ms"
        )
        load = draw_load(rng, settings.load, baseline)
        with elapsed_time("load on stock vLLM"):
            stock = load.send(server)
    with (
        _started(_penalty_spec(settings, spec, tbt_slo_s), SCHEDULER_CLS) as server,
        elapsed_time(f"the same load on {SCHEDULER_CLS}"),
    ):
        penalty = load.send(server)
    return Measured(baseline=baseline, tbt_slo_s=tbt_slo_s, load=load, stock=stock, penalty=penalty)


def _penalty_spec(settings: DemoSettings, stock: ServerSpec, tbt_slo_s: float) -> ServerSpec:
    settings_path = settings.out / "settings.json"
    trace_path = settings.out / "steps.jsonl"
    trace_path.unlink(missing_ok=True)
    slo_ms = round(tbt_slo_s * 1e3, 3)
    write_json(settings_path, {"tbt_slo_ms": slo_ms, "trace_path": str(trace_path.resolve())})
    return replace(
        stock,
        log_path=settings.out / "penalty.log",
        scheduler_cls=SCHEDULER_CLS,
        additional_config={KEY: str(settings_path.resolve())},
    )


@contextmanager
def _started(spec: ServerSpec, name: str) -> Iterator[RunningServer]:
    """Start a server and send the warm-up request, the same for every server."""
    with ExitStack() as stack:
        with elapsed_time(f"start {name} (log: {spec.log_path})"):
            server = stack.enter_context(serve(spec))
            warm_up(server, np.random.default_rng(0))
        yield server


def _make_model(settings: DemoSettings) -> str:
    folder = settings.out / "model"
    spec = replace(DEMO_MODEL, seed=settings.seed)
    parameters = make_tiny_model(folder, spec)
    _say(f"made {folder}: a random Llama of {parameters / 1e6:.1f}M parameters")
    return str(folder)


def _draw(path: Path, settings: DemoSettings, measured: Measured) -> None:
    load = settings.load
    panels = [
        GapPanel(
            name=name,
            traces=traces,
            injections_s=[
                trace.sent_s for trace in measured.load.select(traces, RequestKind.INJECTED)
            ],
        )
        for name, traces in (
            (f"stock vLLM {vllm_version()}", measured.stock),
            ("vllm_penalty_sched, cold start", measured.penalty),
        )
    ]
    title = (
        f"{load.steady_requests} decodes, {load.injected_requests} prompts of about "
        f"{load.injected_prompt_tokens} tokens ({describe_hardware()})"
    )
    draw_gaps(path, panels, tbt_slo_s=measured.tbt_slo_s, title=title)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
