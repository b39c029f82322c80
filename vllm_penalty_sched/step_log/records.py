"""Read a step trace: JSON lines, one for each step that ran."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from vllm_penalty_sched.batch import BatchShape
from vllm_penalty_sched.errors import ConfigError
from vllm_penalty_sched.policy import Reason

_T = TypeVar("_T")
# Larger counts are no token counts, and a float does not hold them.
_MOST_COUNT = 10**15
# Outside of these no time or share is one of a step, and sums and ratios could overflow.
_LEAST_S, _MOST_NUMBER = 1e-9, 1e9
# The ratio follows from the counts; the writer rounds it to six places.
_RATIO_TOLERANCE = 1e-6
_MOST_SHOWN = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step of a trace.

    Attributes:
        done_s: When it completed, on the engine's own clock.
        shape: What it computed.
        reason: What set its prefill budget; None where the plugin did not steer.
        budget_tokens: The most prefill tokens it could carry; None: no limit.
        slo_s: The SLO that it was planned for; None if there was none.
        decode_only_s: What the plan expected of it without prefill; None where nothing was planned
            or known.
        predicted_s: What the model predicted before it learned from the step; None without one.
        observed_s: How long it took, > 0.
        margin: Share by which predictions were raised after it.
    """

    done_s: float
    shape: BatchShape
    reason: Reason | None
    budget_tokens: int | None
    slo_s: float | None
    decode_only_s: float | None = None
    predicted_s: float | None
    observed_s: float
    margin: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceText:
    """The content of one file of a trace, and its name for messages."""

    source: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLog:
    """A trace.

    Attributes:
        steps: In the order in which they completed, at least one.
        cut_lines: Lines that were not written to their end: the last one, and those behind which
            a restarted engine went on.
    """

    steps: tuple[StepRecord, ...]
    cut_lines: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTable:
    """The columns of a trace, each of shape (n,); NaN for what is None in a record."""

    done_s: NDArray[np.float64]
    observed_s: NDArray[np.float64]
    predicted_s: NDArray[np.float64]
    slo_s: NDArray[np.float64]
    decode_only_s: NDArray[np.float64]
    budget_tokens: NDArray[np.float64]
    prefill_tokens: NDArray[np.float64]
    decode_seqs: NDArray[np.float64]
    decode_tokens: NDArray[np.float64]
    decode_context: NDArray[np.float64]
    margin: NDArray[np.float64]
    reasons: tuple[Reason | None, ...]

    @classmethod
    def of(cls, steps: Sequence[StepRecord]) -> StepTable:
        """Take over records."""

        def column(read: Callable[[StepRecord], float | None]) -> NDArray[np.float64]:
            return np.array([read(step) for step in steps], dtype=np.float64)  # None: NaN

        return cls(
            done_s=column(lambda step: step.done_s),
            observed_s=column(lambda step: step.observed_s),
            predicted_s=column(lambda step: step.predicted_s),
            slo_s=column(lambda step: step.slo_s),
            decode_only_s=column(lambda step: step.decode_only_s),
            budget_tokens=column(lambda step: step.budget_tokens),
            prefill_tokens=column(lambda step: step.shape.prefill_tokens),
            decode_seqs=column(lambda step: step.shape.decode_seqs),
            decode_tokens=column(lambda step: step.shape.decode_tokens),
            decode_context=column(lambda step: step.shape.decode_context),
            margin=column(lambda step: step.margin),
            reasons=tuple(step.reason for step in steps),
        )

    @property
    def has_decodes(self) -> NDArray[np.bool_]:
        """Steps in which requests decoded."""
        return self.decode_seqs > 0

    @property
    def is_mixed(self) -> NDArray[np.bool_]:
        """Steps with decodes and prefill."""
        return self.has_decodes & (self.prefill_tokens > 0)

    @property
    def is_decode_only(self) -> NDArray[np.bool_]:
        """Steps with decodes and without prefill."""
        return self.has_decodes & ~(self.prefill_tokens > 0)

    @property
    def is_over(self) -> NDArray[np.bool_]:
        """Steps with decodes that took longer than their SLO."""
        return self.has_decodes & (self.observed_s > self.slo_s)  # not over NaN

    @property
    def is_infeasible(self) -> NDArray[np.bool_]:
        """Steps of which the decodes alone were known to take longer than the SLO.

        Also those in which nobody wanted prefill: the plugin tells those by no reason of their own.
        """
        is_too_long = self.is_decode_only & (self.predicted_s > self.slo_s)  # not where NaN
        return self.has_reason(Reason.INFEASIBLE) | is_too_long

    def has_reason(self, *reasons: Reason) -> NDArray[np.bool_]:
        """Return which steps had one of these reasons."""
        return np.array([reason in reasons for reason in self.reasons], dtype=np.bool_)


