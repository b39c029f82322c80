import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.test_latency import FITTED
from tests.strategies import shapes
from vllm_penalty_sched import BatchShape, Settings
from vllm_penalty_sched.handover_report import HandoverReport
from vllm_penalty_sched.planner import Planner
from vllm_penalty_sched.policy import Decision, Reason
from vllm_penalty_sched.telemetry import (
    REPORT_PERIOD_S,
    StepReport,
    StepTally,
    headroom_tokens_per_s,
)

pytestmark = pytest.mark.slow

SLO_S = 0.1
DECODES = BatchShape(decode_seqs=8, decode_tokens=8, decode_context=8 * 500)
MIXED = DECODES.with_prefill(200, 0)
BASE_TOKENS = 8192


def planner_of(slo_s: float = SLO_S) -> Planner:
    return Planner(Settings(tbt_slo_ms=1e3 * slo_s), FITTED)


def add(
    tally: StepTally,
    shape: BatchShape = MIXED,
    seconds: float = 0.02,
    *,
    decision: Decision | None = None,
    predicted_s: float | None = 0.02,
    planner: Planner | None = None,
) -> None:
    tally.add(
        shape,
        seconds,
        predicted_s=predicted_s,
        decision=decision,
        planner=planner or planner_of(),
    )


def take(
    tally: StepTally,
    now_s: float = 0.0,
    *,
    planner: Planner | None = None,
    faults: int = 0,
    is_idle: bool = False,
) -> StepReport:
    return tally.take(
        planner or planner_of(),
        now_s,
        faults=faults,
        base_tokens=BASE_TOKENS,
        is_idle=is_idle,
    )


decisions = st.builds(
    Decision,
    reason=st.sampled_from(Reason),
    prefill_tokens=st.none() | st.integers(0, 8192),
    slo_s=st.none() | st.floats(0.001, 1.0),
    holds_admission=st.booleans(),
)
steps = st.lists(
    st.tuples(shapes(), st.floats(1e-4, 1.0), st.none() | decisions, st.booleans()), max_size=40
)


@given(steps)
def test_the_reports_add_up_to_the_steps_however_they_are_cut(
    ran: list[tuple[BatchShape, float, Decision | None, bool]],
) -> None:
    tally, planner, reports, made = StepTally(), planner_of(), [], Counter()
    for shape, seconds, decision, cuts in ran:
        add(tally, shape, seconds, decision=decision, planner=planner)
        made.update([decision.reason] if decision else [])
        if cuts:
            reports.append(take(tally, planner=planner, faults=made.total()))
    reports.append(take(tally, planner=planner, faults=made.total()))

    assert [time_s for report in reports for time_s in report.observed_s] == [
        seconds for _, seconds, _, _ in ran
    ]
    assert [ratio for report in reports for ratio in report.prefill_ratios] == [
        shape.prefill_ratio for shape, _, _, _ in ran
    ]
    assert sum((Counter(report.decisions) for report in reports), Counter()) == made
    assert sum(report.faults for report in reports) == made.total()
    assert sum(report.admission_holds for report in reports) == sum(
        decision.holds_admission for _, _, decision, _ in ran if decision
    )
    overruns = [
        seconds > (math.inf if decision and decision.slo_s is None else slo_s)
        for shape, seconds, decision, _ in ran
        if shape.decode_seqs
        for slo_s in [(decision.slo_s if decision else SLO_S) or 0.0]
    ]
    assert sum(report.slo_overruns for report in reports) == sum(overruns)
    penalty_s = sum(FITTED.penalty_s(shape) for shape, *_ in ran if shape.decode_seqs)
    assert sum(report.penalty_s for report in reports) == pytest.approx(penalty_s)


def test_a_step_without_decodes_pays_no_penalty_and_overruns_no_slo() -> None:
    tally = StepTally()

    add(tally, BatchShape(prefills=((4000, 0),)), 10 * SLO_S)

    report = take(tally)
    assert report.penalty_s == 0.0
    assert report.slo_overruns == 0


def test_only_budgets_that_somebody_could_use_beside_decodes_are_told() -> None:
    tally = StepTally()

    add(tally, decision=Decision(reason=Reason.NO_DECODE))
    add(tally, decision=Decision(reason=Reason.NO_PREFILL, prefill_tokens=0))
    add(tally, decision=Decision(reason=Reason.SLO, prefill_tokens=300))
    add(tally, decision=Decision(reason=Reason.DEFERRED, prefill_tokens=0))

    assert list(take(tally).budget_tokens) == [300, 0]


@pytest.mark.parametrize("predicted_s", [None, math.nan, math.inf])
def test_a_prediction_that_is_none_spoils_no_sum(predicted_s: float | None) -> None:
    tally = StepTally()

    add(tally, predicted_s=predicted_s)

    report = take(tally)
    assert list(report.predicted_s) == []
    assert len(report.observed_s) == 1


def test_the_first_report_is_due_at_once_and_the_next_a_period_later() -> None:
    tally = StepTally()
    first = tally.is_due(5.0, is_idle=False)
    take(tally, 5.0)
    add(tally)

    assert first
    assert not tally.is_due(5.0 + 0.99 * REPORT_PERIOD_S, is_idle=False)
    assert tally.is_due(5.0 + REPORT_PERIOD_S, is_idle=False)


