"""From a step's load to its budget, and from its measured time to what is learned."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from vllm_penalty_sched.batch import BatchShape
from vllm_penalty_sched.learning.cold_start import FIRST_CHUNK_TOKENS, ColdStart
from vllm_penalty_sched.learning.latency import MAX_PREFILL_TOKENS, StepTimeModel
from vllm_penalty_sched.learning.margin import ConformalMargin, Slowdown
from vllm_penalty_sched.policy import Decision, PrefillDemand, Reason, StepState, decide
from vllm_penalty_sched.settings import Settings

# The first steps of a process pay for compilation and allocation.
_WARM_UP_STEPS = 2
# A loaded model with this many mixed steps needs no cold start.
_KNOWN_MIXED_STEPS = 24
# How fast the prefill speed is followed: a memory of about 50 steps.
_SPEED_RATE = 0.02
# No decode-only step is shorter or longer: a model that predicts one is spoiled.
_SHORTEST_STEP_S, _LONGEST_STEP_S = 1e-7, 3600.0
# Steps without decodes tell the prefill speed if they are about this large, or the largest so far.
_LARGE_STEP_TOKENS = 512
# Steps in a row that gave nobody a token although a budget was granted.
_STALL_STEPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """What vLLM is about to schedule.

    Attributes:
        decodes: The step without prefill.
        demands: Requests that want prefill, in vLLM's order; the first few are enough.
        demands_could_use_tokens: False if all of them wait for something else than tokens.
        own_slo_s: Tightest SLO that a running decode brought along; None if none did.
        base_tokens: The engine's own token budget for a step.
        slack_s: Time from the step's start to the first deadline of its tokens, seconds; None if
            gaps are limited instead.
    """

    decodes: BatchShape
    demands: tuple[PrefillDemand, ...]
    demands_could_use_tokens: bool
    own_slo_s: float | None
    base_tokens: int
    slack_s: float | None = None


class _FadingSpeed:
    """Prefill speed of the latest steps of a kind."""

    def __init__(self) -> None:
        self._steps = self._seconds = self._tokens = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        kept = 1.0 - _SPEED_RATE
        self._steps = kept * self._steps + 1.0
        self._seconds = kept * self._seconds + seconds
        self._tokens = kept * self._tokens + tokens

    @property
    def is_known(self) -> bool:
        return self._tokens > 0.0

    @property
    def tokens_per_s(self) -> float:
        return self._tokens / self._seconds if self._tokens else math.inf

    @property
    def step_s(self) -> float:
        return self._seconds / self._steps if self._steps else 0.0


class Planner:
    """Holds what was learned, and plans each step with it; has no clock of its own.

    Attributes:
        model: Predicts step times.
        margin: What its predictions are raised by, for noise.
        slowdown: How much slower the machine is right now.
        guards_admission: Whether a request may be held back for the decodes' sake.
        latest_slo_s: The SLO that was last in force, seconds; None before any.
    """

    def __init__(
        self,
        settings: Settings,
        model: StepTimeModel | None = None,
        *,
        margin: ConformalMargin | None = None,
    ) -> None:
        self.model = model or StepTimeModel()
        self.margin = margin or ConformalMargin(settings.miss_rate)
        self.slowdown = Slowdown()
        self.guards_admission = True
        self._settings = settings
        self._limited, self._free = _FadingSpeed(), _FadingSpeed()
        self._most_free_tokens = _LARGE_STEP_TOKENS
        self._cold_start = ColdStart(is_over=self.model.mixed_samples >= _KNOWN_MIXED_STEPS)
        self._warm_up_left = _WARM_UP_STEPS
        self._default_slo_s = self.latest_slo_s = self.slo_s(None, None)
        self._starving_since_s: float | None = None
        self._held_since_s: float | None = None
        self._fruitless_steps = 0

    @property
    def is_cold(self) -> bool:
        """Whether chunks still follow the cold start's probe instead of the model."""
        return not (self._cold_start.is_over and self.model.is_fitted)

    @property
    def max_defer_s(self) -> float:
        """Longest time that prefills may make no progress for the decodes' sake, seconds."""
        return self._settings.max_defer_s

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prefill speed of the latest steps that the SLO limited.

        Before any, as on a prefill instance, of large ones without decodes; infinite before those.
        """
        return self._speed.tokens_per_s

    @property
    def limited_step_s(self) -> float:
        """Mean time of the same steps, seconds; 0 before any."""
        return self._speed.step_s

    @property
    def _speed(self) -> _FadingSpeed:
        return self._limited if self._limited.is_known else self._free

    def prefill_alone_s(self, tokens: int) -> float | None:
        """Return what a prompt takes on an engine like this one that does nothing else, seconds.

        Returns:
            None while that is not known.
        """
        if self.is_cold:
            return None
        seconds = self.model.predict_s(BatchShape(prefills=((tokens, 0),)))
        return seconds if math.isfinite(seconds) else None

    def plan(self, load: StepLoad, now_s: float) -> Decision:
        """Return the prefill budget for a load.

        Args:
            load: What is about to be scheduled.
            now_s: A monotonic clock's reading, seconds.
        """
        decode_only_s = self._decode_only_s(load.decodes)
        self._default_slo_s = self.slo_s(None, decode_only_s)
        slo_s = self.latest_slo_s = self.slo_s(load.own_slo_s, decode_only_s)
        earned_s = 0.0
        if load.slack_s is not None and slo_s is not None:
            earned_s = max(0.0, load.slack_s - slo_s)
        state = StepState(
            decodes=load.decodes,
            demands=load.demands,
            decode_only_s=decode_only_s,
            slo_s=slo_s,
            earned_s=earned_s,
            slo_is_fixed=load.own_slo_s is not None or self._settings.tbt_slo_ms is not None,
            margin=self.margin.relative_for(load.decodes),
            slowdown=self.slowdown.factor,
            most_tokens=self._most_tokens(load.decodes, slo_s),
            seen_tokens=max(FIRST_CHUNK_TOKENS, self.model.largest_prefill_tokens),
            base_tokens=load.base_tokens,
            starved_s=_since(self._starving_since_s, now_s),
            held_s=_since(self._held_since_s, now_s),
            max_defer_s=self._settings.max_defer_s,
            guards_admission=self.guards_admission,
        )
        decision = decide(state, None if self.is_cold else self.model)
        return self._unstalled(decision, load)

    def nothing_to_prefill(self, own_slo_s: float | None = None) -> Decision:
        """Return the decision for a step in which nobody can prefill.

        Args:
            own_slo_s: Tightest SLO that a running decode brought along; None if none did.
        """
        self._is_served()
        self.latest_slo_s = _tighter(own_slo_s, self._default_slo_s)
        return Decision(reason=Reason.NO_PREFILL, prefill_tokens=0, slo_s=self.latest_slo_s)

    def nothing_to_protect(self) -> Decision:
        """Return the decision for a step in which nobody decodes: no limit."""
        self._is_served()
        return Decision(reason=Reason.NO_DECODE)

    def _is_served(self) -> None:
        self._starving_since_s = self._held_since_s = None
        self._fruitless_steps = 0

    def scheduled(
        self, decision: Decision, load: StepLoad, *, prefill_tokens: int, now_s: float
    ) -> None:
        """Take in how many prefill tokens vLLM really scheduled under a decision."""
        if prefill_tokens or not load.demands:
            self._starving_since_s = None
        elif self._starving_since_s is None or now_s < self._starving_since_s:
            self._starving_since_s = now_s  # also where the clock went back
        if not decision.holds_admission:
            self._held_since_s = None
        elif self._held_since_s is None or now_s < self._held_since_s:
            self._held_since_s = now_s
        was_granted = bool(decision.prefill_tokens) and load.demands_could_use_tokens
        fruitless = was_granted and not prefill_tokens
        self._fruitless_steps = self._fruitless_steps + 1 if fruitless else 0

    def learn(self, shape: BatchShape, seconds: float, decision: Decision | None) -> float | None:
        """Learn from a step that ran.

        Args:
            shape: What it computed, at least one token.
            seconds: How long it took, finite and positive.
            decision: The decision that it ran under, if any.

        Returns:
            What the model predicted for it before, seconds; None if it could not.
        """
        if self._warm_up_left:
            self._warm_up_left -= 1
            return None
        was_cold = self.is_cold
        self._learn_speed(shape, seconds, decision)
        predicted_s = self.model.observe(shape, seconds)
        if not shape.prefills:
            self._follow(self._cold_start.decode_only_s if was_cold else predicted_s)
        if decision is None:
            self.latest_slo_s = self._default_slo_s
        is_judged = shape.decode_seqs and not was_cold and not shape.encoder_tokens
        if is_judged and predicted_s is not None:
            self._learn_noise(shape, seconds, predicted_s, decision)
        self._cold_start.observe(
            decode_seqs=shape.decode_seqs,
            prefill_tokens=shape.prefill_tokens,
            seconds=seconds,
            slo_s=decision.slo_s if decision else None,
        )
        return predicted_s

    def slo_s(self, own_slo_s: float | None, decode_only_s: float | None) -> float | None:
        """Return the tightest SLO of those that apply, seconds; None while unsettled."""
        settings = self._settings
        if settings.tbt_slo_ms is not None:
            default_s: float | None = settings.tbt_slo_ms / 1e3
        elif decode_only_s is not None:
            default_s = settings.tbt_slo_scale * decode_only_s
        else:
            default_s = None
        return _tighter(own_slo_s, default_s)

    def _follow(self, decode_only_s: float | None) -> None:
        """Let a derived SLO follow the decode-only time while nobody wants prefill."""
        is_sound = decode_only_s is not None and _SHORTEST_STEP_S < decode_only_s < _LONGEST_STEP_S
        if self._settings.tbt_slo_ms is None and is_sound:
            self._default_slo_s = self.slo_s(None, decode_only_s)

    def _learn_speed(self, shape: BatchShape, seconds: float, decision: Decision | None) -> None:
        # Only from steps that could have used more: a short prompt alone says nothing of the speed.
        if decision is not None and decision.reason in (Reason.SLO, Reason.INFEASIBLE):
            self._limited.add(shape.prefill_tokens, seconds)
        elif not shape.decode_seqs and 2 * shape.prefill_tokens > self._most_free_tokens:
            self._most_free_tokens = max(self._most_free_tokens, shape.prefill_tokens)
            self._free.add(shape.prefill_tokens, seconds)

    def _decode_only_s(self, decodes: BatchShape) -> float | None:
        if not decodes.decode_seqs:
            return None
        if self.is_cold:
            return self._cold_start.decode_only_s
        if not decodes.tokens:  # they all wait for a step in flight: the time of one like this
            decodes = replace(decodes, decode_tokens=decodes.decode_seqs)
        predicted_s = self.model.predict_s(decodes)
        if not _SHORTEST_STEP_S < predicted_s < _LONGEST_STEP_S:
            self._start_afresh()
            raise ArithmeticError(
                f"the step-time model predicts {predicted_s} s for {decodes}: it is forgotten, and "
                "learning starts afresh"
            )
        return predicted_s

    def _start_afresh(self) -> None:
        provenance, stalls = self.model.provenance, self.margin.stalls
        self.model = StepTimeModel()
        self.model.provenance = provenance
        self.margin = ConformalMargin(self._settings.miss_rate)
        self.margin.stalls = stalls  # a count that was reported does not fall
        self.slowdown = Slowdown()
        self._cold_start = ColdStart()
        self._limited, self._free = _FadingSpeed(), _FadingSpeed()
        self._most_free_tokens = _LARGE_STEP_TOKENS

    def _most_tokens(self, decodes: BatchShape, slo_s: float | None) -> int:
        if not self.is_cold:
            return MAX_PREFILL_TOKENS
        if slo_s is None:
            return 0
        return self._cold_start.probe_tokens(decode_seqs=decodes.decode_seqs, slo_s=slo_s)

    def _unstalled(self, decision: Decision, load: StepLoad) -> Decision:
        # No known case in vLLM 0.28-0.33 is left to this; it guards against the unknown ones.
        doublings = self._fruitless_steps // _STALL_STEPS
        if not doublings or not decision.prefill_tokens:
            return decision
        tokens = min(load.base_tokens, decision.prefill_tokens << min(doublings, 20))
        return replace(decision, reason=Reason.STALLED, prefill_tokens=tokens, predicted_s=None)

    def _learn_noise(
        self, shape: BatchShape, seconds: float, predicted_s: float, decision: Decision | None
    ) -> None:
        ratio = seconds / predicted_s
        if shape.prefills:
            overran = None
            if decision is not None and decision.reason is Reason.SLO:
                overran = decision.slo_s is not None and seconds > decision.slo_s
            self.margin.observe(ratio / self.slowdown.factor - 1.0, shape=shape, overran=overran)
        self.slowdown.observe(ratio - 1.0)


def _tighter(one_s: float | None, other_s: float | None) -> float | None:
    if one_s is None or other_s is None:
        return other_s if one_s is None else one_s
    return min(one_s, other_s)


def _since(start_s: float | None, now_s: float) -> float:
    # A clock that went backwards counts as no time.
    return 0.0 if start_s is None else max(0.0, now_s - start_s)
