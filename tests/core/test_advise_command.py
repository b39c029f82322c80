import json
from pathlib import Path

import numpy as np
import pytest

from vllm_penalty_sched.batch import BatchShape
from vllm_penalty_sched.cli.program import main
from vllm_penalty_sched.learning.latency import StepTimeModel
from vllm_penalty_sched.simulation.cost_profiles import find_profile

pytestmark = pytest.mark.slow

LOAD = ["--synthetic", "poisson:5:1000:50", "--kv-bytes-per-token", "131072"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    rng, costs = np.random.default_rng(0), find_profile("a100-llama3-8b")
    shapes = [
        BatchShape(
            prefills=((int(2 ** rng.uniform(3, 13)), int(rng.integers(0, 3000))),),
            decode_seqs=seqs,
            decode_tokens=seqs,
            decode_context=700 * seqs,
        )
        for seqs in rng.integers(0, 200, 300).tolist()
    ]
    shapes += [shape.without_prefill() for shape in shapes if shape.decode_seqs]
    path = tmp_path_factory.mktemp("model") / "model.json"
    StepTimeModel().fit(shapes, [costs.step_s(shape) for shape in shapes]).save(path)
    return str(path)


def test_it_says_yes_or_no_and_why(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "advice.json"

    status = main(["advise", "--model", model, *LOAD, "--tbt-slo-ms", "16", "--json", str(out)])

    printed = capsys.readouterr()
    written = json.loads(out.read_text())
    assert status == 0
    assert printed.out.startswith("yes: disaggregate (+")
    assert written["disaggregate"] is True
    assert written["apart_per_s"] > written["together_per_s"] > 0.0
    assert f"{written['apart_per_s']:.2f} requests/s, 1 for prefill" in printed.out
    assert f"{written['break_even_tokens']} tokens and more" in printed.out
    assert "estimating capacities" in printed.err
    assert written["command"].startswith("vllm-penalty advise")


def test_a_slow_link_turns_it_to_no(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["advise", "--model", model, *LOAD, "--bandwidth-gbs", "0.01"])

    assert status == 0
    assert capsys.readouterr().out.startswith("no: let every GPU do both (")


@pytest.mark.parametrize(
    ("tbt_slo_ms", "verdict"),
    [
        ("5", "no: either way {}"),
        ("11.8", "yes: disaggregate (otherwise {})"),
    ],
)
def test_a_way_that_carries_nothing_is_told_without_a_percentage(
    model: str, tbt_slo_ms: str, verdict: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["advise", "--model", model, *LOAD, "--tbt-slo-ms", tbt_slo_ms])

    assert status == 0
    missed = "under 90% of the requests are within both SLOs, at any rate"
    assert capsys.readouterr().out.splitlines()[0] == verdict.format(missed)


def test_a_loose_slo_carries_no_less_than_a_tight_one(model: str, tmp_path: Path) -> None:
    capacities = []
    for tbt_slo_ms in ("100", "1000", "2000"):
        out = tmp_path / f"{tbt_slo_ms}.json"
        main(["advise", "--model", model, *LOAD, "--tbt-slo-ms", tbt_slo_ms, "--json", str(out)])
        capacities.append(json.loads(out.read_text())["together_per_s"])

    assert capacities == sorted(capacities)
    assert capacities[0] > 1.0


def test_a_trace_is_read_in_any_of_the_forms_of_simulate(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.csv"
    rows = [f"{number},{500 + number},20" for number in range(60)]
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]))

    assert main(["advise", "--model", model, "--trace", str(path), *LOAD[2:]]) == 0
    assert "arriving:               1.00 requests/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (LOAD[:2], "give --kv-bytes-per-token"),
        ([*LOAD, "--gpus", "1"], "--gpus must be from 2"),
        ([*LOAD, "--bandwidth-gbs", "0"], "--bandwidth-gbs must be a number > 0"),
        ([*LOAD, "--tbt-slo-ms", "nan"], "--tbt-slo-ms must be a number > 0"),
        ([*LOAD, "--max-num-seqs", "0"], "--max-num-seqs must be >= 1"),
        (["--trace", "no-such-file", *LOAD[2:]], "no-such-file"),
        (["--synthetic", "poisson", *LOAD[2:]], "poisson:RATE:PROMPT:OUTPUT"),
        (["--live", "http://127.0.0.1:1", *LOAD[2:]], "cannot read http://127.0.0.1:1/metrics"),
    ],
)
def test_bad_input_ends_with_status_2_and_one_line(
    model: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["advise", "--model", model, *arguments])

    printed = capsys.readouterr()
    assert status == 2
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert message in printed.err


def test_a_model_that_is_none_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--model", "no-such-model", *LOAD]) == 2
    assert "cannot read the model no-such-model" in capsys.readouterr().err
