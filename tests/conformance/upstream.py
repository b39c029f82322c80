"""Get vLLM's source distributions through pip: its tests, and its pure Python of any version."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
CACHE = REPOSITORY / "build" / "upstream"
# What vLLM's tests import beside vLLM's CPU build. Only pure Python is used of them.
_ADDITIONS = ("torchvision==0.29.1", "msgpack==1.2.4", "pytest-asyncio==1.5.0")
_STAND_IN = Path(__file__).parent / "metadata_only"


def unpack(version: str) -> Path:
    """Return a folder with ``tests/tests`` and ``package/vllm`` of a version, fetched once.

    They lie apart: whoever runs the tests must not import the package beside them.
    """
    folder = CACHE / version
    if (folder / "complete").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as download:
        archive = _download(version, Path(download))
        with tarfile.open(archive) as content:
            content.extractall(download, filter="data")
        (unpacked,) = (path for path in Path(download).iterdir() if path.is_dir())
        for name, place in (("tests", "tests"), ("vllm", "package")):
            (folder / place).mkdir(parents=True)
            shutil.move(unpacked / name, folder / place / name)
    (folder / "package" / "vllm" / "_version.py").write_text(_version_module(version))
    (folder / "complete").touch()
    return folder


def install_additions() -> Path:
    """Return a folder with packages that vLLM's tests import, fetched once."""
    folder = CACHE / "additions"
    if (folder / "complete").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    print("fetching what the tests import beside vLLM (about 10 MB) ...", flush=True)
    _pip("install", "--no-deps", "--target", str(folder), *_ADDITIONS)
    # It registers operators that its build for another torch cannot load; nothing here calls them.
    (folder / "torchvision" / "_meta_registrations.py").write_text("")
    # Some files import it for a few tests of theirs, which fail with it, as without a GPU anyway.
    (folder / "ray.py").write_text(
        '"""Stands in for ray, so that a module that imports it loads."""'
    )
    (folder / "complete").touch()
    return folder


def _download(version: str, folder: Path) -> Path:
    print(f"fetching the source distribution of vLLM {version} (about 40 MB) ...", flush=True)
    path = os.pathsep.join([str(_STAND_IN), os.environ.get("PYTHONPATH", "")])
    _pip(
        *("download", "--no-deps", "--no-build-isolation", "--no-binary", "vllm"),
        *("--dest", str(folder), f"vllm=={version}"),
        PYTHONPATH=path,
    )
    (archive,) = folder.glob("*.tar.gz")
    return archive


def _pip(*arguments: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"pip {' '.join(arguments)} failed:\n{done.stderr[-2000:]}")


def _version_module(version: str) -> str:
    """Return the module that vLLM's build generates."""
    numbers = tuple(int(part) for part in version.split("."))
    return f"__version__ = {version!r}\n__version_tuple__ = {numbers}\n"
