"""pytest plugin: run vLLM's own tests on our scheduler class, and write down how each ends.

    CONFORMANCE_PASS=enforce CONFORMANCE_OUTCOMES=FILE python -m pytest -p scheduler_plugin ...

The pass is ``stock``, ``observe`` or ``enforce``. Each test appends one JSON line to the file, so
that a crash hides none of those before it; the last line tells what our schedulers decided.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from vllm_penalty_sched.learning.latency import StepTimeModel

# No step of these tests takes that long: a budget is never small for the SLO's sake.
LOOSE_SLO_MS = 60_000.0
MOST_TOKENS = 16_384  # of a step in these tests

_WORST_FIRST = ("failed", "skipped", "passed")
_FOLDERS = re.compile(r"(?<![\w.])(?:/[^\s/:'\"]+)+/")  # a reader has others
_outcomes: dict[str, tuple[str, str]] = {}
_schedulers: Counter[str] = Counter()
_decisions: Counter[str] = Counter()


def pytest_configure() -> None:
    mode = os.environ["CONFORMANCE_PASS"]
    _count_schedulers()
    if mode != "stock":
        _put_ours_in_place(mode)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    known = _outcomes.get(report.nodeid, ("passed", ""))
    if _WORST_FIRST.index(report.outcome) < _WORST_FIRST.index(known[0]):
        known = (report.outcome, _last_words(report.longrepr))
    _outcomes[report.nodeid] = known
    if report.when == "teardown":
        _write(
            test=report.nodeid,
            outcome=known[0],
            reason=known[1],
            schedulers=_schedulers[report.nodeid],
        )


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        reason = _last_words(report.longrepr)
        _write(test=report.nodeid, outcome="failed", reason=reason, schedulers=0)


def pytest_sessionfinish() -> None:
    _write(decisions=dict(_decisions))


@pytest.fixture
def caplog_vllm(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """Stand in for the fixture of vLLM's own conftest, which needs more than is installed."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    return caplog


@pytest.fixture
def default_vllm_config() -> Iterator[Any]:
    """As above."""
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config


@pytest.fixture
def dist_init(default_vllm_config: Any, tmp_path: Path) -> Iterator[None]:
    """As above: a group of this process alone."""
    del default_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )

    init_distributed_environment(
        world_size=1,
        rank=0,
        distributed_init_method=f"file://{tmp_path / 'group'}",
        local_rank=0,
        backend="gloo",
    )
    initialize_model_parallel(1, 1)
    yield
    cleanup_dist_env_and_memory()


def _count_schedulers() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    set_up = Scheduler.__init__

    def counting_set_up(scheduler: Any, *args: Any, **kwargs: Any) -> None:
        _schedulers[os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]] += 1
        set_up(scheduler, *args, **kwargs)

    Scheduler.__init__ = counting_set_up


def _put_ours_in_place(mode: str) -> None:
    """Let every later import of vLLM's scheduler classes find ours, with the settings of a pass."""
    with suppress(ImportError):
        # Diffusion models have a scheduler of their own, which ours does not replace.
        import vllm.v1.core.sched.diffusion_scheduler  # noqa: F401
    from vllm.v1.core.sched import async_scheduler
    from vllm.v1.core.sched import scheduler as sync_scheduler

    from vllm_penalty_sched.engine import scheduler as ours
    from vllm_penalty_sched.learning.latency import StepTimeModel
    from vllm_penalty_sched.planner import Planner
    from vllm_penalty_sched.settings import Settings

    settings = Settings(mode=mode, tbt_slo_ms=LOOSE_SLO_MS)  # type: ignore[arg-type]
    state = _learned().state()
    find_problems, plan = ours.find_problems, Planner.plan

    def finding_none(scheduler: Any) -> list[str]:
        problems = find_problems(scheduler)
        assert not problems, problems  # else it would pass everything through
        return problems

    def counting_plan(planner: Planner, load: Any, now_s: float) -> Any:
        decision = plan(planner, load, now_s)
        _decisions[str(decision.reason)] += 1
        return decision

    ours.read_settings = lambda _: settings
    ours.read_model = lambda *_: StepTimeModel.from_state(state)
    ours.find_problems = finding_none
    Planner.plan = counting_plan  # type: ignore[method-assign]
    sync_scheduler.Scheduler = ours.Scheduler
    async_scheduler.AsyncScheduler = ours.AsyncPenaltyScheduler


def _learned() -> StepTimeModel:
    """Return a model that has seen every size of step: these tests begin where one has.

    A new engine grants no prefill beside decodes until it has timed a few steps without.
    """
    from vllm_penalty_sched.batch import BatchShape
    from vllm_penalty_sched.learning.latency import StepTimeModel

    model, rng = StepTimeModel(), random.Random(0)
    for _ in range(400):
        seqs = rng.randrange(1, 257)
        shape = BatchShape(
            decode_seqs=seqs, decode_tokens=seqs, decode_context=seqs * rng.randrange(1, 8192)
        )
        tokens = int(2 ** rng.uniform(0, math.log2(MOST_TOKENS))) if rng.random() < 0.7 else 0
        shape = shape.with_prefill(tokens, rng.randrange(4096)) if tokens else shape
        model.observe(shape, 1e-3 + 1e-6 * shape.tokens + 1e-9 * shape.decode_context)
    return model


def _last_words(longrepr: Any) -> str:
    if isinstance(longrepr, tuple):  # a skip: file, line, reason
        return str(longrepr[2])[:200]
    crash = getattr(longrepr, "reprcrash", None)
    lines = str(crash.message if crash else longrepr).strip().splitlines() or [""]
    words = lines[0 if crash else -1].removeprefix("E").strip()
    return _FOLDERS.sub("", words)[:200]


def _write(**line: Any) -> None:
    with Path(os.environ["CONFORMANCE_OUTCOMES"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
