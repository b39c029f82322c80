"""On a vLLM that we cannot steer, the scheduler is stock's, with one warning that says why."""

import logging
import sys
from collections.abc import Callable, Iterator
from enum import IntEnum
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

import vllm  # noqa: E402
from vllm.config.diffusion import DiffusionConfig  # noqa: E402
from vllm.v1 import request  # noqa: E402
from vllm.v1.core.sched import interface, request_queue  # noqa: E402
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.output import SchedulerOutput  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler as StockScheduler  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402

import vllm_penalty_sched  # noqa: E402
from tests.engine.virtual import add, is_clean, make_engine, play, start_decodes  # noqa: E402
from vllm_penalty_sched import Scheduler  # noqa: E402
from vllm_penalty_sched.engine.compatibility import find_problems  # noqa: E402
from vllm_penalty_sched.engine.virtual_config import make_scheduler, make_vllm_config  # noqa: E402

SETTINGS = {"tbt_slo_ms": 20.0}
DIFFUSION = "vllm.v1.core.sched.diffusion_scheduler"


class Changed:
    """An object of another vLLM: some attributes gone, some of another kind."""

    def __init__(self, original: Any, **changes: Any) -> None:
        self._original = original
        self._changes = changes

    def __getattr__(self, name: str) -> Any:
        value = self._changes.get(name, getattr(self._original, name))
        if value is None:
            raise AttributeError(name)
        return value


def play_some(scheduler_cls: type, *, is_async: bool = False) -> list[dict[str, int]]:
    engine = make_engine(scheduler_cls, SETTINGS, async_scheduling=is_async)
    start_decodes(engine, 4, output=60)
    play(engine, 20)
    for index in range(3):
        add(engine, f"prompt-{index}", 700, 20)
    play(engine, 5000)
    assert not engine.is_busy
    assert is_clean(engine)
    return [dict(step.output.num_scheduled_tokens) for step in engine.steps]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "vllm.penalty_sched" and record.levelno >= logging.WARNING
    ]


def test_the_installed_vllm_can_be_steered() -> None:
    scheduler = make_engine(Scheduler, SETTINGS).scheduler

    assert find_problems(scheduler) == []
    assert scheduler.planner is not None


def test_the_scenario_of_these_tests_is_one_that_steering_changes() -> None:
    assert play_some(Scheduler) != play_some(StockScheduler)


@pytest.mark.parametrize("version", ["0.27.3", "0.34.0", "1.0.0", "0.34.0rc1.dev3+g1234", "dev"])
def test_a_version_never_tried_is_scheduled_as_stock_would_with_one_warning(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm, "__version__", version)

    ours = play_some(Scheduler)

    assert ours == play_some(StockScheduler)
    (warning,) = warnings_of(caplog)
    assert f"{version}, is not one that it can steer (its version was never tried)" in warning
    assert "0.28 to 0.33" in warning


@pytest.mark.parametrize("version", ["0.28.0", "0.30.1.dev3+g1234", "0.32.0+cpu", "0.33.0rc2"])
def test_a_version_within_the_range_is_steered(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "__version__", version)

    assert make_engine(Scheduler, SETTINGS).scheduler.planner is not None


@pytest.mark.parametrize(("is_async", "stock"), [(False, StockScheduler), (True, AsyncScheduler)])
def test_a_base_without_an_attribute_is_scheduled_as_stock_would(
    is_async: bool,
    stock: type,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delattr(StockScheduler, "pause_state")
    monkeypatch.setattr(interface.SchedulerInterface, "__abstractmethods__", frozenset())
    monkeypatch.setattr(interface.SchedulerInterface, "pause_state", Gone())

    ours = play_some(Scheduler, is_async=is_async)

    assert ours == play_some(stock, is_async=is_async)
    (warning,) = warnings_of(caplog)
    assert "Scheduler has no pause_state" in warning


class Gone:
    def __get__(self, *_: object) -> None:
        raise AttributeError("gone")


def test_a_request_without_an_attribute_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_engine(Scheduler, SETTINGS).scheduler
    make = Request.__init__

    def make_another(self: Request, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        del self.is_prefill_chunk

    monkeypatch.setattr(Request, "__init__", make_another)

    assert find_problems(scheduler) == ["Request has no is_prefill_chunk"]


def test_a_request_that_takes_other_arguments_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_engine(Scheduler, SETTINGS).scheduler
    monkeypatch.setattr(Request, "__init__", lambda _self, *, only: only)

    (problem,) = find_problems(scheduler)
    assert problem.startswith("Request cannot be made: ")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"running": ()}, "Scheduler.running is tuple, not list"),
        ({"max_num_scheduled_tokens": None}, "Scheduler has no max_num_scheduled_tokens"),
        ({"waiting": []}, "Scheduler.waiting is list, not RequestQueue"),
        ({"scheduler_config": object()}, "Scheduler has no scheduler_config"),
        ({"kv_cache_manager": object()}, "Scheduler has no kv_cache_manager"),
    ],
)
def test_an_attribute_that_is_gone_or_of_another_kind_is_named(
    change: dict[str, Any], problem: str
) -> None:
    found = find_problems(Changed(make_engine(Scheduler, SETTINGS).scheduler, **change))

    assert any(one.startswith(problem) for one in found), found


