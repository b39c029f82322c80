"""Random walks over vLLM's real scheduler under the plugin, each drawn from one seed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar
from vllm.v1.structured_output.request import StructuredOutputRequest

from tests.engine.step_laws import Before, Knobs, StepLaws
from tests.engine.virtual import is_clean
from tests.engine.walk_plan import FEATURES, MODEL_LEN, SHARES, WalkPlan
from vllm_penalty_sched import Scheduler
from vllm_penalty_sched.batch import BatchShape
from vllm_penalty_sched.engine.kv_loads import served_first
from vllm_penalty_sched.engine.scheduler import AsyncPenaltyScheduler
from vllm_penalty_sched.engine.virtual_config import make_request, make_scheduler, make_vllm_config
from vllm_penalty_sched.engine.virtual_engine import VirtualEngine
from vllm_penalty_sched.policy import Decision

_MOST_ALIVE = 40
_DRAIN_STEPS = 30_000


class WalkError(AssertionError):
    """What went wrong in a walk; the message says how to see it again."""

    def __init__(self, plan: WalkPlan, step: int, problem: str) -> None:
        self.plan, self.step, self.problem = plan, step, problem
        left_out = "".join(f" --without {name}" for name in sorted(FEATURES - plan.features))
        super().__init__(
            f"step {step}: {problem}\n{plan}\n"
            f"replay: python -m tests.engine.random_soak --seed {plan.seed}{left_out}"
        )


class AnyToken(StructuredOutputGrammar):
    """A grammar that accepts everything: virtual requests have no words."""

    def accept_tokens(self, _request_id: str, _tokens: list[int]) -> bool:
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return tokens

    def rollback(self, _num_tokens: int) -> None: ...

    def fill_bitmask(self, _bitmask: Any, _batch_index: int) -> None: ...

    def is_terminated(self) -> bool:
        return False

    def reset(self) -> None: ...


def image_in(*, offset: int, length: int, name: str) -> MultiModalFeatureSpec:
    """An image at a place of a prompt; images of one name are the same."""
    return MultiModalFeatureSpec(
        data=MultiModalKwargsItem.dummy(),
        mm_position=PlaceholderRange(offset=offset, length=length),
        identifier=name,
        modality="image",
    )


class _SessionEngine(VirtualEngine):
    """Knows that a streaming session's next turn begins with a prefill."""

    def _read(self, output: SchedulerOutput) -> tuple[BatchShape, frozenset[str]]:
        self._decoding.difference_update(new.req_id for new in output.scheduled_new_reqs)
        return super()._read(output)


