import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from vllm_penalty_sched.metrics import RequestTrace
from vllm_penalty_sched.serving.client import StreamRequest, trace_of_reads


def event(payload: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def token_event(text: str = "a") -> bytes:
    return event({"choices": [{"text": text}], "usage": None})


def usage_event(tokens: int) -> bytes:
    return event({"choices": [], "usage": {"completion_tokens": tokens}})


DONE = b"data: [DONE]\n\n"


def trace_of(*reads: bytes, asked_tokens: int, failure: str | None = None) -> RequestTrace:
    stamped = [(float(second), read) for second, read in enumerate(reads, start=1)]
    return trace_of_reads(stamped, asked_tokens, sent_s=0.5, failure=failure)


def test_every_event_with_a_token_is_an_arrival() -> None:
    trace = trace_of(token_event(), token_event(), usage_event(2), DONE, asked_tokens=2)

    assert trace == RequestTrace(sent_s=0.5, arrivals_s=(1.0, 2.0), output_tokens=2)


def test_events_of_one_read_are_one_arrival() -> None:
    trace = trace_of(token_event() + token_event(), token_event(), asked_tokens=3)

    assert trace.arrivals_s == (1.0, 2.0)
    assert trace.output_tokens == 3


def test_an_event_counts_at_the_read_that_completes_it() -> None:
    whole = token_event()

    trace = trace_of(whole[:9], whole[9:], asked_tokens=1)

    assert trace.arrivals_s == (2.0,)


def test_the_servers_own_count_wins_over_the_number_of_events() -> None:
    trace = trace_of(token_event("merged"), usage_event(4), DONE, asked_tokens=4)

    assert (trace.output_tokens, trace.error) == (4, None)


def test_a_stream_that_ends_early_is_an_error() -> None:
    trace = trace_of(token_event(), asked_tokens=5)

    assert trace.error == "asked for 5 tokens, got 1"


def test_an_error_inside_the_stream_is_reported() -> None:
    trace = trace_of(token_event(), event({"error": "out of memory"}), asked_tokens=1)

    assert trace.error == "the server said: out of memory"


def test_a_failed_connection_keeps_what_came_before() -> None:
    trace = trace_of(token_event(), asked_tokens=5, failure="ServerDisconnectedError")

    assert trace.arrivals_s == (1.0,)
    assert trace.error == "ServerDisconnectedError"


@given(
    tokens=st.integers(1, 12),
    texts=st.text(max_size=3),
    cuts=st.lists(st.integers(0, 600), max_size=15),
)
def test_tokens_are_conserved_however_the_stream_is_cut(
    tokens: int, texts: str, cuts: list[int]
) -> None:
    stream = token_event(texts) * tokens + DONE
    edges = [0, *sorted(cuts), len(stream)]
    reads = [stream[start:end] for start, end in pairwise(edges)]

    trace = trace_of(*reads, asked_tokens=tokens)

    assert (trace.output_tokens, trace.error) == (tokens, None)
    assert 1 <= len(trace.arrivals_s) <= tokens
    assert list(trace.arrivals_s) == sorted(set(trace.arrivals_s))


def test_a_request_asks_for_every_token_and_passes_its_slo_on() -> None:
    request = StreamRequest(prompt_token_ids=[7, 8], output_tokens=3, xargs={"tbt_slo_ms": 50})

    body = request.body("tiny")

    assert body["prompt"] == [7, 8]
    assert (body["max_tokens"], body["ignore_eos"], body["stream"]) == (3, True, True)
    assert body["vllm_xargs"] == {"tbt_slo_ms": 50}
    assert "vllm_xargs" not in StreamRequest(prompt_token_ids=[7], output_tokens=1).body("tiny")
