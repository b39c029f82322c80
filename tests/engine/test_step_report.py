"""Whether a report's figures are what happened, on the real scheduler in virtual time."""

import json
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

from tests.engine.virtual import add, make_engine, play, start_decodes  # noqa: E402
from vllm_penalty_sched import Scheduler  # noqa: E402
from vllm_penalty_sched.cli.program import main  # noqa: E402

SLO_S = 0.056


@pytest.mark.parametrize("is_async", [False, True])
def test_the_report_tells_what_the_engine_saw(
    is_async: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "steps.jsonl"
    engine = make_engine(
        Scheduler,
        {"tbt_slo_ms": 1e3 * SLO_S, "trace_path": str(path)},
        async_scheduling=is_async,
    )
    start_decodes(engine, 8)
    for index in range(10):
        add(engine, f"long-{index}", 2000, 16)
    play(engine, 600)
    while engine._in_flight:  # the trace has only steps that completed
        engine._complete(engine._in_flight.popleft())
    engine.scheduler._trace.close()

    assert main(["report", str(path), "--json", str(tmp_path / "figures.json")]) == 0

    figures = json.loads((tmp_path / "figures.json").read_text())
    steps = engine.steps
    seconds = np.array([step.seconds for step in steps])
    has_decodes = np.array([step.shape.decode_seqs > 0 for step in steps])
    is_mixed = np.array([step.shape.decode_seqs > 0 < len(step.shape.prefills) for step in steps])
    prefill_tokens = sum(step.shape.prefill_tokens for step in steps)
    assert figures["steps"] == len(steps)
    assert figures["span_s"] == pytest.approx(engine.now_s)
    assert figures["busy_s"] == pytest.approx(seconds.sum())
    assert figures["decode_time_share"] == pytest.approx(seconds[has_decodes].sum() / engine.now_s)
    assert figures["prefill_tokens"] == prefill_tokens
    assert figures["prefill_tokens_per_s"] == pytest.approx(prefill_tokens / engine.now_s)
    assert {one["reason"]: one["steps"] for one in figures["reasons"]} == engine.scheduler.reasons
    slo = figures["slo"]
    assert slo["least_s"] == slo["most_s"] == SLO_S
    assert slo["overruns"] == np.sum(seconds[has_decodes] > SLO_S)
    assert slo["mixed_held_share"] == pytest.approx(np.mean(seconds[is_mixed] <= SLO_S))
    assert slo["worst"]["observed_s"] == pytest.approx(seconds[has_decodes].max())
    # 0.35 ms a prefill token is what they cost; noise of 3% and attention are the rest.
    penalty = figures["penalty"]
    assert penalty["mixed_steps"] == penalty["estimated_steps"] == is_mixed.sum()
    mixed_tokens = sum(
        step.shape.prefill_tokens for step, mixed in zip(steps, is_mixed, strict=True) if mixed
    )
    assert penalty["penalty_s"] == pytest.approx(3.5e-4 * mixed_tokens, rel=0.1)
    assert figures["mixed_error"]["mape"] < 0.1
    assert "what to change" in capsys.readouterr().out
