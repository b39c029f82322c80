"""vLLM's NIXL connector, for a decode instance that asks for prefills itself.

``{"kv_connector": "PenaltyConnector", "kv_connector_module_path": "vllm_penalty_sched"}``. It adds
nothing to the transfer: that is vLLM's, on every kind of device.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.platforms import current_platform
from vllm.v1.outputs import KVConnectorOutput

from vllm_penalty_sched.disaggregation.handover_settings import HandoverSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from vllm_penalty_sched.engine.prefill_sides import PrefillSides

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_ASKED_OF_PRODUCER = {"do_remote_decode": True, "do_remote_prefill": False}


class PenaltyConnector(NixlPullConnector):  # type: ignore[misc]  # vLLM is not type-checked here
    """Tells vLLM which prompts to wait for, which to read, and which to prefill here.

    Attributes:
        handover_settings: From ``kv_connector_extra_config``.
        sides: Knows who prefills what; None where our scheduler does not choose: then every
            request whose ``kv_transfer_params`` do not say otherwise is prefilled here.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        config = vllm_config.kv_transfer_config
        self.handover_settings = HandoverSettings.from_extra_config(
            config.kv_connector_extra_config,
            kv_role=str(config.kv_role),
            load_failure_policy=config.kv_load_failure_policy,
        )
        self.sides: PrefillSides | None = None
        self._is_producer = config.kv_role == "kv_producer"
        with _setting_up(role):
            super().__init__(vllm_config, role, kv_cache_config)

    def on_new_request(self, request: Request) -> None:
        """Take in a request; what a client says about KV caches counts only where allowed."""
        if not self.handover_settings.allow_client_kv_params:
            request.kv_transfer_params = self._harmless(request.kv_transfer_params)
        super().on_new_request(request)

    def _harmless(self, params: dict[str, Any] | None) -> dict[str, Any] | None:
        # An address in here is one that this engine would connect to, and read from.
        if self._is_producer and params and params.get("do_remote_decode"):
            return dict(_ASKED_OF_PRODUCER)
        return None

    def found(self, request: Request, kv_params: dict[str, Any]) -> None:
        """Take in where a request's KV cache lies; its lease is renewed from now on."""
        request.kv_transfer_params = kv_params
        super().on_new_request(request)

    def give_up(self, request: Request) -> None:
        """Leave a request's KV cache to its lease: the prompt is prefilled here."""
        request.kv_transfer_params["do_remote_prefill"] = False
        super().update_connector_output(KVConnectorOutput(finished_recving={request.request_id}))

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens to read; None if that, or the request's turn, is still to come."""
        if self.sides is not None:
            if self.sides.must_wait(request):
                return None, False
            self.sides.give_up_if_late(request)
        matched: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        return matched

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Take in that a request got blocks, to read its KV cache into or to prefill."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if self.sides is not None:
            self.sides.got_blocks(request, external_tokens=num_external_tokens)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take in which reads have ended."""
        super().update_connector_output(connector_output)
        if self.sides is not None and connector_output.finished_recving:
            failed = getattr(connector_output, "failed_recving", None) or set()
            self.sides.reads_ended(connector_output.finished_recving, failed)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Take in that a request has ended."""
        if self.sides is not None:
            self.sides.ended(request)
        ended: tuple[bool, dict[str, Any] | None] = super().request_finished_all_groups(
            request, block_ids
        )
        return ended

    def shutdown(self) -> None:
        """Stop asking, then let vLLM shut down."""
        if self.sides is not None:
            self.sides.close()
        super().shutdown()


def _stay_on_loopback() -> None:
    # UCX, which NIXL moves the KV cache with, listens on every network device unless told.
    if envs.VLLM_NIXL_SIDE_CHANNEL_HOST in _LOOPBACK:
        os.environ.setdefault("UCX_NET_DEVICES", "lo")


def _setting_up(role: KVConnectorRole) -> Any:
    _stay_on_loopback()
    if role == KVConnectorRole.WORKER and current_platform.is_cpu():
        from vllm_penalty_sched.engine.cpu_nixl import repaired

        return repaired()
    return nullcontext()
