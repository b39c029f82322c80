"""Simulated loads on the real schedulers, vLLM's and ours."""

import json
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

from vllm.v1.core.sched.output import SchedulerOutput  # noqa: E402

from vllm_penalty_sched.batch import BatchShape  # noqa: E402
from vllm_penalty_sched.cli.program import main  # noqa: E402
from vllm_penalty_sched.engine.composition import Composition, read_composition  # noqa: E402
from vllm_penalty_sched.engine.simulation import simulate  # noqa: E402
from vllm_penalty_sched.engine.virtual_engine import VirtualEngine  # noqa: E402
from vllm_penalty_sched.simulation.cost_profiles import find_profile  # noqa: E402
from vllm_penalty_sched.simulation.device import DeviceSpec  # noqa: E402
from vllm_penalty_sched.simulation.goodput import pooled_gaps_s, ttfts_s  # noqa: E402
from vllm_penalty_sched.simulation.plan import EngineSize, SimulationPlan  # noqa: E402
from vllm_penalty_sched.simulation.result import SimulationResult  # noqa: E402
from vllm_penalty_sched.simulation.scheduler_spec import SchedulerSpec  # noqa: E402
from vllm_penalty_sched.simulation.traces import TraceRequest, draw_poisson  # noqa: E402

COSTS = find_profile("a100-llama3-8b", overhead_s=1e-3)


def request(arrival_s: float, prompt: int, output: int, *hash_ids: int) -> TraceRequest:
    return TraceRequest(
        arrival_s=arrival_s, prompt_tokens=prompt, output_tokens=output, hash_ids=hash_ids
    )


def run(name: str, requests: list[TraceRequest], **options: object) -> SimulationResult:
    device = {key: options.pop(key) for key in ("noise_cv", "drift_factor") if key in options}
    engine = options.pop("engine", EngineSize())
    plan = SimulationPlan(
        requests=tuple(requests),
        device=DeviceSpec(costs=COSTS, **device),  # type: ignore[arg-type]
        engine=engine,  # type: ignore[arg-type]
        **options,  # type: ignore[arg-type]
    )
    return simulate(SchedulerSpec.parse(name), plan)


def busy(seconds: float = 12.0) -> list[TraceRequest]:
    return draw_poisson("poisson:7:1000:60", np.random.default_rng(0), duration_s=seconds)


def test_one_request_on_stock_vllm_takes_exactly_the_time_of_its_steps() -> None:
    result = run("stock:512", [request(1.0, 700, 3)], engine=EngineSize(async_scheduling=False))

    steps_s = [
        COSTS.step_s(BatchShape(prefills=((512, 0),))),
        COSTS.step_s(BatchShape(prefills=((188, 512),))),
        COSTS.step_s(BatchShape(decode_seqs=1, decode_tokens=1, decode_context=700)),
        COSTS.step_s(BatchShape(decode_seqs=1, decode_tokens=1, decode_context=701)),
    ]
    times_s = result.served[0].token_times_s
    assert times_s == pytest.approx(1.0 + np.cumsum(steps_s)[1:])
    assert result.steps == 4
    assert result.finished == 1
    assert result.to_json()["reasons"] == {}


def test_the_long_prefill_threshold_of_stock_vllm_is_in_force() -> None:
    two = [request(0.0, 1000, 1), request(0.0, 1000, 1)]

    assert run("stock:2048", two).steps == 1
    assert run("stock:2048:100", two).steps == 10


def test_a_request_that_arrives_during_a_step_joins_the_next_one() -> None:
    result = run(
        "stock:8192",
        [request(0.0, 8000, 2), request(0.001, 10, 1)],
        engine=EngineSize(async_scheduling=False),
    )

    first, second = result.served
    assert second.token_times_s[0] == first.token_times_s[1]


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("name", ["stock:2048", "penalty", "oracle"])
def test_every_scheduler_finishes_a_light_load_with_all_tokens(name: str, is_async: bool) -> None:
    requests = busy(4.0)

    result = run(name, requests, engine=EngineSize(async_scheduling=is_async))

    assert result.finished == len(requests)
    assert [len(served.token_times_s) for served in result.served] == [60] * len(requests)
    assert all(np.all(np.diff(served.token_times_s) >= 0) for served in result.served)