def test_the_last_step_before_idleness_and_a_clock_that_jumps_back_make_a_report_due() -> None:
    tally = StepTally()
    take(tally, 5.0)
    idle_without_news = tally.is_due(5.1, is_idle=True)
    add(tally)

    assert not idle_without_news
    assert tally.is_due(5.1, is_idle=True)
    assert tally.is_due(4.0, is_idle=False)


def test_many_steps_make_a_report_due_and_memory_stays_bounded_if_nobody_takes_it() -> None:
    tally = StepTally()
    take(tally, 5.0)
    for _ in range(100):
        add(tally)
    is_due = tally.is_due(5.1, is_idle=False)
    for _ in range(10_000):
        add(tally)

    assert is_due
    assert len(take(tally).observed_s) <= 1000


@given(
    st.lists(st.floats(1e-6, 1e3), max_size=5),
    st.dictionaries(st.sampled_from([reason.value for reason in Reason]), st.integers(1, 100)),
    st.none() | st.floats(0.0, 1e6),
)
def test_a_report_survives_its_way_as_text(
    times_s: list[float], made: dict[str, int], level: float | None
) -> None:
    report = replace(
        take(StepTally()), observed_s=times_s, decisions=made, headroom_tokens_per_s=level
    )

    assert StepReport.from_json(report.to_json()) == report


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"speed": 9}', "null"])
def test_a_foreign_text_is_no_report(text: str) -> None:
    with pytest.raises((TypeError, ValueError)):
        StepReport.from_json(text)


def test_the_gauges_tell_how_things_stand() -> None:
    tally, planner = StepTally(), planner_of()
    add(tally, planner=planner)

    report = take(tally, planner=planner)

    assert report.slo_s == SLO_S
    assert report.margin == planner.margin.relative
    assert report.model_error == FITTED.mape
    assert report.decode_only_s == FITTED.predict_s(DECODES)


def headroom(
    decodes: BatchShape = DECODES, *, slo_s: float | None = SLO_S, prefilled_per_s: float = 0.0
) -> float | None:
    return headroom_tokens_per_s(
        planner_of(),
        decodes,
        slo_s=slo_s,
        base_tokens=BASE_TOKENS,
        prefilled_per_s=prefilled_per_s,
    )


@given(shapes(with_prefill=False), st.floats(0.001, 1.0), st.floats(0.0, 1e5))
def test_headroom_is_never_negative_and_shrinks_by_what_is_being_prefilled(
    decodes: BatchShape, slo_s: float, prefilled_per_s: float
) -> None:
    alone = headroom(decodes, slo_s=slo_s)
    left = headroom(decodes, slo_s=slo_s, prefilled_per_s=prefilled_per_s)

    assert alone is not None
    assert left == pytest.approx(max(0.0, alone - prefilled_per_s))


@given(shapes(with_prefill=False), st.floats(0.001, 1.0))
def test_there_is_headroom_only_where_a_token_fits_under_the_slo(
    decodes: BatchShape, slo_s: float
) -> None:
    per_s = headroom(decodes, slo_s=slo_s)

    assert not per_s or FITTED.largest_prefill(decodes, 0, slo_s) > 0


def test_decodes_that_overrun_by_themselves_leave_no_headroom() -> None:
    assert headroom(slo_s=0.5 * FITTED.predict_s(DECODES)) == 0.0


def test_headroom_is_the_largest_chunk_that_would_be_planned_over_the_time_of_its_step() -> None:
    planner = planner_of()
    limit_s = SLO_S / (1.0 + planner.margin.relative_for(DECODES))
    tokens = FITTED.largest_prefill(DECODES, 0, limit_s, BASE_TOKENS - DECODES.decode_tokens)

    assert tokens > 500
    assert headroom() == tokens / FITTED.predict_s(DECODES.with_prefill(tokens, 0))


def test_an_idle_engine_may_use_its_whole_token_budget() -> None:
    whole = BatchShape(prefills=((BASE_TOKENS, 0),))

    assert headroom(BatchShape(), slo_s=None) == BASE_TOKENS / FITTED.predict_s(whole)


def test_headroom_is_unknown_while_cold_and_the_idle_engine_forgets_what_it_prefilled() -> None:
    cold, busy, idle = StepTally(), StepTally(), StepTally()
    cold_planner = Planner(Settings(tbt_slo_ms=100.0))
    add(cold, planner=cold_planner)
    add(busy)
    add(idle)

    told = [
        report.headroom_tokens_per_s
        for report in (take(cold, planner=cold_planner), take(busy), take(idle, is_idle=True))
    ]

    assert told[0] is None
    assert told[1] == pytest.approx(headroom(prefilled_per_s=MIXED.prefill_tokens / 0.02))
    assert told[2] == headroom(BatchShape())


def test_what_the_prefill_instance_did_survives_its_way_as_text() -> None:
    handovers = HandoverReport(
        choices={"remote:cheaper_there": 2},
        seconds=[0.5, 0.25],
        fallbacks={"timeout": 1},
        is_up=False,
    )
    tally = StepTally()
    add(tally)
    report = tally.take(
        planner_of(), 0.0, faults=0, base_tokens=BASE_TOKENS, is_idle=False, handovers=handovers
    )

    assert StepReport.from_json(report.to_json()).handovers == handovers
