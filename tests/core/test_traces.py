import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_penalty_sched.errors import ConfigError
from vllm_penalty_sched.simulation.traces import (
    TraceRequest,
    cut_window,
    draw_poisson,
    drop_too_long,
    parse_trace,
    scale_rate,
    spread_ticks,
    tick_of,
)

OWN = "arrival_s,prompt_tokens,output_tokens,prefix_hit_tokens,hash_ids\n"
HUGE, NESTED = "9" * 400, "[" * 900 + "]" * 900
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"

arrivals = st.lists(
    st.floats(0, 1000, allow_nan=False).map(lambda value: round(value, 3)), min_size=1, max_size=30
)


def at(*times_s: float) -> list[TraceRequest]:
    return [TraceRequest(arrival_s=time_s, prompt_tokens=10, output_tokens=5) for time_s in times_s]


def mooncake(**values: str) -> str:
    fields = {"timestamp": "0", "input_length": "10", "output_length": "1", **values}
    return "{" + ", ".join(f'"{name}": {value}' for name, value in fields.items()) + "}\n"


def test_a_csv_trace_is_read_with_its_runs_of_hash_ids() -> None:
    text = OWN + "0.000,1500,20,0,0-2\n1.250,600,7,512,0 7-8\n"

    first, second = parse_trace(text, source="trace")

    assert (first.arrival_s, first.prompt_tokens, first.output_tokens) == (0.0, 1500, 20)
    assert first.hash_ids == (0, 1, 2)
    assert second.arrival_s == 1.25
    assert second.hash_ids == (0, 7, 8)


def test_azures_own_csv_is_read_with_times_from_its_first_request() -> None:
    text = AZURE + ("2023-11-16 23:59:59.5000000,374,44\n2023-11-17 00:00:01.7500000,396,109\n")

    requests = parse_trace(text, source="trace")

    assert [request.arrival_s for request in requests] == [0.0, 2.25]
    assert [request.prompt_tokens for request in requests] == [374, 396]


