"""Ordering by TTFT slack, on vLLM's real scheduler classes and virtual time."""

import math
from collections import deque

import numpy as np
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

from vllm.v1.core.sched.request_queue import FCFSRequestQueue  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402

from tests.engine.virtual import add, is_clean, make_engine, play, start_decodes  # noqa: E402
from vllm_penalty_sched import Scheduler  # noqa: E402
from vllm_penalty_sched.engine.slack_queue import FREE_SHARE, LATE_SHARE, SlackQueue  # noqa: E402
from vllm_penalty_sched.engine.virtual_config import make_request  # noqa: E402

TTFT_S = 10.0


class Waiting:
    """A queue with a clock of its own; a request's TTFT SLO stands in its ``vllm_xargs``."""

    def __init__(self, *, by_priority: bool = False) -> None:
        self.now_s = 0.0
        self.queue = SlackQueue(
            deadline_s=self._deadline_s,
            tokens_left=lambda request: request.num_tokens,
            by_priority=by_priority,
        )

    def _deadline_s(self, request: Request) -> float:
        args = request.sampling_params.extra_args or {}
        return self.now_s + args.get("ttft_s", math.inf)

    def add(
        self, name: str, tokens: int, ttft_s: float | None = None, *, priority: int = 0
    ) -> Request:
        xargs = {"ttft_s": ttft_s} if ttft_s is not None else None
        request = make_request(name, [1] * tokens, 1, xargs=xargs, priority=priority)
        self.queue.add_request(request)
        return request

    def rank(self, *, tokens_per_s: float = 100.0, started_tokens: int = 0) -> None:
        self.queue.rank(self.now_s, tokens_per_s, started_tokens=started_tokens, latency_s=0.0)

    def names(self) -> list[str]:
        return [request.request_id for request in self.queue]

    def pop(self) -> str:
        return str(self.queue.pop_request().request_id)


def test_tokens_in_time_are_those_that_go_before_a_prompt_that_arrives_now() -> None:
    waiting = Waiting()
    waiting.add("no deadline", 1000)
    waiting.add("soon", 100, 5.0)
    waiting.add("later", 10, 50.0)
    waiting.rank()
    in_time = waiting.queue.tokens_in_time
    waiting.now_s = 6.0
    waiting.rank()

    assert in_time == 110
    assert waiting.queue.tokens_in_time == 10


def test_the_earliest_deadline_goes_first_while_all_can_be_in_time() -> None:
    waiting = Waiting()
    waiting.add("late", 100, 9.0)
    waiting.add("soon", 300, 5.0)
    waiting.rank()

    assert waiting.names() == ["soon", "late"]


def test_a_prompt_that_would_make_others_late_goes_after_them() -> None:
    waiting = Waiting()
    waiting.add("long", 900, TTFT_S)
    waiting.add("short", 200, TTFT_S)
    waiting.rank()

    assert waiting.names() == ["short", "long"]


def test_what_was_started_counts_before_those_that_wait() -> None:
    waiting = Waiting()
    waiting.add("long", 600, 9.0)
    waiting.add("short", 200, TTFT_S)
    waiting.rank(started_tokens=400)

    assert waiting.names() == ["short", "long"]


def test_late_ones_and_those_without_an_slo_go_last_as_they_arrived() -> None:
    waiting = Waiting()
    waiting.add("hurried", 10, 1.0)
    waiting.add("patient", 10)
    waiting.now_s = 2.0
    waiting.add("fresh", 10, 1.0)
    waiting.rank()

    assert waiting.names() == ["fresh", "hurried", "patient"]


def test_a_late_prompt_is_served_however_many_others_come() -> None:
    waiting = Waiting()
    waiting.add("late", 100, 1.0)
    waiting.now_s = 2.0
    waiting.rank()

    served = []
    while "late" not in served:
        waiting.add(f"fresh-{len(served)}", 100, 5.0)
        waiting.now_s += 1.0
        waiting.rank()
        served.append(waiting.pop())

    assert len(served) - 1 == round(1 / LATE_SHARE)


