"""Every way in which a small budget could stall a request for ever, on vLLM's real scheduler."""

import inspect
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

from vllm.multimodal.inputs import (  # noqa: E402
    MultiModalFeatureSpec,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager  # noqa: E402
from vllm.v1.core.sched.interface import PauseState  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler as StockScheduler  # noqa: E402

from tests.engine.virtual import add, make_engine, play, prompt, start_decodes  # noqa: E402
from vllm_penalty_sched import Scheduler  # noqa: E402
from vllm_penalty_sched.engine.virtual_config import make_request  # noqa: E402
from vllm_penalty_sched.engine.virtual_engine import VirtualEngine  # noqa: E402

MAX_DEFER_S = 0.5
# Leaves room for about 17 prefill tokens beside the decodes of these tests.
TIGHT = {"tbt_slo_ms": 21.0, "max_defer_s": MAX_DEFER_S}
# Below the decode-only time: nothing fits, ever.
IMPOSSIBLE = {"tbt_slo_ms": 10.0, "max_defer_s": MAX_DEFER_S}


def longest_wait_s(engine: VirtualEngine, request_id: str) -> float:
    """Longest virtual time between two steps that gave the request tokens, from now on."""
    waits_s = []
    since_s = engine.now_s
    while request_id not in engine.token_times_s:
        step = engine.step()
        if step is not None and request_id in step.output.num_scheduled_tokens:
            waits_s.append(engine.now_s - since_s)
            since_s = engine.now_s
        assert engine.now_s - since_s < 20 * MAX_DEFER_S, f"{request_id} is stalled"
    return max(waits_s)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_pause_is_no_steps_time(is_async: bool) -> None:
    engine = make_engine(Scheduler, TIGHT, async_scheduling=is_async)
    start_decodes(engine, 8)
    play(engine, 40)
    learn, learned_s = engine.scheduler.planner.learn, []
    engine.scheduler.planner.learn = lambda shape, seconds, decision: (
        learned_s.append(seconds),
        learn(shape, seconds, decision),
    )[1]

    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    if is_async:  # the steps in flight end; without any, vLLM does not call the scheduler
        engine.step()
        engine.step()
    engine.now_s += 300.0
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    play(engine, 40)

    assert len(learned_s) >= 38
    assert max(learned_s) < 0.1


@pytest.mark.parametrize("every", [8, 32])
def test_where_ranks_prefill_in_step_a_budget_that_waits_does_not_grow(every: int) -> None:
    engine = make_engine(Scheduler, {"tbt_slo_ms": 40.0}, async_scheduling=False)
    schedule = engine.scheduler.schedule
    if "throttle_prefills" not in inspect.signature(StockScheduler.schedule).parameters:
        pytest.skip("this vLLM has no such cadence")
    start_decodes(engine, 8)
    add(engine, "first", 2000, 2)
    play(engine, 100)
    calls = count(1)
    engine.scheduler.schedule = lambda: schedule(next(calls) % every != 0)
    before = len(engine.steps)
    for index in range(3):
        add(engine, f"long-{index}", 500, 2)
    play(engine, 40 * every)

    mixed = [step for step in engine.steps[before:] if step.shape.prefills]
    assert len(mixed) > 10
    assert np.mean([step.seconds > 0.040 for step in mixed]) < 0.05
    assert engine.scheduler.reasons["stalled"] == 0


@pytest.mark.parametrize("is_async", [False, True])
def test_a_prefill_that_never_fits_still_moves_every_max_defer(is_async: bool) -> None:
    engine = make_engine(Scheduler, IMPOSSIBLE, async_scheduling=is_async)
    start_decodes(engine, 8)
    play(engine, 20)
    add(engine, "long", 200, 5)

    assert longest_wait_s(engine, "long") <= MAX_DEFER_S + 0.1
    assert {step.shape.decode_seqs for step in engine.steps[20:]} <= {8, 9}


def test_a_prompt_that_cannot_be_chunked_waits_and_then_runs_whole() -> None:
    engine = make_engine(Scheduler, TIGHT)
    engine.scheduler.scheduler_config.enable_chunked_prefill = False
    start_decodes(engine, 8)
    play(engine, 40)
    add(engine, "whole", 300, 5)
    add(engine, "behind", 10, 5)

    # Its own step takes 120 ms.
    assert longest_wait_s(engine, "whole") <= MAX_DEFER_S + 0.2
    assert longest_wait_s(engine, "behind") <= 2 * MAX_DEFER_S + 0.3
    whole = [step.output.num_scheduled_tokens.get("whole", 0) for step in engine.steps]
    assert 300 in whole


def test_a_mamba_block_wider_than_the_budget_advances_in_parts() -> None:
    engine = make_engine(Scheduler, TIGHT, max_num_batched_tokens=1024)
    scheduler = engine.scheduler
    start_decodes(engine, 8)
    play(engine, 40)
    scheduler.need_mamba_block_aligned_split = True
    scheduler.cache_config.block_size = 528
    scheduler.mamba_partial_cache_hit = False
    scheduler.mamba_has_prefill_checkpoint_blocks = False
    add(engine, "mamba", 1200, 5)

    assert longest_wait_s(engine, "mamba") <= MAX_DEFER_S + 0.1
    assert scheduler.scheduler_config.long_prefill_token_threshold == 0


def test_a_mamba_block_in_parts_cuts_no_draft_off() -> None:
    engine = make_engine(Scheduler, TIGHT, spec_tokens=3, max_num_batched_tokens=1024)
    scheduler = engine.scheduler
    start_decodes(engine, 8)
    play(engine, 40)
    scheduler.need_mamba_block_aligned_split = True
    scheduler.cache_config.block_size = 528
    scheduler.mamba_partial_cache_hit = False
    scheduler.mamba_has_prefill_checkpoint_blocks = False
    for tokens in (1, 2, 3):  # a budget of so few is all that such a prompt needs
        add(engine, f"short-{tokens}", tokens, 5)
        seen = play(engine, 60)

        assert f"short-{tokens}" in engine.token_times_s
        for step in seen:
            needs = step.before.decode_needs
            assert all(step.output.num_scheduled_tokens.get(name) == needs[name] for name in needs)


def test_a_prompt_that_was_found_cached_and_is_not_any_more_still_runs_whole() -> None:
    engine = make_engine(Scheduler, IMPOSSIBLE, max_num_batched_tokens=2048)
    engine.scheduler.scheduler_config.enable_chunked_prefill = False
    start_decodes(engine, 8)
    play(engine, 20)
    shared = prompt(600)
    engine.scheduler.add_request(make_request("first", shared, 2))
    longest_wait_s(engine, "first")
    engine.scheduler.add_request(make_request("again", shared, 2))
    # Just before it may wait no longer, what it was found to share goes.
    starved_s = engine.now_s + MAX_DEFER_S - 0.05
    while engine.now_s < starved_s:
        engine.step()
    pool = engine.scheduler.kv_cache_manager.block_pool
    pool.cached_block_hash_to_block._cache.clear()

    assert longest_wait_s(engine, "again") <= 0.05 + 0.1 + 0.25  # its own step takes 225 ms


def test_a_prefill_end_that_must_not_be_split_is_given_its_lookahead() -> None:
    engine = make_engine(Scheduler, TIGHT)
    start_decodes(engine, 8)
    play(engine, 40)
    engine.scheduler.num_prefill_lookahead = 12
    add(engine, "lookahead", 200, 5)

    assert longest_wait_s(engine, "lookahead") <= MAX_DEFER_S + 0.1


def test_a_fully_cached_prompt_gets_room_for_its_padded_drafts() -> None:
    engine = make_engine(Scheduler, TIGHT, spec_tokens=3)
    shared = prompt(65)
    engine.scheduler.add_request(make_request("first", shared, 2))
    play(engine, 10)
    start_decodes(engine, 8)
    play(engine, 40)
    engine.scheduler.add_request(make_request("hit", shared, 5))

    assert longest_wait_s(engine, "hit") <= MAX_DEFER_S + 0.1


@pytest.mark.parametrize("whole_items_only", [False, True])
def test_an_image_larger_than_the_budget_is_prefilled(whole_items_only: bool) -> None:
    engine = make_engine(Scheduler, TIGHT)
    scheduler = engine.scheduler
    scheduler.scheduler_config.disable_chunked_mm_input = whole_items_only
    scheduler.max_num_encoder_input_tokens = 4096
    scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=4096)
    start_decodes(engine, 8)
    play(engine, 40)
    image = make_request("image", prompt(300), 5)
    image.mm_features = [
        MultiModalFeatureSpec(
            data=MultiModalKwargsItem.dummy(),
            mm_position=PlaceholderRange(offset=50, length=200),
            identifier="image-0",
            modality="image",
        )
    ]
    scheduler.add_request(image)

    assert longest_wait_s(engine, "image") <= MAX_DEFER_S + 0.1


