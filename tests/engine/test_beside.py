"""vLLM's other features beside a steered step, one by one, on its real scheduler classes."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from zlib import crc32

import pytest

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

import torch  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.pooling_params import PoolingParams  # noqa: E402
from vllm.sampling_params import StructuredOutputsParams  # noqa: E402
from vllm.v1.core.encoder_cache_manager import EncoderDecoderCacheManager  # noqa: E402
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler as StockScheduler  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.outputs import ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402
from vllm.v1.structured_output.request import StructuredOutputRequest  # noqa: E402

from tests.engine.random_steps import AnyToken, image_in  # noqa: E402
from tests.engine.test_liveness import MAX_DEFER_S, TIGHT, longest_wait_s  # noqa: E402
from tests.engine.virtual import (  # noqa: E402
    add,
    cpu_like_s,
    is_clean,
    make_engine,
    play,
    prompt,
    start_decodes,
)
from vllm_penalty_sched import Scheduler  # noqa: E402
from vllm_penalty_sched.engine.composition import uncached_tokens  # noqa: E402
from vllm_penalty_sched.engine.virtual_config import (  # noqa: E402
    BLOCK_SIZE,
    make_request,
    make_vllm_config,
)
from vllm_penalty_sched.engine.virtual_engine import VirtualEngine, VirtualStep  # noqa: E402
from vllm_penalty_sched.policy import USEFUL_TOKENS  # noqa: E402

both_modes = pytest.mark.parametrize("is_async", [False, True])


def make_steered(*, is_async: bool, **options: object) -> VirtualEngine:
    """An engine with eight decodes that has learned enough to plan its steps."""
    engine = make_engine(Scheduler, TIGHT, async_scheduling=is_async, **options)
    start_decodes(engine, 8)
    play(engine, 40)
    return engine


def make_steered_with_cached_prompt(*, is_async: bool) -> tuple[VirtualEngine, list[int]]:
    """Such an engine, and 400 tokens that it has just prefilled."""
    engine = make_steered(is_async=is_async)
    shared = prompt(400)
    engine.scheduler.add_request(make_request("first", shared, 5))
    longest_wait_s(engine, "first")
    return engine, shared


def tokens_of(steps: Sequence[VirtualStep], name: str) -> list[int]:
    granted = [step.output.num_scheduled_tokens.get(name, 0) for step in steps]
    return [tokens for tokens in granted if tokens]


def every_decode_got_its_tokens(steps: Sequence[VirtualStep]) -> bool:
    return all(
        step.output.num_scheduled_tokens.get(name, 0) == tokens
        for step in steps
        for name, tokens in step.before.decode_needs.items()
    )


@both_modes
def test_beside_prefix_caching_only_what_is_not_cached_is_prefilled(is_async: bool) -> None:
    engine, shared = make_steered_with_cached_prompt(is_async=is_async)
    before = len(engine.steps)
    engine.scheduler.add_request(make_request("second", shared, 5))

    assert longest_wait_s(engine, "second") <= MAX_DEFER_S + 0.1
    prefilled = [tokens for tokens in tokens_of(engine.steps[before:], "second") if tokens]
    # 400 tokens are 25 blocks; vLLM computes the last one again to have something to sample from.
    assert sum(prefilled[: prefilled.index(1)] if 1 in prefilled else prefilled) == BLOCK_SIZE
    assert every_decode_got_its_tokens(engine.steps[before:])


@both_modes
def test_not_all_that_wait_are_looked_up_in_the_prefix_cache_in_one_step(is_async: bool) -> None:
    engine, shared = make_steered_with_cached_prompt(is_async=is_async)
    coordinator = engine.scheduler.kv_cache_manager.coordinator
    find, calls = coordinator.find_longest_cache_hit, []
    coordinator.find_longest_cache_hit = lambda *args: (calls.append(args), find(*args))[1]
    for index in range(8):
        engine.scheduler.add_request(
            make_request(f"waiting-{index}", shared + prompt(2000, index), 2)
        )
    engine.step()

    look_ups = []
    for _ in range(64):
        calls.clear()
        engine.step()
        look_ups.append(len(calls))

    assert sum(look_ups) >= 3 * 7  # each is looked up again every sixteen steps
    assert max(look_ups) <= 4


@both_modes
def test_a_sliding_window_that_must_be_replayed_is_planned_with_the_rest(is_async: bool) -> None:
    engine, shared = make_steered_with_cached_prompt(is_async=is_async)
    if not hasattr(engine.scheduler, "prefix_replay_tokens"):
        pytest.skip("this vLLM replays no sliding window")
    engine.scheduler.prefix_replay_tokens = 32
    request = make_request("second", shared, 5)

    assert uncached_tokens(engine.scheduler, request) == 32 + BLOCK_SIZE
    engine.scheduler.add_request(request)
    before = len(engine.steps)
    longest_wait_s(engine, "second")
    assert sum(step.shape.prefill_tokens for step in engine.steps[before:]) == 32 + BLOCK_SIZE


@both_modes
def test_beside_lora_no_step_has_more_adapters_than_vllm_allows(is_async: bool) -> None:
    engine = make_steered(is_async=is_async)
    engine.scheduler.lora_config = SimpleNamespace(max_loras=2)
    adapters = {}
    for index in range(9):
        request = make_request(f"lora-{index}", prompt(150, index), 30)
        request.lora_request = LoRARequest(f"adapter-{index % 3}", 1 + index % 3, "unused")
        adapters[request.request_id] = index % 3
        engine.scheduler.add_request(request)
    before = len(engine.steps)
    while not all(name in engine.token_times_s for name in adapters):
        engine.step()

    steps = engine.steps[before:]
    used = [{adapters[n] for n in s.output.num_scheduled_tokens if n in adapters} for s in steps]
    assert max(map(len, used)) == 2
    assert set().union(*used) == {0, 1, 2}
    assert every_decode_got_its_tokens(steps)


@both_modes
def test_beside_structured_output_a_prompt_that_waits_for_its_grammar_holds_up_nobody(
    is_async: bool,
) -> None:
    engine = make_steered(is_async=is_async)
    request = make_request("json", prompt(100), 5)
    schema = StructuredOutputsParams(json={"type": "object"})
    request.structured_output_request = StructuredOutputRequest(params=schema)
    request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    grammar: Future[AnyToken] = Future()
    request.structured_output_request.grammar = grammar
    engine.scheduler.add_request(request)
    add(engine, "plain", 100, 5)

    assert longest_wait_s(engine, "plain") <= MAX_DEFER_S + 0.1
    play(engine, 60)
    assert "json" not in engine.token_times_s
    assert "stalled" not in engine.scheduler.reasons
    grammar.set_result(AnyToken())
    assert longest_wait_s(engine, "json") <= MAX_DEFER_S + 0.1


@both_modes
def test_beside_multimodal_inputs_each_image_is_encoded_once_and_decodes_go_on(
    is_async: bool,
) -> None:
    engine = make_steered(is_async=is_async)
    make_room_for_images(engine, 1024)
    before = len(engine.steps)
    for index in range(3):
        request = make_request(f"image-{index}", prompt(300, index), 5)
        request.mm_features = [image_in(offset=30, length=200, name=f"image-{index}")]
        engine.scheduler.add_request(request)
    waits_s = [longest_wait_s(engine, f"image-{index}") for index in range(3)]

    steps = engine.steps[before:]
    encoded = [name for step in steps for name in step.output.scheduled_encoder_inputs]
    assert sorted(encoded) == ["image-0", "image-1", "image-2"]
    # Each waits for those before it: 300 tokens at the pace that the SLO leaves.
    assert max(waits_s) <= 3 * MAX_DEFER_S
    assert every_decode_got_its_tokens(steps)


def make_seeing(*, is_async: bool) -> VirtualEngine:
    """Such an engine that has an encoder, 2 ms for an image of 100 tokens, and has seen 60."""
    text_s = cpu_like_s()
    engine = make_steered(
        is_async=is_async, step_time_s=lambda shape: text_s(shape) + 2e-5 * shape.encoder_tokens
    )
    make_room_for_images(engine, 1024)
    for index in range(60):
        add_image(engine, f"image-{index}", 20 + index, 100)
        longest_wait_s(engine, f"image-{index}")
    return engine


def make_room_for_images(engine: VirtualEngine, tokens: int) -> None:
    manager = engine.scheduler.encoder_cache_manager
    engine.scheduler.max_num_encoder_input_tokens = tokens
    manager.cache_size = manager.num_free_slots = manager.num_freeable_slots = tokens


def add_image(engine: VirtualEngine, name: str, offset: int, length: int) -> None:
    """Queue a request whose prompt has an image within, and 50 tokens behind it."""
    request = make_request(name, prompt(offset + length + 50, crc32(name.encode())), 2)
    request.mm_features = [image_in(offset=offset, length=length, name=name)]
    engine.scheduler.add_request(request)


@both_modes
def test_what_an_encoder_takes_is_learned_and_kept_within_the_slo(is_async: bool) -> None:
    engine = make_seeing(is_async=is_async)

    encoding = [step for step in engine.steps if step.shape.encoder_tokens]
    late = [step for step in encoding[40:] if step.seconds > 1e-3 * TIGHT["tbt_slo_ms"]]
    learned_s = engine.scheduler.planner.model.coefficients()["encoder_tokens"]
    assert len(encoding) == 60
    assert len(late) <= 1
    assert learned_s == pytest.approx(2e-5, rel=0.15)
    assert every_decode_got_its_tokens(engine.steps[100:])


@both_modes
def test_the_text_before_an_image_that_does_not_fit_does_not_wait_with_it(is_async: bool) -> None:
    engine = make_seeing(is_async=is_async)
    before = len(engine.steps)
    add_image(engine, "large", 40, 1000)  # 20 ms
    longest_wait_s(engine, "large")

    steps = [s for s in engine.steps[before:] if "large" in s.output.num_scheduled_tokens]
    chunks = tokens_of(steps, "large")
    (image,) = [index for index, step in enumerate(steps) if step.shape.encoder_tokens]
    assert 40 - USEFUL_TOKENS < sum(chunks[:image]) <= 40
    assert steps[image - 1].finished_s - engine.steps[before - 1].finished_s < 0.4 * MAX_DEFER_S
    wait_s = steps[image].finished_s - steps[image - 1].finished_s
    assert 4 * 0.020 < wait_s < 4 * 0.020 + 0.1
    assert every_decode_got_its_tokens(engine.steps[before:])


@both_modes
def test_beside_speculative_decoding_no_draft_is_cut_off_for_a_prefill(is_async: bool) -> None:
    engine = make_steered(
        is_async=is_async, spec_tokens=3, accept_drafts=lambda drafts: drafts // 2
    )
    before = len(engine.steps)
    add(engine, "long", 400, 5)
    longest_wait_s(engine, "long")

    mixed = [step for step in engine.steps[before:] if step.shape.prefills]
    assert every_decode_got_its_tokens(engine.steps[before:])
    assert sum(step.shape.decode_tokens for step in mixed) > 3 * sum(
        step.shape.decode_seqs for step in mixed
    )


@both_modes
def test_with_chunked_prefill_off_prompts_run_whole_and_in_order(is_async: bool) -> None:
    engine = make_steered(is_async=is_async)
    engine.scheduler.scheduler_config.enable_chunked_prefill = False
    before = len(engine.steps)
    for index, length in enumerate([300, 40, 250]):
        add(engine, f"whole-{index}", length, 2)
    while engine.scheduler.waiting or "whole-2" not in engine.token_times_s:
        engine.step()
        assert engine.now_s < 60.0, "stalled"

    steps = engine.steps[before:]
    assert [tokens_of(steps, f"whole-{index}")[0] for index in range(3)] == [300, 40, 250]
    first_s = [engine.token_times_s[f"whole-{index}"][0] for index in range(3)]
    assert first_s == sorted(first_s)
    assert every_decode_got_its_tokens(steps)


class PoolingEngine(VirtualEngine):
    """Returns one vector for each finished prompt, and no token."""

    def _runner_output(self, step: VirtualStep) -> ModelRunnerOutput:
        output = super()._runner_output(step)
        if not output.req_ids:
            return output
        pooled = [torch.zeros(1) if tokens else None for tokens in output.sampled_token_ids]
        return replace(output, sampled_token_ids=[], pooler_output=pooled)


@both_modes
def test_a_pooling_model_is_scheduled_as_by_stock_vllm(is_async: bool) -> None:
    def steps_of(scheduler_cls: type) -> list[dict[str, int]]:
        made = make_engine(scheduler_cls, TIGHT, async_scheduling=is_async, prefix_caching=False)
        made.scheduler.num_sampled_tokens_per_step = 0
        engine = PoolingEngine(made.scheduler, cpu_like_s())
        arrivals = [(0.05 * i, pooling_request(f"text-{i}", 100 + 90 * i)) for i in range(40)]
        engine.run(arrivals)
        assert is_clean(engine)
        return [step.output.num_scheduled_tokens for step in engine.steps]

    stock = AsyncScheduler if is_async else StockScheduler
    assert steps_of(Scheduler) == steps_of(stock)


def pooling_request(name: str, length: int) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=prompt(length),
        sampling_params=None,
        pooling_params=PoolingParams(task="embed"),
        arrival_time=0.0,
    )


def make_encoder_decoder_engine(*, is_async: bool) -> VirtualEngine:
    config = make_vllm_config(
        settings=TIGHT,
        async_scheduling=is_async,
        prefix_caching=False,
        enable_chunked_prefill=False,
        disable_chunked_mm_input=True,
        max_num_batched_tokens=8192,
    )
    config.cache_config.num_gpu_blocks = 20_000
    sizes = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=20_000,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec(["self"], FullAttentionSpec(block_size=BLOCK_SIZE, **sizes)),
                KVCacheGroupSpec(["cross"], CrossAttentionSpec(block_size=BLOCK_SIZE, **sizes)),
            ],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        log_stats=True,
    )
    scheduler.is_encoder_decoder = True
    scheduler.max_num_encoder_input_tokens = 3000
    scheduler.encoder_cache_manager = EncoderDecoderCacheManager(cache_size=3000)
    return VirtualEngine(scheduler, cpu_like_s())


@both_modes
def test_an_encoder_decoder_model_is_never_stalled(is_async: bool) -> None:
    engine = make_encoder_decoder_engine(is_async=is_async)

    def speak(name: str, output: int) -> None:
        request = make_request(name, prompt(60), output)
        request.mm_features = [image_in(offset=0, length=1500, name=name)]
        engine.scheduler.add_request(request)

    for index in range(8):
        speak(f"decode-{index}", 800)
    while len(engine.token_times_s) < 8:
        engine.step()
    play(engine, 60)
    before = len(engine.steps)
    for index in range(4):
        speak(f"late-{index}", 10)
        assert longest_wait_s(engine, f"late-{index}") <= MAX_DEFER_S + 0.1
    steps = engine.steps[before:]

    assert every_decode_got_its_tokens(steps)
    assert [tokens_of(steps, f"late-{index}")[0] for index in range(4)] == [60] * 4
    assert "stalled" not in engine.scheduler.reasons
    engine.run([])
    assert is_clean(engine)
