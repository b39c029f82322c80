"""How well do the built-in cost profiles describe the measured tables they were fitted to?

GPU_COSTS=DIR [COST_PROFILES_JSON=FILE] python -m pytest -s benchmarks/test_cost_profiles.py

Fits every profile anew and fails where ``cost_profiles.py`` holds other constants. DIR holds the
tables of measured step costs; they are not part of this repository.
"""

from __future__ import annotations

import gzip
import os
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import nnls

from benchmarks.test_step_time_accuracy import random_step
from vllm_penalty_sched import BatchShape
from vllm_penalty_sched.files import write_json
from vllm_penalty_sched.serving.run_record import record_run
from vllm_penalty_sched.simulation.cost_files import parse_costs
from vllm_penalty_sched.simulation.cost_profiles import PROFILES, ProfileCosts
from vllm_penalty_sched.simulation.table_costs import TableCosts

COMMAND = "GPU_COSTS=DIR COST_PROFILES_JSON=FILE python -m pytest -s benchmarks/" + (
    Path(__file__).name
)
SEED, STEPS = 0, 4000
CONSTANTS = [field.name for field in fields(ProfileCosts)][:9]


def read_costs(folder: Path, name: str) -> TableCosts:
    path = next(
        path for path in (folder / f"{name}-tp1.csv", folder / f"{name}.csv") if path.exists()
    )
    mixed = path.with_name(f"{path.stem}-attn_mixed.csv.gz")
    return parse_costs(
        path.read_text(),
        source=str(path),
        mixed_text=gzip.decompress(mixed.read_bytes()).decode() if mixed.exists() else None,
        mixed_source=str(mixed),
    )


def unit_costs(name: str, shapes: list[BatchShape]) -> np.ndarray:
    """Return each constant's part of each step, were the constant 1 s, shape (steps, constants)."""
    none = dict.fromkeys(CONSTANTS, 0.0)
    profiles = [
        ProfileCosts(**{**none, constant: 1.0}, mape=0.0, source="") for constant in CONSTANTS
    ]
    parts = np.array([[profile.step_s(shape) for profile in profiles] for shape in shapes])
    if not PROFILES[name].mixed_context_s:
        parts[:, CONSTANTS.index("mixed_context_s")] = 0.0
    return parts


def fit(costs: TableCosts, name: str, shapes: list[BatchShape]) -> tuple[dict[str, float], float]:
    true_s = np.array([costs.step_s(shape) for shape in shapes])
    relative = unit_costs(name, shapes) / true_s[:, None]
    scales = np.maximum(relative.max(axis=0), 1e-12)
    found, _ = nnls(relative / scales, np.ones(len(shapes)))
    constants = [float(f"{value:.4g}") for value in found / scales]
    mape = float(np.mean(np.abs(relative @ np.array(constants) - 1.0)))
    return dict(zip(CONSTANTS, constants, strict=True)), mape


@pytest.mark.skipif("GPU_COSTS" not in os.environ, reason="GPU_COSTS names no folder of tables")
def test_the_built_in_profiles_are_the_fits_to_the_tables() -> None:
    folder = Path(os.environ["GPU_COSTS"])
    rng = np.random.default_rng(SEED)
    shapes = [random_step(rng) for _ in range(STEPS)]
    decode_only = [shape.without_prefill() for shape in shapes]
    rows = {}
    print(f"\n{'profile':<26}{'MAPE':>8}{'decode-only':>13}")
    for name, profile in PROFILES.items():
        costs = read_costs(folder, name)
        constants, mape = fit(costs, name, shapes)
        alone = np.mean([abs(profile.step_s(s) / costs.step_s(s) - 1.0) for s in decode_only])
        rows[name] = {**constants, "mape": round(mape, 4), "decode_only_mape": round(alone, 4)}
        print(f"{name:<26}{mape:>8.1%}{alone:>13.1%}")
    if path := os.environ.get("COST_PROFILES_JSON"):
        write_json(path, {"profiles": rows, "steps": STEPS, **record_run(COMMAND, seed=SEED)})

    for name, row in rows.items():
        built_in = {constant: getattr(PROFILES[name], constant) for constant in CONSTANTS}
        assert built_in == pytest.approx({c: row[c] for c in CONSTANTS}, rel=0.01)
        assert PROFILES[name].mape == pytest.approx(row["mape"], abs=0.001)
