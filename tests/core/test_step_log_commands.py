import gzip
import json
import warnings
from pathlib import Path

import numpy as np
import pytest

from tests.step_records import line_of, log_of, step, text_of
from vllm_penalty_sched.cli.program import main
from vllm_penalty_sched.policy import Reason
from vllm_penalty_sched.step_log.plot import draw_steps, elapsed_s, thin
from vllm_penalty_sched.step_log.records import StepLog, StepTable

LOG = log_of(
    step(80.0, decodes=0, prefill=200, reason=Reason.NO_DECODE, slo_ms=None),
    [step(20.0), step(45.0, prefill=100)] * 10,
    step(60.0, prefill=200, reason=Reason.AGED),
)


@pytest.fixture
def trace_path(tmp_path: Path) -> Path:
    path = tmp_path / "steps.jsonl"
    path.write_text(text_of(LOG.steps))
    return path


def figures_of(path: Path, tmp_path: Path) -> dict[str, object]:
    figures_path = tmp_path / "figures.json"
    assert main(["report", str(path), "--json", str(figures_path)]) == 0
    figures: dict[str, object] = json.loads(figures_path.read_text())
    return figures


def test_report_prints_a_page_and_writes_all_its_figures(
    trace_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = figures_of(trace_path, tmp_path)

    page = capsys.readouterr().out
    assert "steps                 22 in 0.79 s" in page
    assert "95.24% of 21 steps with decodes, 1 overran" in page
    assert "aged                       1      4.5%" in page
    assert page.index("what to change") < page.index("aged chunks")
    assert max(len(line) for line in page.splitlines()) <= 92 + len(str(trace_path))
    assert figures["steps"] == 22
    assert figures["slo"]["worst"]["reason"] == "aged"
    assert figures["penalty"]["penalty_s"] == pytest.approx(10 * 0.025 + 0.040)
    assert "aged" in figures["advice"]
    assert figures["command"].startswith("vllm-penalty report")


def test_a_calm_trace_has_nothing_to_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "calm.jsonl"
    path.write_text(text_of(log_of([step(20.0), step(45.0, prefill=100)] * 20).steps))

    assert main(["report", str(path)]) == 0

    assert capsys.readouterr().out.endswith("what to change\n  nothing to change\n")


@pytest.mark.parametrize("rotated", ["steps.jsonl.1", "steps.jsonl.1.gz"])
@pytest.mark.parametrize("newest", ["steps.jsonl", "steps.jsonl.gz"])
def test_a_rotated_or_gzipped_trace_reads_as_one(rotated: str, newest: str, tmp_path: Path) -> None:
    for name, steps in ((rotated, LOG.steps[:9]), (newest, LOG.steps[9:])):
        content = text_of(steps).encode()
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)

    figures = figures_of(tmp_path / newest, tmp_path)

    assert (figures["steps"], figures["runs"]) == (22, 1)


def test_a_trace_that_was_gzipped_since_is_found_by_its_name(tmp_path: Path) -> None:
    for name, steps in (("steps.jsonl.1.gz", LOG.steps[:9]), ("steps.jsonl.gz", LOG.steps[9:])):
        (tmp_path / name).write_bytes(gzip.compress(text_of(steps).encode()))

    assert figures_of(tmp_path / "steps.jsonl", tmp_path)["steps"] == 22


def test_the_figures_are_written_though_nobody_reads_the_page(
    trace_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(*_args: object, **_options: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("builtins.print", closed)
    with pytest.raises(BrokenPipeError):
        main(["report", str(trace_path), "--json", str(tmp_path / "figures.json")])

    assert json.loads((tmp_path / "figures.json").read_text())["steps"] == 22


def test_just_after_a_rotation_the_rotated_file_is_read(trace_path: Path, tmp_path: Path) -> None:
    trace_path.rename(tmp_path / "steps.jsonl.1")

    assert figures_of(trace_path, tmp_path)["steps"] == 22


def test_a_cut_last_line_is_told(
    trace_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with trace_path.open("a") as file:
        file.write(line_of(LOG.steps[0])[:40])

    figures = figures_of(trace_path, tmp_path)

    assert figures["cut_lines"] == 1
    assert "(cut lines: 1)" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["report", "plot"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"{}\n", "line 1, field prefills: must be a list"),
        (text_of(LOG.steps).encode() + b"{nonsense\n", "line 23: not JSON"),
        (line_of(LOG.steps[0])[:30].encode(), "at least one whole line"),
        (gzip.compress(text_of(LOG.steps).encode())[:-20], "not a whole gzip file"),
    ],
)
def test_bad_input_ends_with_status_2_and_one_line(
    command: str,
    content: bytes | None,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "bad.jsonl"
    if content is not None:
        path.write_bytes(content)
    out = ["--out", str(tmp_path / "bad.png")] if command == "plot" else []

    status = main([command, str(path), *out])

    printed = capsys.readouterr()
    assert status == 2
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert "bad.jsonl" in printed.err
    assert message in printed.err


@pytest.mark.parametrize("content", [b"", b"\x89PNG\0 nonsense\xff", b"# a comment\n"])
def test_report_refuses_what_is_no_trace(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_bytes(content)

    status = main(["report", str(tmp_path / "file")])

    printed = capsys.readouterr()
    assert status == 2
    assert printed.err.count("\n") == 1


@pytest.mark.slow
def test_plot_tells_a_trace_by_its_content(
    trace_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    renamed = trace_path.rename(tmp_path / "steps.csv")

    status = main(["plot", str(renamed), "--out", str(tmp_path / "steps.svg")])

    assert status == 0
    assert "wrote" in capsys.readouterr().out
    assert "<svg" in (tmp_path / "steps.svg").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "log",
    [
        LOG,
        log_of(step(80.0, decodes=0, prefill=200, reason=Reason.NO_DECODE, slo_ms=None)),
        log_of(step(1.0), step(500.0, slo_ms=None), step(5.0, predicted_ms=0.0)),
        StepLog(steps=tuple(step(10.0, done_s=done_s) for done_s in (5.0, 4.0, 4.0, 9.0))),
    ],
)
def test_traces_are_drawn_without_warnings(log: StepLog, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_steps(tmp_path / "steps.png", log, title="a trace")

    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")


def test_thinning_keeps_the_highest_of_all_neighbours() -> None:
    heights = np.random.default_rng(0).random(100_000)
    heights[54_321] = 2.0
    places = np.arange(100_000)

    kept = thin(places, heights)

    assert len(kept) <= 4000
    assert 54_321 in kept
    assert np.all(np.diff(kept) > 0)
    # No stretch of a picture is left empty, and no hundred neighbours lose their highest.
    assert np.max(np.diff(kept)) <= 100
    for start in range(0, 100_000, 100):
        assert heights[start : start + 100].max() in heights[kept]
    assert np.array_equal(thin(places[:4000], heights), places[:4000])


def test_a_new_start_of_the_engine_follows_the_run_before() -> None:
    steps = [step(10.0, done_s=done_s) for done_s in (5.0, 5.5, 1.0, 1.5)]

    assert elapsed_s(StepTable.of(steps)) == pytest.approx([0.01, 0.51, 0.52, 1.02])
