"""The real command on a real engine, with limits that leave a small grid."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

from vllm_penalty_sched.calibration.samples import Sample, read_samples  # noqa: E402
from vllm_penalty_sched.cli.program import main  # noqa: E402
from vllm_penalty_sched.serving.server import CPU_ENGINE_ARGS, serves_on_cpu  # noqa: E402
from vllm_penalty_sched.serving.tiny_model import TinyModelSpec, make_tiny_model  # noqa: E402

PROGRAM = Path(sys.executable).with_name("vllm-penalty")
ENGINE_ARGS = (
    *(CPU_ENGINE_ARGS if serves_on_cpu() else ("--gpu-memory-utilization", "0.3")),
    *("--max-num-batched-tokens", "128", "--max-num-seqs", "8"),
)
START_S = 180.0


@dataclass(frozen=True)
class Calibrated:
    interrupted_status: int
    interrupted_text: str
    status: int
    text: str
    figures: dict
    samples: list[Sample]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    sizes = TinyModelSpec(
        hidden_size=64, intermediate_size=128, layers=1, attention_heads=1, max_tokens=512
    )
    make_tiny_model(folder, sizes)
    return str(folder)


@pytest.fixture(scope="module")
def calibrated(model: str, tmp_path_factory: pytest.TempPathFactory) -> Calibrated:
    folder = tmp_path_factory.mktemp("calibration")
    out, figures = folder / "samples.csv", folder / "figures.json"
    command = [str(PROGRAM), "calibrate", model, "--out", str(out), "--quick"]
    command += ["--json", str(figures), "--", *ENGINE_ARGS]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    interrupted = start(command, environment)
    wait_for_samples(out, interrupted, least=5)
    os.killpg(interrupted.pid, signal.SIGINT)  # what ctrl-C in a terminal does
    interrupted_status = interrupted.wait(timeout=60)
    interrupted_text = out.read_text()

    # As if the machine had lost its power while a line was written.
    out.write_text(interrupted_text + "step,8x128,16:")
    resumed = start(command, environment)
    _, errors = resumed.communicate(timeout=600)
    assert resumed.returncode == 0, errors[-3000:]
    text = out.read_text()
    return Calibrated(
        interrupted_status=interrupted_status,
        interrupted_text=interrupted_text,
        status=resumed.returncode,
        text=text,
        figures=json.loads(figures.read_text()),
        samples=read_samples(text, source="samples.csv")[1],
    )


def start(command: list[str], environment: dict[str, str]) -> subprocess.Popen:
    # A shell's background job ignores ctrl-C, and so would all that it starts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(
            command, env=environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGINT, before)


def wait_for_samples(path: Path, process: subprocess.Popen, *, least: int) -> None:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s and process.poll() is None:
        if path.exists() and path.read_text().count("\ncurve,") >= least:
            return
        time.sleep(0.05)
    process.kill()
    pytest.fail(f"no samples: {process.communicate()[1][-3000:]}")


def test_an_interrupted_calibration_goes_on_where_it_stopped(calibrated: Calibrated) -> None:
    earlier = calibrated.interrupted_text.count("\ncurve,")

    assert calibrated.interrupted_status == 130
    assert calibrated.status == 0
    assert calibrated.text.startswith(calibrated.interrupted_text)
    assert calibrated.figures["earlier"] == earlier >= 5
    left = calibrated.figures["points"] - len(calibrated.figures["left_out"])
    assert calibrated.figures["measured"] == left - earlier > 0


def test_every_point_of_the_grid_ran_as_planned_and_stands_once_in_the_file(
    calibrated: Calibrated,
) -> None:
    points = Counter((sample.series, sample.point) for sample in calibrated.samples)

    # A machine under load may have no time for all of them.
    left_out = len(calibrated.figures["left_out"])
    assert calibrated.figures["not_run"] == []
    assert calibrated.figures["never_measured"] == []
    assert len(points) == calibrated.figures["points"] - left_out
    assert set(points.values()) == {1}


def test_the_samples_go_from_decodes_to_prefills_and_fill_the_token_budget(
    calibrated: Calibrated,
) -> None:
    curve = [sample.shape for sample in calibrated.samples if sample.series == "curve"]
    steps = [sample.shape for sample in calibrated.samples if sample.series == "step"]

    assert {shape.decode_seqs + len(shape.prefills) for shape in curve} == {8}
    assert {min(s.prefill_ratio for s in curve), max(s.prefill_ratio for s in curve)} == {0.0, 1.0}
    assert max(shape.tokens for shape in steps) == 128
    assert {shape.decode_seqs for shape in steps} >= {0, 1, 4}
    for shape in curve + steps:
        assert shape.decode_context >= 128 * shape.decode_seqs


def test_the_file_tells_where_it_was_measured(calibrated: Calibrated, model: str) -> None:
    origin, _ = read_samples(calibrated.text, source="samples.csv")

    assert origin.model == model
    assert origin.engine_args == ENGINE_ARGS
    assert (origin.concurrency, origin.grid) == (8, "quick")
    assert origin.vllm_version
    assert origin.hardware


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    # What the command sets for vLLM would else stay for the servers of other tests.
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")


@pytest.mark.parametrize(
    ("options", "engine_args", "message"),
    [
        ([], ["--no-such-option"], "--no-such-option"),
        ([], ["--max-num-seqs", "many"], "--max-num-seqs"),
        ([], ["--async-scheduling"], "async_scheduling"),
        ([], ["--enable-prefix-caching"], "enable_prefix_caching"),
        ([], ["--model", "another"], "twice"),
        ([], ["--max-model-len", "100000"], "max_model_len"),
        ([], ["--pipeline-parallel-size", "2"], "pipeline"),
        (["--concurrency", "1"], [], "concurrency must be >= 2, got 1"),
    ],
)
def test_bad_input_ends_with_status_2_and_one_line(
    model: str,
    tmp_path: Path,
    options: list[str],
    engine_args: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = ["--out", str(tmp_path / "samples.csv")]

    status = main(["calibrate", model, *out, *options, "--", *engine_args])

    ours = [line for line in capsys.readouterr().err.splitlines() if "vllm-penalty:" in line]
    assert status == 2
    assert list(tmp_path.iterdir()) == []
    assert len(ours) == 1
    assert ours[0].startswith("vllm-penalty: error: ")
    assert message in ours[0]


def test_a_file_measured_otherwise_is_left_alone(
    calibrated: Calibrated, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "samples.csv"
    path.write_text(calibrated.text)

    status = main(["calibrate", model, "--out", str(path), "--quick", "--concurrency", "4"])

    assert status == 2
    assert "concurrency is 8 there and 4 here" in capsys.readouterr().err
    assert path.read_text() == calibrated.text
