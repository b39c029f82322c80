import json
from dataclasses import replace

import pytest

from tests.step_records import log_of, step
from vllm_penalty_sched.policy import Reason
from vllm_penalty_sched.step_log.decode_only_times import estimate_decode_only_s
from vllm_penalty_sched.step_log.records import StepLog, StepTable
from vllm_penalty_sched.step_log.report import format_step_report
from vllm_penalty_sched.step_log.summary import ReasonShare, summarize_steps


def estimates_ms(log: StepLog) -> list[float]:
    return (1e3 * estimate_decode_only_s(StepTable.of(log.steps))).tolist()


def test_the_figures_of_a_small_trace() -> None:
    log = log_of(
        step(30.0, decodes=0, prefill=200, reason=Reason.NO_DECODE, slo_ms=None, budget=0),
        [step(10.0)] * 4,
        step(60.0, prefill=300, budget=400, predicted_ms=45.0),
        step(40.0, prefill=100, reason=Reason.FITS, predicted_ms=50.0),
        step(50.0, slo_ms=60.0, predicted_ms=45.0),
    )

    summary = summarize_steps(log)

    assert (summary.steps, summary.runs, summary.cut_lines) == (8, 1, 0)
    assert summary.span_s == pytest.approx(0.22)
    assert summary.decode_time_share == pytest.approx(190 / 220)
    assert summary.prefill_tokens == 600
    assert summary.prefill_tokens_per_s == pytest.approx(600 / 0.22)
    assert summary.budget_use == pytest.approx(400 / 500)
    assert summary.slo is not None
    assert (summary.slo.least_s, summary.slo.most_s) == (0.05, 0.06)
    assert (summary.slo.steps, summary.slo.overruns) == (7, 1)
    assert summary.slo.held_share == pytest.approx(6 / 7)
    assert (summary.slo.mixed_held_share, summary.slo.decode_only_held_share) == (0.5, 1.0)
    assert (summary.slo.worst.number, summary.slo.worst.observed_s) == (6, 0.06)
    # The five decode-only steps of the same eight decodes have a median of 10 ms.
    assert (summary.penalty.mixed_steps, summary.penalty.estimated_steps) == (2, 2)
    assert summary.penalty.penalty_s == pytest.approx(0.050 + 0.030)
    assert summary.penalty.share == pytest.approx(80 / 190)
    assert summary.penalty.mean_s == pytest.approx(0.040)
    assert summary.mixed_error is not None
    assert summary.mixed_error.mape == pytest.approx((15 / 60 + 10 / 40) / 2)
    assert summary.mixed_error.bias == pytest.approx((-15 / 60 + 10 / 40) / 2)
    assert summary.decode_only_error is not None
    assert summary.decode_only_error.steps == 5
    assert summary.decode_only_error.mape == pytest.approx(0.1 / 5)
    assert summary.reasons[0] == ReasonShare(
        reason=Reason.NO_PREFILL,
        steps=5,
        step_share=5 / 8,
        time_share=pytest.approx(90 / 220),
    )


def test_pauses_and_new_starts_of_the_clock_count_as_they_should() -> None:
    steps = [step(10.0, done_s=done_s) for done_s in (5.0, 5.01, 7.0, 1.0, 1.5)]

    summary = summarize_steps(StepLog(steps=tuple(steps)))

    assert summary.runs == 2
    assert summary.span_s == pytest.approx(2.01 + 0.51)
    assert summary.decode_time_share == pytest.approx(0.05 / 2.52)


def test_the_longest_wait_ends_with_a_prefill_token_or_when_none_is_wanted() -> None:
    waiting = [step(10.0, reason=Reason.DEFERRED), step(10.0, reason=Reason.HELD)]
    log = log_of(
        [*waiting, step(20.0, prefill=8)],
        [*waiting, step(10.0, reason=Reason.INFEASIBLE), step(10.0)],
        [step(10.0, reason=Reason.INFEASIBLE), step(10.0, prefill=9, reason=Reason.INFEASIBLE)],
        waiting,
    )

    assert summarize_steps(log).longest_wait_s == pytest.approx(0.030)


def test_a_wait_does_not_reach_over_a_new_start_of_the_engine() -> None:
    waits = [step(10.0, reason=Reason.DEFERRED, done_s=done_s) for done_s in (5.0, 5.01, 1.0)]

    assert summarize_steps(StepLog(steps=tuple(waits))).longest_wait_s == pytest.approx(0.020)


def test_without_slo_prediction_or_decodes_the_figures_are_unknown() -> None:
    first = replace(step(30.0, decodes=0, prefill=200, slo_ms=None), reason=None, predicted_s=None)

    summary = summarize_steps(log_of(first))
    page = format_step_report(summary, [], source="trace")

    assert summary.slo is summary.mixed_error is summary.decode_only_error is None
    assert summary.penalty.mean_s is None
    assert summary.decode_time_share == 0.0
    assert "none in force" in page
    assert "none: no prefill ran beside decodes" in page
    assert "not steered" in page
    json.dumps(summary.to_json(), allow_nan=False)


def test_a_mixed_step_is_compared_with_decode_only_steps_of_its_decodes_and_context() -> None:
    alone = [step(10.0, context=1000)] * 9 + [step(20.0, context=90_000)] * 9
    others = [step(99.0, decodes=16)] * 9

    log = log_of(alone, others, step(50.0, prefill=9, context=1100))
    log_late = log_of(alone, others, step(50.0, prefill=9, context=80_000))

    assert estimates_ms(log)[-1] == pytest.approx(10.0)
    assert estimates_ms(log_late)[-1] == pytest.approx(20.0)
    assert estimates_ms(log)[0] == 10.0


def test_far_from_all_decode_only_steps_it_is_what_the_plan_expected() -> None:
    alone = [step(10.0)] * 9

    near = log_of(alone, step(90.0, decodes=10, prefill=9, alone_ms=30.0))
    far = log_of(alone, step(90.0, decodes=11, prefill=9, alone_ms=30.0))
    long = log_of(alone, step(90.0, prefill=9, context=1100, alone_ms=30.0))

    assert estimates_ms(near)[-1] == pytest.approx(10.0)
    assert estimates_ms(far)[-1] == estimates_ms(long)[-1] == pytest.approx(30.0)
    assert summarize_steps(far).penalty.penalty_s == pytest.approx(0.060)


def test_without_either_the_penalty_is_unknown() -> None:
    log = log_of([step(10.0)] * 30, step(90.0, decodes=16, prefill=9))

    summary = summarize_steps(log)

    assert (summary.penalty.mixed_steps, summary.penalty.estimated_steps) == (1, 0)
    assert "penalty paid          unknown" in format_step_report(summary, [], source="trace")
