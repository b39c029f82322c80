"""A spoiled model, a full disk, a wrong clock and senseless requests: all requests still finish."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

from tests.core.test_latency import learned  # noqa: E402
from tests.engine.virtual import add, is_clean, make_engine, play, start_decodes  # noqa: E402
from vllm_penalty_sched import ConfigError, ModelFileError, Scheduler  # noqa: E402
from vllm_penalty_sched.batch import BatchShape  # noqa: E402
from vllm_penalty_sched.engine.virtual_config import make_request  # noqa: E402
from vllm_penalty_sched.engine.virtual_engine import VirtualEngine  # noqa: E402
from vllm_penalty_sched.learning.step_cost import StepCost  # noqa: E402

LOG = "vllm.penalty_sched"
POISONS = [float("nan"), float("inf"), 0.0, 1e300]


@pytest.fixture(autouse=True)
def faults_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENALTY_SCHED_STRICT")


def tracebacks(caplog: pytest.LogCaptureFixture) -> int:
    return len([record for record in caplog.records if record.exc_info])


def run_mixed_load(engine: VirtualEngine, *, prompts: int = 6) -> None:
    start_decodes(engine, 4, output=300)
    for index in range(prompts):
        add(engine, f"prompt-{index}", 500, 20)
        play(engine, 20)
    play(engine, 20_000)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the poison
@pytest.mark.parametrize("where", ["all", "prefill", "speed"])
@pytest.mark.parametrize("poison", POISONS)
def test_a_model_that_is_spoiled_while_it_runs_is_forgotten_and_learned_anew(
    poison: float, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(Scheduler, {"tbt_slo_ms": 56.0})
    start_decodes(engine, 4, output=2000)
    for index in range(4):
        add(engine, f"warm-{index}", 800, 2)
        play(engine, 30)
    model = engine.scheduler.planner.model
    count = len(model._cost.coefficients_s)
    if where == "speed":
        model._speed.factor = poison
    else:
        first = 0 if where == "all" else 1
        model._scaled[first:] = poison
        kept = model._cost.coefficients_s[:first]
        model._cost = StepCost((*kept, *[poison] * (count - first)))

    with caplog.at_level(logging.ERROR, LOG):
        for index in range(12):
            add(engine, f"prompt-{index}", 500, 20)
            play(engine, 20)
        play(engine, 20_000)

    assert is_clean(engine)
    assert len(engine.token_times_s["prompt-11"]) == 20
    healed = engine.scheduler.planner.model
    eight = BatchShape(decode_seqs=8, decode_tokens=8, decode_context=8 * 300)
    # cpu_like_s: 13 ms and 0.12 ms a decode.
    assert healed.predict_s(eight) == pytest.approx(0.014, rel=0.3)
    assert np.all(np.isfinite(list(healed.coefficients().values())))
    faults = engine.scheduler.faults
    assert tracebacks(caplog) == min(1, faults)
    if where != "prefill":  # there it is learned over before any decode-only time is asked for
        assert faults >= 1


@pytest.mark.parametrize("poison", [*POISONS[:2], -1.0])
def test_a_spoiled_model_file_stops_the_start(poison: float, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    learned(200).save(path)
    content = json.loads(path.read_text())
    content["speed"] = poison
    path.write_text(json.dumps(content))

    with pytest.raises(ModelFileError, match="speed"):
        make_engine(Scheduler, {"model": str(path)})


def unwritable_paths(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "folder").mkdir()
    names = ("file/log", "folder", "a\0b", "x" * 5000)
    return (*(str(tmp_path / name) for name in names), "/proc/no-such-folder/log")


@pytest.mark.parametrize("what", range(5))
def test_a_path_that_cannot_be_written_costs_the_file_and_nothing_else(
    what: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = unwritable_paths(tmp_path)[what]
    settings = {"tbt_slo_ms": 56.0, "trace_path": path, "state_path": path}
    engine = make_engine(Scheduler, settings)

    with caplog.at_level(logging.WARNING, LOG):
        run_mixed_load(engine)
        engine.scheduler._trace.close()
        engine.scheduler.shutdown()
        engine.scheduler._saver.write()

    assert is_clean(engine)
    assert engine.scheduler.faults == 0
    assert caplog.text.count("the step trace ends here") == 1
    assert caplog.text.count("no longer saved") == 1


def test_a_full_disk_costs_the_trace_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    engine = make_engine(Scheduler, {"tbt_slo_ms": 56.0, "trace_path": "/dev/full"})

    with caplog.at_level(logging.WARNING, LOG):
        run_mixed_load(engine)
        engine.scheduler._trace.close()

    assert is_clean(engine)
    assert engine.scheduler.faults == 0
    assert "No space left" in caplog.text


def test_a_full_disk_costs_the_state_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_number: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    path = tmp_path / "state.json"
    engine = make_engine(Scheduler, {"tbt_slo_ms": 56.0, "state_path": str(path)})

    with caplog.at_level(logging.WARNING, LOG):
        run_mixed_load(engine)
        engine.scheduler._saver.write()

    assert is_clean(engine)
    assert engine.scheduler.faults == 0
    assert "No space left" in caplog.text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("pacing", ["gap", "deadline"])
def test_a_clock_that_goes_back_an_hour_stalls_no_prompt(pacing: str) -> None:
    settings = {"tbt_slo_ms": 10.0, "max_defer_s": 0.5, "pacing": pacing, "ttft_slo_ms": 900}
    engine = make_engine(Scheduler, settings)
    start_decodes(engine, 8)
    play(engine, 20)
    add(engine, "long", 200, 5)
    play(engine, 10)  # it is starving by now
    engine.scheduler.clock = lambda: engine.now_s - 3600.0
    back_s = engine.now_s

    while "long" not in engine.scheduler.requests or not any(
        "long" in step.output.num_scheduled_tokens for step in engine.steps
    ):
        engine.step()
        assert engine.now_s < back_s + 0.5 + 0.1


def test_ten_thousand_senseless_slos_are_ignored_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    senseless: list[Any] = [
        *(None, True, False, "", "fast", "nan", "inf", "1e999", "-5", -1, 0, 0.0, -0.0),
        *(float("nan"), float("inf"), -float("inf"), 1e300, 2**64 - 1, -(2**63), "9" * 5000),
        *([], [50], {}, {"tbt": 50}, b"50", 3_600_000.1, object(), "\0"),
    ]
    engine = make_engine(Scheduler, {"tbt_slo_ms": 56.0}, max_num_seqs=512)

    with caplog.at_level(logging.WARNING, LOG):
        for number in range(10_000):
            xargs = {
                "tbt_slo_ms": senseless[number % len(senseless)],
                "ttft_slo_ms": senseless[number // len(senseless) % len(senseless)],
            }
            engine.scheduler.add_request(
                make_request(f"r{number}", [number], 1 + number % 3, xargs=xargs)
            )
        engine.run([])

    assert is_clean(engine)
    assert len(engine.token_times_s) == 10_000
    assert engine.scheduler.faults == 0
    assert len([record for record in caplog.records if "_slo_ms must be" in record.message]) == 1


def test_a_path_of_settings_that_no_system_can_read_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        make_engine(Scheduler, "settings\0.json")
