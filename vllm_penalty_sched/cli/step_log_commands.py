"""The subcommand ``report``, and ``plot`` for a step trace."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_penalty_sched.errors import ConfigError
from vllm_penalty_sched.files import write_json
from vllm_penalty_sched.step_log.advice import advise
from vllm_penalty_sched.step_log.plot import draw_steps
from vllm_penalty_sched.step_log.records import StepLog, TraceText, read_step_log
from vllm_penalty_sched.step_log.report import format_step_report
from vllm_penalty_sched.step_log.summary import summarize_steps

if TYPE_CHECKING:
    import argparse

_GZIP_MAGIC = b"\x1f\x8b"


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``report``."""
    parser.add_argument(
        "trace", type=Path, metavar="TRACE", help="what trace_path wrote; may be gzipped"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")


def run_report(arguments: argparse.Namespace) -> int:
    """Print the page of a trace, and write its figures."""
    log = _read_trace(arguments.trace)
    summary = summarize_steps(log)
    advice = advise(log, summary)
    print(format_step_report(summary, advice, source=str(arguments.trace)))
    if arguments.json:
        figures = {
            "trace": str(arguments.trace),
            **summary.to_json(),
            "advice": {one.rule: str(one) for one in advice},
            "command": arguments.command,
        }
        write_json(arguments.json, figures)
    return 0


def is_step_trace(path: Path) -> bool:
    """Return whether a file holds a step trace and not, for instance, samples.

    Raises:
        OSError: If it cannot be read.
    """
    return _read_text(_files(path)[-1]).lstrip().startswith("{")


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
        [TraceText(source=str(file), text=_read_text(file)) for file in _files(path)]
    )


def _files(path: Path) -> list[Path]:
    """Return the rotated file of a trace, if there is one, and the trace's own.

    Just after a rotation there is only the rotated one.
    """
    stem = path.with_suffix("") if path.suffix == ".gz" else path
    rotated = (Path(f"{stem}.1"), Path(f"{stem}.1.gz"))
    files = [file for file in rotated if file.exists()][:1]
    return [*files, path] if path.exists() or not files else files


def _read_text(path: Path) -> str:
    content = path.read_bytes()
    if content.startswith(_GZIP_MAGIC):
        try:
            content = gzip.decompress(content)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ConfigError(f"{path}: not a whole gzip file: {error}") from error
    return content.decode("utf-8", errors="replace")
