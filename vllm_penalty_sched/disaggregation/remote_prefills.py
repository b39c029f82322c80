"""Follow the prompts that a prefill instance prefills, from the question to the KV cache."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from vllm_penalty_sched.disaggregation.availability import Availability
from vllm_penalty_sched.disaggregation.handover_settings import HandoverSettings
from vllm_penalty_sched.disaggregation.handover_time import HandoverTime
from vllm_penalty_sched.disaggregation.pricing import Choice
from vllm_penalty_sched.handover_report import HandoverReport

# Any token will do: what the prefill instance says is thrown away.
_PROBE: Mapping[str, object] = {"prompt": [0], "max_tokens": 1}
# How fast an instance is that lost to this one shows only if it is asked all the same, so often.
TRIAL_PERIOD_S = 10.0
# Hand-over times kept for a report that nobody takes.
_MOST_SECONDS = 1000


class Fallback(StrEnum):
    """Why a prompt that was to be prefilled elsewhere is prefilled here after all."""

    UNREACHABLE = "unreachable"
    BROKE_OFF = "broke_off"
    REFUSED = "refused"
    TIMEOUT = "timeout"
    EXPIRED = "expired"
    READ_FAILED = "read_failed"


# What says nothing about the instance as a whole.
_HARMLESS = (Fallback.REFUSED, Fallback.EXPIRED)


class PrefillError(Exception):
    """The prefill instance did not do what it was asked."""

    def __init__(self, cause: Fallback, message: str) -> None:
        super().__init__(message)
        self.cause = cause


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillAnswer:
    """What came back.

    Attributes:
        kv_params: Where the KV cache lies, as vLLM's connector understands it.
        answered_s: When it came, on the clock of the caller's ``now_s``.
    """

    kv_params: Mapping[str, object]
    answered_s: float


class Ask(Protocol):
    """Sends a body to the prefill instance and returns at once."""

    def __call__(self, body: Mapping[str, object]) -> Future[PrefillAnswer]:
        """Return the answer to come; it fails with a PrefillError."""


class _Phase(StrEnum):
    ASKED = "asked"
    ANSWERED = "answered"
    READING = "reading"


@dataclass(slots=True, kw_only=True)
class _Prompt:
    tokens: int
    asked_s: float
    answer: Future[PrefillAnswer]
    phase: _Phase = _Phase.ASKED
    engine: object = None


class RemotePrefills:
    """Each prompt is asked for, answered, read, and forgotten, or falls back to this instance.

    Has no clock and no thread of its own. A name that it does not know stands for a prompt that is
    prefilled here.

    Attributes:
        availability: Whether the prefill instance can be asked.
    """

    def __init__(
        self, ask: Ask, settings: HandoverSettings, *, guess_s: Callable[[int], float | None]
    ) -> None:
        """Start with an instance that is taken to be there.

        Args:
            ask: Reaches it.
            settings: How long to wait.
            guess_s: Time that it would take for a prompt of n tokens, until enough was seen.
        """
        self.availability = Availability()
        self._ask = ask
        self._settings = settings
        self._guess_s = guess_s
        self._prefill_time = HandoverTime(guess_s)
        self._read_time = HandoverTime(lambda _tokens: 0.0)
        self._prompts: dict[str, _Prompt] = {}
        self._probe: Future[PrefillAnswer] | None = None
        self._latest_s = -math.inf
        self._read_from: set[object] = set()
        self._choices: Counter[str] = Counter()
        self._fallbacks: Counter[str] = Counter()
        self._seconds: list[float] = []

    def price_s(self, tokens: int, *, now_s: float) -> float | None:
        """Return how long a prompt of ``tokens`` tokens asked for now would take; None: unknown."""
        prefill_s = self._prefill_time.predict_s(tokens, now_s=now_s)
        read_s = self._read_time.predict_s(tokens, now_s=now_s)
        return None if prefill_s is None else prefill_s + (read_s or 0.0)

    def trial_s(self, tokens: int, *, now_s: float) -> float | None:
        """Return how long a prompt would take if nothing kept the instance from being quick.

        Returns:
            None unless it is time to see whether it is.
        """
        is_due = now_s - self._latest_s > TRIAL_PERIOD_S and not self._prompts
        return self._guess_s(tokens) if is_due else None

    def chosen(self, choice: Choice) -> None:
        """Count a choice."""
        self._choices[f"{choice.side}:{choice.reason}"] += 1

    def ask(
        self,
        name: str,
        body: Mapping[str, object],
        *,
        tokens: int,
        now_s: float,
        due_s: float = math.inf,
    ) -> None:
        """Ask for a prompt.

        Args:
            name: The request's id.
            body: What to post.
            tokens: Prompt tokens not cached here, >= 1.
            now_s: The time.
            due_s: When its first token is due.
        """
        self._latest_s = now_s
        self._prefill_time.start(name, tokens, now_s=now_s, due_s=due_s)
        self._prompts[name] = _Prompt(tokens=tokens, asked_s=now_s, answer=self._ask(body))

    def is_asked(self, name: str) -> bool:
        """Return whether a prompt's answer is still to come."""
        prompt = self._prompts.get(name)
        return prompt is not None and prompt.phase is _Phase.ASKED

    def poll(self, now_s: float) -> dict[str, Mapping[str, object]]:
        """Return where the KV caches lie that were announced since the last call, by name.

        Prompts whose answer failed or is overdue are forgotten.
        """
        self._poll_probe(now_s)
        answers = {}
        for name, prompt in list(self._prompts.items()):
            if prompt.phase is not _Phase.ASKED:
                continue
            if prompt.answer.done():
                kv_params = self._read_answer(name, prompt, now_s)
                if kv_params is not None:
                    answers[name] = kv_params
            elif now_s - prompt.asked_s > self._settings.prefill_timeout_s:
                self._fall_back(name, Fallback.TIMEOUT, now_s)
        return answers

    def expires(self, name: str, *, now_s: float) -> bool:
        """Return whether an announced KV cache must not be read any more; its prompt is forgotten.

        Past its lease the blocks may hold another prompt by now, and the read would not tell.
        """
        prompt = self._prompts.get(name)
        if prompt is None or prompt.phase is not _Phase.ANSWERED:
            return False
        if now_s - prompt.asked_s <= self._settings.read_within_s:
            return False
        self._fall_back(name, Fallback.EXPIRED, now_s)
        return True

    def read_begins(self, name: str, *, now_s: float) -> None:
        """Take in that a KV cache is being read."""
        prompt = self._prompts.get(name)
        if prompt is not None and prompt.phase is _Phase.ANSWERED:
            prompt.phase = _Phase.READING
            # The first read from an engine waits until the two know each other: nothing to learn.
            if prompt.engine in self._read_from:
                self._read_time.start(name, prompt.tokens, now_s=now_s)

    def read_ends(self, name: str, *, succeeded: bool, now_s: float) -> None:
        """Take in that a KV cache is here, or could not be read; nothing if none was being read."""
        prompt = self._prompts.get(name)
        if prompt is None or prompt.phase is not _Phase.READING:
            return
        if not succeeded:
            self._fall_back(name, Fallback.READ_FAILED, now_s)
            return
        self._latest_s = now_s
        self._read_from.add(prompt.engine)
        self._read_time.finish(name, now_s=now_s)
        if len(self._seconds) < _MOST_SECONDS:
            self._seconds.append(now_s - prompt.asked_s)
        del self._prompts[name]

    def forget(self, name: str) -> None:
        """Take in that a request has ended; nothing if its prompt is unknown."""
        prompt = self._prompts.pop(name, None)
        if prompt is not None:
            prompt.answer.cancel()
            self._prefill_time.drop(name)
            self._read_time.drop(name)

    def take_report(self) -> HandoverReport:
        """Return what happened since the last call."""
        report = HandoverReport(
            choices=dict(self._choices),
            seconds=tuple(self._seconds),
            fallbacks=dict(self._fallbacks),
            is_up=self.availability.is_up,
        )
        self._choices.clear()
        self._fallbacks.clear()
        self._seconds.clear()
        return report

    def _read_answer(self, name: str, prompt: _Prompt, now_s: float) -> Mapping[str, object] | None:
        try:
            answer = prompt.answer.result()
        except PrefillError as error:
            self._fall_back(name, error.cause, now_s)
            return None
        except CancelledError:
            self._fall_back(name, Fallback.BROKE_OFF, now_s)
            return None
        if not answer.kv_params:
            self._fall_back(name, Fallback.REFUSED, now_s)
            return None
        self.availability.succeeded()
        self._prefill_time.finish(name, now_s=answer.answered_s)
        prompt.phase = _Phase.ANSWERED
        prompt.engine = answer.kv_params.get("remote_engine_id")
        return answer.kv_params

    def _fall_back(self, name: str, cause: Fallback, now_s: float) -> None:
        self.forget(name)
        self._fallbacks[cause] += 1
        # Those asked for before the first failure fail with it: one failure, not many.
        if cause not in _HARMLESS and self.availability.is_up:
            self.availability.failed(now_s)

    def _poll_probe(self, now_s: float) -> None:
        if self._probe is not None and self._probe.done():
            failed = self._probe.cancelled() or self._probe.exception() is not None
            self._probe = None
            if failed:
                self.availability.failed(now_s)
            else:
                self.availability.succeeded()
        if self.availability.should_probe(now_s):
            self._probe = self._ask(_PROBE)