def test_the_oracle_keeps_every_step_within_the_slo_where_stock_overruns() -> None:
    stock, oracle = run("stock:2048", busy()), run("oracle", busy())

    assert stock.overrun_share > 0.1
    assert oracle.overrun_share == 0.0
    assert np.max(pooled_gaps_s(oracle.served)) <= 0.05 + 1e-9
    assert oracle.goodput.own_p99_gap > stock.goodput.own_p99_gap + 0.5
    assert set(oracle.reasons) >= {"no_prefill", "slo"}


def test_the_penalty_scheduler_learns_the_costs_from_observed_times_alone() -> None:
    result = run("penalty", busy())

    assert result.reasons["cold"] > 0
    assert result.reasons["slo"] > 20
    assert result.overrun_share < 0.02
    assert result.goodput.own_p99_gap > 0.7


def test_equal_seeds_repeat_a_run_and_noise_changes_it() -> None:
    first, again, other, quiet = (
        run("penalty", busy(3.0), noise_cv=noise_cv, seed=seed).served
        for noise_cv, seed in ((0.1, 1), (0.1, 1), (0.1, 2), (0.0, 1))
    )

    assert first == again
    assert first != other
    assert first != quiet


def test_a_drift_slows_every_step() -> None:
    usual, slow = (run("stock:512", busy(3.0), drift_factor=factor) for factor in (1.0, 2.0))

    ratio = np.median(pooled_gaps_s(slow.served)) / np.median(pooled_gaps_s(usual.served))
    assert ratio > 1.9


def test_an_overloaded_run_ends_at_its_time_and_the_unfinished_are_misses() -> None:
    requests = [request(0.0, 4000, 50) for _ in range(60)]

    result = run("stock:512", requests, drain_s=3.0)

    assert 3.0 <= result.virtual_s < 3.3
    assert 0 < result.finished < 60
    assert result.goodput.tpot <= result.finished / 60
    assert len(result.served) == 60


def test_a_run_that_cannot_meet_its_target_any_more_ends_early() -> None:
    requests = draw_poisson("poisson:40:4000:20", np.random.default_rng(0), duration_s=30.0)
    plan = SimulationPlan(
        requests=tuple(requests), device=DeviceSpec(costs=COSTS), engine=EngineSize()
    )

    ended = simulate(SchedulerSpec.parse("stock:512"), plan, most_misses=20)

    assert ended.virtual_s < 0.9 * requests[-1].arrival_s
    assert ended.goodput.tpot * len(requests) < len(requests) - 20


@pytest.mark.parametrize("is_caching", [True, False])
def test_only_with_prefix_caching_the_blocks_of_equal_hash_ids_are_computed_once(
    is_caching: bool,
) -> None:
    engine = EngineSize(prefix_caching=is_caching, async_scheduling=False)
    requests = [request(0.0, 512, 1, 5), request(5.0, 600, 1, 5, 6)]

    result = run("stock:8192", requests, engine=engine)

    first_s, second_s = ttfts_s(result.served)
    assert first_s == pytest.approx(COSTS.step_s(BatchShape(prefills=((512, 0),))))
    second = BatchShape(prefills=((88, 512),)) if is_caching else BatchShape(prefills=((600, 0),))
    assert second_s == pytest.approx(COSTS.step_s(second))


