"""Requests whose KV cache comes from elsewhere, beside decodes and prefills on virtual time."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.engine.virtual import (
    NEEDS_KV_QUEUES,
    add,
    cpu_like_s,
    is_clean,
    make_engine,
    play,
    start_decodes,
)
from vllm_penalty_sched import Scheduler
from vllm_penalty_sched.engine.virtual_engine import VirtualEngine

pytestmark = NEEDS_KV_QUEUES
SLO_MS = 56.0


def add_pulled(engine: VirtualEngine, name: str, length: int, output: int) -> None:
    """Add a request whose KV cache lies ready elsewhere."""
    add(engine, name, length, output, xargs={"kv_transfer_params": {"do_remote_prefill": True}})


def make_puller(**config: Any) -> VirtualEngine:
    return make_engine(
        Scheduler,
        {"tbt_slo_ms": SLO_MS},
        step_time_s=cpu_like_s(noise=0.0),
        kv_transfer={
            "kv_connector": "StubConnector",
            "kv_connector_module_path": "tests.engine.stub_connector",
            "kv_role": "kv_consumer",
        },
        **config,
    )


def warm_engine(**config: Any) -> VirtualEngine:
    """Return one that has learned, with eight decodes that go on."""
    engine = make_puller(**config)
    start_decodes(engine, 8)
    for number in range(30):
        add(engine, f"warm-{number}", 100 + 10 * number, 2)
        play(engine, 12)
    return engine


def reading(engine: VirtualEngine) -> set[str]:
    names: set[str] = engine.scheduler.connector.reading
    return names


def arrive(engine: VirtualEngine, name: str) -> None:
    # What vLLM's update_from_output does for a read that its worker reports (0.31-0.33).
    engine.scheduler.finished_recving_kv_req_ids.add(name)


def granted(engine: VirtualEngine, name: str) -> int:
    tokens: int = engine.steps[-1].output.num_scheduled_tokens.get(name, 0)
    return tokens


def step(engine: VirtualEngine) -> None:
    play(engine, 1)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_one_whose_kv_cache_is_here_gets_its_token_ahead_of_running_prefills(
    async_scheduling: bool,
) -> None:
    engine = warm_engine(async_scheduling=async_scheduling)
    add(engine, "long", 4000, 4)
    play(engine, 3)
    add_pulled(engine, "pulled", 600, 4)
    step(engine)
    was_read = "pulled" in reading(engine)
    arrive(engine, "pulled")
    step(engine)

    assert was_read
    assert granted(engine, "pulled") == 1
    assert granted(engine, "long") > 0
    decision_tokens = engine.scheduler.planner.latest_slo_s
    assert engine.steps[-1].seconds <= decision_tokens


def test_reading_begins_though_no_prefill_token_is_left() -> None:
    engine = warm_engine()
    for number in range(3):
        add(engine, f"long-{number}", 4000, 4)
    play(engine, 3)
    for number in range(4):
        add_pulled(engine, f"pulled-{number}", 600, 4)
    step(engine)

    assert reading(engine) == {f"pulled-{number}" for number in range(4)}


def test_those_that_arrive_at_once_are_served_at_once() -> None:
    engine = warm_engine()
    add(engine, "long", 4000, 4)
    for number in range(4):
        add_pulled(engine, f"pulled-{number}", 600, 4)
    step(engine)
    for number in range(4):
        arrive(engine, f"pulled-{number}")
    step(engine)

    assert [granted(engine, f"pulled-{number}") for number in range(4)] == [1] * 4


def test_one_that_is_being_prefilled_elsewhere_is_no_demand_and_stops_nobody() -> None:
    engine = warm_engine()
    for number in range(40):
        engine.scheduler.connector.asked.add(f"asked-{number}")
        add(engine, f"asked-{number}", 600, 4)
    play(engine, 150)  # longer than max_defer_s
    reasons = set(engine.scheduler.reasons)
    add(engine, "short", 40, 4)
    play(engine, 30)

    assert "aged" not in reasons
    assert "stalled" not in reasons
    assert "short" in engine.token_times_s
    assert not any(name.startswith("asked") for name in engine.token_times_s)


def test_a_read_that_failed_is_prefilled_here() -> None:
    engine = warm_engine()
    add_pulled(engine, "pulled", 600, 4)
    step(engine)
    request = engine.scheduler.requests["pulled"]
    request.num_computed_tokens = 0
    engine.scheduler.failed_recving_kv_req_ids.add("pulled")
    arrive(engine, "pulled")
    play(engine, 60)

    assert len(engine.token_times_s["pulled"]) == 4
    assert any(new > 1 for step in engine.steps[-60:] for new, _ in step.shape.prefills)


def test_nothing_is_lost_or_left_when_prompts_go_both_ways() -> None:
    engine = make_puller()
    for number in range(40):
        add(engine, f"local-{number}", 50 + 37 * number % 900, 6)
        add_pulled(engine, f"pulled-{number}", 60 + 53 * number % 900, 6)
        play(engine, 3)
        for name in list(reading(engine)):
            reading(engine).discard(name)
            arrive(engine, name)
    while engine.is_busy:
        for name in list(reading(engine)):
            reading(engine).discard(name)
            arrive(engine, name)
        engine.step()

    assert len(engine.token_times_s) == 80
    assert all(len(times) == 6 for times in engine.token_times_s.values())
    assert is_clean(engine)
