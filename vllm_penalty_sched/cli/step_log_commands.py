"""The subcommand ``report``, and ``plot`` for a step trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vllm_penalty_sched.files import read_text, write_json
from vllm_penalty_sched.step_log.advice import advise
from vllm_penalty_sched.step_log.plot import draw_steps
from vllm_penalty_sched.step_log.records import StepLog, TraceText, read_step_log
from vllm_penalty_sched.step_log.report import format_step_report
from vllm_penalty_sched.step_log.summary import summarize_steps

if TYPE_CHECKING:
    import argparse


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``report``."""
    parser.add_argument(
        "trace", type=Path, metavar="TRACE", help="what trace_path wrote; may be gzipped"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")


def run_report(arguments: argparse.Namespace) -> int:
    """Write the figures of a trace, and print its page."""
    log = _read_trace(arguments.trace)
    summary = summarize_steps(log)
    advice = advise(log, summary)
    if arguments.json:
        figures = {
            "trace": str(arguments.trace),
            **summary.to_json(),
            "advice": {one.rule: str(one) for one in advice},
            "command": arguments.command,
        }
        write_json(arguments.json, figures)
    print(format_step_report(summary, advice, source=str(arguments.trace)))
    return 0


def is_step_trace(path: Path) -> bool:
    """Return whether a file holds a step trace and not, for instance, samples.

    Raises:
        OSError: If it cannot be read.
    """
    return read_text(_files(path)[-1]).lstrip().startswith("{")


def draw_trace(path: Path, out: Path) -> None:
    """Draw a trace.

    Raises:
        ConfigError: If it is no valid trace, or the picture's suffix names no format.
        MissingDependencyError: If matplotlib is not installed; names the extra.
        OSError: If a file cannot be read or written.
    """
    draw_steps(out, _read_trace(path), title=str(path))


def _read_trace(path: Path) -> StepLog:
    return read_step_log(
        [TraceText(source=str(file), text=read_text(file)) for file in _files(path)]
    )


def _files(path: Path) -> list[Path]:
    """Return the rotated file of a trace, if there is one, and the trace's own, gzipped or not.

    Just after a rotation there is only the rotated one.
    """
    stem = path.with_suffix("") if path.suffix == ".gz" else path
    rotated = [file for file in (Path(f"{stem}.1"), Path(f"{stem}.1.gz")) if file.exists()]
    own = [file for file in (path, stem, Path(f"{stem}.gz")) if file.exists()]
    return [*rotated[:1], *own[:1]] or [path]