class Walk:
    """One walk: random acts between the steps, and the laws checked after each.

    Attributes:
        seen: How often what happened, by name; ``steps`` counts calls of ``schedule()``.
    """

    def __init__(self, plan: WalkPlan, scheduler_cls: type[Scheduler] = Scheduler) -> None:
        self.plan = plan
        self.seen: Counter[str] = Counter()
        self._rngs = {name: random.Random(f"{name} {plan.seed}") for name in (*FEATURES, "load")}
        config = make_vllm_config(
            settings=plan.settings,
            async_scheduling=plan.is_async,
            max_num_seqs=plan.seqs,
            max_num_batched_tokens=plan.step_tokens,
            max_model_len=MODEL_LEN,
            prefix_caching=plan.prefix_caching,
            policy=plan.policy,
            enable_chunked_prefill=plan.chunked_prefill,
            disable_chunked_mm_input=plan.whole_images,
            long_prefill_token_threshold=plan.long_prefill_tokens,
        )
        if plan.is_async and scheduler_cls is not Scheduler:
            scheduler_cls = type("AsyncMutant", (scheduler_cls, AsyncPenaltyScheduler), {})
        scheduler = make_scheduler(scheduler_cls, config, kv_blocks=plan.kv_blocks)
        scheduler.num_spec_tokens = plan.spec_tokens
        scheduler.use_v2_model_runner = plan.is_v2_runner
        scheduler._is_strict = True
        if "loras" in plan.features:
            scheduler.lora_config = SimpleNamespace(max_loras=2)
        scheduler.max_num_encoder_input_tokens = 1024
        scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=1024)
        drafts = random.Random(f"drafts {plan.seed}")
        self.engine = _SessionEngine(
            scheduler, self._step_time_s(), accept_drafts=lambda most: drafts.randint(0, most)
        )
        self._clock_ahead_s = 0.0
        scheduler.clock = lambda: self.engine.now_s + self._clock_ahead_s
        self._laws = StepLaws(
            knobs=Knobs.of(scheduler),
            max_defer_s=plan.settings["max_defer_s"],
            steers=plan.settings["mode"] == "enforce",
        )
        self._decision: Decision | None = None
        self._watch_decisions(scheduler)
        self._made = 0
        self._asked: dict[str, int] = {}
        self._grammars: list[tuple[int, Future[AnyToken]]] = []
        self._sessions: set[str] = set()
        self._pause_until = 0

    def run(self, steps: int) -> Counter[str]:
        """Walk so many steps, let everything finish, and return what was seen.

        Raises:
            WalkError: If a law was broken or anything was raised.
        """
        try:
            while self.seen["steps"] < steps:
                self._act()
                self._step()
            self._finish(steps + _DRAIN_STEPS)
        except AssertionError as error:
            raise WalkError(self.plan, self.seen["steps"], str(error) or repr(error)) from error
        except Exception as error:
            raise WalkError(self.plan, self.seen["steps"], repr(error)) from error
        return self.seen

    def _watch_decisions(self, scheduler: Scheduler) -> None:
        plan = scheduler._plan

        def watched(*args: Any) -> Any:
            planned = plan(*args)
            self._decision = planned.decision
            self.seen[str(planned.decision.reason)] += 1
            return planned

        scheduler._plan = watched

    def _step_time_s(self) -> Callable[[BatchShape], float]:
        rng, load = self._rngs["outliers"], self._rngs["load"]
        per_token_s = load.choice([2e-5, 3.5e-4])
        has_outliers = "outliers" in self.plan.features

        def step_time_s(shape: BatchShape) -> float:
            steady_s = 13e-3 + 1.2e-4 * shape.decode_tokens + per_token_s * shape.prefill_tokens
            if has_outliers and rng.random() < 0.02:
                self.seen["outliers"] += 1
                return steady_s * rng.uniform(2.0, 60.0)
            return steady_s * rng.lognormvariate(0.0, 0.05)

        return step_time_s

    def _step(self) -> None:
        scheduler = self.engine.scheduler
        before = Before.of(scheduler, self.engine.now_s)
        self._decision = None
        self.seen["steps"] += 1
        step = self.engine.step()
        if step is None:  # nothing to schedule, or all is paused
            self.engine.now_s += 0.005
            return
        problems = self._laws.check(before, step, scheduler, self._decision)
        assert not problems, "; ".join(problems)
        assert scheduler._timer.in_flight <= 2, "leak: steps in flight"
        self.seen["steps_with_decodes"] += bool(before.decodes_due)
        self.seen["mixed_steps"] += bool(step.shape.prefills and before.decodes_due)
        self.seen["owed_prefill"] += before.could_prefill and bool(before.decodes_due)
        self.seen["preemptions"] += len(step.output.preempted_req_ids or ())
        self.seen["draft_steps"] += bool(step.output.scheduled_spec_decode_tokens)
        self.seen["images"] += len(step.output.scheduled_encoder_inputs)
        # The virtual engine keeps all steps; a walk needs none of them.
        self.engine.steps.clear()

    def _act(self) -> None:
        if self._rngs["load"].random() < 0.25 and len(self.engine.scheduler.requests) < _MOST_ALIVE:
            self._arrive()
        for name in sorted(self.plan.features):
            if SHARES[name] and self._rngs[name].random() < SHARES[name]:
                getattr(self, f"_do_{name}")(self._rngs[name])
                self.seen[name] += 1
        self._make_grammars_ready(self.seen["steps"])
        scheduler = self.engine.scheduler
        if scheduler.pause_state != PauseState.UNPAUSED and self.seen["steps"] > self._pause_until:
            scheduler.set_pause_state(PauseState.UNPAUSED)

    def _arrive(self) -> Request:
        request = self._make_request(f"r{self._made}", self._rngs["load"])
        self._made += 1
        self.engine.scheduler.add_request(request)
        self._asked[request.request_id] = request.max_tokens
        return request

    def _make_request(self, name: str, rng: random.Random) -> Request:
        length = rng.choice([1, 5, 40, 300, 900])
        shared = random.Random(rng.randrange(3))  # three families of common prefixes
        request = make_request(
            name,
            [shared.randrange(2000) for _ in range(length)],
            rng.randrange(1, 60),
            priority=rng.randrange(3),
            arrival_s=float(self._made),
            xargs=self._slos(),
            prefix_caching=self.plan.prefix_caching,
        )
        self._dress(request, length)
        return request

    def _slos(self) -> dict[str, Any] | None:
        rng = self._rngs["slos"]
        if "slos" not in self.plan.features or rng.random() < 0.6:
            return None
        self.seen["slos"] += 1
        return {
            "tbt_slo_ms": rng.choice([15, "30", 100, "nonsense", -1]),
            "ttft_slo_ms": rng.choice([300, 3000, None]),
        }

    def _dress(self, request: Request, length: int) -> None:
        """Give a request an adapter or an image, if the walk has any."""
        rng = self._rngs["loras"]
        if "loras" in self.plan.features and rng.random() < 0.5:
            number = rng.randrange(1, 5)
            request.lora_request = LoRARequest(f"lora-{number}", number, "unused")
            request.block_hashes.clear()
            request.update_block_hashes()  # an adapter has prefixes of its own
            self.seen["loras"] += 1
        rng = self._rngs["images"]
        if "images" in self.plan.features and length >= 300 and rng.random() < 0.4:
            offset, name = rng.randrange(60), f"image-{rng.randrange(20)}"
            request.mm_features = [image_in(offset=offset, length=200, name=name)]

    def _do_aborts(self, rng: random.Random) -> None:
        alive = list(self.engine.scheduler.requests)
        self._abort(rng.sample(alive, min(len(alive), rng.choice([1, 1, 3, 40]))))

    def _abort(self, names: list[str]) -> None:
        self.engine.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
        for name in names:
            self._asked.pop(name, None)
            self._sessions.discard(name)

    def _do_pauses(self, rng: random.Random) -> None:
        state = rng.choice([PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
        self.engine.scheduler.set_pause_state(state)
        self._pause_until = self.seen["steps"] + rng.randrange(1, 20)

    def _do_resets(self, rng: random.Random) -> None:
        # vLLM raises if a request that waits holds blocks, such as a session between its turns.
        holds = bool(served_first(self.engine.scheduler))
        running = not holds and rng.random() < 0.5
        self.engine.scheduler.reset_prefix_cache(reset_running_requests=running)

    def _do_clock_jumps(self, rng: random.Random) -> None:
        jump_s = rng.choice([-3600.0, -1.0, -0.01, 0.01, 1.0, 3600.0])
        self._clock_ahead_s += jump_s
        if jump_s < 0.0:
            self._laws.clock_went_back()

    def _do_grammars(self, rng: random.Random) -> None:
        request = self._make_request(f"g{self._made}", rng)
        self._made += 1
        schema = StructuredOutputsParams(json={"type": "object"})
        request.structured_output_request = StructuredOutputRequest(params=schema)
        request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        grammar: Future[AnyToken] = Future()
        request.structured_output_request.grammar = grammar
        self._grammars.append((self.seen["steps"] + rng.randrange(60), grammar))
        self.engine.scheduler.add_request(request)

    def _make_grammars_ready(self, step: int) -> None:
        rng = self._rngs["grammars"]
        for _, grammar in [due for due in self._grammars if due[0] <= step]:
            if rng.random() < 0.1:
                grammar.set_exception(ValueError("no such grammar"))
            else:
                grammar.set_result(AnyToken())
        self._grammars = [due for due in self._grammars if due[0] > step]

    def _do_sessions(self, rng: random.Random) -> None:
        """Open a streaming session, send one its next input, or end one."""
        alive = sorted(self._sessions & self.engine.scheduler.requests.keys())
        if not alive or rng.random() < 0.3:
            name = f"s{self._made}"
            self._made += 1
            self._sessions.add(name)
        else:
            name = rng.choice(alive)
        ends = name in alive and rng.random() < 0.3
        self._send_to_session(name, rng, ends=ends)

    def _send_to_session(self, name: str, rng: random.Random, *, ends: bool) -> None:
        prompt = [rng.randrange(2000) for _ in range(rng.choice([1, 20, 200]))]
        request = make_request(
            name, prompt, rng.randrange(1, 20), prefix_caching=self.plan.prefix_caching
        )
        request.resumable = not ends
        self.engine.scheduler.add_request(request)
        if ends:
            self._sessions.discard(name)

    def _finish(self, most_steps: int) -> None:
        """Let all requests finish; nothing of theirs may be left."""
        scheduler = self.engine.scheduler
        scheduler.set_pause_state(PauseState.UNPAUSED)
        self._make_grammars_ready(most_steps)
        for name in sorted(self._sessions & scheduler.requests.keys()):
            self._send_to_session(name, self._rngs["sessions"], ends=True)
        while self.engine.is_busy:
            self._step()
            assert self.seen["steps"] < most_steps, f"stalled: {list(scheduler.requests)[:9]}"
        assert is_clean(self.engine), f"leak: {list(scheduler.requests)[:9]}, or blocks"
        assert scheduler.faults == 0, "faults"
        for name, asked in self._asked.items():
            got = len(self.engine.token_times_s[name])
            assert got == asked, f"tokens: {name} got {got} of {asked}"
        self._check_nothing_is_kept()

    def _check_nothing_is_kept(self) -> None:
        scheduler = self.engine.scheduler
        for number in range(3):  # what is gone is looked for when some prefill beside others
            scheduler.add_request(make_request(f"last-{number}", [number] * 20, 200))
            for _ in range(3):
                self._step()
        alive = len(scheduler.requests)
        while self.engine.is_busy:
            self._step()
        kept = len(scheduler._slos._slos)
        assert kept <= 2 * alive, f"leak: SLOs of {kept} requests"
        kept = len(scheduler._deadlines._first_token_s) if scheduler._deadlines else 0
        assert kept <= 2 * alive, f"leak: first tokens of {kept} requests"
