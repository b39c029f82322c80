"""Every call of the plugin's own logic is guarded; the calls are read off the code itself."""

import ast
import functools
import inspect
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

from vllm.v1.core.sched.interface import PauseState  # noqa: E402

from tests.engine.virtual import add, is_clean, make_engine, play, start_decodes  # noqa: E402
from vllm_penalty_sched import Scheduler  # noqa: E402
from vllm_penalty_sched.engine import scheduler as scheduler_module  # noqa: E402
from vllm_penalty_sched.engine.virtual_engine import VirtualEngine  # noqa: E402

SOURCE = ast.parse(inspect.getsource(scheduler_module))
# What vLLM calls: the methods that we override, and what our waiting queue asks of the scheduler.
ENTRIES = (
    *("add_request", "schedule", "update_from_output", "set_pause_state", "shutdown"),
    *("_deadline_in_queue_s", "_tokens_in_queue"),
)
# Calls in them that need no guard: vLLM's own, or a few reads that every step makes anyway.
UNGUARDED = {
    *("super", "super().add_request", "super().schedule", "super().update_from_output"),
    *("super().set_pause_state", "super().shutdown", "any", "kwargs.values", "partial"),
    *("int", "self._guarded", "self.clock", "self._may_steer", "self._schedule_within"),
    *("self._ttft_slo_of", "may_load"),
}
# Reached only with a prefill instance to ask: see the tests of the disaggregation.
WITH_A_PREFILL_INSTANCE = {"self.sides.choose", "self.sides.take_in", "put_ahead"}


def guarded_calls() -> dict[str, range]:
    """What is guarded, and the source lines of the call."""
    calls = {}
    for node in ast.walk(SOURCE):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self._guarded":
            what = ast.unparse(node.args[0])
            calls[what] = range(node.lineno, (node.end_lineno or node.lineno) + 1)
    return calls


GUARDED = guarded_calls()
REACHED = sorted(GUARDED.keys() - WITH_A_PREFILL_INSTANCE)


def fail_before(_call: Callable[..., Any], *_args: Any) -> None:
    raise RuntimeError("poisoned")


def fail_after(call: Callable[..., Any], *args: Any) -> None:
    call(*args)
    raise RuntimeError("poisoned")


def poison(engine: VirtualEngine, lines: range, fail: Callable[..., None]) -> None:
    """Let the guarded call on these lines fail, and no other."""
    guard = engine.scheduler._guarded

    def poisoned(call: Callable[..., Any], *args: Any) -> Any:
        if sys._getframe(1).f_lineno in lines:
            return guard(functools.partial(fail, call), *args)
        return guard(call, *args)

    engine.scheduler._guarded = poisoned


def run_a_load(engine: VirtualEngine) -> None:
    start_decodes(engine, 4, output=60)
    for index in range(4):
        add(engine, f"prompt-{index}", 500, 20, xargs={"tbt_slo_ms": 50, "ttft_slo_ms": 900})
        play(engine, 4)
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    play(engine, 5000)
    engine.scheduler.shutdown()


def make(tmp_path: Path, *, is_async: bool = False, policy: str = "fcfs") -> VirtualEngine:
    settings = {
        "tbt_slo_ms": 56.0,
        "ttft_slo_ms": 5000.0,
        "pacing": "deadline",
        "state_path": str(tmp_path / "state.json"),
        "trace_path": str(tmp_path / "trace.jsonl"),
    }
    return make_engine(Scheduler, settings, async_scheduling=is_async, policy=policy)


@pytest.mark.parametrize(("is_async", "policy"), [(False, "priority"), (True, "fcfs")])
@pytest.mark.parametrize("fail", [fail_before, fail_after])
@pytest.mark.parametrize("what", REACHED)
def test_a_fault_in_any_guarded_call_is_counted_told_once_and_hurts_no_request(
    what: str,
    fail: Callable[..., None],
    is_async: bool,
    policy: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("PENALTY_SCHED_STRICT")
    engine = make(tmp_path, is_async=is_async, policy=policy)
    base_tokens = engine.scheduler.max_num_scheduled_tokens
    poison(engine, GUARDED[what], fail)

    with caplog.at_level(logging.ERROR, "vllm.penalty_sched"):
        run_a_load(engine)

    assert not engine.is_busy
    assert is_clean(engine)
    assert {len(times_s) for times_s in engine.token_times_s.values()} == {60, 20}
    assert engine.scheduler.faults >= 1
    assert len([record for record in caplog.records if record.exc_info]) == 1
    assert engine.scheduler.max_num_scheduled_tokens == base_tokens


def test_what_vllm_calls_does_nothing_outside_of_the_guard() -> None:
    methods = {node.name: node for node in ast.walk(SOURCE) if isinstance(node, ast.FunctionDef)}
    unguarded = {
        f"{entry}: {ast.unparse(node.func)}"
        for entry in ENTRIES
        for node in ast.walk(methods[entry])
        if isinstance(node, ast.Call) and ast.unparse(node.func) not in UNGUARDED
    }

    assert unguarded == set()


def test_every_method_of_vllms_that_is_overridden_is_an_entry() -> None:
    stock = vars(scheduler_module.VllmScheduler)
    overridden = {
        name
        for name, value in vars(Scheduler).items()
        if inspect.isfunction(value) and name in stock and not name.startswith("__")
    }

    assert overridden == {name for name in ENTRIES if not name.startswith("_")}