def read_step_log(files: Sequence[TraceText]) -> StepLog:
    """Read the files of one trace.

    Args:
        files: From the oldest to the newest.

    Raises:
        ConfigError: If there is no step, or a line other than a cut one breaks a rule; the message
            names the file, the line and the field.
    """
    steps: list[StepRecord] = []
    cut_lines = 0
    for file in files:
        *lines, rest = file.text.split("\n")
        if rest.strip():
            # A file that ends within a line was cut, unless only the line break is missing.
            is_cut = file is files[-1] and rest.startswith("{") and not _is_json(rest)
            cut_lines += is_cut
            lines += [] if is_cut else [rest]
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            if _is_left_by_a_kill(lines[number - 1 : number + 1]):
                cut_lines += 1
            else:
                steps.append(_read_line(line, f"{file.source}, line {number}"))
    if not steps:
        names = " and ".join(file.source for file in files)
        raise ConfigError(f"{names}: must hold at least one whole line of a step trace, got none")
    return StepLog(steps=tuple(steps), cut_lines=cut_lines)


def _is_left_by_a_kill(line_and_next: Sequence[str]) -> bool:
    # The writer leaves an empty line behind half a one that it finds when it starts.
    line, *behind = line_and_next
    return behind == [""] and line.startswith("{") and not _is_json(line)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _read_line(line: str, where: str) -> StepRecord:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: must be a JSON object, got {_short(content)}")
    row = _Row(content, where)
    shape = BatchShape(
        prefills=row.read("prefills", _chunks, "a list of [new >= 1, cached >= 0]"),
        decode_seqs=row.read("decode_seqs", _count, "an integer >= 0"),
        decode_tokens=row.read("decode_tokens", _count, "an integer >= 0"),
        decode_context=row.read("decode_context", _count, "an integer >= 0"),
        encoder_tokens=row.read_if_there("encoder_tokens", _count, "an integer >= 0") or 0,
    )
    if not shape.tokens:
        raise ConfigError(f"{where}, field decode_tokens: a step must have a token, got none")
    row.read("prefill_ratio", _ratio_of(shape), f"{shape.prefill_ratio:.6f} as the counts say")
    return StepRecord(
        done_s=row.read("done_s", _number, "a number, -1e9 to 1e9"),
        shape=shape,
        reason=row.read("reason", _or_none(_reason), f"null or one of {', '.join(Reason)}"),
        budget_tokens=row.read("budget_tokens", _or_none(_count), "null or an integer >= 0"),
        slo_s=row.read("slo_s", _or_none(_positive), "null or seconds, 1e-9 to 1e9"),
        decode_only_s=row.read_if_there(
            "decode_only_s", _or_none(_not_negative), "null or seconds, 0 to 1e9"
        ),
        predicted_s=row.read("predicted_s", _or_none(_not_negative), "null or seconds, 0 to 1e9"),
        observed_s=row.read("observed_s", _positive, "seconds, 1e-9 to 1e9"),
        margin=row.read("margin", _number, "a number, -1e9 to 1e9"),
    )


@dataclass(frozen=True, slots=True)
class _Row:
    content: dict[str, object]
    where: str

    def read(self, field: str, parse: Callable[[object], _T], rule: str) -> _T:
        if field not in self.content:
            raise ConfigError(f"{self.where}, field {field}: must be {rule}, got no such field")
        value = self.content[field]
        try:
            return parse(value)
        except ValueError:
            raise ConfigError(
                f"{self.where}, field {field}: must be {rule}, got {_short(value)}"
            ) from None

    def read_if_there(self, field: str, parse: Callable[[object], _T], rule: str) -> _T | None:
        return self.read(field, parse, rule) if field in self.content else None


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value <= _MOST_COUNT:
        raise ValueError
    return value


def _number(value: object) -> float:
    # A bool is an int to isinstance; NaN fails the comparison.
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError  # noqa: TRY004 - one kind for all that breaks a rule
    if not abs(value) <= _MOST_NUMBER:
        raise ValueError
    return float(value)


def _positive(value: object) -> float:
    number = _number(value)
    if number < _LEAST_S:
        raise ValueError
    return number


def _not_negative(value: object) -> float:
    number = _number(value)
    if number < 0.0:
        raise ValueError
    return number


def _reason(value: object) -> Reason:
    if not isinstance(value, str):
        raise ValueError  # noqa: TRY004 - as above
    return Reason(value)


def _chunks(value: object) -> tuple[tuple[int, int], ...]:
    if not isinstance(value, list):
        raise ValueError  # noqa: TRY004 - as above
    return tuple(_chunk(pair) for pair in value)


def _chunk(pair: object) -> tuple[int, int]:
    if not isinstance(pair, list) or len(pair) != 2 or _count(pair[0]) == 0:
        raise ValueError
    return _count(pair[0]), _count(pair[1])


def _or_none(parse: Callable[[object], _T]) -> Callable[[object], _T | None]:
    return lambda value: None if value is None else parse(value)


def _ratio_of(shape: BatchShape) -> Callable[[object], float]:
    def parse(value: object) -> float:
        ratio = _number(value)
        if abs(ratio - shape.prefill_ratio) > _RATIO_TOLERANCE:
            raise ValueError
        return ratio

    return parse


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
