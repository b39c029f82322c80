import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_penalty_sched.cli import main, make_parser
from vllm_penalty_sched.serving.demo import settings_from_arguments

HEAVY_MODULES = {"matplotlib", "sklearn", "torch", "vllm", "aiohttp", "tokenizers"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--slo-factor", "1"], "slo_factor must be > 1, got 1.0"),
        (["demo", "--steady", "0"], "steady_requests must be >= 1, got 0"),
        (["demo", "--model", "./no-such-folder"], "model must be a folder or a hub name"),
        (["make-model", "unused", "--hidden", "10"], "hidden_size must be a multiple"),
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
    code = "import vllm_penalty_sched.cli, sys; print(*sys.modules)"

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


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('{"tbt_slo_ms": -1, "mode": "go", "slo": 5}', ["tbt_slo_ms", "got -1", "'go'", "slo"]),
        ('{"model": "no-such-model.json"}', ["no-such-model.json"]),
        ("{", ["not JSON"]),
        (None, ["No such file"]),
    ],
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