def test_decodes_are_told_from_prefills_as_the_scheduler_does_even_under_preemption(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    befores: list[Composition] = []
    read, schedule = VirtualEngine._read, VirtualEngine._schedule

    def remember(engine: VirtualEngine) -> object:
        befores.append(read_composition(engine.scheduler))
        return schedule(engine)

    def compare(engine: VirtualEngine, output: SchedulerOutput) -> object:
        found = read(engine, output)
        granted = output.num_scheduled_tokens
        decodes = [name for name in granted if name in befores[-1].decode_needs]
        assert found[0].decode_seqs == len(decodes)
        assert found[0].decode_tokens == sum(granted[name] for name in decodes)
        assert found[0].tokens == output.total_num_scheduled_tokens
        return found

    monkeypatch.setattr(VirtualEngine, "_read", compare)
    monkeypatch.setattr(VirtualEngine, "_schedule", remember)
    requests = [request(0.02 * index, 200 + 7 * index, 120) for index in range(30)]

    result = run("stock:512", requests, engine=EngineSize(max_model_len=1000, kv_blocks=200))

    assert result.preemptions > 0
    assert len(befores) > 200


def test_a_deferred_prefill_is_timed_from_the_first_step_that_left_it_out() -> None:
    decodes = [request(0.0, 16, 400) for _ in range(8)]
    late = [request(2.0, 2000, 5)]

    # An SLO below the decode-only time: prefills trickle, after at most max_defer_s.
    result = run("oracle,max_defer_s=0.5", decodes + late, tbt_slo_s=0.005)
    stock = run("stock:8192", decodes + late, tbt_slo_s=0.005)

    assert 0.4 <= result.longest_defer_s <= 0.6
    assert stock.longest_defer_s == 0.0


def test_the_command_line_writes_runs_and_picture_and_prints_a_line_for_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["stock:512", "penalty", "oracle"]
    out, picture = tmp_path / "runs.json", tmp_path / "runs.png"
    arguments = ["simulate", "--synthetic", "poisson:5:500:20", "--duration", "3", "--rate", "1.5"]
    for name in names:
        arguments += ["--scheduler", name]

    status = main([*arguments, "--json", str(out), "--plot", str(picture)])

    printed = capsys.readouterr().out
    runs = json.loads(out.read_text())
    assert status == 0
    assert [run["scheduler"] for run in runs] == names
    assert set(runs[0]) >= {
        "scheduler", "requests", "finished", "steps", "virtual_s", "ttft_s", "tbt_s", "goodput",
        "tokens_per_s", "overrun_share", "wall_s", "reasons", "command", "commit", "seed",
    }  # fmt: skip
    assert list(runs[0]["ttft_s"]) == ["p50", "p90", "p99", "max"]
    assert list(runs[0]["tbt_s"]) == ["p50", "p99", "p999", "max"]
    assert list(runs[0]["goodput"]) == ["tpot", "own_p99_gap", "deadline"]
    assert runs[0]["requests"] == sum(row["requests"] for row in runs[0]["ttft_by_prompt_length"])
    assert all(any(line.startswith(name) for line in printed.splitlines()) for name in names)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_capacity_names_the_best_static_budget_and_writes_every_probe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "capacity.json"
    load = ["--synthetic", "poisson:8:1000:40", "--duration", "3"]
    search = ["--grid", "512,768", "--tolerance", "0.5", "--scheduler", "oracle"]

    status = main(["capacity", *load, *search, "--json", str(out)])

    found = json.loads(out.read_text())
    rates = {entry["scheduler"]: entry["rate"] for entry in found["schedulers"]}
    assert status == 0
    assert list(rates) == ["oracle", "stock:512", "stock:768"]
    assert found["best_static"] == "stock:512"
    assert rates["oracle"] >= rates["stock:512"] > 0.0
    assert rates["stock:768"] == 0.0  # failed where stock:512 did not
    for entry in found["schedulers"]:
        met = [probe["rate"] for probe in entry["probes"] if probe["is_met"]]
        assert entry["rate"] == pytest.approx(max(met, default=0.0), abs=1e-4)
    assert "best static budget in hindsight: stock:512" in capsys.readouterr().out
