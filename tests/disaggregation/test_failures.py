"""What may happen to a prefill instance: the decode instance goes on, with the right tokens.

Each test starts the prefill instance anew, which takes half a minute: `make disagg` runs them.
"""

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.disagg]
pytest.importorskip("vllm")

from tests.disaggregation.instances import (  # noqa: E402
    One,
    free_port,
    increase,
    kv_transfer,
    launch,
    post,
    prompt,
)

TIMEOUT_S, LEASE_S = 4.0, 12
READ_WITHIN_S = LEASE_S - 5.0
# 2,560 tokens, so that a few long answers do not fit.
DECODE_BLOCKS, DECODE_SEATS = 80, 8
FALLBACKS = "penalty_sched_prefill_fallbacks_total"
UP = "penalty_sched_prefill_instance_up"


class Bench:
    """A decode instance, and a prefill instance that comes and goes at one address."""

    def __init__(self, folder: Path, model: str) -> None:
        self._folder, self._model = folder, model
        self._prefill_port, self._side_port = free_port(), free_port()
        self._starts = 0
        self.prefill: One | None = None
        self.decode = launch(
            folder / "decode.log",
            model,
            core=1,
            kv_transfer_config=kv_transfer(
                "kv_consumer",
                prefill_url=f"http://127.0.0.1:{self._prefill_port}",
                prefill_timeout_s=TIMEOUT_S,
                kv_lease_duration=LEASE_S,
            ),
            num_gpu_blocks_override=DECODE_BLOCKS,
            max_num_seqs=DECODE_SEATS,
            max_model_len=2400,
        )
        self.decode.wait()

    def start_prefill(self) -> One:
        self._starts += 1
        self.prefill = launch(
            self._folder / f"prefill-{self._starts}.log",
            self._model,
            core=0,
            port=self._prefill_port,
            side_port=self._side_port,
            kv_transfer_config=kv_transfer("kv_producer", kv_lease_duration=LEASE_S),
            max_model_len=2400,
            max_num_batched_tokens=512,
        )
        self.prefill.wait()
        return self.prefill

    def running_prefill(self) -> One:
        """Return the prefill instance, started if it does not run, and known to be up."""
        if self.prefill is None or self.prefill.process.poll() is not None:
            self.start_prefill()
        assert self.prefill is not None
        self.await_up()
        return self.prefill

    def await_up(self, limit_s: float = 240.0) -> float:
        started_s = time.monotonic()
        while not self.is_up():
            assert time.monotonic() - started_s < limit_s, "it is never asked again"
            time.sleep(0.5)
        return time.monotonic() - started_s

    def is_up(self) -> bool:
        # A request makes it look, and the next one sees what came of it.
        with self.decode.forced("remote"):
            self.decode.tokens(prompt(40, int(time.time() * 1e3) % 10**9), 2)
        return self.metrics().get(UP) == 1

    def metrics(self) -> dict[str, float]:
        """Return the decode instance's metrics, up to date: they are reported once a second."""
        time.sleep(1.1)
        with self.decode.forced("local"):
            self.decode.tokens(prompt(8, 0), 2)
        return self.decode.metrics()

    def close(self) -> None:
        self.decode.kill()
        if self.prefill is not None:
            self.prefill.kill()


@pytest.fixture(scope="module")
def bench(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("failures"), model)
    yield bench
    bench.close()


def test_a_prefill_instance_that_is_not_there_yet_is_found_once_it_is(
    bench: Bench, findings: dict[str, Any]
) -> None:
    before = bench.metrics()
    with bench.decode.forced("remote"):
        absent = bench.decode.start(prompt(300, 2), 8)
        absent.tokens()
    after = bench.metrics()
    bench.start_prefill()
    found_s = bench.await_up()
    prefill = bench.running_prefill()
    with bench.decode.forced("remote"):
        remote = bench.decode.tokens(prompt(300, 3), 8)

    assert increase(before, after, f"{FALLBACKS}:unreachable") == 1
    assert absent.seconds < TIMEOUT_S
    assert remote == prefill.tokens(prompt(300, 3), 8)
    assert prefill.tokens(prompt(300, 2), 8) == absent.tokens()
    findings["absent at start"] = {"request_s": absent.seconds, "found_again_s": found_s}


def test_killed_while_it_prefills(bench: Bench, findings: dict[str, Any]) -> None:
    prefill = bench.running_prefill()
    before = bench.metrics()
    beside = bench.decode.start(prompt(20, 11), 300)
    with bench.decode.forced("remote"):
        post(f"{prefill.url}/slow", {"step_s": 1.0})  # four steps: it will be within one of them
        running = bench.decode.start(prompt(2000, 10), 8)
        time.sleep(1.5)
        prefill.kill()
        tokens = running.tokens()
    after = bench.metrics()
    prefill = bench.running_prefill()

    assert increase(before, after, f"{FALLBACKS}:broke_off") == 1
    assert tokens == prefill.tokens(prompt(2000, 10), 8)
    assert beside.tokens() == prefill.tokens(prompt(20, 11), 300)
    findings["killed mid-prefill"] = {"request_s": running.seconds}


