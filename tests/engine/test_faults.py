"""An error in the plugin's own logic never reaches the engine."""

import logging
from collections.abc import Callable

import pytest

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

from tests.engine.virtual import add, is_clean, make_engine, play, start_decodes  # noqa: E402
from vllm_penalty_sched import Scheduler  # noqa: E402
from vllm_penalty_sched.engine import scheduler as scheduler_module  # noqa: E402
from vllm_penalty_sched.engine import stats_transport  # noqa: E402
from vllm_penalty_sched.engine.virtual_engine import VirtualEngine  # noqa: E402
from vllm_penalty_sched.telemetry import StepReport, StepTally  # noqa: E402


def fail(*_args: object, **_options: object) -> None:
    raise RuntimeError("poisoned")


ENTRY_POINTS = {
    "prefilling": lambda patch, _: patch.setattr(scheduler_module, "read_prefilling", fail),
    "composition": lambda patch, _: patch.setattr(scheduler_module, "read_composition", fail),
    "demands": lambda patch, _: patch.setattr(scheduler_module, "read_demands", fail),
    "scheduled shape": lambda patch, _: patch.setattr(scheduler_module, "read_scheduled", fail),
    "plan": lambda patch, engine: patch.setattr(engine.scheduler.planner, "plan", fail),
    "take in": lambda patch, engine: patch.setattr(engine.scheduler.planner, "scheduled", fail),
    "learn": lambda patch, engine: patch.setattr(engine.scheduler.planner, "learn", fail),
    "request slo": lambda patch, engine: patch.setattr(engine.scheduler._slos, "add", fail),
    "notes": lambda patch, engine: patch.setattr(engine.scheduler._notes, "about", fail),
    "report carrier": lambda patch, _: patch.setattr(stats_transport, "find_carrier", fail),
    "report text": lambda patch, _: patch.setattr(StepReport, "to_json", fail),
    "report": lambda patch, _: patch.setattr(StepTally, "take", fail),
    "tally": lambda patch, _: patch.setattr(StepTally, "add", fail),
    "reports": lambda patch, engine: patch.setattr(engine.scheduler._reports, "send", fail),
    "timer": lambda patch, engine: patch.setattr(engine.scheduler._timer, "completed", fail),
}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> VirtualEngine:
    monkeypatch.delenv("PENALTY_SCHED_STRICT", raising=False)
    return make_engine(Scheduler, {"tbt_slo_ms": 56.0})


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_a_fault_at_any_entry_point_is_counted_told_once_and_hurts_no_request(
    name: str,
    engine: VirtualEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    poison: Callable[..., None] = ENTRY_POINTS[name]
    poison(monkeypatch, engine)
    base_tokens = engine.scheduler.max_num_scheduled_tokens

    with caplog.at_level(logging.ERROR, "vllm.penalty_sched"):
        start_decodes(engine, 4, output=50)
        for index in range(3):
            add(engine, f"prompt-{index}", 500, 20)
            play(engine, 4)
        play(engine, 5000)

    assert not engine.is_busy
    assert len(engine.token_times_s["prompt-2"]) == 20
    assert engine.scheduler.faults > 1
    assert len([record for record in caplog.records if record.exc_info]) == 1
    assert engine.scheduler.max_num_scheduled_tokens == base_tokens
    monkeypatch.undo()
    assert is_clean(engine)


@pytest.mark.parametrize("name", ["scheduled shape", "take in", "learn", "timer"])
@pytest.mark.parametrize("tbt_slo_ms", [10.0, 56.0])
def test_prefills_do_not_wait_for_a_plan_that_never_hears_what_came_of_it(
    name: str, tbt_slo_ms: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("PENALTY_SCHED_STRICT", raising=False)
    engine = make_engine(Scheduler, {"tbt_slo_ms": tbt_slo_ms})
    start_decodes(engine, 8, output=100_000)
    play(engine, 40)
    ENTRY_POINTS[name](monkeypatch, engine)
    with caplog.at_level(logging.ERROR, "vllm.penalty_sched"):
        add(engine, "long", 2000, 5)
        began_s = engine.now_s
        while "long" not in engine.token_times_s and engine.now_s < began_s + 10.0:
            engine.step()

    assert "long" in engine.token_times_s
    suspended = [r for r in caplog.records if "steps in a row" in r.getMessage()]
    assert len(suspended) == 1


def test_steering_goes_on_a_minute_after_the_last_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENALTY_SCHED_STRICT", raising=False)
    engine = make_engine(Scheduler, {"tbt_slo_ms": 56.0})
    start_decodes(engine, 8, output=100_000)
    play(engine, 40)
    with monkeypatch.context() as patch:
        ENTRY_POINTS["learn"](patch, engine)
        play(engine, 20)
    faults, planned = engine.scheduler.faults, sum(engine.scheduler.reasons.values())
    suspended_s = engine.now_s
    play(engine, 100)
    assert sum(engine.scheduler.reasons.values()) == planned
    while engine.now_s < suspended_s + 61.0:
        engine.step()

    play(engine, 100)
    assert sum(engine.scheduler.reasons.values()) >= planned + 100
    assert engine.scheduler.faults == faults


def test_strict_mode_raises_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENALTY_SCHED_STRICT", "1")
    engine = make_engine(Scheduler)
    monkeypatch.setattr(scheduler_module, "read_prefilling", fail)
    add(engine, "request", 10, 2)

    with pytest.raises(RuntimeError, match="poisoned"):
        engine.scheduler.schedule()


def test_the_budget_is_restored_when_vllms_own_schedule_raises(engine: VirtualEngine) -> None:
    start_decodes(engine, 4)
    play(engine, 20)
    add(engine, "long", 2000, 5)
    base_tokens = engine.scheduler.max_num_scheduled_tokens
    engine.scheduler.kv_cache_manager.allocate_slots = fail

    with pytest.raises(RuntimeError, match="poisoned"):
        engine.scheduler.schedule()

    assert engine.scheduler.max_num_scheduled_tokens == base_tokens
    assert engine.scheduler.faults == 0


def test_a_clock_that_jumps_backwards_and_forwards_harms_nothing(engine: VirtualEngine) -> None:
    times_s = iter(range(10**6))
    engine.scheduler.clock = lambda: (next(times_s) * 7919 % 1000) - 500.0

    start_decodes(engine, 4, output=50)
    for index in range(3):
        add(engine, f"prompt-{index}", 500, 20)
    play(engine, 5000)

    assert not engine.is_busy
    assert engine.scheduler.faults == 0


def test_a_scheduler_built_without_init_behaves_like_stock(engine: VirtualEngine) -> None:
    bare = object.__new__(type(engine.scheduler))
    bare.__dict__.update(
        {
            name: value
            for name, value in engine.scheduler.__dict__.items()
            if name not in {"planner", "reasons", "_timer", "_slos", "_notes", "_steers"}
        }
    )
    engine.scheduler = bare

    add(engine, "request", 100, 5)
    play(engine, 100)

    assert not engine.is_busy
    assert len(engine.token_times_s["request"]) == 5
