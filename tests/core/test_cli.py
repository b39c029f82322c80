import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.core.test_fitting import on_the_published_curve, random_samples
from vllm_penalty_sched import BatchShape, load_model
from vllm_penalty_sched.calibration.samples import SamplesOrigin, write_samples
from vllm_penalty_sched.cli.program import main, make_parser
from vllm_penalty_sched.serving.demo import settings_from_arguments

LOAD = ["--model", "no-such-model", "--synthetic", "poisson:1:100:10"]
HEAVY_MODULES = {"matplotlib", "sklearn", "torch", "vllm", "aiohttp", "tokenizers"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--slo-factor", "1"], "slo_factor must be > 1, got 1.0"),
        (["demo", "--steady", "0"], "steady_requests must be >= 1, got 0"),
        (["demo", "--model", "./no-such-folder"], "model must be a folder or a hub name"),
        (["demo", "--seed", "-1"], "seed must be >= 0, got -1"),
        (["demo", "--prompts", "1000000000"], "injected_requests must be <= 10000000"),
        (["demo", "--json", "."], "cannot write .: Is a directory"),
        (["make-model", "unused", "--hidden", "10"], "hidden_size must be a multiple"),
        (["make-model", "unused", "--seed", "-1"], "seed must be >= 0, got -1"),
        (["check", "no-such-file", "--json", ""], "cannot write .: Is a directory"),
        (["report", "no-such-file", "--json", "/proc/no-such/x"], "cannot write /proc/no-such/x"),
        (["advise", *LOAD, "--json", "."], "cannot write .: Is a directory"),
        (["capacity", *LOAD[2:], "--json", "."], "cannot write .: Is a directory"),
        (["simulate", *LOAD[2:], "--json", ""], "cannot write .: Is a directory"),
    ],
)
def test_bad_input_ends_with_status_2_and_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(arguments)

    printed = capsys.readouterr()
    assert status == 2
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("vllm-penalty: error: ")
    assert message in printed.err


def test_an_unwritable_folder_ends_with_status_2_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("not a folder")

    status = main(["make-model", str(tmp_path / "file" / "model")])

    printed = capsys.readouterr()
    assert status == 2
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["no-such-command"], ["demo", "--seed", "one"]])
def test_an_unknown_command_or_value_ends_with_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)

    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("vllm-penalty")
    assert printed.count("\n") == 1


def test_demo_options_reach_the_settings() -> None:
    options = ["demo", "--out", "here", "--steady", "3", "--prompts", "5", "--serve-args"]
    arguments = make_parser().parse_args([*options, "--dtype bfloat16"])

    settings = settings_from_arguments(arguments, command="vllm-penalty demo")

    assert settings.out == Path("here")
    assert (settings.load.steady_requests, settings.load.injected_requests) == (3, 5)
    assert settings.engine_args == ("--dtype", "bfloat16")


def test_the_command_line_loads_no_heavy_module_before_it_needs_one() -> None:
    code = "import vllm_penalty_sched.cli.program, sys; print(*sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert HEAVY_MODULES.isdisjoint(done.stdout.split())


@pytest.mark.vllm
def test_make_model_writes_a_model_of_the_asked_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(
        ["make-model", str(tmp_path), "--layers", "1", "--hidden", "32", "--vocab", "300"]
    )

    assert status == 0
    assert (tmp_path / "model.safetensors").stat().st_size > 4 * 300 * 32
    assert "parameters" in capsys.readouterr().out


def test_check_shows_the_settings_in_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "good.json").write_text('{"tbt_slo_ms": 42}')

    status = main(["check", str(tmp_path / "good.json"), "--json", str(tmp_path / "all.json")])

    assert status == 0
    assert re.search(r"tbt_slo_ms +42\b", capsys.readouterr().out)
    in_force = json.loads((tmp_path / "all.json").read_text())
    assert in_force["tbt_slo_ms"] == 42
    assert in_force["tbt_slo_scale"] == 2.0


