import json
import logging
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

from tests.core.test_latency import learned  # noqa: E402
from tests.engine.virtual import add, make_engine, play, start_decodes  # noqa: E402
from vllm_penalty_sched import BatchShape, Scheduler  # noqa: E402
from vllm_penalty_sched.engine import step_trace  # noqa: E402
from vllm_penalty_sched.engine.step_timer import TimedStep  # noqa: E402
from vllm_penalty_sched.engine.step_trace import StepTrace  # noqa: E402
from vllm_penalty_sched.engine.virtual_engine import VirtualEngine  # noqa: E402
from vllm_penalty_sched.step_log.records import TraceText, read_step_log  # noqa: E402

LOG = "vllm.penalty_sched"


def run_engine(path: Path) -> VirtualEngine:
    engine = make_engine(Scheduler, {"tbt_slo_ms": 56.0, "state_path": str(path)})
    start_decodes(engine, 8)
    for index in range(10):
        add(engine, f"long-{index}", 2000, 16)
    play(engine, 3000)
    return engine


def wait_for_file(path: Path) -> dict:
    deadline_s = time.monotonic() + 10.0
    while not path.exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return json.loads(path.read_text())


def test_what_was_learned_is_saved_while_running_and_taken_up_by_the_next_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "state.json"
    run_engine(path)
    saved = wait_for_file(path)

    with caplog.at_level(logging.INFO, LOG):
        planner = make_engine(Scheduler, {"state_path": str(path)}).scheduler.planner

    assert saved["samples"] > 0
    assert planner.model.samples == json.loads(path.read_text())["samples"]
    assert "going on from" in caplog.text


def save_state_of_this_engine(path: Path) -> dict:
    model = learned(100)
    model.provenance = make_engine(Scheduler).scheduler.planner.model.provenance
    model.save(path)
    return json.loads(path.read_text())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"hardware": "another GPU"}, "another GPU"),
        ({"model": "another model"}, "another model"),
        ({"vllm_version": "0.1.0"}, "0.1.0"),
        ({"speed": -1}, "speed must be"),
        ({"schema": "of something else"}, "schema must be"),
    ],
)
def test_a_state_that_does_not_fit_is_left_aside_with_one_warning(
    change: dict, told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "state.json"
    state = save_state_of_this_engine(path)
    taken_up = make_engine(Scheduler, {"state_path": str(path)}).scheduler.planner.model.samples
    path.write_text(json.dumps(state | change))
    spoiled = path.read_text()

    with caplog.at_level(logging.WARNING, LOG):
        engine = make_engine(Scheduler, {"state_path": str(path)})

    warnings = [r.getMessage() for r in caplog.records if "starts afresh" in r.getMessage()]
    assert taken_up == 100
    assert engine.scheduler.planner.model.samples == 0
    assert len(warnings) == 1
    assert told in warnings[0]
    assert path.read_text() == spoiled


def test_a_disk_that_cannot_be_written_costs_the_state_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    settings = {
        "state_path": str(tmp_path / "file" / "state.json"),
        "trace_path": str(tmp_path / "file" / "trace.jsonl"),
    }
    with caplog.at_level(logging.WARNING, LOG):
        engine = make_engine(Scheduler, settings)
        add(engine, "request", 500, 50)
        play(engine, 1000)
        engine.scheduler._trace.close()
        time.sleep(0.5)

    assert not engine.is_busy
    assert engine.scheduler.faults == 0
    assert "no longer saved" in caplog.text
    assert "trace ends here" in caplog.text


def test_the_trace_has_one_line_for_each_step_that_ran(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    engine = make_engine(Scheduler, {"trace_path": str(path)})
    start_decodes(engine, 4, output=50)
    play(engine, 1000)
    engine.scheduler._trace.close()

    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == len(engine.steps)
    assert {"prefill_ratio", "reason", "budget_tokens", "predicted_s", "observed_s"} <= set(
        lines[0]
    )


def test_the_trace_of_an_observer_tells_the_slo(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    settings = {"trace_path": str(path), "mode": "observe", "tbt_slo_ms": 56.0}
    engine = make_engine(Scheduler, settings)
    start_decodes(engine, 4, output=50)
    play(engine, 1000)
    engine.scheduler._trace.close()

    log = read_step_log([TraceText(source="trace", text=path.read_text())])

    assert {step.slo_s for step in log.steps} == {0.056}


def test_a_trace_goes_on_readably_behind_a_line_that_a_kill_cut(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    for _ in range(2):
        engine = make_engine(Scheduler, {"trace_path": str(path)})
        start_decodes(engine, 4, output=50)
        play(engine, 1000)
        engine.scheduler._trace.close()
        path.write_bytes(path.read_bytes()[:-40])

    log = read_step_log([TraceText(source="trace", text=path.read_text())])

    assert len(log.steps) == 2 * len(engine.steps) - 2
    assert log.cut_lines == 2


def test_what_was_learned_and_traced_is_on_disk_when_shutdown_returns(tmp_path: Path) -> None:
    # A forked engine process ends without the interpreter's clean-up.
    state, trace = tmp_path / "state.json", tmp_path / "trace.jsonl"
    engine = make_engine(Scheduler, {"state_path": str(state), "trace_path": str(trace)})
    start_decodes(engine, 4, output=50)
    play(engine, 1000)

    engine.scheduler.shutdown()

    assert json.loads(state.read_text())["samples"] == engine.scheduler.planner.model.samples
    assert len(trace.read_text().splitlines()) == len(engine.steps)


def test_a_step_that_is_no_json_ends_the_trace_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trace = StepTrace(str(tmp_path / "trace.jsonl"))
    step = TimedStep(BatchShape(decode_seqs=1, decode_tokens=1), None, 0.01)

    with caplog.at_level(logging.WARNING, LOG):
        trace.add(step, done_s=object(), predicted_s=None, margin=0.0)
        trace.close()
        trace.add(step, done_s=1.0, predicted_s=None, margin=0.0)

    assert "trace ends here" in caplog.text
    assert trace._steps.empty()


def test_two_engines_that_share_a_trace_by_mistake_both_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(step_trace, "MOST_BYTES", 1)
    path = tmp_path / "trace.jsonl"
    rotate = Path.replace

    def other_was_first(self: Path, target: Path) -> Path:
        rotate(self, target)
        return rotate(self, target)

    monkeypatch.setattr(Path, "replace", other_was_first)
    trace = StepTrace(str(path))
    with caplog.at_level(logging.WARNING, LOG):
        trace.add(
            TimedStep(BatchShape(decode_seqs=1, decode_tokens=1), None, 0.01),
            done_s=1.0,
            predicted_s=None,
            margin=0.0,
        )
        trace.close()

    assert path.with_name("trace.jsonl.1").exists()
    assert caplog.text == ""


def test_a_state_is_saved_though_the_clock_went_back(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    engine = run_engine(path)
    engine.scheduler._saver.write()
    path.unlink()
    engine.scheduler.clock = lambda: engine.now_s - 3600.0

    add(engine, "later", 500, 20)
    play(engine, 200)

    assert wait_for_file(path)["samples"] > 0
