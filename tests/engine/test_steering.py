"""Random loads on the real scheduler classes: what holds in every step of every mode."""

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler as StockScheduler  # noqa: E402

from tests.engine.virtual import is_clean, make_engine, prompt  # noqa: E402
from vllm_penalty_sched import Scheduler  # noqa: E402
from vllm_penalty_sched.engine.virtual_config import make_request  # noqa: E402
from vllm_penalty_sched.engine.virtual_engine import VirtualEngine, VirtualStep  # noqa: E402
from vllm_penalty_sched.policy import Decision  # noqa: E402


@dataclass
class Watched:
    """What a run of random requests showed."""

    steps: int = 0
    mixed_steps: int = 0
    preemptions: int = 0
    problems: list[str] = field(default_factory=list)


def watch(step: VirtualStep, decision: Decision, seen: Watched) -> None:
    granted = step.output.num_scheduled_tokens
    preempted = set(step.output.preempted_req_ids or ())
    needs = step.before.decode_needs
    seen.steps += 1
    seen.preemptions += len(preempted)
    seen.mixed_steps += bool(step.shape.prefills and step.shape.decode_seqs)
    for request_id in needs.keys() - preempted:
        if granted.get(request_id, 0) != needs[request_id]:
            seen.problems.append(f"step {seen.steps}: {request_id} got {granted.get(request_id)}")
    budget = decision.prefill_tokens
    if budget is None:
        return
    # A decode that loses its blocks in the middle of a step hands its tokens on (priority policy).
    handed_on = sum(needs.get(request_id, 0) for request_id in preempted)
    if step.shape.prefill_tokens > budget + handed_on:
        seen.problems.append(f"step {seen.steps}: {step.shape.prefill_tokens} over {budget}")
    if step.shape.tokens > step.before.decodes.decode_tokens + budget:
        seen.problems.append(f"step {seen.steps}: {step.shape.tokens} tokens in all")


def run_random(
    *, seed: int, is_async: bool, spec_tokens: int, policy: str, kv_blocks: int, slo_ms: float
) -> tuple[VirtualEngine, Watched]:
    rng = random.Random(seed)
    engine = make_engine(
        Scheduler,
        {"tbt_slo_ms": slo_ms, "max_defer_s": 0.5},
        kv_blocks=kv_blocks,
        spec_tokens=spec_tokens,
        accept_drafts=lambda drafts: rng.randint(0, drafts),
        async_scheduling=is_async,
        policy=policy,
        max_num_seqs=32,
        max_num_batched_tokens=1024,
    )
    decisions: list[Decision] = []
    plan = engine.scheduler._plan

    def watched_plan(*args: Any) -> Any:
        planned = plan(*args)
        decisions.append(planned.decision)
        return planned

    engine.scheduler._plan = watched_plan
    todo = [
        make_request(
            f"request-{index}",
            prompt(rng.choice([5, 40, 300, 900]), rng.randrange(3)),
            rng.randrange(1, 200),
            priority=rng.randrange(3),
            arrival_s=float(index),
        )
        for index in range(60)
    ]
    seen = Watched()
    while todo or engine.is_busy:
        if todo and rng.random() < 0.3:
            engine.scheduler.add_request(todo.pop(0))
        step = engine.step()
        if step is not None:
            watch(step, decisions[-1], seen)
        assert seen.steps < 20_000, "requests never finish"
    return engine, seen


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("spec_tokens", [0, 3])
@pytest.mark.parametrize("is_async", [False, True])
def test_decodes_get_their_tokens_prefills_stay_within_budget_and_all_finish(
    is_async: bool, spec_tokens: int, policy: str
) -> None:
    preemptions = mixed_steps = 0
    for seed, (kv_blocks, slo_ms) in enumerate(
        [(4000, 25.0), (4000, 60.0), (130, 60.0), (130, 200.0)]
    ):
        engine, seen = run_random(
            seed=seed,
            is_async=is_async,
            spec_tokens=spec_tokens,
            policy=policy,
            kv_blocks=kv_blocks,
            slo_ms=slo_ms,
        )
        preemptions += seen.preemptions
        mixed_steps += seen.mixed_steps

        assert seen.problems == []
        assert is_clean(engine)
        assert engine.scheduler.faults == 0
        assert engine.scheduler.max_num_scheduled_tokens == 1024
    assert preemptions > 0
    assert mixed_steps > 200


@pytest.mark.parametrize("is_async", [False, True])
def test_the_one_name_becomes_the_class_for_the_scheduling_mode(is_async: bool) -> None:
    scheduler = make_engine(Scheduler, async_scheduling=is_async).scheduler

    assert isinstance(scheduler, Scheduler)
    assert isinstance(scheduler, StockScheduler)
    assert isinstance(scheduler, AsyncScheduler) is is_async


def test_vllm_finds_the_class_by_its_public_path() -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    assert resolve_obj_by_qualname("vllm_penalty_sched.Scheduler") is Scheduler