@pytest.mark.parametrize(
    ("owner", "name", "problem"),
    [
        (SchedulerOutput, "make_empty", "SchedulerOutput cannot be made: "),
        (vllm.sampling_params, "SamplingParams", "Request cannot be made: "),
    ],
)
def test_what_a_probe_needs_and_is_gone_is_named(
    owner: object, name: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = make_engine(Scheduler, SETTINGS).scheduler
    monkeypatch.delattr(owner, name)

    (found,) = find_problems(scheduler)
    assert found.startswith(problem)


def test_a_step_output_without_a_field_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_engine(Scheduler, SETTINGS).scheduler
    empty = SchedulerOutput.make_empty()
    changed = Changed(empty, total_num_scheduled_tokens=None)
    monkeypatch.setattr(SchedulerOutput, "make_empty", lambda: changed)

    assert find_problems(scheduler) == ["SchedulerOutput has no total_num_scheduled_tokens"]


def add_request_in_session(self: Any, request: Request, session: str = "") -> None:
    self.seen = session
    _add_request(self, request)


_add_request = StockScheduler.add_request


def add_request_wanting_more(self: Any, request: Request, session: str) -> None:
    add_request_in_session(self, request, session)


def test_a_method_that_wants_more_gets_it_from_a_scheduler_that_passes_through(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(StockScheduler, "add_request", add_request_wanting_more)
    monkeypatch.setattr(add_request_wanting_more, "__module__", "vllm.v1.core.sched.scheduler")
    engine = make_engine(Scheduler, SETTINGS)

    engine.scheduler.add_request(_request(), "chat-1")

    assert engine.scheduler.seen == "chat-1"
    (warning,) = warnings_of(caplog)
    assert "Scheduler.add_request() wants (request, session), not (request)" in warning


def test_a_method_that_may_be_given_more_is_still_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StockScheduler, "add_request", add_request_in_session)
    engine = make_engine(Scheduler, SETTINGS)

    engine.scheduler.add_request(_request(), session="chat-1")

    assert engine.scheduler.planner is not None
    assert engine.scheduler.seen == "chat-1"


def _request() -> Request:
    from vllm_penalty_sched.engine.virtual_config import make_request

    return make_request("request", [1, 2, 3], 2)


def test_a_schedule_that_takes_its_budget_elsewhere_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = make_engine(Scheduler, SETTINGS).scheduler
    schedule = StockScheduler.schedule
    monkeypatch.setattr(StockScheduler, "schedule", lambda self: schedule(self))

    (problem,) = find_problems(scheduler)
    assert "takes no budget from max_num_scheduled_tokens" in problem


def test_a_waiting_queue_that_wants_another_method_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm_penalty_sched.engine.slack_queue import SlackQueue

    scheduler = make_engine(Scheduler, SETTINGS).scheduler
    monkeypatch.setattr(SlackQueue, "__abstractmethods__", frozenset({"steal_request"}))

    assert find_problems(scheduler) == ["RequestQueue wants steal_request()"]


WITHOUT_PREEMPTED = IntEnum(
    "RequestStatus",
    [name for name in RequestStatus.__members__ if name != "PREEMPTED"],
    module=RequestStatus.__module__,
)
MOVED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "PauseState": lambda patch: patch.delattr(interface, "PauseState"),
    "RequestQueue": lambda patch: patch.delattr(request_queue, "RequestQueue"),
    "PREEMPTED": lambda patch: patch.setattr(request, "RequestStatus", WITHOUT_PREEMPTED),
    "vllm.v1.core.sched.interface": lambda patch: patch.setitem(
        sys.modules, "vllm.v1.core.sched.interface", None
    ),
}


@pytest.fixture
def reloads_our_modules() -> Iterator[None]:
    """Let this test import the modules of engine/ anew, and no other one."""
    prefix = "vllm_penalty_sched.engine."
    package = sys.modules[prefix[:-1]]
    modules = {name: module for name, module in sys.modules.items() if name.startswith(prefix)}
    attributes = dict(vars(package))
    for name in modules:
        del sys.modules[name]
    yield
    for name in [name for name in sys.modules if name.startswith(prefix)]:
        del sys.modules[name]
    sys.modules.update(modules)
    vars(package).clear()
    vars(package).update(attributes)


@pytest.mark.usefixtures("reloads_our_modules")
@pytest.mark.parametrize(("is_async", "stock"), [(False, StockScheduler), (True, AsyncScheduler)])
@pytest.mark.parametrize("name", MOVED)
def test_a_vllm_without_something_that_we_import_gets_its_own_scheduler(
    name: str,
    is_async: bool,
    stock: type,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    MOVED[name](monkeypatch)

    scheduler_cls = vllm_penalty_sched.Scheduler
    scheduler = make_engine(scheduler_cls, SETTINGS, async_scheduling=is_async).scheduler

    assert type(scheduler) is stock
    (warning,) = warnings_of(caplog)
    assert name in warning


@pytest.mark.parametrize("is_async", [False, True])
def test_a_diffusion_model_gets_the_scheduler_that_vllm_has_for_it(
    is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_vllm_config(settings=SETTINGS, async_scheduling=is_async)
    config.diffusion_config = DiffusionConfig(canvas_length=8)

    scheduler = make_scheduler(Scheduler, config)

    assert not isinstance(scheduler, Scheduler)
    assert isinstance(scheduler, AsyncScheduler) is is_async
    own = f"Diffusion{'Async' if is_async else ''}Scheduler"
    if find_spec(DIFFUSION) and hasattr(import_module(DIFFUSION), own):
        assert type(scheduler).__name__ == own
    (warning,) = warnings_of(caplog)
    assert "diffusion models" in warning


@pytest.mark.usefixtures("reloads_our_modules")
def test_an_import_that_fails_for_a_fault_of_ours_is_not_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "vllm_penalty_sched.planner", None)

    with pytest.raises(ImportError, match="planner"):
        vllm_penalty_sched.Scheduler  # noqa: B018
