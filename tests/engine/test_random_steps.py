"""Random walks over the real scheduler classes: what holds in every step of every mode."""

from dataclasses import replace
from typing import Any

import pytest

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

from tests.engine.random_soak import shrink, walk_many  # noqa: E402
from tests.engine.random_steps import Walk, WalkError  # noqa: E402
from tests.engine.walk_plan import FEATURES, WalkPlan  # noqa: E402
from vllm_penalty_sched import Scheduler  # noqa: E402
from vllm_penalty_sched.engine.request_slos import RequestSlos  # noqa: E402
from vllm_penalty_sched.engine.step_limits import PlannedStep  # noqa: E402

STEPS = 5000
MUTANT_STEPS = 8000
WHAT_A_WALK_MUST_MEET = {
    *FEATURES,
    *("async_walks", "observing_walks", "mixed_steps", "owed_prefill", "preemptions"),
    *("draft_steps", "slo", "fits", "cold", "aged", "deferred", "infeasible"),
}


def test_every_law_holds_in_5000_random_steps() -> None:
    seen = walk_many(STEPS)

    assert seen["steps"] >= STEPS
    assert {name for name in WHAT_A_WALK_MUST_MEET if not seen[name]} == set()


def test_a_seed_gives_the_same_walk_each_time() -> None:
    first, second = (Walk(WalkPlan.of_seed(3)).run(120) for _ in range(2))

    assert first == second


class PrefillsFirst(Scheduler):
    def _put_decodes_first(self, *_args: Any) -> None:
        self.running.sort(key=lambda request: not request.is_prefill_chunk)


class ForgetsOneDecode(Scheduler):
    def _plan(self, *args: Any) -> PlannedStep:
        planned = super()._plan(*args)
        if planned.before is None or planned.before.decodes.decode_tokens < 2:
            return planned
        decodes = planned.before.decodes
        fewer = replace(decodes, decode_tokens=decodes.decode_tokens - 1)
        return replace(planned, before=replace(planned.before, decodes=fewer))


class KeepsTheKnob(Scheduler):
    def _schedule_within(self, *args: Any, **kwargs: Any) -> Any:
        output = super()._schedule_within(*args, **kwargs)
        self.max_num_scheduled_tokens -= 1
        return output


class ExceedsTheBudget(Scheduler):
    def _prepare(self, *args: Any) -> PlannedStep:
        planned = super()._prepare(*args)
        if planned.limits is None or not planned.decision.prefill_tokens:
            return planned
        most = min(self.max_num_scheduled_tokens, planned.limits.budget_tokens + 1)
        return replace(planned, limits=replace(planned.limits, budget_tokens=most))


class NeverAges(Scheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.planner._settings = replace(self.planner._settings, max_defer_s=3600.0)


class ServesTheLastPrefillFirst(Scheduler):
    def _put_decodes_first(self, *args: Any) -> None:
        super()._put_decodes_first(*args)
        waiting = [request for request in self.running if request.is_prefill_chunk]
        self.running[len(self.running) - len(waiting) :] = waiting[::-1]


class RaisesOnADeadline(Scheduler):
    def _slack_s(self, *args: Any) -> float | None:
        if super()._slack_s(*args) is not None:
            raise RuntimeError("poisoned")
        return None


class KeepsSlosForEver(Scheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._slos = _Hoarder()


class _Hoarder(RequestSlos):
    def _forget_all_but(self, _alive: object) -> None:
        pass


@pytest.mark.parametrize(
    ("mutant", "law"),
    [
        (PrefillsFirst, "decode"),
        (ForgetsOneDecode, "decode"),
        (KeepsTheKnob, "knobs"),
        (ExceedsTheBudget, "budget"),
        (NeverAges, "starved"),
        (ServesTheLastPrefillFirst, "overtaken"),
        (RaisesOnADeadline, "RuntimeError"),
        (KeepsSlosForEver, "leak"),
    ],
)
def test_a_walk_finds_the_fault_of_a_mutant(mutant: type[Scheduler], law: str) -> None:
    with pytest.raises(WalkError) as error:
        walk_many(MUTANT_STEPS, scheduler_cls=mutant)

    assert error.value.problem.startswith(law)


def test_a_failure_names_its_seed_and_is_shrunk_to_the_features_it_needs() -> None:
    with pytest.raises(WalkError, match=r"replay: python .* --seed \d+") as error:
        walk_many(MUTANT_STEPS, scheduler_cls=KeepsTheKnob)

    # The knob is kept whatever else happens, so nothing else has to.
    assert error.value.plan.features == frozenset()
    assert shrink(error.value, KeepsTheKnob) is error.value
