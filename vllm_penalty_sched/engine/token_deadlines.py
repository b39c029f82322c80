"""How long a step may take if tokens have deadlines, not gaps limits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.request import Request


class TokenDeadlines:
    """Follows when each running request got its first token: token k is due k SLOs later."""

    def __init__(self) -> None:
        self._first_token_s: dict[str, float] = {}

    def take_in(self, outputs: Mapping[int, Any], *, now_s: float) -> None:
        """Take in what ``update_from_output`` returned for a step that completed at a time."""
        first_token_s = self._first_token_s
        for engine_outputs in outputs.values():
            for output in engine_outputs.outputs:
                if output.finish_reason is not None:
                    first_token_s.pop(output.request_id, None)
                elif output.new_token_ids and output.request_id not in first_token_s:
                    first_token_s[output.request_id] = now_s

    def slack_s(
        self,
        decoding: Iterable[Request],
        *,
        slo_s: Callable[[str], float],
        starts_s: float,
    ) -> float:
        """Return how long the next step may take until the first of its tokens is due, seconds.

        Args:
            decoding: The requests that decode in it, at least one.
            slo_s: TBT SLO of a request by its id, seconds.
            starts_s: When the step can start: behind the steps in flight.
        """
        slack_s = float("inf")
        for request in decoding:
            own_slo_s = slo_s(request.request_id)
            first_s = self._first_token_s.get(request.request_id)
            if first_s is None or first_s > starts_s:  # still in flight, or the clock went back
                due_s = starts_s + own_slo_s
            else:
                # Tokens that steps in flight will bring count as if they were there.
                index = request.num_output_tokens + request.num_output_placeholders
                due_s = first_s + index * own_slo_s
            slack_s = min(slack_s, due_s - starts_s)
        return slack_s

    def forget_all_but(self, requests: Mapping[str, Request]) -> None:
        """Drop requests that are gone, such as aborted ones."""
        if len(self._first_token_s) > 2 * len(requests):
            self._first_token_s = {
                name: at_s for name, at_s in self._first_token_s.items() if name in requests
            }
