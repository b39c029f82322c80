"""Run README.md: every bash and python block in order, in one folder that looks like a checkout.

A comment on the line above a fence says what else to do with the block:
    <!-- skip: REASON -->  not run; the text above it must state the reason too
    <!-- server -->        started in the background until its --port answers at /health; stopped
                           at the end, or when a later block takes the port
    <!-- output -->        text that the block before it must have printed
"""

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
import urllib.request
import venv
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from vllm_penalty_sched.settings import Settings

README = Path(__file__).parents[1] / "README.md"
FENCE = re.compile(r"(?ms)(.*?)(?:^<!-- ((?:(?!-->).)+) -->\n)?^```(\w*)[^\n]*\n(.*?)^```$")
SHELLS = {"bash": ["bash", "-euo", "pipefail"], "python": ["python"]}
SHOWN = {"console", "json", "text", "promql"}
RUN_LIMIT_S, START_LIMIT_S, STOP_LIMIT_S = 900, 300, 30


class Block(NamedTuple):
    line: int
    text_above: str
    directive: str | None
    language: str
    code: str

    def __str__(self) -> str:
        return f"line {self.line}"


TEXT = README.read_text() if README.exists() else ""
BLOCKS = [Block(TEXT.count("\n", 0, m.start(3)) + 1, *m.groups()) for m in FENCE.finditer(TEXT)]


class Reader:
    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.folder = folder
        self.env = env
        self.printed = ""
        self.servers: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, block: Block) -> tuple[subprocess.Popen[bytes], Path]:
        script = self.folder / f"readme_line_{block.line}.{block.language}"
        script.write_text(block.code)
        log = script.with_suffix(".log")
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*SHELLS[block.language], script.name], cwd=self.folder, env=self.env,
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        return process, log

    def run(self, block: Block) -> None:
        process, log = self.start(block)
        with suppress(subprocess.TimeoutExpired):
            process.wait(RUN_LIMIT_S)
        status = process.poll()
        stop(process)
        self.printed = log.read_text()
        assert status == 0, f"exit status {status} (None: timeout): {log}\n{self.printed[-4000:]}"

    def serve(self, block: Block) -> None:
        found = re.search(r"--port[ =](\d+)", block.code)
        port = found[1] if found else "8000"
        if port in self.servers:
            stop(self.servers.pop(port))
        assert not answers(port), f"another program answers on port {port}"
        process, log = self.start(block)
        self.servers[port] = process
        deadline_s = time.monotonic() + START_LIMIT_S
        while not answers(port):
            alive = process.poll() is None and time.monotonic() < deadline_s
            assert alive, f"no server on port {port}: {log}\n{log.read_text()[-4000:]}"
            time.sleep(1)


def stop(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_LIMIT_S)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def answers(port: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
        return True
    return False


def make_overlay(prefix: Path) -> None:
    # Sees all of ours, but a block's `pip install` cannot replace our editable install.
    venv.create(prefix, symlinks=True, with_pip=True)
    ours = Path(sysconfig.get_path("purelib"))
    link = prefix / ours.relative_to(sys.prefix) / "ours.pth"
    link.write_text(f"import site; site.addsitedir({str(ours)!r})\n")


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    prefix = tmp_path_factory.mktemp("environment")
    make_overlay(prefix)
    path = f"{prefix}/bin:{sys.prefix}/bin:{os.environ['PATH']}"
    env = os.environ | {"VIRTUAL_ENV": str(prefix), "PATH": path}
    reader = Reader(tmp_path_factory.mktemp("readme"), env)
    for entry in README.parent.iterdir():
        if entry.name not in {".git", "build", "dist"}:
            (reader.folder / entry.name).symlink_to(entry)
    yield reader
    for server in reader.servers.values():
        stop(server)


def test_the_readme_exists_and_every_fence_in_it_is_a_block() -> None:
    assert README.exists()
    assert len(re.findall(r"^ *```", TEXT, re.MULTILINE)) == 2 * len(BLOCKS) > 0


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_the_block_is_of_a_known_kind_and_a_skip_says_why(block: Block) -> None:
    kind, _, reason = (block.directive or "run").partition(": ")
    reason_is_stated = reason.lower() in " ".join(block.text_above.lower().split())

    assert block.language in SHELLS.keys() | SHOWN
    assert kind in {"run", "skip", "server", "output"}
    assert reason_is_stated, f"the text above the fence must say: {reason}"
    assert bool(reason) == (kind == "skip")


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "json"], ids=str)
def test_the_json_block_holds_valid_settings(block: Block) -> None:
    values = json.loads(block.code)
    if isinstance(values, dict) and isinstance(values.get("penalty_sched"), dict):
        Settings.from_mapping(values["penalty_sched"])


@pytest.mark.vllm
@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if b.language in SHELLS or b.directive], ids=str
)
def test_the_block_runs(block: Block, reader: Reader) -> None:
    if block.directive == "server":
        reader.serve(block)
    elif block.directive == "output":
        assert block.code.strip() in reader.printed
    elif block.directive:
        pytest.skip(block.directive)
    else:
        reader.run(block)
