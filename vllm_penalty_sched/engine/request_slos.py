"""Keep the SLOs that single requests brought along."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_penalty_sched.settings import RequestSlo

if TYPE_CHECKING:
    from vllm.v1.request import Request

log = logging.getLogger("vllm.penalty_sched")


class RequestSlos:
    """Per-request SLOs by request id; most deployments have none, and then it costs nothing."""

    def __init__(self, *, least_tbt_slo_s: float = 0.0) -> None:
        """Begin with none.

        Args:
            least_tbt_slo_s: A tighter TBT SLO counts as this one.
        """
        self._least_tbt_slo_s = least_tbt_slo_s
        self._slos: dict[str, RequestSlo] = {}
        self._has_warned = False

    def add(self, request: Request, alive: Mapping[str, Request]) -> None:
        """Read a new request's SLOs; a wrong value is ignored, with one warning in all.

        Args:
            request: The request; a streaming session's next input brings the session's new SLOs.
            alive: All requests that vLLM holds: those that are gone are forgotten.
        """
        params = request.sampling_params
        slo, problems = RequestSlo.from_extra_args(params.extra_args if params else None)
        if problems and not self._has_warned:
            self._has_warned = True
            log.warning(
                "request %s: %s; ignored, and so are later wrong values without a warning",
                request.request_id,
                "; ".join(problems),
            )
        if len(self._slos) > 2 * len(alive):
            self._forget_all_but(alive)
        if slo.tbt_slo_s is not None and slo.tbt_slo_s < self._least_tbt_slo_s:
            slo = replace(slo, tbt_slo_s=self._least_tbt_slo_s)
        if slo.tbt_slo_s is None and slo.ttft_slo_s is None:
            self._slos.pop(request.request_id, None)
        else:
            self._slos[request.request_id] = slo

    def ttft_s(self, request_id: str) -> float | None:
        """Return a request's own TTFT SLO, seconds; None if it brought none."""
        slo = self._slos.get(request_id)
        return slo.ttft_slo_s if slo else None

    def tbt_s(self, request_id: str) -> float | None:
        """Return a request's own TBT SLO, seconds; None if it brought none."""
        slo = self._slos.get(request_id)
        return slo.tbt_slo_s if slo else None

    def tightest_tbt_s(self, request_ids: Iterable[str]) -> float | None:
        """Return the tightest of these requests' own TBT SLOs, seconds; None without any."""
        if not self._slos:
            return None
        own_s = (self.tbt_s(request_id) for request_id in request_ids)
        return min((slo_s for slo_s in own_s if slo_s is not None), default=None)

    def _forget_all_but(self, alive: Mapping[str, Request]) -> None:
        for request_id in [known for known in self._slos if known not in alive]:
            del self._slos[request_id]
