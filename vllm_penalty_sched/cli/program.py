"""The command line ``vllm-penalty``: one subcommand a job."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from vllm_penalty_sched.calibration.fitting import CurveFit, StepFit, fit_curve, fit_step_time
from vllm_penalty_sched.calibration.grid import FULL, QUICK
from vllm_penalty_sched.calibration.samples import Sample, SamplesOrigin, read_samples
from vllm_penalty_sched.cli import advise_commands, simulation_commands, step_log_commands
from vllm_penalty_sched.errors import ConfigError, MissingDependencyError, PenaltySchedError
from vllm_penalty_sched.files import check_writable, write_json
from vllm_penalty_sched.learning.latency import load_model
from vllm_penalty_sched.plot import check_suffix, draw_fit, require_matplotlib
from vllm_penalty_sched.serving import demo
from vllm_penalty_sched.serving.run_record import describe_hardware, record_run, vllm_version
from vllm_penalty_sched.serving.server import CPU_KV_CACHE_GIB, serves_on_cpu
from vllm_penalty_sched.serving.tiny_model import TinyModelSpec, make_tiny_model
from vllm_penalty_sched.settings import Settings, inert_settings, settings_in_json

if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRAM = "vllm-penalty"
BAD_INPUT_STATUS, INTERRUPTED_STATUS = 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        argv: Arguments after the program's name; those of the process if None.

    Returns:
        The exit status: 0, or 2 after one message on standard error, or 130 if interrupted.
    """
    argv = sys.argv[1:] if argv is None else argv
    own, engine_args = _split_engine_args(argv)
    arguments = make_parser().parse_args(own, argparse.Namespace(engine_args=engine_args))
    arguments.command = shlex.join([PROGRAM, *argv])
    try:
        _check_outputs(arguments)
        status: int = arguments.run(arguments)
    except (PenaltySchedError, OSError) as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return BAD_INPUT_STATUS
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return INTERRUPTED_STATUS
    return status


def _check_outputs(arguments: argparse.Namespace) -> None:
    """Raise before the work what would spoil its end: a file that cannot be written."""
    figures: Path | None = getattr(arguments, "json", None)
    picture: Path | None = getattr(arguments, "picture", None)
    if figures is not None:
        check_writable(figures, by_rename=True)
    if picture is not None:
        require_matplotlib()
        check_suffix(picture)
        check_writable(picture)


def _split_engine_args(argv: Sequence[str]) -> tuple[Sequence[str], tuple[str, ...]]:
    """Split off what stands behind ``--``, which argparse would take for positional arguments."""
    if argv[:1] != ["calibrate"] or "--" not in argv:
        return argv, ()
    place = argv.index("--")
    return argv[:place], tuple(argv[place + 1 :])


class _Parser(argparse.ArgumentParser):
    """Reports a wrong option in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT_STATUS, f"{self.prog}: error: {message} (see --help)\n")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser: one block a subcommand, each with the function that runs it."""
    parser = _Parser(
        prog=PROGRAM, description="Tools around the vLLM scheduler that holds a decode latency SLO."
    )
    subcommands = parser.add_subparsers(title="subcommands", required=True, metavar="COMMAND")

    command = subcommands.add_parser("demo", help=demo.__doc__)
    demo.add_arguments(command)
    command.set_defaults(run=_run_demo)

    command = subcommands.add_parser("check", help="check a settings file before a server reads it")
    command.add_argument("file", type=Path, metavar="FILE", help="a JSON file of settings")
    command.add_argument("--json", type=Path, metavar="OUT", help="write all settings in force")
    command.set_defaults(run=_run_check)

    command = subcommands.add_parser("make-model", help="write a small random Llama")
    _add_model_arguments(command)
    command.set_defaults(run=_run_make_model)

    command = subcommands.add_parser(
        "calibrate",
        help="measure an engine's steps over a grid of compositions",
        usage="%(prog)s [options] MODEL --out SAMPLES [-- ENGINE_ARGUMENTS ...]",
        epilog="What follows -- goes to vLLM's engine as it stands. An interrupted calibration "
        "goes on where it stopped when the same command runs again.",
    )
    _add_calibrate_arguments(command)
    command.set_defaults(run=_run_calibrate)

    command = subcommands.add_parser("fit", help="fit measured steps and print how well it fits")
    command.add_argument("samples", type=Path, metavar="SAMPLES", help="a CSV file of samples")
    command.add_argument(
        "--form",
        choices=("curve", "step"),
        required=True,
        help="the polynomial f(r), or the step-time model that sizes chunks",
    )
    command.add_argument("--degree", type=int, help="of f(r) (2)")
    command.add_argument("--out", type=Path, metavar="OUT", help="save the step-time model")
    command.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    command.set_defaults(run=_run_fit)

    command = subcommands.add_parser("report", help="sum up a step trace and say what to change")
    step_log_commands.add_report_arguments(command)
    command.set_defaults(run=step_log_commands.run_report)

    command = subcommands.add_parser("plot", help="draw measured steps and fits, or a step trace")
    command.add_argument(
        "file", type=Path, metavar="FILE", help="a CSV file of samples, or what trace_path wrote"
    )
    command.add_argument(
        "--out", type=Path, dest="picture", required=True, metavar="FILE", help="the picture"
    )
    command.set_defaults(run=_run_plot)

    command = subcommands.add_parser(
        "simulate", help="play a trace through vLLM's scheduler and ours on virtual time"
    )
    simulation_commands.add_simulate_arguments(command)
    command.set_defaults(run=simulation_commands.run_simulate)

    command = subcommands.add_parser(
        "capacity",
        help="search the highest rate at which enough requests are served well",
        epilog="The rate is bracketed by doubling or halving, then bisected. The share does not "
        "fall with the rate everywhere: another rate near the one named may meet the target too.",
    )
    simulation_commands.add_capacity_arguments(command)
    command.set_defaults(run=simulation_commands.run_capacity)

    command = subcommands.add_parser(
        "advise", help="say whether separate prefill instances would pay, and why"
    )
    advise_commands.add_advise_arguments(command)
    command.set_defaults(run=advise_commands.run_advise)

    return parser


