"""What was learned survives SIGKILL at any moment.

Here a process with a real scheduler on virtual time, which saves after every few steps; a real
server that is killed is in test_server.py.
"""

import json
import logging
import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

from tests.engine.virtual import add, make_engine, play, start_decodes  # noqa: E402
from vllm_penalty_sched import Scheduler, load_model  # noqa: E402
from vllm_penalty_sched.engine import learned_state  # noqa: E402

LOG = "vllm.penalty_sched"
KILLS = 15
LONGEST_LIFE_S = 0.25
SAVE_PERIOD_S = 0.05  # of virtual time: about three steps


def learn_for_ever(path: str) -> None:
    learned_state.SAVE_PERIOD_S = SAVE_PERIOD_S
    engine = make_engine(Scheduler, {"tbt_slo_ms": 56.0, "state_path": path})
    start_decodes(engine, 8, output=1_000_000)
    for number in range(1_000_000):
        add(engine, f"long-{number}", 500, 4)
        play(engine, 10)
        engine.steps.clear()


def kill_after_first_save(path: Path, life_s: float) -> None:
    """Run until a save by this very process, and for a random time on."""
    before = path.stat().st_mtime_ns if path.exists() else None
    # Forked: it shares what this process has imported, which takes vLLM tens of seconds.
    process = multiprocessing.get_context("fork").Process(target=learn_for_ever, args=(str(path),))
    process.start()
    deadline_s = time.monotonic() + 30.0
    while not path.exists() or path.stat().st_mtime_ns == before:
        assert process.is_alive()
        assert time.monotonic() < deadline_s, "nothing was saved"
        time.sleep(0.002)
    time.sleep(life_s)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL


def test_the_state_survives_kill_9_at_any_moment_and_learning_goes_on_from_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "state.json"
    lives_s = np.random.default_rng(0).uniform(0.0, LONGEST_LIFE_S, KILLS)
    samples = []
    for life_s in lives_s.tolist():
        kill_after_first_save(path, life_s)
        samples.append(load_model(path).samples)

    with caplog.at_level(logging.INFO, LOG):
        planner = make_engine(Scheduler, {"state_path": str(path)}).scheduler.planner

    # Each process went on from what the one before had saved last.
    assert samples == sorted(samples)
    assert samples[-1] > samples[0]
    assert planner.model.samples == samples[-1]
    assert f"going on from {path}" in caplog.text


def test_what_killed_writers_left_behind_does_not_pile_up(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    for number in range(20):
        left = tmp_path / f".state.json.{number:016x}.tmp"
        left.write_text('{"schema": "half a fi')
        os.utime(left, (time.time() - 3600.0, time.time() - 3600.0))

    kill_after_first_save(path, LONGEST_LIFE_S)

    # At most what the latest writer was about to rename.
    assert json.loads(path.read_text())["samples"] > 0
    assert len(list(tmp_path.iterdir())) <= 2
