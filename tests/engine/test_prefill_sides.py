"""A real scheduler with our real connector on virtual time, asking a small HTTP server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.request import Request, RequestStatus

from tests.engine.test_prefill_client import Server
from tests.engine.virtual import (
    NEEDS_KV_QUEUES,
    add,
    cpu_like_s,
    make_engine,
    play,
    start_decodes,
)
from vllm_penalty_sched import ConfigError, Scheduler
from vllm_penalty_sched.engine.virtual_engine import VirtualEngine

pytestmark = NEEDS_KV_QUEUES
ADDRESS = {
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "prefill",
    "remote_request_id": "there",
    "remote_host": "127.0.0.1",
    "remote_port": 1,
    "tp_size": 1,
}
ENGINES: list[VirtualEngine] = []
KV_PARAMS = {"do_remote_prefill": True, "do_remote_decode": False, **ADDRESS}


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    server.content = json.dumps({"kv_transfer_params": KV_PARAMS}).encode()
    yield server
    server.http.shutdown()
    server.http.server_close()


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while ENGINES:
        ENGINES.pop().scheduler.connector.shutdown()


def make_instance(role: str = "kv_consumer", **extra: Any) -> VirtualEngine:
    engine = make_engine(
        Scheduler,
        {"tbt_slo_ms": 30.0},
        step_time_s=cpu_like_s(noise=0.0),
        kv_transfer={
            "kv_connector": "PenaltyConnector",
            "kv_connector_module_path": "vllm_penalty_sched",
            "kv_role": role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        },
    )
    ENGINES.append(engine)
    return engine


def warm_engine(server: Server) -> VirtualEngine:
    """Return one with eight decodes that has learned, from prompts that it prefilled."""
    engine = make_instance(prefill_url=server.url)
    server.status = 400  # whatever is asked is refused
    start_decodes(engine, 8)
    for number in range(30):
        add(engine, f"warm-{number}", 100 + 10 * number, 2)
        until(engine, f"warm-{number}", tokens=2)
    server.status = 200
    server.bodies.clear()
    return engine


def until(engine: VirtualEngine, name: str, *, tokens: int) -> None:
    """Step until a request has so many tokens; real time passes too, for the client's thread."""
    deadline_s = time.monotonic() + 20.0
    while len(engine.token_times_s[name]) < tokens:
        assert time.monotonic() < deadline_s, f"{name} is not served"
        time.sleep(0.0005)
        play(engine, 1)


def pull(engine: VirtualEngine, name: str) -> None:
    """Let a request's KV cache be read, as soon as the scheduler wants to."""
    request = engine.scheduler.requests[name]
    deadline_s = time.monotonic() + 20.0
    while request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
        assert time.monotonic() < deadline_s, "reading does not begin"
        time.sleep(0.0005)
        play(engine, 1)
    engine.scheduler.finished_recving_kv_req_ids.add(name)


def test_beside_tight_decodes_a_prompt_is_asked_for_read_and_needs_one_token(
    server: Server,
) -> None:
    engine = warm_engine(server)
    before = len(engine.steps)
    add(engine, "long", 900, 4, xargs={"ttft_slo_ms": 5000})
    pull(engine, "long")
    until(engine, "long", tokens=4)

    (body,) = server.bodies
    assert len(body["prompt"]) == 900
    assert body["max_tokens"] == 1
    assert body["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
    assert body["vllm_xargs"] == {"ttft_slo_ms": 5000}
    computed = [step.output.num_scheduled_tokens.get("long", 0) for step in engine.steps[before:]]
    assert sum(computed) == 4
    notes = engine.scheduler.sides.take_notes()
    assert [note["side"] for note in notes if note["request"] == "long"] == ["remote"]


def test_beside_nobody_a_prompt_is_prefilled_here(server: Server) -> None:
    engine = warm_engine(server)
    decodes = [name for name in engine.scheduler.requests if name.startswith("decode")]
    engine.scheduler.finish_requests(decodes, RequestStatus.FINISHED_ABORTED)
    add(engine, "short", 200, 4)
    until(engine, "short", tokens=4)

    assert server.bodies == []


def test_what_the_prefill_instance_refuses_is_prefilled_here(server: Server) -> None:
    engine = warm_engine(server)
    server.status = 400
    before = len(engine.steps)
    add(engine, "long", 900, 4)
    until(engine, "long", tokens=4)

    assert len(server.bodies) == 1
    assert sum(step.shape.prefill_tokens for step in engine.steps[before:]) == 900


def test_an_aborted_request_is_called_off_and_forgotten(server: Server) -> None:
    engine = warm_engine(server)
    server.delay_s = 30.0
    add(engine, "long", 900, 4)
    play(engine, 3)
    while not server.bodies:
        time.sleep(0.01)
    engine.scheduler.finish_requests("long", RequestStatus.FINISHED_ABORTED)
    play(engine, 3)

    assert server.was_left.wait(10)
    assert "long" not in engine.scheduler.requests


def named(params: dict[str, Any], role: str = "kv_consumer", **extra: Any) -> Request:
    """Return a request that names these parameters, as the scheduler keeps it."""
    engine = make_instance(role, **extra)
    add(engine, "named", 100, 4, xargs={"kv_transfer_params": dict(params)})
    request: Request = engine.scheduler.requests["named"]
    return request


def test_where_a_client_says_its_kv_cache_lies_is_ignored_unless_allowed() -> None:
    assert named(KV_PARAMS).kv_transfer_params is None
    assert named(KV_PARAMS, role="kv_producer").kv_transfer_params is None
    assert named(KV_PARAMS, allow_client_kv_params=True).kv_transfer_params == KV_PARAMS


def test_a_prefill_instance_is_told_to_keep_a_kv_cache_and_nothing_else() -> None:
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    kept = named({**asked, **ADDRESS}, role="kv_producer").kv_transfer_params

    assert kept == asked


def test_wrong_settings_stop_the_start() -> None:
    with pytest.raises(ConfigError, match="prefill_url must be an http"):
        make_instance(prefill_url="nowhere")
