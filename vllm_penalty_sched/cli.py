"""The command line ``vllm-penalty``: one subcommand a job."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from vllm_penalty_sched.errors import PenaltySchedError
from vllm_penalty_sched.files import write_json
from vllm_penalty_sched.latency import load_model
from vllm_penalty_sched.serving import demo
from vllm_penalty_sched.serving.tiny_model import TinyModelSpec, make_tiny_model
from vllm_penalty_sched.settings import Settings

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
    arguments = make_parser().parse_args(argv)
    arguments.command = shlex.join([PROGRAM, *argv])
    try:
        status: int = arguments.run(arguments)
    except (PenaltySchedError, OSError) as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return BAD_INPUT_STATUS
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return INTERRUPTED_STATUS
    return status


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

    return parser


def _run_demo(arguments: argparse.Namespace) -> int:
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
