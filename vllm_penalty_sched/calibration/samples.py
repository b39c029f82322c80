"""Measured steps as CSV: what each computed and how long it took, below where they ran."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from reprlib import Repr
from typing import NoReturn, TypeVar

from vllm_penalty_sched.batch import BatchShape
from vllm_penalty_sched.errors import ConfigError
from vllm_penalty_sched.learning.model_state import Provenance

SCHEMA = "vllm_penalty_sched/samples/1"
COMMENT = "# "
COLUMNS = (
    "series",
    "point",
    "prefills",
    "decode_seqs",
    "decode_tokens",
    "decode_context",
    "prefill_ratio",
    "seconds",
)

LEAST_S, MOST_S = 1e-9, 1e9
"""Times outside are no times of steps, and overflow when a fit squares or divides them."""

_T = TypeVar("_T")
# The ratio is there for other programs: it follows from the counts, and is written in full.
_RATIO_TOLERANCE = 1e-9
# Longer counts are no token counts, and slow to convert.
_MOST_DIGITS = 15
_SECONDS_RULE = f"a number from {LEAST_S:g} to {MOST_S:g}"
_BRIEFLY = Repr()
_BRIEFLY.maxstring = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measured step.

    Attributes:
        series: What it was measured for: ``curve`` for the penalty curve's set-up.
        point: The planned composition that it stands for, unique within its series; may be empty.
        shape: What ran.
        seconds: How long it took, from ``LEAST_S`` to ``MOST_S``.

    Raises:
        ConfigError: If the shape has no token, or the time breaks its rule.
    """

    series: str
    point: str = ""
    shape: BatchShape
    seconds: float

    def __post_init__(self) -> None:
        if not self.shape.tokens:
            raise ConfigError("a measured step must have at least one token, got none")
        if not LEAST_S <= self.seconds <= MOST_S:
            raise ConfigError(f"seconds must be {_SECONDS_RULE}, got {self.seconds}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesOrigin:
    """Where and how the steps of one file were measured.

    Attributes:
        hardware: Processor, cores and GPU.
        vllm_version: As installed.
        model: Folder or hub name.
        engine_args: Further arguments of vLLM's engine.
        concurrency: Concurrent requests of the series ``curve``.
        grid: Which set of compositions, ``quick`` or ``full``.
        plugin_version: Of this package.
        date: When the file was begun, ISO 8601.
    """

    hardware: str
    vllm_version: str
    model: str
    engine_args: tuple[str, ...] = ()
    concurrency: int
    grid: str
    plugin_version: str
    date: str

    @property
    def provenance(self) -> Provenance:
        """What a model fitted to the file carries along."""
        return Provenance(hardware=self.hardware, model=self.model, vllm_version=self.vllm_version)

    def check_continues(self, earlier: SamplesOrigin, *, source: str) -> None:
        """Check that steps measured here belong into a file begun earlier.

        Args:
            earlier: The file's origin.
            source: The file's name, for the message.

        Raises:
            ConfigError: If anything but the package's version and the date differs.
        """
        different = [
            f"{name} is {getattr(earlier, name)!r} there and {getattr(self, name)!r} here"
            for name in (field.name for field in fields(self))
            if name not in ("plugin_version", "date")
            and getattr(earlier, name) != getattr(self, name)
        ]
        if different:
            raise ConfigError(
                f"{source} was measured elsewhere or otherwise ({'; '.join(different)}): "
                "give another file, or delete it"
            )


def write_origin(origin: SamplesOrigin) -> str:
    """Return the start of a file: the origin as JSON in comment lines, and the column names."""
    text = json.dumps({"schema": SCHEMA, **asdict(origin)}, indent=1)
    comments = "".join(f"{COMMENT}{line}\n" for line in text.splitlines())
    return comments + ",".join(COLUMNS) + "\n"


def write_sample(sample: Sample) -> str:
    """Return a sample as one line, to append to a file.

    Raises:
        ConfigError: If a name holds a line break.
    """
    shape = sample.shape
    if any(len(name.splitlines()) > 1 or "\n" in name for name in (sample.series, sample.point)):
        raise ConfigError(
            f"series and point must be one line, got {sample.series!r} and {sample.point!r}"
        )
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(
        [
            sample.series,
            sample.point,
            ";".join(f"{new}:{cached}" for new, cached in shape.prefills),
            shape.decode_seqs,
            shape.decode_tokens,
            shape.decode_context,
            repr(shape.prefill_ratio),
            repr(float(sample.seconds)),
        ]
    )
    return line.getvalue()


def write_samples(origin: SamplesOrigin, samples: Iterable[Sample]) -> str:
    """Return a whole file."""
    return write_origin(origin) + "".join(map(write_sample, samples))


def read_samples(text: str, *, source: str) -> tuple[SamplesOrigin, list[Sample]]:
    """Read a file.

    Args:
        text: Its content.
        source: Its name, for the message.

    Raises:
        ConfigError: If anything in it breaks a rule; the message names the file, the line and the
            column.
    """
    lines = text.split("\n")
    start = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    origin = _read_origin([line[len(COMMENT) :] for line in lines[:start]], source=source)
    columns = lines[start].rstrip("\r") if start < len(lines) else ""
    if columns != ",".join(COLUMNS):
        raise ConfigError(
            f"{source}, line {start + 1}: must name the columns {','.join(COLUMNS)}, "
            f"got {_short(columns)}"
        )
    samples = [
        _read_row(line.rstrip("\r"), where=f"{source}, line {number}")
        for number, line in enumerate(lines[start + 1 :], start + 2)
        if line.strip()
    ]
    return origin, samples


def _read_origin(comments: Sequence[str], *, source: str) -> SamplesOrigin:
    where = f"{source}, comment lines at its start"
    if not comments:
        raise ConfigError(f"{where}: must hold where the steps were measured, got none")
    try:
        content = json.loads("\n".join(comments))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        got = content.get("schema") if isinstance(content, dict) else content
        raise ConfigError(f"{where}: schema must be {SCHEMA!r}, got {_short(got)}")
    texts = {
        name: _text_of(content, name, where)
        for name in ("hardware", "vllm_version", "model", "grid", "plugin_version", "date")
    }
    concurrency, arguments = content.get("concurrency"), content.get("engine_args")
    if type(concurrency) is not int or concurrency < 1:
        raise ConfigError(
            f"{where}: concurrency must be an integer >= 1, got {_short(concurrency)}"
        )
    if not isinstance(arguments, list) or not all(isinstance(word, str) for word in arguments):
        raise ConfigError(f"{where}: engine_args must be a list of texts, got {_short(arguments)}")
    return SamplesOrigin(**texts, concurrency=concurrency, engine_args=tuple(arguments))


def _text_of(content: dict[str, object], name: str, where: str) -> str:
    value = content.get(name)
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {name} must be a text, got {_short(value)}")
    return value


def _read_row(line: str, *, where: str) -> Sample:
    try:
        cells = next(csv.reader([line], strict=True))
    except csv.Error as error:
        raise ConfigError(f"{where}: not CSV: {error}") from error
    if len(cells) != len(COLUMNS):
        raise ConfigError(f"{where}: must have {len(COLUMNS)} columns, got {len(cells)}")
    row = _Row(dict(zip(COLUMNS, cells, strict=True)), where)
    try:
        shape = BatchShape(
            prefills=row.read("prefills", _chunks, "NEW:CACHED pairs joined by ;"),
            decode_seqs=row.read("decode_seqs", _count, "an integer >= 0"),
            decode_tokens=row.read("decode_tokens", _count, "an integer >= 0"),
            decode_context=row.read("decode_context", _count, "an integer >= 0"),
        )
        sample = Sample(
            series=row.cells["series"],
            point=row.cells["point"],
            shape=shape,
            seconds=row.read("seconds", _seconds, _SECONDS_RULE),
        )
    except ConfigError as error:
        if str(error).startswith(where):
            raise
        raise ConfigError(f"{where}: {error}") from error
    ratio = row.read("prefill_ratio", float, "a number")
    if not abs(ratio - shape.prefill_ratio) <= _RATIO_TOLERANCE:
        row.refuse("prefill_ratio", f"{shape.prefill_ratio!r} as the counts say")
    return sample


@dataclass(frozen=True, slots=True)
class _Row:
    cells: dict[str, str]
    where: str

    def read(self, column: str, parse: Callable[[str], _T], rule: str) -> _T:
        try:
            return parse(self.cells[column])
        except ValueError:
            self.refuse(column, rule)

    def refuse(self, column: str, rule: str) -> NoReturn:
        got = _short(self.cells[column])
        raise ConfigError(f"{self.where}, column {column}: must be {rule}, got {got}")


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
        raise ValueError(text)
    return int(text)


def _seconds(text: str) -> float:
    value = float(text)
    if not LEAST_S <= value <= MOST_S:
        raise ValueError(text)
    return value


def _chunks(text: str) -> tuple[tuple[int, int], ...]:
    chunks = []
    for pair in text.split(";") if text else []:
        new, separator, cached = pair.partition(":")
        if not separator or not _count(new):
            raise ValueError(text)
        chunks.append((_count(new), _count(cached)))
    return tuple(chunks)


def _short(value: object) -> str:
    """Return the value's ``repr``, cut where it is long or deep."""
    return _BRIEFLY.repr(value)
