"""Read tables of measured step costs."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from vllm_penalty_sched.errors import ConfigError
from vllm_penalty_sched.files import csv_rows
from vllm_penalty_sched.simulation.cost_grids import AttentionGrid, Curve, MixedGrid
from vllm_penalty_sched.simulation.table_costs import TableCosts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

COLUMNS = ("table", "x", "y", "ms")
MIXED_COLUMNS = ("p", "c", "d", "ctx", "ms")
# No table is of more tokens, or of steps of more milliseconds.
_MOST_NUMBER = 1e9
_Cells = dict[tuple[int, int], float]


def parse_costs(
    text: str,
    *,
    source: str,
    mixed_text: str | None = None,
    mixed_source: str = "",
    mixed_decode_factor: float = 1.0,
    overhead_s: float = 0.0,
) -> TableCosts:
    """Return the step costs in tables ``linear``, ``attn_prefill`` and ``attn_decode``.

    The tables ``lm_head`` and ``sampler`` are added if they are there; others are passed over.

    Args:
        text: CSV with the columns table, x, y, ms.
        source: Its name, for messages.
        mixed_text: CSV with the columns p, c, d, ctx, ms: attention of a chunk of p new tokens on
            c cached ones together with d decodes of context ctx; None if not measured.
        mixed_source: Its name, for messages.
        mixed_decode_factor: See ``TableCosts``.
        overhead_s: See ``TableCosts``.

    Raises:
        ConfigError: If a line, or what the tables lack, makes a step's cost unknown.
    """
    if not mixed_decode_factor >= 1.0:
        raise ConfigError(f"the mixed-decode factor must be >= 1, got {mixed_decode_factor}")
    if mixed_text is not None and mixed_decode_factor > 1.0:
        raise ConfigError(
            f"{mixed_source} holds measured mixed steps: a mixed-decode factor "
            f"({mixed_decode_factor}) is for tables without them"
        )
    tables: dict[str, _Cells] = defaultdict(dict)
    for name, x, y, cost_ms in _rows(text, COLUMNS, source):
        tables[name][int(x), int(y)] = 1e-3 * float(cost_ms)
    for name in ("linear", "attn_prefill", "attn_decode"):
        if name not in tables:
            raise ConfigError(f"{source} lacks the table {name}")
    most, cost_s = max((x, cost_s) for (x, _), cost_s in tables["linear"].items())
    if not (most and cost_s):
        raise ConfigError(f"{source}: table linear must hold a cost > 0 at its largest x >= 1")
    return TableCosts(
        linear=_curve(tables["linear"]),
        heads=tuple(_curve(tables[name]) for name in ("lm_head", "sampler") if name in tables),
        prefill=_attention_grid(tables["attn_prefill"], f"{source}: table attn_prefill"),
        decode=_attention_grid(tables["attn_decode"], f"{source}: table attn_decode"),
        mixed=None if mixed_text is None else _mixed_grid(mixed_text, mixed_source),
        mixed_decode_factor=mixed_decode_factor,
        overhead_s=overhead_s,
    )


def _rows(text: str, columns: tuple[str, ...], source: str) -> Iterator[list[str]]:
    """Yield the checked rows: counts >= 0, and a positive cost in the last column."""
    rows = csv_rows(text.splitlines(), source=source)
    _, header = next(rows, (1, []))
    if tuple(header) != columns:
        raise ConfigError(
            f"{source} line 1: the columns must be {','.join(columns)}, got {','.join(header)[:80]}"
        )
    for line, row in rows:
        if len(row) != len(columns) or not _are_costs(row[1 - len(columns) :]):
            raise ConfigError(
                f"{source} line {line}: {','.join(columns)} must be counts >= 0 and a cost >= 0, "
                f"none above {_MOST_NUMBER:g}, got {','.join(row)[:80]}"
            )
        yield row


def _are_costs(values: list[str]) -> bool:
    try:
        counts = [int(value) for value in values[:-1]]
        cost = float(values[-1])
    except ValueError:
        return False
    return all(0 <= number <= _MOST_NUMBER for number in (*counts, cost))


def _curve(cells: _Cells) -> Curve:
    return Curve({x: cost_s for (x, _), cost_s in cells.items()})


def _attention_grid(cells: _Cells, name: str) -> AttentionGrid:
    first = tuple(sorted({x for x, _ in cells}))
    second = tuple(sorted({y for _, y in cells}))
    if len(first) < 2 or len(second) < 2 or first[0] < 1:
        raise ConfigError(f"{name} must have at least two x >= 1 and two y")
    costs_s = np.array([[cells.get((x, y), np.nan) for y in second] for x in first])
    _fill_gaps(costs_s, first, second)
    if not np.all(costs_s > 0.0):
        raise ConfigError(f"{name} must hold a cost > 0 at the smallest x and y")
    return AttentionGrid(first, second, costs_s)


def _fill_gaps(
    costs_s: NDArray[np.float64], first: tuple[int, ...], second: tuple[int, ...]
) -> None:
    """Fill in what was not measured, in proportion to the nearest measured smaller count."""
    for i, j in np.argwhere(np.isnan(costs_s)):
        if j > 0 and not np.isnan(costs_s[i, j - 1]):
            costs_s[i, j] = costs_s[i, j - 1] * max(second[j], 1) / max(second[j - 1], 1)
        elif i > 0:
            costs_s[i, j] = costs_s[i - 1, j] * first[i] / first[i - 1]


def _mixed_grid(text: str, source: str) -> MixedGrid:
    rows = [
        ([int(count) for count in counts], 1e-3 * float(cost_ms))
        for *counts, cost_ms in _rows(text, MIXED_COLUMNS, source)
    ]
    axes = tuple(tuple(sorted({counts[axis] for counts, _ in rows})) for axis in range(4))
    if any(len(axis) < 2 or axis[0] != 0 for axis in axes):
        raise ConfigError(f"{source} must have 0 and at least one more count of p, c, d and ctx")
    costs_s = np.full([len(axis) for axis in axes], np.nan)
    for counts, cost_s in rows:
        costs_s[tuple(axis.index(count) for axis, count in zip(axes, counts, strict=True))] = cost_s
    _fill_mixed_gaps(costs_s)
    if np.isnan(costs_s).any():
        raise ConfigError(f"{source} lacks a combination of p, c, d and ctx")
    return MixedGrid(axes, costs_s)


def _fill_mixed_gaps(costs_s: NDArray[np.float64]) -> None:
    """Fill in what does not depend on a count, and the most decodes beside a prefill."""
    costs_s[0] = costs_s[0, :1]  # without a prefill: whatever c
    costs_s[0, :, 0, :] = 0.0
    without_decodes = costs_s[:, :, 0]
    without_decodes[:] = np.fmax.reduce(without_decodes, axis=-1, keepdims=True)
    no_context = costs_s[..., 0]
    no_context[:] = np.where(np.isnan(no_context), costs_s[..., 1], no_context)
    fewer_s = costs_s[0, :, -2]
    growth = np.divide(costs_s[0, :, -1], fewer_s, out=np.ones_like(fewer_s), where=fewer_s > 0)
    most = costs_s[1:, :, -1]
    most[:] = np.where(np.isnan(most), costs_s[1:, :, -2] * growth, most)
