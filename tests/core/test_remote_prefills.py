from collections.abc import Mapping
from concurrent.futures import Future

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_penalty_sched.disaggregation.handover_settings import HandoverSettings
from vllm_penalty_sched.disaggregation.pricing import Choice, ChoiceReason, Side
from vllm_penalty_sched.disaggregation.remote_prefills import (
    TRIAL_PERIOD_S,
    Fallback,
    PrefillAnswer,
    PrefillError,
    RemotePrefills,
)

SETTINGS = HandoverSettings(prefill_url="http://prefill", prefill_timeout_s=4.0, lease_s=15.0)
KV_PARAMS = {"do_remote_prefill": True, "remote_engine_id": "p"}


class FakeInstance:
    """Takes questions; the test says when and how each is answered."""

    def __init__(self) -> None:
        self.asked: list[Future[PrefillAnswer]] = []
        self.bodies: list[Mapping[str, object]] = []

    def ask(self, body: Mapping[str, object]) -> Future[PrefillAnswer]:
        self.bodies.append(body)
        self.asked.append(Future())
        return self.asked[-1]

    def answer(self, place: int, at_s: float, **kv_params: object) -> None:
        answer = PrefillAnswer(kv_params=kv_params or KV_PARAMS, answered_s=at_s)
        self.asked[place].set_result(answer)

    def fail(self, place: int, cause: Fallback) -> None:
        self.asked[place].set_exception(PrefillError(cause, "as told"))


def make() -> tuple[FakeInstance, RemotePrefills]:
    instance = FakeInstance()
    return instance, RemotePrefills(instance.ask, SETTINGS, guess_s=lambda tokens: tokens / 1000)


def ask(remote: RemotePrefills, name: str, now_s: float, tokens: int = 500) -> None:
    remote.ask(name, {"prompt": [1]}, tokens=tokens, now_s=now_s)


def test_an_answered_prompt_is_read_and_its_time_told() -> None:
    instance, remote = make()
    ask(remote, "a", 0.0)
    was_asked = remote.is_asked("a")
    instance.answer(0, 0.5)

    assert was_asked
    assert remote.poll(0.6) == {"a": KV_PARAMS}
    assert remote.poll(0.7) == {}
    assert not remote.is_asked("a")
    remote.read_begins("a", now_s=0.7)
    remote.read_ends("a", succeeded=True, now_s=0.9)
    report = remote.take_report()
    assert report.seconds == (pytest.approx(0.9),)
    assert not report.fallbacks
    assert report.is_up


@pytest.mark.parametrize(
    ("cause", "is_up"),
    [
        (Fallback.UNREACHABLE, False),
        (Fallback.BROKE_OFF, False),
        (Fallback.TIMEOUT, False),
        (Fallback.REFUSED, True),
    ],
)
def test_a_failed_question_falls_back_and_only_a_refusal_speaks_for_the_instance(
    cause: Fallback, is_up: bool
) -> None:
    instance, remote = make()
    ask(remote, "a", 0.0)
    instance.fail(0, cause)

    assert remote.poll(0.1) == {}
    assert not remote.is_asked("a")
    report = remote.take_report()
    assert report.fallbacks == {cause: 1}
    assert report.is_up is is_up


def test_no_answer_within_the_limit_falls_back_and_calls_the_question_off() -> None:
    instance, remote = make()
    ask(remote, "a", 0.0)

    still_asked = remote.poll(4.0) == {} and remote.is_asked("a")
    remote.poll(4.1)

    assert still_asked
    assert not remote.is_asked("a")
    assert instance.asked[0].cancelled()
    assert remote.take_report().fallbacks == {Fallback.TIMEOUT: 1}


def test_an_answer_without_a_kv_cache_is_a_refusal() -> None:
    instance, remote = make()
    ask(remote, "a", 0.0)
    instance.asked[0].set_result(PrefillAnswer(kv_params={}, answered_s=0.1))

    assert remote.poll(0.2) == {}
    assert remote.take_report().fallbacks == {Fallback.REFUSED: 1}


def test_a_kv_cache_expires_counted_from_when_it_was_asked_for() -> None:
    instance, remote = make()
    ask(remote, "early", 0.0)
    ask(remote, "late", 0.0)
    instance.answer(0, 3.9)
    instance.answer(1, 3.9)
    remote.poll(3.9)

    assert not remote.expires("early", now_s=10.0)
    assert remote.expires("late", now_s=10.1)
    assert not remote.expires("late", now_s=10.2)  # forgotten: prefilled here by now
    assert not remote.expires("unknown", now_s=99.0)
    assert remote.take_report().fallbacks == {Fallback.EXPIRED: 1}


