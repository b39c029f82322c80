import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.packaging


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    built = run(sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", folder, ROOT, cwd=folder)
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def bare_python(wheel: Path) -> Path:
    folder = wheel.parent / "venv"
    venv.create(folder, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    installed = run(python, "-m", "pip", "install", wheel, cwd=wheel.parent)
    assert installed.returncode == 0, installed.stderr
    return python


def evaluate(python: Path, code: str) -> str:
    finished = run(python, "-I", "-c", code, cwd=python.parent)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


def test_the_wheel_holds_the_package_its_type_marker_and_the_license(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()

    assert "vllm_penalty_sched/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"vllm_penalty_sched"}


def test_a_plain_install_brings_neither_vllm_nor_torch_nor_matplotlib(bare_python: Path) -> None:
    code = "import importlib.metadata as m; print(*(d.name.lower() for d in m.distributions()))"
    installed = set(evaluate(bare_python, code).split())

    assert {"numpy", "scikit-learn"} <= installed
    assert installed.isdisjoint({"matplotlib", "torch", "vllm"})


def test_the_import_is_quick_and_loads_no_heavy_module(bare_python: Path) -> None:
    code = (
        "import sys, time; start = time.perf_counter(); import vllm_penalty_sched;"
        "print(time.perf_counter() - start, *sys.modules)"
    )
    runs = [evaluate(bare_python, code).split() for _ in range(5)]

    assert median(float(seconds) for seconds, *_ in runs) < 0.5
    assert {"matplotlib", "sklearn", "torch", "vllm"}.isdisjoint(runs[0])


def test_the_scheduler_without_vllm_raises_one_error_naming_the_extra(bare_python: Path) -> None:
    code = "from vllm_penalty_sched import Scheduler"
    finished = run(bare_python, "-c", code, cwd=bare_python.parent)

    assert finished.returncode == 1
    assert "During handling of the above exception" not in finished.stderr
    last_line = finished.stderr.strip().splitlines()[-1]
    assert "MissingDependencyError" in last_line
    assert "vllm-penalty-sched[vllm]" in last_line


def test_the_command_line_starts_without_vllm(bare_python: Path) -> None:
    finished = run(bare_python.parent / "vllm-penalty", "--help", cwd=bare_python.parent)

    assert finished.returncode == 0, finished.stderr
    assert "usage: vllm-penalty" in finished.stdout
