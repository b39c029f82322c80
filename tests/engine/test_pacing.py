"""Pacing by token deadlines, on vLLM's real scheduler classes and virtual time."""

import numpy as np
import pytest

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

from tests.engine.virtual import (  # noqa: E402
    add,
    cpu_like_s,
    is_clean,
    make_engine,
    play,
    start_decodes,
)
from vllm_penalty_sched import Scheduler  # noqa: E402
from vllm_penalty_sched.engine.virtual_engine import VirtualEngine  # noqa: E402

SLO_S = 0.060


def make_paced(pacing: str, *, is_async: bool, max_num_batched_tokens: int = 8192) -> VirtualEngine:
    engine = make_engine(
        Scheduler,
        {"tbt_slo_ms": 1e3 * SLO_S, "pacing": pacing},
        step_time_s=cpu_like_s(noise=0.01),
        async_scheduling=is_async,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    start_decodes(engine, 4)
    for index in range(4):  # what the model learns from
        add(engine, f"warm-{index}", 800, 2)
        play(engine, 30)
    while any(f"warm-{index}" in engine.scheduler.requests for index in range(4)):
        engine.step()
    return engine


def prefill_steps(engine: VirtualEngine, name: str, tokens: int) -> list[float]:
    """Send a prompt; return the times of the steps until its first token."""
    add(engine, name, tokens, 2)
    seconds = []
    while name not in engine.token_times_s:
        step = engine.step()
        if step is not None and step.shape.prefills:
            seconds.append(step.seconds)
    return seconds


def lateness_s(engine: VirtualEngine) -> float:
    """How much later than first token + k x SLO the latest token of any decode came."""
    worst_s = -np.inf
    for name, times_s in engine.token_times_s.items():
        if name.startswith("decode"):
            due_s = times_s[0] + SLO_S * np.arange(len(times_s))
            worst_s = max(worst_s, float(np.max(np.array(times_s) - due_s)))
    return worst_s


@pytest.mark.parametrize("is_async", [False, True])
def test_saved_time_is_spent_on_larger_chunks_and_deadlines_hold(is_async: bool) -> None:
    engine = make_paced("deadline", is_async=is_async)
    play(engine, 60)

    steps_s = prefill_steps(engine, "long", 4000)

    assert max(steps_s) > 3 * SLO_S
    assert len(steps_s) < 4000 / 60 / 4  # under gap pacing a step carries about 100 tokens
    assert lateness_s(engine) <= 0.1 * SLO_S


@pytest.mark.parametrize("is_async", [False, True])
def test_gap_pacing_never_spends_it(is_async: bool) -> None:
    engine = make_paced("gap", is_async=is_async)
    play(engine, 60)

    assert max(prefill_steps(engine, "long", 4000)) <= 1.05 * SLO_S


@pytest.mark.parametrize("is_async", [False, True])
def test_without_savings_no_more_is_spent_than_gap_pacing_leaves(is_async: bool) -> None:
    chunks = {}
    for pacing in ("gap", "deadline"):
        engine = make_paced(pacing, is_async=is_async)
        add(engine, "newcomer", 16, 100)  # has saved nothing yet
        while "newcomer" not in engine.token_times_s:
            engine.step()
        before = len(engine.steps)
        prefill_steps(engine, "long", 2000)
        mixed = [step for step in engine.steps[before:] if step.shape.prefills]
        chunks[pacing] = np.median([step.shape.prefill_tokens for step in mixed])

    fits = (SLO_S - 14e-3) / 3.5e-4  # what cpu_like_s has room for within the SLO
    assert 0.95 * chunks["gap"] <= chunks["deadline"] <= 1.05 * fits


def test_the_tightest_requests_deadline_rules() -> None:
    engine = make_paced("deadline", is_async=False)
    add(engine, "tight", 16, 400, xargs={"tbt_slo_ms": 30})
    play(engine, 60)

    prefill_steps(engine, "long", 2000)

    times_s = np.array(engine.token_times_s["tight"])
    due_s = times_s[0] + 0.030 * np.arange(len(times_s))
    assert np.max(times_s - due_s) <= 0.1 * 0.030


def test_aborted_requests_are_forgotten() -> None:
    engine = make_paced("deadline", is_async=True)
    from vllm.v1.request import RequestStatus

    for index in range(40):
        add(engine, f"aborted-{index}", 16, 500)
    play(engine, 60)
    engine.scheduler.finish_requests(
        [f"aborted-{index}" for index in range(40)], RequestStatus.FINISHED_ABORTED
    )
    prefill_steps(engine, "long", 500)

    assert len(engine.scheduler._deadlines._first_token_s) < 20
    engine.scheduler.finish_requests(
        [f"decode-{index}" for index in range(4)], RequestStatus.FINISHED_ABORTED
    )
    engine.run([])
    assert is_clean(engine)
