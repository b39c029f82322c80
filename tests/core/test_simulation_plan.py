import math

import pytest

from vllm_penalty_sched.errors import ConfigError
from vllm_penalty_sched.simulation.cost_profiles import find_profile
from vllm_penalty_sched.simulation.device import DeviceSpec
from vllm_penalty_sched.simulation.link import LinkSpec
from vllm_penalty_sched.simulation.plan import EngineSize, SimulationPlan
from vllm_penalty_sched.simulation.scheduler_spec import SchedulerKind, SchedulerSpec
from vllm_penalty_sched.simulation.traces import TraceRequest

REQUESTS = (
    TraceRequest(arrival_s=0.0, prompt_tokens=10, output_tokens=5),
    TraceRequest(arrival_s=3.0, prompt_tokens=10, output_tokens=100),
)


def make_plan(**options: object) -> SimulationPlan:
    device = DeviceSpec(costs=find_profile("a100-llama3-8b"))
    return SimulationPlan(
        **{"requests": REQUESTS, "device": device, "engine": EngineSize(), **options}  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("text", "kind", "budget", "threshold", "overrides"),
    [
        ("stock:512", SchedulerKind.STOCK, 512, 0, {}),
        ("stock:2048:256", SchedulerKind.STOCK, 2048, 256, {}),
        ("penalty", SchedulerKind.PENALTY, 8192, 0, {}),
        (
            "penalty:1024,order=fcfs,miss_rate=0.01",
            SchedulerKind.PENALTY,
            1024,
            0,
            {"order": "fcfs", "miss_rate": 0.01},
        ),
        ("oracle,max_defer_s=2", SchedulerKind.ORACLE, 8192, 0, {"max_defer_s": 2}),
    ],
)
def test_a_scheduler_is_read_with_its_budget_threshold_and_settings(
    text: str, kind: SchedulerKind, budget: int, threshold: int, overrides: dict[str, object]
) -> None:
    spec = SchedulerSpec.parse(text)

    assert spec.name == text
    assert (spec.kind, spec.budget_tokens, spec.long_prefill_threshold) == (kind, budget, threshold)
    assert spec.overrides == overrides


@pytest.mark.parametrize(
    ("text", "remote_from_tokens", "budget"),
    [
        ("pair", None, 8192),
        ("pair:priced", None, 8192),
        ("pair:always", 0.0, 8192),
        ("pair:never", math.inf, 8192),
        ("pair:2048", 2048.0, 8192),
        ("pair:priced:4096", None, 4096),
    ],
)
def test_a_pair_is_read_with_its_rule(
    text: str, remote_from_tokens: float | None, budget: int
) -> None:
    spec = SchedulerSpec.parse(text)

    assert spec.kind is SchedulerKind.PAIR
    assert spec.remote_from_tokens == remote_from_tokens
    assert (spec.budget_tokens, spec.engines) == (budget, 1)


def test_several_engines_are_read_before_their_scheduler() -> None:
    spec = SchedulerSpec.parse("2x:stock:512")

    assert (spec.kind, spec.budget_tokens, spec.engines) == (SchedulerKind.STOCK, 512, 2)


def test_a_pair_needs_to_know_the_size_of_a_kv_cache() -> None:
    spec = SchedulerSpec.parse("pair")

    make_plan(link=LinkSpec(kv_bytes_per_token=1)).check(spec)
    with pytest.raises(ConfigError, match="pair: give --kv-bytes-per-token"):
        make_plan().check(spec)


@pytest.mark.parametrize(
    "text",
    [
        *["", "stock", "stock:0", "stock:-1", "stock:1:2:3", "penalty:1:2", "vllm:512"],
        *["stock:512,x=1", "pair:sometimes", "pair:0", "2x:pair", "0x:penalty", "99x:penalty"],
    ],
)
def test_a_scheduler_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="a scheduler must be stock:BUDGET"):
        SchedulerSpec.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("penalty,miss_rate", "a setting must be NAME=VALUE, got 'miss_rate'"),
        ("penalty,miss_rate=2", "miss_rate must be a share"),
        ("oracle,speed=2", "speed is not a setting"),
    ],
)
def test_a_wrong_setting_of_a_scheduler_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SchedulerSpec.parse(text)


def test_a_plans_settings_are_its_slos_its_own_and_the_schedulers_in_this_order() -> None:
    plan = make_plan(ttft_slo_s=1.0, tbt_slo_s=0.03, settings={"miss_rate": 0.01})

    assert plan.penalty_settings() == {
        "tbt_slo_ms": 30.0,
        "ttft_slo_ms": 1000.0,
        "miss_rate": 0.01,
    }
    assert plan.penalty_settings({"miss_rate": 0.1})["miss_rate"] == 0.1


def test_a_run_ends_when_the_last_request_within_its_slos_would_have_finished() -> None:
    assert make_plan().end_s == pytest.approx(3.0 + 2.0 + 100 * 0.05)
    assert make_plan(drain_s=1.0).end_s == 4.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tbt_slo_s": 0.0}, "tbt_slo_ms must be"),
        ({"ttft_slo_s": -1.0}, "ttft_slo_ms must be"),
        ({"settings": {"order": "random"}}, "order must be"),
        ({"drain_s": -1.0}, "drain must be >= 0 s"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(**options)


def test_an_engine_too_small_for_one_request_or_a_budget_below_its_seats_is_refused() -> None:
    EngineSize(max_model_len=160, kv_blocks=11)
    with pytest.raises(ConfigError, match="kv_blocks must be >= 11 to hold one request"):
        EngineSize(max_model_len=160, kv_blocks=10)
    with pytest.raises(ConfigError, match="max_num_seqs must be >= 1, got 0"):
        EngineSize(max_num_seqs=0)
    make_plan().check(SchedulerSpec.parse("stock:256"))
    with pytest.raises(ConfigError, match="stock:255: the budget must be at least max_num_seqs"):
        make_plan().check(SchedulerSpec.parse("stock:255"))
