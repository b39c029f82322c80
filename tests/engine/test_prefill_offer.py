"""Offers read off a real scheduler."""

import pytest

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

from tests.engine.virtual import add, cpu_like_s, make_engine, play, prompt, start_decodes  # noqa: E402
from vllm_penalty_sched import Scheduler  # noqa: E402
from vllm_penalty_sched.disaggregation.pricing import LocalOffer  # noqa: E402
from vllm_penalty_sched.engine.prefill_offer import read_offer, read_tokens_ahead  # noqa: E402
from vllm_penalty_sched.engine.virtual_config import make_request  # noqa: E402
from vllm_penalty_sched.engine.virtual_engine import VirtualEngine  # noqa: E402

SLO_S = 0.06


def make(**settings: object) -> VirtualEngine:
    options = {"tbt_slo_ms": 1e3 * SLO_S, **settings}
    return make_engine(Scheduler, options, step_time_s=cpu_like_s(noise=0.0))


def warm(engine: VirtualEngine) -> None:
    start_decodes(engine, 4)
    for place in range(30):
        add(engine, f"warm-{place}", 400, 2)
    while any(name.startswith("warm") for name in engine.scheduler.requests):
        engine.step()


def offer(engine: VirtualEngine, tokens: int, ahead: int | None = None) -> LocalOffer | None:
    request = make_request(f"new-{tokens}", prompt(tokens, 7), 4)
    planner = engine.scheduler.planner
    return read_offer(engine.scheduler, planner, request, tokens_ahead=ahead)


def test_before_anything_is_learned_there_is_no_offer() -> None:
    assert offer(make(), 500) is None


def test_beside_decodes_a_prompt_takes_steps_of_the_slo_and_delays_each_decode() -> None:
    engine = make()
    warm(engine)

    found = offer(engine, 1000)

    # 13 ms without prefill, 0.35 ms a token.
    steps = 1000 * 0.35e-3 / (SLO_S - 13.5e-3)
    assert found is not None
    assert found.first_token_s == pytest.approx(steps * SLO_S, rel=0.15)
    assert found.delay_s == pytest.approx(4 * steps * (SLO_S - 13.5e-3), rel=0.15)


def test_the_offer_is_what_the_scheduler_then_does() -> None:
    engine = make()
    warm(engine)
    found = offer(engine, 2000)
    asked_s = engine.now_s

    add(engine, "real", 2000, 4)
    while "real" not in engine.token_times_s:
        engine.step()

    assert found is not None
    assert found.first_token_s == pytest.approx(engine.token_times_s["real"][0] - asked_s, rel=0.15)


def test_all_that_prefill_or_wait_go_before_a_request_that_is_not_added_yet() -> None:
    engine = make()
    warm(engine)
    add(engine, "first", 2000, 4)
    add(engine, "second", 700, 4)
    play(engine, 1)

    ahead = read_tokens_ahead(engine.scheduler)
    granted = engine.steps[-1].shape.prefill_tokens

    assert ahead == 2700 - granted
    assert offer(engine, 500) == offer(engine, 500, ahead)


def test_prompts_that_are_late_already_do_not_go_before_it() -> None:
    engine = make(ttft_slo_ms=100.0)
    warm(engine)
    add(engine, "first", 4000, 4)
    add(engine, "second", 700, 4)
    play(engine, 8)

    started = engine.scheduler.requests["first"]
    left = started.num_tokens - started.num_computed_tokens
    assert "second" not in engine.token_times_s
    assert 0 < read_tokens_ahead(engine.scheduler) == left