def test_a_read_that_has_begun_never_expires_and_one_that_fails_falls_back() -> None:
    instance, remote = make()
    ask(remote, "a", 0.0)
    instance.answer(0, 0.5)
    remote.poll(0.5)
    remote.read_begins("a", now_s=1.0)

    assert not remote.expires("a", now_s=99.0)
    remote.read_ends("a", succeeded=False, now_s=99.0)
    report = remote.take_report()
    assert report.fallbacks == {Fallback.READ_FAILED: 1}
    assert not report.is_up


def test_after_a_failure_it_is_probed_and_used_again_when_it_answers() -> None:
    instance, remote = make()
    ask(remote, "a", 0.0)
    instance.fail(0, Fallback.UNREACHABLE)
    remote.poll(0.1)
    remote.poll(0.9)
    before = len(instance.asked)
    remote.poll(1.2)
    remote.poll(1.3)

    assert (before, len(instance.asked)) == (1, 2)
    assert "kv_transfer_params" not in instance.bodies[1]
    assert not remote.availability.is_up
    instance.answer(1, 1.4)
    remote.poll(1.5)
    assert remote.availability.is_up


def test_many_failures_at_once_are_one_for_the_wait_until_the_probe() -> None:
    instance, remote = make()
    for number in range(8):
        ask(remote, str(number), 0.0)
    for number in range(8):
        instance.fail(number, Fallback.BROKE_OFF)
    remote.poll(0.1)
    remote.poll(1.2)

    assert len(instance.asked) == 9


def test_an_instance_that_seems_dear_is_tried_now_and_then() -> None:
    instance, remote = make()
    ask(remote, "a", 0.0)
    while_asked = remote.trial_s(500, now_s=99.0)
    instance.answer(0, 3.0)
    remote.poll(3.0)
    remote.read_begins("a", now_s=3.0)
    remote.read_ends("a", succeeded=True, now_s=3.0)

    assert while_asked is None
    assert remote.trial_s(500, now_s=3.0 + TRIAL_PERIOD_S) is None
    assert remote.trial_s(500, now_s=3.1 + TRIAL_PERIOD_S) == pytest.approx(0.5)


def test_a_forgotten_prompt_is_called_off_and_its_late_answer_ignored() -> None:
    instance, remote = make()
    ask(remote, "a", 0.0)
    remote.forget("a")

    assert instance.asked[0].cancelled()
    assert remote.poll(1.0) == {}
    assert not remote.take_report().fallbacks


def test_the_first_read_from_an_engine_teaches_nothing() -> None:
    instance, remote = make()
    for place in range(12):
        ask(remote, str(place), float(place))
        instance.answer(place, place + 0.5)
        remote.poll(place + 0.5)
        remote.read_begins(str(place), now_s=place + 0.5)
        # Meeting takes long; later reads take nothing.
        remote.read_ends(str(place), succeeded=True, now_s=place + (3.5 if place == 0 else 0.5))

    assert remote.price_s(500, now_s=99.0) == pytest.approx(0.5, rel=0.01)


def test_choices_are_counted_by_side_and_reason_and_told_once() -> None:
    _, remote = make()
    remote.chosen(Choice(side=Side.REMOTE, reason=ChoiceReason.TRIAL))
    remote.chosen(Choice(side=Side.REMOTE, reason=ChoiceReason.TRIAL))

    assert remote.take_report().choices == {"remote:trial": 2}
    assert remote.take_report().choices == {}


EVENTS = st.sampled_from(["ask", "answer", "fail", "begin", "end", "lose", "wait"])


def act(
    instance: FakeInstance, remote: RemotePrefills, event: str, place: int, now_s: float
) -> None:
    name = str(place)
    if event == "answer" and not instance.asked[place].done():
        instance.answer(place, now_s)
    elif event == "fail" and not instance.asked[place].done():
        instance.fail(place, Fallback.BROKE_OFF)
    elif event == "begin" and not remote.expires(name, now_s=now_s):
        remote.read_begins(name, now_s=now_s)
    elif event in ("end", "lose"):
        remote.read_ends(name, succeeded=event == "end", now_s=now_s)
    remote.poll(now_s)


@given(st.lists(st.tuples(EVENTS, st.integers(0, 7)), max_size=60))
def test_every_prompt_asked_for_is_read_or_falls_back_exactly_once(
    events: list[tuple[str, int]],
) -> None:
    instance, remote = make()
    places: list[int] = []  # of prompts among all that was asked, probes included
    now_s = 0.0
    for event, number in events:
        now_s += 0.7
        if event == "ask":
            places.append(len(instance.asked))
            ask(remote, str(places[-1]), now_s)
        elif places:
            act(instance, remote, event, places[number % len(places)], now_s)
    for place in places:
        for event in ("wait", "begin", "end"):
            act(instance, remote, event, place, now_s + 100.0)
    report = remote.take_report()

    assert len(report.seconds) + sum(report.fallbacks.values()) == len(places)
