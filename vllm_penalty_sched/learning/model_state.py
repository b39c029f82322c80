"""What a step-time model has learned, as JSON and back, checked field by field."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_penalty_sched.errors import ModelFileError
from vllm_penalty_sched.learning.features import TERMS

SCHEMA = "vllm_penalty_sched/step-time-model/3"

_UPPER = np.triu_indices(len(TERMS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where the steps ran that a model learned from."""

    hardware: str = "unknown"
    model: str = "unknown"
    vllm_version: str = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedSums:
    """The sums of one kind of steps: gram (t, t) and moment (t,) over t = len(TERMS) terms."""

    gram: NDArray[np.float64]
    moment: NDArray[np.float64]
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """Everything that a step-time model goes on from.

    Attributes:
        coefficients_s: Seconds per unit of each term at speed 1, in ``TERMS`` order; for readers.
        speed: Factor on them for the machine's latest speed, > 0.
        largest_prefill_tokens: Most prefill tokens of a step learned from.
        decode_only: Sums of the steps without prefill.
        mixed: Sums of the steps with prefill.
        mape: Mean absolute relative error of the latest predictions; None if there were none.
        r_squared: Their coefficient of determination; None if there were none.
        provenance: Where the steps ran.
    """

    coefficients_s: tuple[float, ...]
    speed: float
    largest_prefill_tokens: int
    decode_only: LearnedSums
    mixed: LearnedSums
    mape: float | None
    r_squared: float | None
    provenance: Provenance


def state_to_json(state: ModelState) -> dict[str, Any]:
    """Return the state as a JSON object."""
    return {
        "schema": SCHEMA,
        "hardware": state.provenance.hardware,
        "model": state.provenance.model,
        "vllm_version": state.provenance.vllm_version,
        "samples": state.decode_only.samples + state.mixed.samples,
        "mape": state.mape,
        "r_squared": state.r_squared,
        "speed": state.speed,
        "largest_prefill_tokens": state.largest_prefill_tokens,
        "coefficients_s": dict(zip(TERMS, state.coefficients_s, strict=True)),
        "decode_only": _sums_to_json(state.decode_only),
        "mixed": _sums_to_json(state.mixed),
    }


def state_from_json(text: str, *, source: str) -> ModelState:
    """Read a state back.

    Args:
        text: The file's contents.
        source: The file's name, for messages.

    Raises:
        ModelFileError: Naming the file and the first field that is missing, foreign, of the wrong
            shape, negative where it must not be, or not finite.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{source} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelFileError(f"{source} must hold a JSON object, got {type(content).__name__}")
    read = _Reader(content, source)
    if content.get("schema") != SCHEMA:
        raise read.error("schema", repr(SCHEMA))
    coefficients = read.mapping("coefficients_s")
    if list(coefficients) != list(TERMS):
        raise read.error("coefficients_s", f"the terms {', '.join(TERMS)}")
    inner = _Reader(coefficients, source, "coefficients_s.")
    return ModelState(
        coefficients_s=tuple(inner.number(name, lambda v: v >= 0, ">= 0") for name in TERMS),
        speed=read.number("speed", lambda v: v > 0, "> 0"),
        largest_prefill_tokens=read.count("largest_prefill_tokens"),
        decode_only=_sums_from_json(read, "decode_only"),
        mixed=_sums_from_json(read, "mixed"),
        mape=read.number_or_none("mape", lambda v: v >= 0, ">= 0"),
        r_squared=read.number_or_none("r_squared", lambda v: v <= 1, "<= 1"),
        provenance=Provenance(
            hardware=read.text("hardware"),
            model=read.text("model"),
            vllm_version=read.text("vllm_version"),
        ),
    )


def _sums_to_json(sums: LearnedSums) -> dict[str, Any]:
    return {
        "samples": sums.samples,
        "moment": sums.moment.tolist(),
        "gram_upper": sums.gram[_UPPER].tolist(),
    }


def _sums_from_json(read: _Reader, name: str) -> LearnedSums:
    inner = _Reader(read.mapping(name), read.source, f"{name}.")
    gram = np.zeros((len(TERMS), len(TERMS)))
    gram[_UPPER] = inner.array("gram_upper", len(_UPPER[0]))
    return LearnedSums(
        gram=np.triu(gram) + np.triu(gram, 1).T,
        moment=inner.array("moment", len(TERMS)),
        samples=inner.count("samples"),
    )


class _Reader:
    """Takes checked fields out of a JSON object."""

    def __init__(self, content: Mapping[str, Any], source: str, path: str = "") -> None:
        self._content = content
        self._path = path
        self.source = source

    def error(self, name: str, rule: str) -> ModelFileError:
        got = repr(self._content.get(name, "nothing"))[:60]
        return ModelFileError(f"{self.source}: {self._path}{name} must be {rule}, got {got}")

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self._content.get(name)
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return value

    def text(self, name: str) -> str:
        value = self._content.get(name)
        if not isinstance(value, str):
            raise self.error(name, "a text")
        return value

    def number(self, name: str, holds: Callable[[float], bool], rule: str) -> float:
        value: Any = self._content.get(name)
        if not _is_finite(value) or not holds(value):
            raise self.error(name, f"a finite number {rule}")
        return float(value)

    def count(self, name: str) -> int:
        return int(self.number(name, lambda v: v >= 0 and v == int(v), ">= 0 and whole"))

    def number_or_none(self, name: str, holds: Callable[[float], bool], rule: str) -> float | None:
        if name in self._content and self._content[name] is None:
            return None
        return self.number(name, holds, rule)

    def array(self, name: str, length: int) -> NDArray[np.float64]:
        values = self._content.get(name)
        if not isinstance(values, list) or len(values) != length:
            raise self.error(name, f"{length} numbers")
        # The sums of non-negative terms: a negative one is no sum of steps.
        if not all(_is_finite(value) and value >= 0 for value in values):
            raise self.error(name, f"{length} finite numbers >= 0")
        return np.array(values, dtype=np.float64)


def _is_finite(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