def test_a_prompt_behind_another_lora_is_served_when_the_first_is_done() -> None:
    engine = make_engine(Scheduler, TIGHT)
    engine.scheduler.lora_config = SimpleNamespace(max_loras=1)
    start_decodes(engine, 8)
    play(engine, 40)
    for number, name in ((1, "lora-1"), (2, "lora-2")):
        request = make_request(name, prompt(100, number), 5)
        request.lora_request = SimpleNamespace(lora_int_id=number, lora_name=name)
        engine.scheduler.add_request(request)

    assert longest_wait_s(engine, "lora-1") <= MAX_DEFER_S + 0.1
    assert longest_wait_s(engine, "lora-2") <= MAX_DEFER_S + 0.5


def test_a_preempted_decode_is_replayed_while_others_decode() -> None:
    engine = make_engine(
        Scheduler, TIGHT, kv_blocks=60, max_num_batched_tokens=512, max_model_len=512
    )
    start_decodes(engine, 6, output=200)

    seen = play(engine, 3000)

    assert sum(len(step.output.preempted_req_ids or ()) for step in seen) > 0
    assert not engine.is_busy


def test_a_request_that_waits_for_blocks_does_not_raise_the_budget() -> None:
    engine = make_engine(Scheduler, {"tbt_slo_ms": 40.0}, kv_blocks=80, max_model_len=1200)
    start_decodes(engine, 8, output=200)
    play(engine, 40)
    add(engine, "large", 1000, 5)

    play(engine, 100)

    assert "stalled" not in engine.scheduler.reasons
