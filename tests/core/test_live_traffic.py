from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from vllm_penalty_sched.errors import ConfigError
from vllm_penalty_sched.serving.live_traffic import compare_scrapes, watch_server

pytestmark = pytest.mark.slow


def scrape(requests: int, *, penalty_s: float = 0.0, steps_s: float | None = None) -> str:
    lines = [
        "# HELP vllm:request_prompt_tokens Number of prefill tokens processed.",
        f'vllm:request_prompt_tokens_bucket{{engine="0",le="100.0"}} {requests / 2}',
        f'vllm:request_prompt_tokens_bucket{{engine="0",le="1000.0"}} {requests}.0',
        f'vllm:request_prompt_tokens_bucket{{engine="0",le="+Inf"}} {requests}.0',
        f'vllm:request_prompt_tokens_count{{engine="0"}} {requests}.0',
        f'vllm:request_prompt_tokens_sum{{engine="0"}} {300 * requests}',
        f'vllm:request_generation_tokens_count{{engine="0"}} {requests}.0',
        f'vllm:request_generation_tokens_sum{{engine="0"}} {40 * requests}',
    ]
    if steps_s is not None:
        lines += [
            f'penalty_sched_penalty_seconds_total{{engine="0"}} {penalty_s}',
            f'penalty_sched_observed_step_seconds_sum{{engine="0"}} {steps_s}',
        ]
    return "\n".join(lines) + "\n"


def test_the_rate_is_that_of_the_watch_and_the_lengths_are_those_of_the_histograms() -> None:
    live = compare_scrapes(scrape(1000), scrape(1020), 10.0, source="it")

    lengths = live.traffic.prompt_tokens
    assert live.traffic.requests_per_s == 2.0
    assert live.traffic.output_tokens == 40.0
    assert (lengths <= 100).mean() == pytest.approx(0.5, abs=0.01)
    assert 900 < lengths[-1] <= 1000
    assert live.penalty_share is None


def test_engines_of_one_server_add_up() -> None:
    def two(requests: int) -> str:
        return scrape(requests) + scrape(requests).replace('engine="0"', 'engine="1"')

    live = compare_scrapes(two(10), two(20), 10.0, source="it")

    assert live.traffic.requests_per_s == 2.0


def test_the_penalty_is_told_where_the_plugin_runs() -> None:
    live = compare_scrapes(
        scrape(10, penalty_s=1.0, steps_s=100.0),
        scrape(20, penalty_s=3.0, steps_s=110.0),
        10.0,
        source="it",
    )

    assert live.penalty_share == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("up 1\n", "up 1\n", "is it a vLLM server's"),
        (scrape(10), scrape(10), "no request finished within 10 s"),
        ("", "\x00 {{{ le=\n", "is it a vLLM server's"),
        (scrape(10), scrape(20).replace("generation", "other"), "is it a vLLM server's"),
        (scrape(10), scrape(20).replace("20.0", "NaN"), "is it a vLLM server's"),
    ],
)
def test_what_is_no_busy_vllm_server_is_refused(before: str, after: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compare_scrapes(before, after, 10.0, source="it")


def test_a_bucket_without_a_number_for_a_bound_counts_for_nothing() -> None:
    strange = 'vllm:request_prompt_tokens_bucket{le="many"} 5\n'

    live = compare_scrapes(scrape(10), strange + scrape(20), 10.0, source="it")

    assert live.traffic.requests_per_s == 1.0


class _Metrics(BaseHTTPRequestHandler):
    scrapes = 0

    def do_GET(self) -> None:
        type(self).scrapes += 1
        self.send_response(200)
        self.end_headers()
        self.wfile.write(scrape(10 * self.scrapes).encode())

    def log_message(self, *_args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Metrics) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_a_server_is_scraped_twice(url: str) -> None:
    waits_s: list[float] = []

    live = watch_server(f"{url}/metrics", 7.0, sleep=waits_s.append)

    assert waits_s == [7.0]
    assert live.traffic.requests_per_s > 0.0
    assert live.traffic.output_tokens == 40.0


@pytest.mark.parametrize(
    ("address", "seconds", "message"),
    [
        ("http://127.0.0.1:1", 1.0, "cannot read http://127.0.0.1:1/metrics"),
        ("file:///etc/passwd", 1.0, "must begin with http"),
        ("http://127.0.0.1:1", 0.0, "must be > 0 s"),
        ("http://127.0.0.1:1", float("inf"), "must be > 0 s"),
        ("http://127.0.0.1:1/ x", 1.0, "cannot read http://127.0.0.1:1/ x/metrics"),
        ("http://127.0.0.1:port", 1.0, "cannot read http://127.0.0.1:port/metrics"),
    ],
)
def test_a_server_that_cannot_be_read_is_told(address: str, seconds: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        watch_server(address, seconds)
