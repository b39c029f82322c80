from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.step_records import log_of, step
from vllm_penalty_sched.policy import Reason
from vllm_penalty_sched.step_log.advice import Advice, advise
from vllm_penalty_sched.step_log.records import StepRecord
from vllm_penalty_sched.step_log.summary import summarize_steps

CALM = [step(20.0), step(40.0, prefill=100)] * 500


def advice(*parts: StepRecord | Sequence[StepRecord]) -> dict[str, Advice]:
    log = log_of(*parts)
    return {one.rule: one for one in advise(log, summarize_steps(log))}


def test_a_calm_trace_needs_no_change() -> None:
    assert advice(CALM) == {}


def test_an_slo_below_the_decode_only_time_names_the_batch_and_the_slo_that_would_do() -> None:
    decodes = [step(10.0 + 0.5 * seqs, decodes=seqs) for seqs in range(64, 97) for _ in range(20)]
    beyond = [step(60.0, decodes=100, reason=Reason.INFEASIBLE)] * 80

    found = advice(decodes, beyond)

    text = str(found["infeasible"])
    # The steps with more than 80 decodes as well, in which nobody wanted prefill.
    assert "SLO infeasible 59% of the time" in text
    assert "the decode batch is too large" in text
    assert "lower --max-num-seqs to about 80" in text
    assert "raise tbt_slo_ms to about 75" in text


def test_an_infeasible_slo_without_a_batch_that_holds_it_names_only_the_slo() -> None:
    found = advice([step(60.0, reason=Reason.INFEASIBLE)] * 10)

    assert "raise tbt_slo_ms to about 75" in str(found["infeasible"])
    assert "--max-num-seqs to about" not in str(found["infeasible"])


def test_an_slo_that_no_batch_holds_does_not_blame_the_batch() -> None:
    alone = [step(60.0, decodes=1)] * 10

    text = str(advice(alone, [step(62.0, decodes=9, reason=Reason.INFEASIBLE)] * 20)["infeasible"])

    assert "a batch of 1 takes longer already; raise tbt_slo_ms" in text
    assert "too large" not in text


def test_without_prefills_an_slo_below_the_decode_only_time_is_infeasible_too() -> None:
    found = advice([step(60.0)] * 100)

    assert "SLO infeasible 100% of the time" in str(found["infeasible"])
    assert "overruns" not in found


def test_an_engine_that_is_full_says_so() -> None:
    full = [step(49.0, prefill=200)] * 95 + [step(20.0)] * 5

    text = str(advice(full)["full"])

    assert "prefills were cut to fit the SLO in 95% of the steps and used 100%" in text
    assert "add an engine" in text
    assert "full" not in advice(full[20:], [step(20.0)] * 20)


def test_where_noise_takes_the_room_the_slo_is_not_blamed() -> None:
    noisy = [step(20.0, reason=Reason.DEFERRED, margin=0.9)] * 100

    text = str(advice(CALM, noisy)["deferred"])

    assert "the machine's noise takes the room (margin 90%)" in text
    assert "too little room" not in text


def test_predictions_that_scatter_ask_for_no_calibration() -> None:
    high, low = step(40.0, predicted_ms=50.0), step(40.0, predicted_ms=30.0)

    text = str(advice([high, low] * 50)["predictions"])

    assert "high and low alike" in text
    assert "recalibrate" not in text


def test_the_batch_is_judged_by_the_times_at_which_it_was_too_large() -> None:
    before_the_machine_slowed = [step(40.0, decodes=19)] * 50
    infeasible = [step(60.0, decodes=20, reason=Reason.INFEASIBLE)] * 20
    between = [step(45.0, decodes=12)] * 5

    found = advice(before_the_machine_slowed, infeasible, between, infeasible)

    assert "lower --max-num-seqs to about 12" in str(found["infeasible"])


def test_a_far_smaller_batch_is_not_advised() -> None:
    alone = [step(40.0, decodes=2)] * 10

    found = advice(alone, [step(60.0, decodes=9, reason=Reason.INFEASIBLE)] * 10)

    assert "--max-num-seqs to about" not in str(found["infeasible"])


def test_a_moment_of_infeasibility_is_no_reason_to_change() -> None:
    assert "infeasible" not in advice(CALM, [step(60.0, reason=Reason.INFEASIBLE)] * 4)


def test_deferred_prefills_tell_how_little_room_there_is() -> None:
    deferred = [step(45.0, reason=Reason.DEFERRED)] * 100

    text = str(advice(CALM, deferred)["deferred"])

    assert "prefills were deferred 9% of steps, at the longest for 4.50 s" in text
    assert "(SLO 50.0 ms, decode-only step 45.0 ms)" in text
    assert "deferred" not in advice(CALM, deferred[:50])