def _run_demo(arguments: argparse.Namespace) -> int:
    if arguments.seed < 0:
        raise ConfigError(f"seed must be >= 0, got {arguments.seed}")
    demo.run_demo(demo.settings_from_arguments(arguments, command=arguments.command))
    return 0


def _run_check(arguments: argparse.Namespace) -> int:
    text = arguments.file.read_text(encoding="utf-8", errors="replace")
    settings = Settings.from_json(text, source=str(arguments.file))
    if settings.model is not None:
        load_model(settings.model)
    in_force = asdict(settings)
    for name, value in in_force.items():
        print(f"{name:14} {value if value is not None else '-'}")
    for line in inert_settings(settings_in_json(text, source=str(arguments.file))):
        print(f"{PROGRAM}: warning: {line}", file=sys.stderr)
    if arguments.json:
        write_json(arguments.json, in_force)
    return 0


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    sizes = TinyModelSpec()
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    for option, name in (
        ("--hidden", "hidden_size"),
        ("--intermediate", "intermediate_size"),
        ("--layers", "layers"),
        ("--heads", "attention_heads"),
        ("--vocab", "vocab_size"),
        ("--max-tokens", "max_tokens"),
        ("--seed", "seed"),
    ):
        parser.add_argument(
            option, dest=name, type=int, default=getattr(sizes, name), help="(%(default)s)"
        )


def _run_make_model(arguments: argparse.Namespace) -> int:
    spec = TinyModelSpec(
        hidden_size=arguments.hidden_size,
        intermediate_size=arguments.intermediate_size,
        layers=arguments.layers,
        attention_heads=arguments.attention_heads,
        vocab_size=arguments.vocab_size,
        max_tokens=arguments.max_tokens,
        seed=arguments.seed,
    )
    parameters = make_tiny_model(arguments.out, spec)
    print(f"wrote {arguments.out}: {parameters} parameters")
    return 0


def _add_calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a folder or a hub name")
    parser.add_argument("--out", type=Path, required=True, metavar="SAMPLES", help="a CSV file")
    parser.add_argument(
        "--concurrency",
        type=int,
        default=8,
        help="concurrent requests of the penalty curve's set-up (%(default)s)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a small grid, for at most three minutes with a small model",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured where")


def _run_calibrate(arguments: argparse.Namespace) -> int:
    began_s = time.perf_counter()
    if arguments.concurrency < 2:
        raise ConfigError(f"concurrency must be >= 2, got {arguments.concurrency}")
    run = record_run(arguments.command, seed=0)
    origin = SamplesOrigin(
        hardware=describe_hardware(),
        vllm_version=vllm_version() or "",
        model=arguments.model,
        engine_args=arguments.engine_args,
        concurrency=arguments.concurrency,
        grid="quick" if arguments.quick else "full",
        plugin_version=version("vllm-penalty-sched"),
        date=str(run["date"]),
    )
    if not origin.vllm_version:
        raise MissingDependencyError(
            "calibrate needs vLLM, which is not installed: pip install 'vllm-penalty-sched[vllm]'"
        )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")  # read when vLLM is imported
    if serves_on_cpu():
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(CPU_KV_CACHE_GIB))
    from vllm_penalty_sched.engine.calibrator import calibrate

    spec = QUICK if arguments.quick else FULL
    result = calibrate(arguments.out, origin, spec, began_s=began_s)
    print(f"{arguments.out}: {result}")
    if arguments.json:
        write_json(arguments.json, {**asdict(origin), **asdict(result), **run})
    return 0


def _read_samples(path: Path) -> tuple[SamplesOrigin, list[Sample]]:
    return read_samples(path.read_text(encoding="utf-8", errors="replace"), source=str(path))


def _run_fit(arguments: argparse.Namespace) -> int:
    origin, samples = _read_samples(arguments.samples)
    fit: CurveFit | StepFit
    if arguments.form == "curve":
        if arguments.out:
            raise ConfigError("--out saves a step-time model: give --form step, or --json")
        degree = 2 if arguments.degree is None else arguments.degree
        fit = fit_curve(samples, degree=degree)
    else:
        if arguments.degree is not None:
            raise ConfigError("--degree is about f(r): give --form curve")
        fit = fit_step_time(samples)
        fit.model.provenance = origin.provenance
        if arguments.out:
            fit.model.save(arguments.out)
    print(fit)
    if arguments.json:
        write_json(arguments.json, {**asdict(origin.provenance), **fit.to_json()})
    return 0


def _run_plot(arguments: argparse.Namespace) -> int:
    if step_log_commands.is_step_trace(arguments.file):
        step_log_commands.draw_trace(arguments.file, arguments.picture)
    else:
        origin, samples = _read_samples(arguments.file)
        title = f"{origin.model} on {origin.hardware}"
        draw_fit(arguments.picture, fit_curve(samples), fit_step_time(samples), title=title)
    print(f"wrote {arguments.picture}")
    return 0
