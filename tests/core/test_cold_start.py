from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from vllm_penalty_sched.learning.cold_start import FIRST_CHUNK_TOKENS, ColdStart


def after_decode_only(seconds: float = 0.014) -> ColdStart:
    cold_start = ColdStart()
    for _ in range(4):
        cold_start.observe(decode_seqs=8, prefill_tokens=0, seconds=seconds, slo_s=None)
    return cold_start


def play(cold_start: ColdStart, slo_s: float, token_s: float) -> list[tuple[int, float]]:
    steps = []
    while not cold_start.is_over:
        tokens = cold_start.probe_tokens(decode_seqs=8, slo_s=slo_s)
        seconds = 0.014 + token_s * tokens
        cold_start.observe(decode_seqs=8, prefill_tokens=tokens, seconds=seconds, slo_s=slo_s)
        steps.append((tokens, seconds))
    return steps


def test_no_prefill_is_tried_before_a_decode_only_time_is_known() -> None:
    assert ColdStart().probe_tokens(decode_seqs=8, slo_s=1.0) == 0


def test_the_first_chunk_is_at_most_64_tokens() -> None:
    assert after_decode_only().probe_tokens(decode_seqs=8, slo_s=10.0) == FIRST_CHUNK_TOKENS


def test_under_a_tight_slo_the_published_curve_allows_less() -> None:
    assert after_decode_only().probe_tokens(decode_seqs=8, slo_s=0.0145) < FIRST_CHUNK_TOKENS


@given(st.floats(1e-6, 1e-3))
def test_time_in_proportion_to_tokens_never_overruns_after_the_first_chunk(token_s: float) -> None:
    slo_s = 0.056
    steps = play(after_decode_only(), slo_s, token_s)

    first_overran = steps[0][1] > slo_s
    assert first_overran or all(seconds <= slo_s for _, seconds in steps)
    assert all(later <= 2 * before for (before, _), (later, _) in pairwise(steps))


def test_an_overrun_halves_the_chunk() -> None:
    cold_start = after_decode_only()
    tokens = cold_start.probe_tokens(decode_seqs=8, slo_s=0.05)
    cold_start.observe(decode_seqs=8, prefill_tokens=tokens, seconds=0.09, slo_s=0.05)

    assert cold_start.probe_tokens(decode_seqs=8, slo_s=0.05) == tokens // 2


def test_it_ends_after_eight_mixed_steps() -> None:
    assert len(play(after_decode_only(), 0.056, 3.5e-4)) == 8


def test_steps_without_decodes_say_nothing_about_chunks() -> None:
    cold_start = ColdStart()
    cold_start.observe(decode_seqs=0, prefill_tokens=2048, seconds=0.7, slo_s=None)

    assert cold_start.decode_only_s is None
    assert not cold_start.is_over
