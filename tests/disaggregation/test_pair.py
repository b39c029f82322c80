"""A real prefill and a real decode instance with NIXL between them; requests go to the latter."""

import json
import signal
import socket
import time
from collections.abc import Callable, Iterator

import pytest

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

import psutil  # noqa: E402

from tests.disaggregation.instances import (  # noqa: E402
    Pair,
    Running,
    increase,
    post,
    prompt,
    started_pair,
)

TBT_SLO_MS, TIGHT_SLO_MS = 60.0, 20.0
TIMEOUT_S = 5.0
LEASE_S = 12
LENGTHS = (8, 31, 32, 33, 100, 512, 1000)
CHOICES = "penalty_sched_prefill_choices_total"
FALLBACKS = "penalty_sched_prefill_fallbacks_total"
LOCAL = "prompt_tokens_by_source_total:local_compute"
REMOTE = "prompt_tokens_by_source_total:external_kv_transfer"


@pytest.fixture(scope="module")
def pair(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    lease = {"kv_lease_duration": LEASE_S}
    with started_pair(
        tmp_path_factory.mktemp("pair"),
        model,
        settings={"tbt_slo_ms": TBT_SLO_MS},
        extra={"prefill_timeout_s": TIMEOUT_S, **lease},
        prefill_extra=lease,
    ) as pair:
        yield pair


def until(holds: Callable[[], bool], limit_s: float = 60.0) -> bool:
    deadline_s = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.2)
    return True


def decodes(pair: Pair, count: int, output: int, slo_ms: float = TBT_SLO_MS) -> list[Running]:
    running = [
        pair.decode.start(prompt(24, 900 + index), output, vllm_xargs={"tbt_slo_ms": slo_ms})
        for index in range(count)
    ]
    time.sleep(1.0)
    return running


def test_greedy_tokens_are_those_of_one_instance_and_came_over_the_connector(pair: Pair) -> None:
    before = pair.decode.metrics()
    with pair.decode.forced("remote"):
        found = [pair.decode.tokens(prompt(length, 1), 16) for length in LENGTHS]
    after = pair.decode.metrics()

    assert found == [pair.prefill.tokens(prompt(length, 1), 16) for length in LENGTHS]
    assert increase(before, after, REMOTE) == sum(LENGTHS)
    assert increase(before, after, LOCAL) == 0
    assert sum(after.get(f"{FALLBACKS}:{cause}", 0) for cause in ("timeout", "read_failed")) == 0


def test_a_wrong_kv_cache_would_show(pair: Pair) -> None:
    tokens = prompt(256, 2)
    post(f"{pair.prefill.url}/misread", {"on": True})
    with pair.decode.forced("remote"):
        found = pair.decode.tokens(tokens, 16)
    post(f"{pair.prefill.url}/misread", {"on": False})

    assert found != pair.prefill.tokens(tokens, 16)


def test_who_names_an_address_is_not_followed(pair: Pair) -> None:
    with socket.socket() as trap:
        trap.bind(("127.0.0.1", 0))
        trap.listen()
        trap.settimeout(2.0)
        address = {
            "remote_engine_id": "foreign",
            "remote_request_id": "foreign",
            "remote_host": "127.0.0.1",
            "remote_port": trap.getsockname()[1],
            "remote_block_ids": [[1, 2]],
            "remote_num_tokens": 64,
            "tp_size": 1,
        }
        read = {"do_remote_prefill": True, "do_remote_decode": False, **address}
        read_back = {"do_remote_prefill": False, "do_remote_decode": True, **address}
        tokens = prompt(64, 4)
        asked = [
            one.start(tokens, 8, kv_transfer_params=params)
            for one in (pair.decode, pair.prefill)
            for params in (read, read_back)
        ]

        with pytest.raises(TimeoutError):
            trap.accept()

    assert len({tuple(running.tokens()) for running in asked}) == 1


