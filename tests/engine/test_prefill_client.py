"""The client against a small HTTP server of this process."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

pytestmark = pytest.mark.vllm
pytest.importorskip("aiohttp")

from vllm_penalty_sched.disaggregation.remote_prefills import (  # noqa: E402
    Fallback,
    PrefillError,
)
from vllm_penalty_sched.engine.prefill_client import PrefillClient  # noqa: E402

KV_PARAMS = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]]}
TIMEOUT_S = 4.0


class Server:
    """Answers as the test says, and notes what it was sent and who hung up."""

    def __init__(self) -> None:
        self.status, self.content, self.delay_s = 200, b"{}", 0.0
        self.bodies: list[Any] = []
        self.keys: list[str | None] = []
        self.was_left = threading.Event()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                owner.bodies.append(
                    json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                )
                owner.keys.append(self.headers["Authorization"])
                self.connection.settimeout(owner.delay_s or None)
                if owner.delay_s:
                    try:
                        if not self.connection.recv(1):
                            owner.was_left.set()
                            return
                    except TimeoutError:
                        pass
                self.send_response(owner.status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(owner.content)))
                self.end_headers()
                self.wfile.write(owner.content)

            def log_message(self, *_: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_address[1]}"


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.http.shutdown()
    server.http.server_close()


@pytest.fixture
def client(server: Server) -> Iterator[PrefillClient]:
    client = PrefillClient(server.url, timeout_s=TIMEOUT_S)
    yield client
    client.close()


def cause_of(client: PrefillClient) -> Fallback:
    with pytest.raises(PrefillError) as caught:
        client.ask({}).result(10)
    return caught.value.cause


def test_the_body_arrives_and_the_place_of_the_kv_cache_comes_back(
    server: Server, client: PrefillClient
) -> None:
    server.content = json.dumps({"kv_transfer_params": KV_PARAMS}).encode()
    before_s = time.monotonic()

    answer = client.ask({"prompt": [1, 2, 3]}).result(10)

    assert answer.kv_params == KV_PARAMS
    assert before_s <= answer.answered_s <= time.monotonic()
    assert server.bodies == [{"prompt": [1, 2, 3]}]
    assert server.keys == [None]


@pytest.mark.parametrize("content", [b"{}", b"[]", b'{"kv_transfer_params": null}'])
def test_an_answer_that_names_no_kv_cache_has_none(
    server: Server, client: PrefillClient, content: bytes
) -> None:
    server.content = content

    assert client.ask({}).result(10).kv_params == {}


@pytest.mark.parametrize(
    ("status", "content", "cause"),
    [
        (400, b"{}", Fallback.REFUSED),
        (503, b"{}", Fallback.BROKE_OFF),
        (200, b"no JSON", Fallback.BROKE_OFF),
    ],
)
def test_what_is_no_answer_fails_with_its_cause(
    server: Server, client: PrefillClient, status: int, content: bytes, cause: Fallback
) -> None:
    server.status, server.content = status, content

    assert cause_of(client) is cause


def test_no_answer_in_time_is_a_timeout(server: Server, client: PrefillClient) -> None:
    server.delay_s = 30.0

    assert cause_of(client) is Fallback.TIMEOUT
    assert server.was_left.wait(10)


def test_nobody_there_is_unreachable() -> None:
    server = Server()
    server.http.shutdown()
    server.http.server_close()
    client = PrefillClient(server.url, timeout_s=TIMEOUT_S)

    assert cause_of(client) is Fallback.UNREACHABLE
    client.close()


def test_a_question_that_is_called_off_hangs_up(server: Server) -> None:
    server.delay_s = 30.0
    client = PrefillClient(server.url, timeout_s=60.0)
    question = client.ask({})
    while not server.bodies:
        time.sleep(0.01)
    question.cancel()

    assert server.was_left.wait(10)
    client.close()


def test_the_servers_own_api_key_is_sent(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "open sesame")
    client = PrefillClient(server.url, timeout_s=TIMEOUT_S)
    client.ask({}).result(10)
    client.close()

    assert server.keys == ["Bearer open sesame"]
