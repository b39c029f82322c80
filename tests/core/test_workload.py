import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_penalty_sched.errors import ConfigError
from vllm_penalty_sched.workload import (
    LoadSpec,
    RequestKind,
    draw_prompt,
    estimate_busy_s,
    plan_load,
)

SEEDS = st.integers(0, 2**32 - 1)
SPECS = st.builds(
    LoadSpec,
    steady_requests=st.integers(1, 12),
    injected_requests=st.integers(0, 40),
    injected_prompt_tokens=st.integers(1, 4000),
    length_jitter=st.floats(0, 0.99),
)


@given(seed=SEEDS, spec=SPECS)
def test_the_same_seed_gives_the_same_plan(seed: int, spec: LoadSpec) -> None:
    first, second = (
        plan_load(np.random.default_rng(seed), spec, injection_start_s=1, injection_end_s=9)
        for _ in range(2)
    )

    assert first == second


@given(seed=SEEDS, spec=SPECS, start_s=st.floats(0, 50), length_s=st.floats(0, 50))
def test_prompts_arrive_in_order_within_the_window_and_decodes_at_the_start(
    seed: int, spec: LoadSpec, start_s: float, length_s: float
) -> None:
    plan = plan_load(
        np.random.default_rng(seed),
        spec,
        injection_start_s=start_s,
        injection_end_s=start_s + length_s,
    )

    steady = [request for request in plan if request.kind is RequestKind.STEADY]
    injected_s = [request.arrival_s for request in plan if request.kind is RequestKind.INJECTED]
    assert [request.arrival_s for request in steady] == [0.0] * spec.steady_requests
    assert len(injected_s) == spec.injected_requests
    assert injected_s == sorted(injected_s)
    assert all(start_s <= arrival_s <= start_s + length_s for arrival_s in injected_s)


@given(seed=SEEDS, spec=SPECS)
def test_prompt_lengths_stay_within_the_jitter(seed: int, spec: LoadSpec) -> None:
    plan = plan_load(np.random.default_rng(seed), spec, injection_start_s=0, injection_end_s=1)

    lengths = [request.prompt_tokens for request in plan if request.kind is RequestKind.INJECTED]
    half_width = spec.injected_prompt_tokens * spec.length_jitter + 1  # + 1: rounding
    assert all(abs(length - spec.injected_prompt_tokens) <= half_width for length in lengths)
    assert all(length >= 1 for length in lengths)


def test_a_reversed_window_is_refused() -> None:
    with pytest.raises(ConfigError, match="start <= end, got 2 to 1 s"):
        plan_load(np.random.default_rng(0), LoadSpec(), injection_start_s=2, injection_end_s=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steady_requests", 0),
        ("steady_output_tokens", 0),
        ("injected_requests", -1),
        ("injected_prompt_tokens", 0),
        ("length_jitter", 1.0),
        ("steady_requests", 10_000_001),
        ("injected_requests", 10**12),
        ("steady_output_tokens", 10**12),
        ("injected_prompt_tokens", 10_000_001),
    ],
)
def test_a_bad_number_is_refused_by_name_and_value(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be .*, got {value}"):
        LoadSpec(**{name: value})


def test_the_busy_time_adds_decode_steps_and_prefills() -> None:
    spec = LoadSpec(steady_output_tokens=1000, injected_requests=30)

    busy_s = estimate_busy_s(spec, decode_step_s=0.01, prompt_s=0.5)

    assert busy_s == pytest.approx(25.0)


@given(seed=SEEDS, tokens=st.integers(1, 300))
def test_prompts_have_the_asked_length_and_ordinary_tokens(seed: int, tokens: int) -> None:
    prompt = draw_prompt(np.random.default_rng(seed), tokens)

    assert len(prompt) == tokens
    assert all(260 <= token_id < 2000 for token_id in prompt)
