import gzip
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_penalty_sched.cli.program import main

LOAD = ["--synthetic", "poisson:1:100:10", "--scheduler", "penalty"]
TRACED, DEEP = "penalty,trace_path=", "penalty,order=" + "[" * 100_000
TRACE = "arrival_s,prompt_tokens,output_tokens\n0,10,5\n1,20,5\n"


def fails_with_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    status = main(arguments)

    printed = capsys.readouterr()
    assert status == 2
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("vllm-penalty: error: ")
    return printed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simulate", *LOAD[:2]], "give at least one --scheduler"),
        (["simulate", *LOAD, "--scheduler", "stock"], "a scheduler must be stock:BUDGET"),
        (["simulate", *LOAD, "--scheduler", "stock:100"], "at least max_num_seqs (256)"),
        (["simulate", *LOAD, "--order", "random"], "order must be one of"),
        (["simulate", *LOAD, "--tbt-slo-ms", "0"], "tbt_slo_ms must be"),
        (["simulate", *LOAD, "--costs", "profile:b200"], "b200 is no cost profile"),
        (["simulate", *LOAD, "--costs", "no-such-file.csv"], "no-such-file.csv"),
        (["simulate", *LOAD, "--drift", "soon"], "--drift must be TIME:FACTOR"),
        (["simulate", *LOAD, "--noise", "-1"], "noise must be"),
        (["simulate", *LOAD, "--overhead-ms", "nan"], "--overhead-ms must be a number >= 0"),
        (["simulate", *LOAD, "--mixed-decode-factor", "0"], "mixed-decode factor must be >= 1"),
        (["simulate", *LOAD, "--max-model-len", "50"], "longer than max_model_len 50"),
        (["simulate", *LOAD, "--kv-blocks", "10"], "kv_blocks must be"),
        (["simulate", *LOAD, "--rate", "0"], "rate must be a number > 0"),
        (["simulate", *LOAD, "--start", "-1"], "start >= 0"),
        (["simulate", *LOAD, "--start", "1e9"], "at most 10000000 requests"),
        (["simulate", *LOAD, "--duration", "inf"], "at most 10000000 requests"),
        (["simulate", *LOAD, "--seed", "3", "--seed", "-1"], "--seed must be >= 0, got -1"),
        (["capacity", *LOAD, "--seed", "-1"], "--seed must be >= 0, got -1"),
        (["simulate", *LOAD[:2], "--scheduler", DEEP], "order must be one of"),
        (["simulate", *LOAD[:2], "--scheduler", f"{TRACED}/proc/no-such/x"], "cannot write /proc"),
        (["simulate", *LOAD[:2], "--scheduler", f"{TRACED}."], "cannot write .: Is a directory"),
        (["capacity", *LOAD[:2], "--scheduler", f"{TRACED}."], "cannot write .: Is a directory"),
        (["simulate", *LOAD[:2], "--scheduler", "penalty,state_path=."], "cannot write ."),
        (["simulate", *LOAD, "--jobs", "0"], "--jobs must be >= 1"),
        (["simulate", "--synthetic", "poisson", *LOAD[2:]], "poisson:RATE:PROMPT:OUTPUT"),
        (["capacity", *LOAD, "--target", "2"], "target must be a share"),
        (["capacity", *LOAD, "--tolerance", "0"], "tolerance must be a share"),
        (["capacity", *LOAD, "--grid", "512,many"], "got stock:many"),
    ],
)
def test_bad_input_ends_with_status_2_and_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in fails_with_one_line(arguments, capsys)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (TRACE.encode() + b"2,x,5\n", "line 4: prompt_tokens must be a whole number >= 1"),
        (gzip.compress(TRACE.encode())[:-9], "is not a whole gzip file"),
        (gzip.compress(TRACE.encode())[:10] + b"\xff" * 50, "is not a whole gzip file"),
        (TRACE.encode() + b"2," + b"1" * 140_000 + b",5\n", "line 4: not CSV: field larger"),
        (b'{"timestamp": ' + b"[" * 100_000, "line 1: must be a JSON object"),
        (b'{"timestamp": ' + b"9" * 400 + b"}", "line 1: timestamp must be a number >= 0"),
        (b"\x00\xff", "line 1: a trace must be"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_trace_ends_with_its_name_and_line(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(content)

    line = fails_with_one_line(["simulate", "--trace", str(path), "--scheduler", "penalty"], capsys)

    assert str(path) in line
    assert message in line


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (f"linear,{'1' * 140_000},0,1", "line 2: not CSV: field larger"),
        (f"linear,{'1' * 400},0,1", "line 2: table,x,y,ms must be counts >= 0 and a cost >= 0"),
        ("linear,1,0,1e300", "line 2: table,x,y,ms must be counts >= 0 and a cost >= 0"),
        ("linear,0,0,1\nattn_prefill,1,0,1\nattn_decode,1,0,1", "table linear must hold a cost"),
        ("linear,1,0,0\nattn_prefill,1,0,1\nattn_decode,1,0,1", "table linear must hold a cost"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_costs_end_with_their_name_and_line(
    rows: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "costs.csv"
    path.write_text(f"table,x,y,ms\n{rows}\n")

    line = fails_with_one_line(["simulate", *LOAD, "--costs", str(path)], capsys)

    assert str(path) in line
    assert message in line
    assert len(line) < 400


@pytest.mark.parametrize(
    ("picture", "message"),
    [("x.txt", "a picture's suffix must be one of"), ("file/x.png", "cannot write file/x.png")],
)
def test_a_picture_that_cannot_be_drawn_is_told_before_the_run(
    picture: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")

    assert message in fails_with_one_line(["simulate", *LOAD, "--plot", picture], capsys)
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_bad_input_is_told_before_vllm_is_imported() -> None:
    code = (
        "import sys; from vllm_penalty_sched.cli.program import main;"
        "status = main(['simulate', '--synthetic', 'poisson:1:1:1', '--scheduler', 'stock:1']);"
        "print(status, 'vllm' in sys.modules)"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.split() == ["2", "False"]
