"""A KV connector whose reads end when a test says so, for schedulers on virtual time."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)


class StubConnector(KVConnectorBase_V1, SupportsHMA):
    """Reads the KV cache of requests whose parameters say so; waits for those in ``asked``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.asked: set[str] = set()
        self.reading: set[str] = set()
        self.admits_prefills = True

    @property
    def sides(self) -> StubConnector:
        return self

    def is_asked(self, request: Any) -> bool:
        return request.request_id in self.asked

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        if self.is_asked(request):
            return None, False
        params = request.kv_transfer_params
        if params and params.get("do_remote_prefill"):
            return request.num_prompt_tokens - computed, True
        return (0 if self.admits_prefills else None), False

    def update_state_after_alloc(self, request: Any, blocks: Any, external: int) -> None:
        del blocks
        if external:
            self.reading.add(request.request_id)
            request.kv_transfer_params["do_remote_prefill"] = False

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        del scheduler_output
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        del request, block_ids
        return False, None

    def start_load_kv(self, *_: Any, **__: Any) -> None: ...

    def wait_for_layer_load(self, *_: Any) -> None: ...

    def save_kv_layer(self, *_: Any, **__: Any) -> None: ...

    def wait_for_save(self) -> None: ...
