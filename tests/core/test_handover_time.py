from __future__ import annotations

import itertools

import numpy as np
import pytest

from vllm_penalty_sched.disaggregation.handover_time import HandoverTime

LATENCY_S, PER_TOKEN_S, PER_PAIR_S = 0.02, 1e-4, 2e-8


def true_s(tokens: int) -> float:
    return LATENCY_S + PER_TOKEN_S * tokens + PER_PAIR_S * tokens**2 / 2


def unknown(_tokens: int) -> None:
    return None


def taught(times: int = 60) -> tuple[HandoverTime, float]:
    handovers = HandoverTime(unknown)
    rng = np.random.default_rng(0)
    now_s = 0.0
    for name in range(times):
        tokens = int(rng.integers(16, 8000))
        handovers.start(name, tokens, now_s=now_s)
        now_s += true_s(tokens)
        handovers.finish(name, now_s=now_s)
        now_s += 1.0
    return handovers, now_s


def test_it_learns_what_hand_overs_take() -> None:
    handovers, now_s = taught()

    for tokens in (16, 500, 2000, 8000):
        assert handovers.predict_s(tokens, now_s=now_s) == pytest.approx(true_s(tokens), rel=0.02)


def test_nothing_is_predicted_without_guess_and_samples() -> None:
    assert HandoverTime(unknown).predict_s(100, now_s=0.0) is None


def test_the_guess_is_scaled_by_the_first_hand_overs() -> None:
    handovers = HandoverTime(lambda tokens: 1e-3 * tokens)
    handovers.start("a", 100, now_s=0.0)
    handovers.finish("a", now_s=0.3)

    assert handovers.predict_s(200, now_s=1.0) == pytest.approx(0.6)


def test_those_asked_for_before_are_waited_for() -> None:
    handovers, now_s = taught()

    handovers.start("first", 4000, now_s=now_s)
    handovers.start("second", 2000, now_s=now_s)

    queue_s = true_s(4000) + true_s(2000) - 2 * LATENCY_S
    assert handovers.pending_tokens == 6000
    assert handovers.predict_s(1000, now_s=now_s) == pytest.approx(queue_s + true_s(1000), rel=0.02)


def test_prompts_in_a_queue_are_learned_from_as_well() -> None:
    handovers = HandoverTime(unknown)
    rng = np.random.default_rng(1)
    ends_s, clock = 0.0, 0.0
    for name in range(80):
        tokens = int(rng.integers(100, 4000))
        handovers.start(name, tokens, now_s=clock)
        work_s = true_s(tokens) - LATENCY_S
        ends_s += work_s
        clock += 0.5 * work_s
        if name % 2:
            for done in (name - 1, name):
                handovers.finish(done, now_s=ends_s + LATENCY_S)
            clock = ends_s + LATENCY_S

    per_token_s = (
        handovers.predict_s(3000, now_s=clock) - handovers.predict_s(1000, now_s=clock)  # type: ignore[operator]
    ) / 2000
    assert per_token_s == pytest.approx(PER_TOKEN_S + 2000 * PER_PAIR_S, rel=0.25)


def test_an_instance_that_hangs_becomes_dearer_every_second_and_cheap_again_once_it_answers() -> (
    None
):
    handovers, now_s = taught()
    handovers.start("hangs", 500, now_s=now_s)

    prices = [handovers.predict_s(500, now_s=now_s + wait_s) or 0.0 for wait_s in (1, 2, 4)]
    handovers.finish("hangs", now_s=now_s + 5)

    assert all(later - earlier > 0.9 for earlier, later in itertools.pairwise(prices))
    assert handovers.predict_s(500, now_s=now_s + 5) == pytest.approx(true_s(500), rel=0.2)


def test_a_dropped_hand_over_is_neither_waited_for_nor_learned_from() -> None:
    handovers, now_s = taught()
    before_s = handovers.predict_s(500, now_s=now_s)

    handovers.start("aborted", 8000, now_s=now_s)
    handovers.drop("aborted")
    handovers.finish("aborted", now_s=now_s + 100)

    assert handovers.predict_s(500, now_s=now_s) == before_s


def test_it_follows_an_instance_that_became_slower() -> None:
    handovers, now_s = taught()
    for name in range(100, 180):
        handovers.start(name, 1000, now_s=now_s)
        now_s += 3 * true_s(1000)
        handovers.finish(name, now_s=now_s)

    assert handovers.predict_s(1000, now_s=now_s) == pytest.approx(3 * true_s(1000), rel=0.2)


def test_prompts_that_are_prefilled_together_are_learned_from_as_one() -> None:
    handovers, now_s = taught(8)
    for step in range(30):
        names = [(step, place) for place in range(4)]
        for name in names:
            handovers.start(name, 1000, now_s=now_s)
        now_s += LATENCY_S + 4 * (true_s(1000) - LATENCY_S)
        for name in names:
            handovers.finish(name, now_s=now_s)
            now_s += 1e-3  # their transfers follow one another

    for place in range(4):
        handovers.start(place, 1000, now_s=now_s)
    queue_s = 4 * (true_s(1000) - LATENCY_S)
    assert handovers.predict_s(1000, now_s=now_s) == pytest.approx(queue_s + true_s(1000), rel=0.15)


def test_a_prompt_that_is_late_already_is_not_waited_for() -> None:
    handovers, now_s = taught()

    handovers.start("late", 8000, now_s=now_s, due_s=now_s + 0.1)
    in_time_s = handovers.predict_s(500, now_s=now_s + 0.05)
    late_s = handovers.predict_s(500, now_s=now_s + 0.15)

    assert in_time_s == pytest.approx(true_s(500) + true_s(8000) - LATENCY_S - 0.05, rel=0.02)
    assert late_s == pytest.approx(true_s(500), rel=0.02)


def test_an_instance_that_hangs_with_late_prompts_only_becomes_dearer_as_well() -> None:
    handovers, now_s = taught()
    handovers.start("hangs", 500, now_s=now_s, due_s=now_s + 0.1)

    prices = [handovers.predict_s(500, now_s=now_s + wait_s) or 0.0 for wait_s in (1, 2, 4)]

    assert all(later - earlier > 0.9 for earlier, later in itertools.pairwise(prices))