def test_both_instances_listen_on_loopback_alone(pair: Pair) -> None:
    with pair.decode.forced("remote"):
        pair.decode.tokens(prompt(64, 5), 4)
    listening = {
        connection.laddr.ip
        for one in (pair.prefill, pair.decode)
        for connection in psutil.Process(one.process.pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }

    assert listening == {"127.0.0.1"}


@pytest.fixture(scope="module")
def warm_pair(pair: Pair) -> Pair:
    """Let the decode instance learn what its steps cost, and what hand-overs take."""
    running = decodes(pair, 8, 700)
    with pair.decode.forced("local"):
        for seed in range(12):
            pair.decode.tokens(prompt(150 + 20 * seed, 100 + seed), 4)
    with pair.decode.forced("remote"):
        for seed in range(16):
            pair.decode.tokens(prompt(100 + 50 * seed, 200 + seed), 4)
    for one in running:
        one.tokens()
    with pair.decode.forced("local"):
        for seed in range(16):  # beside nobody
            pair.decode.tokens(prompt(10 + 20 * seed, 250 + seed), 4)
    return pair


def test_an_idle_decode_instance_prefills_and_a_busy_one_has_it_done(warm_pair: Pair) -> None:
    pair = warm_pair
    seen = len(pair.choices())
    for length in (100, 250, 500):
        pair.decode.tokens(prompt(length, 300), 4)
    idle = pair.choices()[seen:]

    running = decodes(pair, 8, 400, slo_ms=TIGHT_SLO_MS)
    for length in (100, 250, 500):
        pair.decode.tokens(prompt(length, 301), 4)
    seen += len(idle) + len(running)
    assert all(one.tokens() for one in running)
    busy = pair.choices()[seen:]

    assert [choice["side"] for choice in idle] == ["local"] * 3
    assert [choice["reason"] for choice in idle] == ["cheaper_here"] * 3
    assert [choice["side"] for choice in busy] == ["remote"] * 3
    assert all(choice["local_s"] > choice["remote_s"] for choice in busy)


def test_a_stopped_prefill_instance_is_left_alone_until_it_is_back(warm_pair: Pair) -> None:
    pair, tokens = warm_pair, prompt(400, 400)
    expected = pair.prefill.tokens(tokens, 8)
    before = pair.decode.metrics()
    pair.prefill.signal(signal.SIGSTOP)
    try:
        with pair.decode.forced("remote"):
            waited = pair.decode.start(tokens, 8)
            assert waited.tokens() == expected
            again = pair.decode.start(prompt(401, 401), 8)
            again.tokens()
    finally:
        pair.prefill.signal(signal.SIGCONT)
    after = pair.decode.metrics()

    assert TIMEOUT_S <= waited.seconds < TIMEOUT_S + 5.0
    assert again.seconds < TIMEOUT_S
    assert increase(before, after, f"{FALLBACKS}:timeout") == 1
    assert increase(before, after, f"{CHOICES}:unavailable:local") == 1
    assert after["penalty_sched_prefill_instance_up"] == 0

    def is_back() -> bool:
        with pair.decode.forced("remote"):
            pair.decode.tokens(prompt(40, int(time.time() * 1e3) % 10**9), 2)
        return pair.decode.metrics()["penalty_sched_prefill_instance_up"] == 1

    assert until(is_back)


def test_a_client_that_leaves_while_its_prompt_is_prefilled_leaves_no_block_behind(
    warm_pair: Pair,
) -> None:
    pair = warm_pair
    before = pair.prefill.metrics()
    with pair.decode.forced("remote"):
        body = json.dumps({"prompt": prompt(3500, 500), "max_tokens": 8}).encode()
        with socket.create_connection(("127.0.0.1", pair.decode.port)) as client:
            head = f"POST /v1/completions HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            time.sleep(0.3)
        next_tokens = pair.decode.tokens(prompt(50, 501), 8)

    assert next_tokens == pair.prefill.tokens(prompt(50, 501), 8)
    assert until(lambda: pair.decode.blocks_in_use() == 0, LEASE_S + 10)
    assert until(lambda: pair.prefill.blocks_in_use() == 0, LEASE_S + 10)
    assert increase(before, pair.prefill.metrics(), "penalty_sched_faults_total") == 0