def test_a_prompt_without_a_deadline_is_not_outranked_by_loose_ones() -> None:
    waiting = Waiting()
    waiting.add("late", 100, 1.0)
    waiting.now_s = 2.0
    waiting.add("patient", 100)
    served = []
    while "patient" not in served:
        waiting.add(f"loose-{len(served)}", 100, 3600.0)
        waiting.rank()
        served.append(waiting.pop())

    assert len(served) - 1 == round(1 / FREE_SHARE)


def test_a_preempted_request_goes_before_all() -> None:
    waiting = Waiting()
    waiting.add("fresh", 10, 1.0)
    for name in ("younger", "older"):  # the order in which vLLM preempts
        request = make_request(name, [1] * 10, 5)
        request.status = RequestStatus.PREEMPTED
        waiting.queue.prepend_request(request)
    waiting.rank()

    assert waiting.names() == ["older", "younger", "fresh"]


def test_a_request_preempted_after_its_admission_goes_before_all_as_well() -> None:
    waiting = Waiting()
    for name in ("admitted", "other"):
        waiting.add(name, 100, TTFT_S)
    waiting.rank()
    admitted = waiting.queue.pop_request()
    admitted.status = RequestStatus.PREEMPTED

    waiting.queue.prepend_request(admitted)
    waiting.add("urgent", 1, TTFT_S / 100)
    waiting.rank()

    assert waiting.names() == ["admitted", "urgent", "other"]


def test_a_skipped_request_comes_back_to_its_place() -> None:
    waiting = Waiting()
    for name in ("first", "second", "third"):
        waiting.add(name, 10, TTFT_S)
    waiting.add("patient", 100)
    waiting.rank()

    skipped = deque([waiting.queue.pop_request()])
    skipped.appendleft(waiting.queue.pop_request())  # as vLLM collects them
    assert waiting.pop() == "third"
    waiting.queue.prepend_requests(skipped)

    assert waiting.names() == ["first", "second", "patient"]
    waiting.rank()
    assert waiting.names() == ["first", "second", "patient"]


def test_under_the_priority_policy_the_order_only_breaks_ties() -> None:
    waiting = Waiting(by_priority=True)
    waiting.add("urgent-but-low", 10, 1.0, priority=5)
    waiting.add("patient-but-high", 10, priority=0)
    waiting.add("late", 900, TTFT_S, priority=1)
    waiting.add("quick", 200, TTFT_S, priority=1)
    waiting.rank()

    assert waiting.names() == ["patient-but-high", "quick", "late", "urgent-but-low"]


