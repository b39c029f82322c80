import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.step_records import line_of, log_of, step, text_of
from tests.strategies import nonsense, shapes
from vllm_penalty_sched.errors import ConfigError
from vllm_penalty_sched.policy import Reason
from vllm_penalty_sched.step_log.advice import advise
from vllm_penalty_sched.step_log.records import StepLog, StepRecord, TraceText, read_step_log
from vllm_penalty_sched.step_log.report import format_step_report
from vllm_penalty_sched.step_log.summary import summarize_steps

pytestmark = pytest.mark.slow

GOOD = step(20.0, prefill=100)
RULES = {
    "done_s": "a number",
    "decode_seqs": "an integer >= 0",
    "decode_tokens": "an integer >= 0",
    "decode_context": "an integer >= 0",
    "prefills": "a list of [new >= 1, cached >= 0]",
    "encoder_tokens": "an integer >= 0",
    "prefill_ratio": "as the counts say",
    "reason": "null or one of no_decode",
    "budget_tokens": "null or an integer >= 0",
    "slo_s": "null or seconds",
    "decode_only_s": "null or seconds",
    "predicted_s": "null or seconds",
    "observed_s": "seconds",
    "margin": "a number",
}
MAY_BE_ABSENT = {"decode_only_s", "encoder_tokens"}  # earlier versions did not write them
MAY_BE_NULL = {"reason", "budget_tokens", "slo_s", "decode_only_s", "predicted_s"}

seconds = st.floats(1e-9, 1e9)
records = st.builds(
    StepRecord,
    done_s=st.floats(-1e9, 1e9),
    shape=shapes().filter(lambda shape: shape.tokens > 0),
    reason=st.none() | st.sampled_from(Reason),
    budget_tokens=st.none() | st.integers(0, 10**15),
    slo_s=st.none() | seconds,
    decode_only_s=st.none() | st.floats(0.0, 1e9),
    predicted_s=st.none() | st.floats(0.0, 1e9),
    observed_s=seconds,
    margin=st.floats(-1e9, 1e9),
)


def read(*texts: str) -> StepLog:
    return read_step_log(
        [TraceText(source=f"trace-{place}", text=text) for place, text in enumerate(texts)]
    )


@given(st.lists(records, min_size=1, max_size=20))
def test_what_was_written_is_read_back(steps: list[StepRecord]) -> None:
    log = read(text_of(steps))

    assert log == StepLog(steps=tuple(steps))


@given(st.lists(records, min_size=1, max_size=30))
def test_every_valid_trace_has_a_page_and_figures(steps: list[StepRecord]) -> None:
    log = StepLog(steps=tuple(steps))

    summary = summarize_steps(log)
    page = format_step_report(summary, advise(log, summary), source="trace.jsonl")

    assert "what to change" in page
    assert 0.0 <= summary.decode_time_share <= 1.0
    assert sum(share.steps for share in summary.reasons) == len(steps)
    assert sum(share.time_share for share in summary.reasons) == pytest.approx(1.0)
    if summary.slo:
        assert 0.0 <= summary.slo.held_share <= 1.0


def test_the_rotated_file_comes_first() -> None:
    first, second = log_of(GOOD, step(10.0)).steps

    log = read(text_of([first]), text_of([second]))

    assert log.steps == (first, second)


@given(st.integers(1, len(line_of(GOOD)) - 1))
def test_a_last_line_cut_anywhere_is_counted(length: int) -> None:
    log = read(text_of([GOOD]) + line_of(GOOD)[:length])

    assert log == StepLog(steps=(GOOD,), cut_lines=1)


def test_a_last_line_without_its_line_break_counts_as_whole() -> None:
    log = read(text_of([GOOD]) + line_of(GOOD))

    assert log == StepLog(steps=(GOOD, GOOD))


@given(st.integers(1, len(line_of(GOOD)) - 1))
def test_a_line_cut_anywhere_by_a_kill_is_counted_where_the_next_engine_went_on(
    length: int,
) -> None:
    cut = line_of(GOOD)[:length]

    log = read(f"{text_of([GOOD])}{cut}\n\n{text_of([GOOD])}")

    assert log == StepLog(steps=(GOOD, GOOD), cut_lines=1)


def test_a_cut_line_elsewhere_is_refused() -> None:
    cut = line_of(GOOD)[:30]

    with pytest.raises(ConfigError, match="trace-0, line 2: not JSON"):
        read(f"{text_of([GOOD])}{cut}\n{line_of(GOOD)}\n")
    with pytest.raises(ConfigError, match="trace-0, line 2: not JSON"):
        read(text_of([GOOD]) + cut, text_of([GOOD]))


@pytest.mark.parametrize("text", ["", "\n\n", line_of(GOOD)[:20]])
def test_a_trace_without_a_step_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="trace-0: must hold at least one whole line"):
        read(text)


def test_fields_of_another_version_may_be_there_or_not() -> None:
    assert read(line_of(GOOD, colour="red") + "\n").steps == (GOOD,)
    assert read(line_of(GOOD, decode_only_s=...) + "\n").steps == (GOOD,)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((field, ...) for field in RULES if field not in MAY_BE_ABSENT),
        *((field, None) for field in RULES if field not in MAY_BE_NULL),
        *((field, True) for field in RULES),
        ("done_s", float("nan")),
        ("observed_s", 0.0),
        ("observed_s", float("inf")),
        ("observed_s", 10**400),
        ("slo_s", 0),
        ("predicted_s", -1e-9),
        ("decode_seqs", 8.0),
        ("decode_tokens", 10**16),
        ("decode_context", -1),
        ("prefills", [[0, 0]]),
        ("prefills", [[1]]),
        ("prefills", [[1, -1]]),
        ("prefills", ["12"]),
        ("prefill_ratio", 0.5),
        ("reason", "because"),
        ("budget_tokens", 1.5),
    ],
)
def test_a_wrong_value_is_refused_with_file_line_and_field(field: str, value: Any) -> None:
    text = f"{line_of(GOOD)}\n{line_of(GOOD, **{field: value})}\n{line_of(GOOD)}\n"

    with pytest.raises(ConfigError) as refused:
        read(text)

    assert re.match(f"trace-0, line 2, field {field}: must be ", str(refused.value))
    assert RULES[field] in str(refused.value)
    assert len(str(refused.value)) < 400


def test_a_step_without_a_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="line 1, field decode_tokens: a step must have a token"):
        read(line_of(step(10.0, decodes=0), prefill_ratio=0.0) + "\n")


@given(st.sampled_from(sorted(RULES)), nonsense)
def test_nonsense_is_read_or_refused_with_its_line(field: str, value: Any) -> None:
    text = line_of(GOOD, **{field: value}) + "\n"

    try:
        log = read(text)
    except ConfigError:
        with pytest.raises(ConfigError, match=r"\Atrace-0, line 1, field \w+: [^\n]*\Z"):
            read(text)
    else:
        assert summarize_steps(log).steps == 1


@pytest.mark.parametrize("line", ["5", "[]", "nonsense", "{" * 100_000, "9" * 5000])
def test_what_is_no_object_is_refused(line: str) -> None:
    with pytest.raises(ConfigError, match="trace-0, line 1: ") as refused:
        read(f"{line}\n")

    assert len(str(refused.value)) < 400
