"""On a real vLLM outside of the range our class schedules like stock, with one warning.

Runs in the matrix alone, so that its name is not one that pytest collects.
"""

import logging

import pytest
import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as StockScheduler

from tests.engine.virtual import add, make_engine, play, start_decodes
from vllm_penalty_sched import Scheduler


def steps_of(scheduler_cls: type, *, is_async: bool) -> list[dict[str, int]]:
    engine = make_engine(scheduler_cls, {"tbt_slo_ms": 20.0}, async_scheduling=is_async)
    start_decodes(engine, 4, output=60)
    play(engine, 20)
    for index in range(3):
        add(engine, f"prompt-{index}", 700, 20)
    play(engine, 5000)
    assert not engine.is_busy
    return [dict(step.output.num_scheduled_tokens) for step in engine.steps]


@pytest.mark.parametrize(("is_async", "stock"), [(False, StockScheduler), (True, AsyncScheduler)])
def test_every_step_is_that_of_stock_and_one_warning_tells_it(
    is_async: bool, stock: type, caplog: pytest.LogCaptureFixture
) -> None:
    ours = steps_of(Scheduler, is_async=is_async)

    assert ours == steps_of(stock, is_async=is_async)
    warnings = [
        record.getMessage()
        for record in caplog.records
        if record.name == "vllm.penalty_sched" and record.levelno >= logging.WARNING
    ]
    assert len(warnings) == 1
    assert f"this vLLM, {vllm.__version__}, is not one that it can steer" in warnings[0]