class QueueMachine(RuleBasedStateMachine):
    """Whatever is done to it, it holds what was put in, and iterates as it pops."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = Waiting(by_priority=True)
        self.inside: dict[str, Request] = {}
        self.out: list[Request] = []
        self.made = 0

    @rule(
        tokens=st.integers(1, 300),
        ttft_s=st.one_of(st.none(), st.floats(0.01, 20.0)),
        priority=st.integers(0, 2),
    )
    def add(self, tokens: int, ttft_s: float | None, priority: int) -> None:
        self.made += 1
        name = f"r{self.made}"
        self.inside[name] = self.waiting.add(name, tokens, ttft_s, priority=priority)

    @rule(passed_s=st.floats(0.0, 5.0), speed=st.sampled_from([1.0, 100.0, math.inf]))
    def rank(self, passed_s: float, speed: float) -> None:
        self.waiting.now_s += passed_s
        self.waiting.rank(tokens_per_s=speed)

    @rule()
    def pop(self) -> None:
        if self.inside:
            announced = self.waiting.queue.peek_request()
            popped = self.waiting.queue.pop_request()
            assert popped is announced
            self.out.append(self.inside.pop(popped.request_id))

    @rule(preempted=st.booleans())
    def prepend(self, preempted: bool) -> None:
        if self.out:
            request = self.out.pop()
            if preempted:
                request.status = RequestStatus.PREEMPTED
            self.waiting.queue.prepend_request(request)
            self.inside[request.request_id] = request

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.inside:
            name = data.draw(st.sampled_from(sorted(self.inside)))
            strangers = [make_request("stranger", [1], 1)]
            self.waiting.queue.remove_requests({self.inside.pop(name), *strangers})

    @invariant()
    def holds_what_was_put_in(self) -> None:
        names = self.waiting.names()
        assert sorted(names) == sorted(self.inside)
        assert len(self.waiting.queue) == len(self.inside)
        assert bool(self.waiting.queue) == bool(self.inside)
        if names:
            assert names[0] == self.waiting.queue.peek_request().request_id


QueueMachine.TestCase.settings = hypothesis_settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
TestQueueMachine = QueueMachine.TestCase


def test_an_empty_queue_has_nothing_to_peek_at() -> None:
    with pytest.raises(IndexError, match="empty"):
        Waiting().queue.peek_request()


@pytest.mark.parametrize(
    ("settings", "xargs", "queue_type"),
    [
        ({"tbt_slo_ms": 60, "ttft_slo_ms": 2000}, None, SlackQueue),
        ({"tbt_slo_ms": 60, "ttft_slo_ms": 2000, "order": "fcfs"}, None, FCFSRequestQueue),
        ({"tbt_slo_ms": 60}, None, FCFSRequestQueue),
        ({"tbt_slo_ms": 60}, {"ttft_slo_ms": 2000}, SlackQueue),
        ({"ttft_slo_ms": 2000, "mode": "observe"}, None, FCFSRequestQueue),
    ],
)
def test_vllms_own_queue_stays_while_there_is_nothing_to_order_by(
    settings: dict[str, object], xargs: dict[str, object] | None, queue_type: type
) -> None:
    engine = make_engine(Scheduler, settings)

    add(engine, "one", 32, 4, xargs=xargs)

    assert type(engine.scheduler.waiting) is queue_type
    engine.run([])
    assert is_clean(engine)


def overload(
    settings: dict[str, object], *, async_scheduling: bool, policy: str = "fcfs"
) -> dict[str, np.ndarray]:
    """Return TTFTs by kind of prompt under a load that the SLO leaves no room for."""
    engine = make_engine(
        Scheduler, settings, async_scheduling=async_scheduling, policy=policy, max_num_seqs=64
    )
    rng = np.random.default_rng(5)
    arrivals = []
    sent_s = {}
    for index in range(220):
        kind, tokens = ("short", 60) if index % 4 else ("long", 1500)
        name = f"{kind}-{index}"
        sent_s[name] = float(rng.uniform(0.0, 45.0))
        prompt = rng.integers(0, 2000, tokens).tolist()
        arrivals.append((sent_s[name], make_request(name, prompt, 12, arrival_s=sent_s[name])))
    start_decodes(engine, 4, output=3000)
    engine.run([(engine.now_s + at_s, request) for at_s, request in arrivals])
    assert is_clean(engine)
    start_s = min(times[0] for times in engine.token_times_s.values())
    return {
        kind: np.array(
            [
                engine.token_times_s[name][0] - at_s - start_s
                for name, at_s in sent_s.items()
                if name.startswith(kind)
            ]
        )
        for kind in ("short", "long")
    }


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_under_overload_most_meet_their_ttft_and_all_are_served(
    async_scheduling: bool, policy: str
) -> None:
    settings = {"tbt_slo_ms": 40, "ttft_slo_ms": 2000}

    ordered = overload(settings, async_scheduling=async_scheduling, policy=policy)
    plain = overload(settings | {"order": "fcfs"}, async_scheduling=async_scheduling, policy=policy)

    def in_time(ttfts_s: dict[str, np.ndarray]) -> float:
        return float(np.mean(np.concatenate(list(ttfts_s.values())) <= 2.0))

    assert np.mean(ordered["short"] <= 2.0) > 0.9
    assert in_time(ordered) > 1.5 * in_time(plain)


def test_ordering_keeps_the_decodes_within_their_slo() -> None:
    engine = make_engine(Scheduler, {"tbt_slo_ms": 60, "ttft_slo_ms": 500})
    start_decodes(engine, 8)
    for index in range(40):
        add(engine, f"p{index}", 200 + 40 * index, 2)

    steps = play(engine, 400)

    late = [step for step in steps[80:] if step.shape.prefills]
    assert late
    for step in steps:
        needs = step.before.decode_needs
        assert all(step.output.num_scheduled_tokens[name] == needs[name] for name in needs)
