"""``mode: observe`` schedules like stock, token for token, and only measures."""

import random

import pytest

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler as StockScheduler  # noqa: E402

from tests.engine.virtual import cpu_like_s, make_engine, prompt  # noqa: E402
from vllm_penalty_sched import Scheduler  # noqa: E402
from vllm_penalty_sched.engine.virtual_config import make_request  # noqa: E402

STEPS = 2000


def decisions_of(scheduler_cls: type, settings: dict, *, seed: int, **config: object) -> list:
    """Play random arrivals and aborts, and return what each of the steps granted."""
    rng = random.Random(seed)
    engine = make_engine(
        scheduler_cls,
        settings,
        kv_blocks=220,
        step_time_s=cpu_like_s(noise=0.0),
        max_num_seqs=24,
        max_num_batched_tokens=512,
        **config,
    )
    granted = []
    while len(granted) < STEPS:
        if rng.random() < 0.15:
            request = make_request(
                f"request-{len(granted)}-{rng.random()}",
                prompt(rng.choice([5, 40, 300, 900]), rng.randrange(5)),
                rng.randrange(1, 120),
                priority=rng.randrange(3),
                arrival_s=float(len(granted)),
            )
            engine.scheduler.add_request(request)
        if engine.scheduler.requests and rng.random() < 0.01:
            victim = rng.choice(sorted(engine.scheduler.requests))
            engine.scheduler.finish_requests(victim, _aborted())
        step = engine.step()
        if step is not None:
            preempted = sorted(step.output.preempted_req_ids or ())
            granted.append((dict(step.output.num_scheduled_tokens), preempted))
    return granted


def _aborted() -> object:
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize(("is_async", "stock"), [(False, StockScheduler), (True, AsyncScheduler)])
def test_two_thousand_random_steps_are_those_of_stock(
    is_async: bool, stock: type, policy: str
) -> None:
    config = {"async_scheduling": is_async, "policy": policy}

    theirs = decisions_of(stock, {}, seed=1, **config)
    ours = decisions_of(Scheduler, {"mode": "observe", "tbt_slo_ms": 15}, seed=1, **config)
    enforced = decisions_of(Scheduler, {"mode": "enforce", "tbt_slo_ms": 25}, seed=1, **config)

    assert len(theirs) == STEPS
    assert ours == theirs
    assert enforced != theirs  # the comparison can tell a difference
    assert sum(len(preempted) for _, preempted in theirs) > 0


def test_observing_learns_what_steps_cost() -> None:
    engine = make_engine(Scheduler, {"mode": "observe"}, step_time_s=cpu_like_s(noise=0.01))
    for index in range(20):
        engine.scheduler.add_request(make_request(f"r{index}", prompt(300, index), 50))
    while engine.is_busy:
        engine.step()

    model = engine.scheduler.planner.model
    assert model.samples > 40
    truth_s = cpu_like_s(noise=0.0)
    for shape in {step.shape for step in engine.steps}:
        assert model.predict_s(shape) == pytest.approx(truth_s(shape), rel=0.05)
    assert not engine.scheduler.reasons
