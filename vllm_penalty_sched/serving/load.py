"""A planned load with its prompts, and what a server makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_penalty_sched.errors import ServerError
from vllm_penalty_sched.metrics import Quantiles, pooled_gaps
from vllm_penalty_sched.serving.client import StreamRequest, stream_load
from vllm_penalty_sched.workload import (
    LoadSpec,
    PlannedRequest,
    RequestKind,
    draw_prompt,
    estimate_busy_s,
    plan_load,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from vllm_penalty_sched.metrics import RequestTrace
    from vllm_penalty_sched.serving.server import RunningServer

WARM_UP_PROMPT_TOKENS, WARM_UP_OUTPUT_TOKENS = 16, 4
# Shares of the load's busy time: every prompt comes while the steady decodes still run.
INJECTION_START, INJECTION_END = 0.02, 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What a server takes when nothing competes.

    Attributes:
        decode_only: Token gaps of the steady decodes alone.
        prompt_s: Time to first token of one long prompt alone.
    """

    decode_only: Quantiles
    prompt_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A planned load with its prompts; sent again, it is the same to the token.

    Attributes:
        plan: The requests.
        prompts: Token ids, one prompt for each.
    """

    plan: Sequence[PlannedRequest]
    prompts: Sequence[Sequence[int]]

    def send(self, server: RunningServer) -> list[RequestTrace]:
        """Send every request at its time and return their traces, in the plan's order.

        Raises:
            ServerError: If the server died under the load.
        """
        return _stream(server, self._requests())

    def select(self, traces: Sequence[RequestTrace], kind: RequestKind) -> list[RequestTrace]:
        """Return the traces of one kind of request."""
        pairs = zip(self.plan, traces, strict=True)
        return [trace for planned, trace in pairs if planned.kind is kind]

    def _requests(self) -> list[StreamRequest]:
        return [
            StreamRequest(
                prompt_token_ids=prompt,
                output_tokens=planned.output_tokens,
                send_at_s=planned.arrival_s,
            )
            for planned, prompt in zip(self.plan, self.prompts, strict=True)
        ]


def draw_load(rng: np.random.Generator, spec: LoadSpec, baseline: Baseline) -> Load:
    """Draw a load that fits the server's speed.

    Args:
        rng: Source of arrival times, lengths and prompts.
        spec: Counts and lengths.
        baseline: Scales the arrival times, so that a fast and a slow machine see the same mix.

    Returns:
        The load.
    """
    busy_s = estimate_busy_s(
        spec, decode_step_s=baseline.decode_only.p50_s, prompt_s=baseline.prompt_s
    )
    plan = plan_load(
        rng,
        spec,
        injection_start_s=INJECTION_START * busy_s,
        injection_end_s=INJECTION_END * busy_s,
    )
    return Load(plan=plan, prompts=[draw_prompt(rng, request.prompt_tokens) for request in plan])


def warm_up(server: RunningServer, rng: np.random.Generator) -> None:
    """Send one tiny request: the first one pays one-off costs that no later one does.

    No more than that, for a scheduler that learns from what it serves must stay cold.

    Raises:
        ServerError: If it fails.
    """
    _send_alone(server, rng, prompt_tokens=WARM_UP_PROMPT_TOKENS, tokens=WARM_UP_OUTPUT_TOKENS)


def measure_baseline(server: RunningServer, spec: LoadSpec, rng: np.random.Generator) -> Baseline:
    """Measure the steady decodes without prompts, and one long prompt without decodes.

    The decodes run in full: a step grows slower with their context, and a shorter run would
    set the SLO by its fastest part.

    Args:
        server: A server that is idle.
        spec: The load whose requests are measured.
        rng: Source of the prompts, none of which is sent again.

    Returns:
        Both times.

    Raises:
        ServerError: If a request fails.
    """
    gap_traces = _send_alone(
        server,
        rng,
        prompt_tokens=spec.steady_prompt_tokens,
        tokens=spec.steady_output_tokens,
        count=spec.steady_requests,
    )
    _, gaps_s = pooled_gaps(gap_traces)
    prompts = [
        _send_alone(server, rng, prompt_tokens=spec.injected_prompt_tokens, tokens=1)[0]
        for _ in range(2)  # the first prompt of a size is slower
    ]
    return Baseline(
        decode_only=Quantiles.of(gaps_s),
        prompt_s=prompts[-1].arrivals_s[0] - prompts[-1].sent_s,
    )


def _send_alone(
    server: RunningServer,
    rng: np.random.Generator,
    *,
    prompt_tokens: int,
    tokens: int,
    count: int = 1,
) -> list[RequestTrace]:
    requests = [
        StreamRequest(prompt_token_ids=draw_prompt(rng, prompt_tokens), output_tokens=tokens)
        for _ in range(count)
    ]
    traces = _stream(server, requests)
    for trace in traces:
        if trace.error is not None:
            raise ServerError(f"a request failed: {trace.error}; see {server.log_path}")
    return traces


def _stream(server: RunningServer, requests: Sequence[StreamRequest]) -> list[RequestTrace]:
    traces = stream_load(server.url, requests, model=server.model, core=server.spare_core)
    server.raise_if_dead()
    return traces
