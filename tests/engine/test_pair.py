"""A prefill and a decode instance, both real schedulers, on one virtual time."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

from vllm_penalty_sched.batch import BatchShape  # noqa: E402
from vllm_penalty_sched.engine.simulation import simulate  # noqa: E402
from vllm_penalty_sched.simulation.cost_profiles import find_profile  # noqa: E402
from vllm_penalty_sched.simulation.device import DeviceSpec  # noqa: E402
from vllm_penalty_sched.simulation.goodput import pooled_gaps_s, ttfts_s  # noqa: E402
from vllm_penalty_sched.simulation.link import LinkSpec  # noqa: E402
from vllm_penalty_sched.simulation.plan import EngineSize, SimulationPlan  # noqa: E402
from vllm_penalty_sched.simulation.result import SimulationResult  # noqa: E402
from vllm_penalty_sched.simulation.scheduler_spec import SchedulerSpec  # noqa: E402
from vllm_penalty_sched.simulation.traces import TraceRequest, draw_poisson  # noqa: E402

COSTS = find_profile("a100-llama3-8b", overhead_s=1e-3)
KV_BYTES = 131_072


def run(
    name: str,
    requests: Sequence[TraceRequest],
    *,
    bandwidth: float = 25e9,
    latency_s: float = 5e-3,
    prefill: str | None = None,
    engine: EngineSize | None = None,
    **options: object,
) -> SimulationResult:
    plan = SimulationPlan(
        requests=tuple(requests),
        device=DeviceSpec(costs=COSTS),
        prefill_device=None if prefill is None else DeviceSpec(costs=find_profile(prefill)),
        engine=engine or EngineSize(),
        link=LinkSpec(
            kv_bytes_per_token=KV_BYTES, bandwidth_bytes_per_s=bandwidth, latency_s=latency_s
        ),
        **options,  # type: ignore[arg-type]
    )
    return simulate(SchedulerSpec.parse(name), plan)


def request(arrival_s: float, prompt: int, output: int) -> TraceRequest:
    return TraceRequest(arrival_s=arrival_s, prompt_tokens=prompt, output_tokens=output)


def busy(rate: float = 12.0, seconds: float = 8.0) -> list[TraceRequest]:
    return draw_poisson(f"poisson:{rate}:1000:40", np.random.default_rng(0), duration_s=seconds)


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("name", ["pair:priced", "pair:always", "pair:500", "2x:penalty"])
def test_every_request_finishes_once_with_all_its_tokens(name: str, is_async: bool) -> None:
    load = [request(0.05 * place, 100 + 40 * place, 1 + place % 30) for place in range(60)]

    result = run(name, load, engine=EngineSize(async_scheduling=is_async), drain_s=1e3)

    assert [len(served.token_times_s) for served in result.served] == [
        one.output_tokens for one in load
    ]
    for served, one in zip(result.served, load, strict=True):
        assert served.token_times_s[0] > one.arrival_s
        assert all(np.diff(served.token_times_s) > 0.0)


def test_requests_survive_preemptions_on_the_decode_instance() -> None:
    few_blocks = EngineSize(max_model_len=800, kv_blocks=120)
    load = [request(0.0, 300, 200) for _ in range(12)]

    result = run("pair:always", load, engine=few_blocks, drain_s=1e3)

    assert result.finished == len(load)
    assert result.preemptions > 0


def test_the_same_seed_gives_the_same_result() -> None:
    first, second = run("pair:priced", busy()), run("pair:priced", busy())

    assert first.served == second.served
    assert first.choices == second.choices


def test_a_pair_that_never_sends_a_prompt_away_is_one_engine() -> None:
    pair, one = run("pair:never", busy()), run("penalty", busy())

    assert pair.served == one.served
    assert pair.steps == one.steps


def test_a_prompt_sent_away_takes_its_prefill_its_transfer_and_one_token_here() -> None:
    engine = EngineSize(async_scheduling=False)

    result = run("pair:always", [request(1.0, 1000, 2)], engine=engine)

    prefill_s = COSTS.step_s(BatchShape(prefills=((1000, 0),)))
    transfer_s = 5e-3 + 1000 * KV_BYTES / 25e9
    last_token_s = COSTS.step_s(BatchShape(prefills=((1, 999),)))
    decode_s = COSTS.step_s(BatchShape(decode_seqs=1, decode_tokens=1, decode_context=1000))
    first_s = 1.0 + prefill_s + transfer_s + last_token_s
    assert result.served[0].token_times_s == pytest.approx([first_s, first_s + decode_s])


def test_a_transfer_is_the_only_thing_that_a_slower_link_changes_for_one_prompt() -> None:
    fast, slow, none = (
        run("pair:always", [request(0.0, 1000, 1)], bandwidth=bandwidth, latency_s=0.0)
        for bandwidth in (1e9, 0.5e9, math.inf)
    )

    ttft_s = [float(result.served[0].ttft_s or 0.0) for result in (none, fast, slow)]
    assert ttft_s[1] - ttft_s[0] == pytest.approx(1000 * KV_BYTES / 1e9)
    assert ttft_s[2] - ttft_s[0] == pytest.approx(1000 * KV_BYTES / 0.5e9)


def test_decodes_beside_remote_prefills_are_not_delayed_by_them() -> None:
    load = busy(rate=6.0)

    together, apart = run("penalty", load), run("pair:always", load)

    # Steps of a few dozen decodes and what is left of their prompts: no chunk of any.
    without_prefill_s = COSTS.step_s(
        BatchShape(
            prefills=((1, 999),) * 4, decode_seqs=32, decode_tokens=32, decode_context=32 * 1040
        )
    )
    assert np.quantile(pooled_gaps_s(together.served), 0.99) > 2 * without_prefill_s
    assert np.max(pooled_gaps_s(apart.served)) < without_prefill_s


def test_a_faster_prefill_instance_brings_first_tokens_sooner() -> None:
    same = run("pair:always", busy(rate=6.0))
    faster = run("pair:always", busy(rate=6.0), prefill="h100-llama2-7b")

    assert np.mean(ttfts_s(faster.served)) < 0.7 * np.mean(ttfts_s(same.served))


def test_over_a_hopeless_link_priced_choices_keep_prompts_here() -> None:
    priced = run("pair:priced", busy(rate=8.0), bandwidth=1e7)
    never = run("pair:never", busy(rate=8.0), bandwidth=1e7)

    away = sum(count for name, count in priced.choices.items() if name.startswith("remote"))
    assert away <= 0.05 * len(priced.served)
    assert priced.goodput.own_p99_gap >= never.goodput.own_p99_gap - 0.05


def test_under_a_load_for_two_priced_choices_serve_more_than_any_fixed_rule() -> None:
    load = busy(rate=17.0, seconds=12.0)

    goodput = {
        name: run(f"pair:{name}", load).goodput.own_p99_gap
        for name in ("priced", "always", "never", "2048")
    }

    priced = goodput.pop("priced")
    assert priced > 0.9
    assert priced > max(goodput.values())


def test_two_engines_share_a_load() -> None:
    load = busy(rate=16.0)

    two, one = run("2x:penalty", load), run("penalty", load)

    assert np.mean(ttfts_s(two.served)) < 0.5 * np.mean(ttfts_s(one.served))
    assert two.tokens_per_s > one.tokens_per_s