def test_killed_between_its_answer_and_the_read(bench: Bench, findings: dict[str, Any]) -> None:
    prefill = bench.running_prefill()
    before = bench.metrics()
    post(f"{prefill.url}/die_after_answer", {})
    with bench.decode.forced("remote"):
        running = bench.decode.start(prompt(600, 20), 8)
        tokens = running.tokens()
    after = bench.metrics()
    prefill = bench.running_prefill()

    lost = increase(before, after, f"{FALLBACKS}:read_failed")
    assert lost == 1
    assert tokens == prefill.tokens(prompt(600, 20), 8)
    findings["killed between answer and read"] = {"request_s": running.seconds}


@pytest.mark.parametrize("is_noticed", [True, False])
def test_restarted_it_is_asked_and_read_again(
    bench: Bench, findings: dict[str, Any], is_noticed: bool
) -> None:
    bench.running_prefill().kill()
    if is_noticed:
        with bench.decode.forced("remote"):
            bench.decode.tokens(prompt(100, 30), 4)
    prefill = bench.start_prefill()
    found_s = bench.await_up()
    before = bench.metrics()
    seed = 31 + is_noticed
    with bench.decode.forced("remote"):
        tokens = bench.decode.tokens(prompt(500, seed), 8)
    after = bench.metrics()

    assert tokens == prefill.tokens(prompt(500, seed), 8)
    assert increase(before, after, "prompt_tokens_by_source_total:external_kv_transfer") == 500
    how = "noticed" if is_noticed else "unnoticed"
    findings[f"restarted with a new engine id, {how}"] = {"found_again_s": found_s}


def test_stopped_it_costs_no_more_than_the_limit(bench: Bench, findings: dict[str, Any]) -> None:
    prefill = bench.running_prefill()
    beside = bench.decode.start(prompt(20, 40), 200)
    prefill.signal(signal.SIGSTOP)
    with bench.decode.forced("remote"):
        running = bench.decode.start(prompt(400, 41), 8)
        tokens = running.tokens()
    prefill.signal(signal.SIGCONT)
    bench.await_up()

    assert TIMEOUT_S <= running.seconds < TIMEOUT_S + 5.0
    assert tokens == prefill.tokens(prompt(400, 41), 8)
    assert beside.tokens() == prefill.tokens(prompt(20, 40), 200)
    findings["stopped (SIGSTOP)"] = {"request_s": running.seconds, "limit_s": TIMEOUT_S}


def test_a_kv_cache_is_not_read_near_the_end_of_its_lease(
    bench: Bench, findings: dict[str, Any]
) -> None:
    prefill = bench.running_prefill()
    before = bench.metrics()
    post(f"{bench.decode.url}/slow", {"step_s": 0.05})
    with bench.decode.forced("local"):
        # Every seat is taken for twice as long as the answer may be read.
        seats = [bench.decode.start(prompt(8, 50 + seat), 290) for seat in range(DECODE_SEATS)]
        time.sleep(1.0)
    with bench.decode.forced("remote"):
        late = bench.decode.start(prompt(400, 60), 8)
        tokens = late.tokens()
    post(f"{bench.decode.url}/slow", {"step_s": 0.0})
    after = bench.metrics()

    assert late.seconds > READ_WITHIN_S
    assert increase(before, after, f"{FALLBACKS}:expired") == 1
    assert tokens == prefill.tokens(prompt(400, 60), 8)
    assert all(len(seat.tokens()) == 290 for seat in seats)
    findings["read later than the lease allows"] = {"request_s": late.seconds}


def test_a_preempted_request_whose_kv_cache_was_read_is_computed_anew(
    bench: Bench, findings: dict[str, Any]
) -> None:
    prefill = bench.running_prefill()
    before = bench.metrics()
    with bench.decode.forced("remote"):
        running = [bench.decode.start(prompt(500, 70 + seed), 250) for seed in range(4)]
        tokens = [one.tokens() for one in running]
    after = bench.metrics()

    preemptions = increase(before, after, "num_preemptions_total")
    assert preemptions > 0
    assert tokens == [prefill.tokens(prompt(500, 70 + seed), 250) for seed in range(4)]
    findings["preempted after the read"] = {"preemptions": preemptions}


def test_nothing_is_left_behind(bench: Bench) -> None:
    prefill = bench.running_prefill()
    deadline_s = time.monotonic() + LEASE_S + 10
    while bench.decode.blocks_in_use() or prefill.blocks_in_use():
        assert time.monotonic() < deadline_s
        time.sleep(0.5)

    assert bench.metrics()["penalty_sched_faults_total"] == 0