def test_held_admission_tells_at_how_many_decodes() -> None:
    held = [step(45.0, decodes=40, reason=Reason.HELD)] * 100

    text = str(advice(CALM, held)["held"])

    assert "admission was held 9% of steps, at about 40 decodes" in text
    assert "held" not in advice(CALM, held[:50])


def test_aged_chunks_tell_how_many_overran() -> None:
    aged = [step(60.0, prefill=32, reason=Reason.AGED), step(45.0, prefill=32, reason=Reason.AGED)]

    found = advice(CALM, aged * 5)

    assert "aged chunks in 1.0% of steps (10), 50% of them over the SLO" in str(found["aged"])
    assert set(found) == {"aged"}
    assert "aged" not in advice(CALM, aged)


@pytest.mark.parametrize(
    ("prefill", "kind"), [(0, "25% for decode-only steps"), (100, "25% for mixed steps")]
)
def test_predictions_that_are_off_ask_for_a_calibration(prefill: int, kind: str) -> None:
    off = [step(40.0, prefill=prefill, predicted_ms=50.0)] * 50

    text = str(advice(off)["predictions"])

    assert "predictions are off by more than 10%" in text
    assert f"{kind} (bias +25%)" in text
    assert "recalibrate" in text
    assert "predictions" not in advice(off[:49])
    assert "predictions" not in advice([replace(one, predicted_s=0.043) for one in off])


def graph_steps(above_ms: float, *, size: int = 256, count: int = 10) -> list[StepRecord]:
    return [step(20.0, decodes=size)] * count + [step(above_ms, decodes=size + size // 32)] * count


@pytest.mark.parametrize("size", [32, 256, 512])
def test_a_jump_of_decode_only_steps_above_a_graph_size_asks_for_larger_graphs(size: int) -> None:
    text = str(advice(graph_steps(40.0, size=size))["graph_size"])

    assert f"jump above {size} decode tokens, from 20.0 to 40.0 ms" in text
    assert f"raise --max-cudagraph-capture-size above {size}" in text


def test_growth_in_proportion_to_the_decodes_is_no_jump() -> None:
    growing = [step(0.05 * seqs, decodes=seqs) for seqs in range(100, 600) for _ in range(3)]

    assert "graph_size" not in advice(growing)
    assert "graph_size" not in advice(graph_steps(24.0))
    assert "graph_size" not in advice(graph_steps(40.0, count=9))
    assert "graph_size" not in advice(graph_steps(40.0, size=300))


def test_a_jump_that_longer_contexts_explain_is_none() -> None:
    below = [step(20.0, decodes=256, context=256_000)] * 10
    above = [step(40.0, decodes=264, context=512_000)] * 10

    assert "graph_size" not in advice(below, above)


def test_stalls_are_counted_with_the_longest() -> None:
    stall = step(49.0, predicted_ms=16.0)

    text = str(advice(CALM, [stall] * 3)["stalls"])

    assert "stalls: 3 steps took over 3 x their prediction, the longest 49 ms" in text
    assert "stalls" not in advice(CALM, [stall] * 2)
    assert "stalls" not in advice(CALM, [replace(stall, predicted_s=0.017)] * 3)
    assert "stalls" not in advice(CALM * 8, [stall] * 3)


def test_a_long_cold_start_asks_for_a_model() -> None:
    cold = [step(40.0, prefill=50, reason=Reason.COLD)] * 100

    assert "the cold start took 12% of the time" in str(advice(CALM, cold)["cold"])
    assert "cold" not in advice(CALM, cold[:50])


def test_budgets_that_go_unused_point_to_the_kv_cache() -> None:
    unused = [step(20.0, reason=Reason.STALLED, budget=64)] * 20

    assert "unused before 2.0% of steps" in str(advice(CALM, unused)["unused"])
    assert "unused" not in advice(CALM, unused[:5])


def test_decode_only_steps_that_overrun_name_the_slo_that_they_would_hold() -> None:
    over = [step(60.0, predicted_ms=48.0)] * 50

    text = str(advice(CALM, over)["overruns"])

    assert "9.1% of the decode-only steps overran the SLO where it was feasible" in text
    assert "raise tbt_slo_ms to 60 or more" in text
    assert "overruns" not in advice(CALM, over[:5])


def test_mixed_steps_that_overrun_ask_for_a_lower_miss_rate() -> None:
    over = [step(60.0, prefill=100)] * 20

    text = str(advice(CALM, over)["overruns"])

    assert "3.8% of the mixed steps overran" in text
    assert "lower miss_rate" in text
    assert "overruns" not in advice(CALM, over[:5])


def test_a_trace_of_mode_observe_says_that_nothing_was_steered() -> None:
    unsteered = [replace(step(20.0), reason=None, budget_tokens=None, slo_s=None)] * 600

    assert "without a decision of the plugin" in str(advice(CALM[:500], unsteered)["unsteered"])
    assert "unsteered" not in advice(CALM[:500], unsteered[:500])