def test_mooncakes_json_lines_are_read_with_milliseconds_as_seconds() -> None:
    lines = [
        {"timestamp": 3000, "input_length": 6755, "output_length": 500, "hash_ids": [0, 1]},
        {"timestamp": 4500, "input_length": 10, "output_length": 1, "hash_ids": [0]},
    ]

    requests = parse_trace("\n".join(map(json.dumps, lines)), source="trace")

    assert [request.arrival_s for request in requests] == [0.0, 1.5]
    assert [request.hash_ids for request in requests] == [(0, 1), (0,)]
    assert requests[0].tokens == 7255


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: a trace must be JSON lines or have the columns"),
        ("prompt_tokens,output_tokens\n3,4\n", "line 1: a trace must be JSON lines or have"),
        (OWN, "holds no request"),
        (OWN + "0,10,5,0,\n-1,10,5,0,\n", "line 3: arrival_s must be a number >= 0, got '-1'"),
        (OWN + "nan,10,5,0,\n", "line 2: arrival_s must be a number >= 0"),
        (OWN + "0,10,0,0,\n", "line 2: output_tokens must be a whole number >= 1, got '0'"),
        (OWN + "0,1.5,1,0,\n", "line 2: prompt_tokens must be a whole number >= 1"),
        (OWN + "0,10\n", "line 2: output_tokens must be a whole number >= 1, got None"),
        (OWN + "0,10,5,0,a-b\n", "line 2: hash_ids must be ids and runs"),
        (AZURE + "yesterday,1,1\n", "line 2: TIMESTAMP must be a date and time"),
        ('{"timestamp": 0}\n', "line 1: input_length must be a whole number >= 1, got None"),
        ('{"timestamp": 0,\n', "line 1: must be a JSON object"),
        (
            '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": "0-3"}\n',
            "line 1: hash_ids must be a list of whole numbers",
        ),
        (OWN + "0,10,5,0," + "1" * 140_000, "line 2: not CSV: field larger than field limit"),
        ("a" * 140_000 + ",b\n", "line 1: not CSV: field larger than field limit"),
        (OWN + "0,20000000,5,0,\n", "line 2: prompt_tokens must be <= 10000000"),
        (OWN + "0,10,5,0,0-1000000000\n", "line 2: hash_ids must be at most one a prompt token"),
        (OWN + "0,10,5,0,0-8 3-4\n", "line 2: hash_ids must be at most one a prompt token (10)"),
        (OWN + f"0,10,5,0,0-{HUGE}\n", "line 2: hash_ids must be at most one a prompt token"),
        (AZURE + "0001-01-01 00:00:00,1,1\n", "line 2: TIMESTAMP must be a date and time"),
        (mooncake(timestamp=HUGE), "line 1: timestamp must be a number >= 0"),
        (mooncake(output_length=HUGE), "line 1: output_length must be <= 10000000"),
        (mooncake(hash_ids="[" * 100_000), "line 1: must be a JSON object"),
        (mooncake(hash_ids=NESTED), "line 1: hash_ids must be a list of whole numbers, got [[["),
        (mooncake(input_length=NESTED), "line 1: input_length must be a whole number >= 1, got [["),
        (mooncake(timestamp=NESTED), "line 1: timestamp must be a number >= 0, got [[["),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_line_is_named_with_its_rule(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_trace(text, source="some.csv")

    assert str(raised.value).startswith("some.csv")
    assert message in str(raised.value)
    assert len(str(raised.value)) < 300


def test_a_window_keeps_what_arrives_in_it_and_counts_from_its_start() -> None:
    inside = cut_window(at(0, 9.9, 10, 15, 19.9, 20), start_s=10, duration_s=10)

    assert [round(request.arrival_s, 3) for request in inside] == [0.0, 5.0, 9.9]


@pytest.mark.parametrize(
    ("start_s", "duration_s", "message"),
    [
        (-1.0, 1.0, "start >= 0 and duration > 0"),
        (0.0, 0.0, "start >= 0 and duration > 0"),
        (float("nan"), 1.0, "start >= 0 and duration > 0"),
        (50.0, 10.0, "no request arrives from 50 s to 60 s"),
    ],
)
def test_a_window_that_makes_no_sense_is_refused(
    start_s: float, duration_s: float, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        cut_window(at(0, 1), start_s=start_s, duration_s=duration_s)


@given(arrivals, st.floats(0.1, 10))
def test_a_rate_divides_the_times_and_changes_nothing_else(
    times_s: list[float], rate: float
) -> None:
    scaled = scale_rate(at(*times_s), rate)

    assert [request.arrival_s * rate for request in scaled] == pytest.approx(times_s)
    assert all((request.prompt_tokens, request.output_tokens) == (10, 5) for request in scaled)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf"), 5e-324])
def test_a_rate_that_is_no_positive_number_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="rate must be a number > 0"):
        scale_rate(at(0, 1), rate)


def test_requests_above_the_longest_length_are_left_out_and_counted() -> None:
    fitting, left_out = drop_too_long(at(0, 1), 15)
    none_fitting, all_left_out = drop_too_long(at(0, 1), 14)

    assert (len(fitting), left_out) == (2, 0)
    assert (len(none_fitting), all_left_out) == (0, 2)


def test_arrivals_on_a_jittery_three_second_grid_are_recognized() -> None:
    times_s = [3.0 * tick + 0.001 * (tick % 3) for tick in range(20) if tick != 7 for _ in range(5)]

    assert tick_of(at(*times_s)) == pytest.approx(3.0, abs=0.01)


@pytest.mark.parametrize(
    "times_s",
    [
        np.sort(np.random.default_rng(0).uniform(0, 100, 200)).round(3).tolist(),
        [float(second) for second in range(50)],  # one request a tick
        [0.1 * tick for tick in range(50) for _ in range(4)],  # too fine to matter
        [0.0, 0.0, 0.0, 1e-5, 2e-5, 1e308, 1e308, 1e308],  # ticks that no float can count
    ],
)
def test_other_arrivals_are_taken_as_they_are(times_s: list[float]) -> None:
    assert tick_of(at(*times_s)) is None


@given(arrivals, st.integers(0, 100))
def test_spreading_moves_each_arrival_by_less_than_a_tick_and_repeats_with_the_seed(
    times_s: list[float], seed: int
) -> None:
    spread = spread_ticks(at(*times_s), 3.0, np.random.default_rng(seed))
    again = spread_ticks(at(*times_s), 3.0, np.random.default_rng(seed))

    assert spread == again
    moved_s = [request.arrival_s for request in spread]
    assert moved_s == sorted(moved_s)
    assert 0.0 <= sum(moved_s) - sum(times_s) <= 3.0 * len(times_s)
    lows_s = sorted(times_s)
    assert all(low <= moved <= low + 3.0 for low, moved in zip(lows_s, moved_s, strict=True))


def test_a_poisson_load_has_its_rate_and_lengths() -> None:
    requests = draw_poisson("poisson:20:300:40", np.random.default_rng(1), duration_s=200.0)

    assert len(requests) == pytest.approx(4000, abs=4 * 4000**0.5)
    assert {(request.prompt_tokens, request.output_tokens) for request in requests} == {(300, 40)}
    gaps_s = np.diff([request.arrival_s for request in requests])
    assert np.std(gaps_s) / np.mean(gaps_s) == pytest.approx(1.0, abs=0.1)
    assert requests[-1].arrival_s < 200.0


@pytest.mark.parametrize(
    "spec",
    [
        "poisson:1:2",
        "gamma:1:2:3",
        "poisson:0:2:3",
        "poisson:1:0:3",
        "poisson:1:2.5:3",
        f"poisson:1:{HUGE}:3",
        "",
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_synthetic_load_is_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match="poisson:RATE:PROMPT:OUTPUT"):
        draw_poisson(spec, np.random.default_rng(0), duration_s=10.0)


@pytest.mark.parametrize(
    ("rate", "duration_s"), [(1, float("inf")), (1, float("nan")), (1, 1e9), (1e9, 1), (1e300, 1)]
)
def test_more_requests_than_memory_holds_are_refused_before_they_are_drawn(
    rate: float, duration_s: float
) -> None:
    with pytest.raises(ConfigError, match="at most 10000000 requests"):
        draw_poisson(f"poisson:{rate}:2:3", np.random.default_rng(0), duration_s=duration_s)