def test_check_warns_of_settings_that_do_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "inert.json"
    path.write_text('{"penalty_sched": {"ttft_slo_ms": 900, "order": "fcfs", "mode": "observe"}}')

    status = main(["check", str(path)])

    printed = capsys.readouterr()
    assert status == 0
    assert re.search(r"order +fcfs\b", printed.out)
    assert printed.err.count("\n") == 1
    assert "warning: ttft_slo_ms (900) has no effect" in printed.err


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('{"tbt_slo_ms": -1, "mode": "go", "slo": 5}', ["tbt_slo_ms", "got -1", "'go'", "slo"]),
        ('{"model": "no-such-model.json"}', ["no-such-model.json"]),
        ("{", ["not JSON"]),
        ("[" * 100_000, ["no settings file"]),
        (None, ["No such file"]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_check_tells_every_mistake_in_one_line(
    text: str | None, parts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.json"
    if text is not None:
        path.write_text(text)

    status = main(["check", str(path)])

    printed = capsys.readouterr()
    assert status == 2
    assert printed.err.count("\n") == 1
    for part in parts:
        assert part in printed.err


@pytest.fixture
def samples_path(tmp_path: Path) -> Path:
    origin = SamplesOrigin(
        hardware="a made-up GPU",
        vllm_version="0.32.0",
        model="a-model",
        concurrency=8,
        grid="full",
        plugin_version="0.1.0",
        date="2026-01-01T00:00:00+00:00",
    )
    path = tmp_path / "samples.csv"
    path.write_text(write_samples(origin, [*on_the_published_curve(), *random_samples(60)]))
    return path


def test_fit_prints_the_curve_and_writes_its_figures(
    samples_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures_path = tmp_path / "figures.json"

    status = main(["fit", str(samples_path), "--form", "curve", "--json", str(figures_path)])

    assert status == 0
    assert "f(r) = 1.630 r^2 + 1.390 r + 14.520 ms" in capsys.readouterr().out
    figures = json.loads(figures_path.read_text())
    assert figures["coefficients_ms"] == pytest.approx([14.52, 1.39, 1.63])
    assert (figures["model"], figures["hardware"]) == ("a-model", "a made-up GPU")


def test_fit_takes_the_degree_of_the_curve(
    samples_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["fit", str(samples_path), "--form", "curve", "--degree", "1"])

    assert status == 0
    assert "r^2 +" not in capsys.readouterr().out


def test_fit_saves_a_step_time_model_that_knows_where_it_is_from(
    samples_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["fit", str(samples_path), "--form", "step", "--out", str(tmp_path / "m.json")])

    assert status == 0
    assert re.search(r"R\^2 = 0\.\d+, MAPE \d+\.\d+%", capsys.readouterr().out)
    model = load_model(tmp_path / "m.json")
    assert model.provenance.hardware == "a made-up GPU"
    assert model.provenance.vllm_version == "0.32.0"
    assert model.predict_s(BatchShape(decode_seqs=8, decode_tokens=8, decode_context=800)) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--synthetic", "poisson:1:9:9", "--duration", "inf"], "at most 10000000 requests"),
        (["--synthetic", "poisson:1:9:9", "--ttft-slo-ms", "1e-9"], "within 10000000 times"),
        (["--live", "http://127.0.0.1:1/ x"], "cannot read http://127.0.0.1:1/ x/metrics"),
    ],
)
def test_advise_refuses_bad_traffic_in_one_line(
    options: list[str],
    message: str,
    samples_path: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = str(tmp_path / "m.json")
    main(["fit", str(samples_path), "--form", "step", "--out", model])
    capsys.readouterr()

    status = main(["advise", "--model", model, "--kv-bytes-per-token", "1000", *options])

    printed = capsys.readouterr()
    assert status == 2
    assert printed.err.count("\n") == 1
    assert message in printed.err


@pytest.mark.slow
def test_plot_writes_a_picture(samples_path: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    status = main(["plot", str(samples_path), "--out", str(tmp_path / "fit.png")])

    assert status == 0
    assert (tmp_path / "fit.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit", "no-such.csv", "--form", "curve"], "No such file"),
        (["plot", "no-such.csv", "--out", "unused.png"], "No such file"),
        (["fit", "SAMPLES", "--form", "curve", "--out", "unused.json"], "give --form step"),
        (["fit", "SAMPLES", "--form", "step", "--degree", "2"], "give --form curve"),
        (["fit", "SAMPLES", "--form", "curve", "--degree", "0"], "degree must be >= 1, got 0"),
        (["fit", "SAMPLES", "--form", "curve", "--degree", "30"], "more than 30 different"),
        (["fit", "NONSENSE", "--form", "step"], "nonsense.csv"),
        (["fit", "SAMPLES", "--form", "step", "--out", ""], "Is a directory"),
        (["fit", "ODD", "--form", "step"], "column seconds: must be a number from 1e-09 to 1e+09"),
        (["plot", "SAMPLES", "--out", "picture.xyz"], "picture.xyz"),
        (["plot", "SAMPLES", "--out", "NONSENSE/picture.png"], "Not a directory"),
    ],
)
def test_fit_and_plot_refuse_bad_input_in_one_line(
    arguments: list[str],
    message: str,
    samples_path: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if arguments[0] == "plot":
        pytest.importorskip("matplotlib")
    (tmp_path / "nonsense.csv").write_bytes(b"\x89PNG\0 nonsense")
    odd = re.sub(r"[^,]*$", "1e300\n", samples_path.read_text())
    (tmp_path / "odd.csv").write_text(odd)
    files = {
        "SAMPLES": str(samples_path),
        "NONSENSE": str(tmp_path / "nonsense.csv"),
        "ODD": str(tmp_path / "odd.csv"),
    }

    status = main([re.sub("[A-Z]+", lambda name: files[name[0]], word) for word in arguments])

    printed = capsys.readouterr()
    assert status == 2
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert message in printed.err
