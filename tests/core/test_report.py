import json
from pathlib import Path

from vllm_penalty_sched.files import write_json
from vllm_penalty_sched.metrics import RequestTrace
from vllm_penalty_sched.report import LoadResult, evaluate_load, format_table, judge

SLO_S = 0.05


def load(*gaps_s: float, error: str | None = None) -> LoadResult:
    arrivals_s = tuple(sum(gaps_s[:count], start=1.0) for count in range(len(gaps_s) + 1))
    trace = RequestTrace(
        sent_s=0.0, arrivals_s=arrivals_s, output_tokens=len(arrivals_s), error=error
    )
    return evaluate_load([trace], steady_traces=[trace], tbt_slo_s=SLO_S)


def failed_load() -> LoadResult:
    trace = RequestTrace(sent_s=0.0, arrivals_s=(), output_tokens=0, error="HTTP 500")
    return evaluate_load([trace], steady_traces=[trace], tbt_slo_s=SLO_S)


def missed_rules(stock: LoadResult, penalty: LoadResult) -> list[str]:
    return [target.rule for target in judge(stock, penalty) if not target.is_met]


def test_a_smooth_load_meets_every_target() -> None:
    assert missed_rules(load(*[0.02] * 200), load(*[0.021] * 200)) == []


def test_a_gap_just_over_the_slo_is_forgiven_once_in_a_hundred() -> None:
    smooth = load(*[0.04] * 200)

    assert missed_rules(smooth, load(*[0.04] * 198, 0.06, 0.06)) == []
    assert missed_rules(smooth, load(*[0.04] * 197, 0.06, 0.06, 0.06)) == [
        "at least 99% of the gaps within 1.05 x SLO"
    ]


def test_a_gap_over_twice_the_slo_counts_only_after_fifty_steps() -> None:
    smooth = load(*[0.04] * 500)

    assert missed_rules(smooth, load(0.2, *[0.04] * 499)) == []
    assert missed_rules(smooth, load(*[0.04] * 499, 0.2)) == [
        "at most 0.1% over 2 x SLO after 50 steps"
    ]


def test_a_much_longer_load_misses_the_total_time() -> None:
    assert missed_rules(load(*[0.01] * 200), load(*[0.03] * 200)) == [
        "total time at most 1.3 x stock"
    ]


def test_a_failed_request_misses_its_target_and_says_why() -> None:
    target = judge(load(0.01), load(0.01, error="HTTP 500"))[-1]

    assert str(target) == "MISSED  no failed request: 1; HTTP 500"


def test_a_load_without_tokens_meets_no_latency_target() -> None:
    missed = missed_rules(load(*[0.02] * 200), failed_load())

    assert "at least 99% of the gaps within 1.05 x SLO" in missed
    assert "at most 0.1% over 2 x SLO after 50 steps" in missed


def test_the_numbers_for_the_file_are_in_milliseconds_and_seconds() -> None:
    numbers = load(0.04, 0.04, 0.04, 0.08).to_json()

    assert numbers["tbt_ms"] == {"p50": 40.0, "p99": 78.8, "p999": 79.88, "max": 80.0}
    assert numbers["ttft_ms"] == {"p50": 1000.0, "p99": 1000.0}
    assert numbers["within_slo"] == 0.75
    assert numbers["seconds"] == 1.2
    assert (numbers["requests"], numbers["errors"], numbers["output_tokens"]) == (1, 0, 5)


def test_unknown_numbers_are_written_as_null(tmp_path: Path) -> None:
    write_json(tmp_path / "report.json", failed_load().to_json())

    numbers = json.loads((tmp_path / "report.json").read_text())
    assert numbers["within_slo"] is None
    assert numbers["tbt_ms"] == {"p50": None, "p99": None, "p999": None, "max": None}


def test_the_table_shows_both_loads_in_aligned_columns() -> None:
    lines = format_table(load(0.04, 0.3), load(0.04, 0.05), tbt_slo_s=SLO_S).splitlines()

    assert lines[0].split() == ["stock", "vLLM", "penalty_sched"]
    assert lines[4].split() == ["max", "300.0", "ms", "50.0", "ms"]
    assert len({len(line) for line in lines}) == 1
