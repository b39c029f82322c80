import os
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.core.test_fitting import on_the_published_curve
from vllm_penalty_sched.calibration.samples import Sample, SamplesOrigin, write_samples

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples" / "slurm"
SCRIPTS = sorted(EXAMPLES.glob("*.sbatch"))


def write_machine(path: Path, *, model: str, factor: float) -> None:
    origin = SamplesOrigin(
        hardware=f"a made-up {path.stem}",
        vllm_version="0.32.0",
        model=model,
        concurrency=8,
        grid="full",
        plugin_version="0.1.0",
        date="2026-01-01T00:00:00+00:00",
    )
    samples = [
        Sample(series="curve", shape=sample.shape, seconds=factor * sample.seconds)
        for sample in on_the_published_curve()
    ]
    path.write_text(write_samples(origin, samples))


def collect(picture: Path, *files: Path) -> int:
    # In this process: another would spend its time on importing.
    return runpy.run_path(str(EXAMPLES / "collect.py"))["main"](picture, list(files))


def write_stand_in(folder: Path, name: str, script: str) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
    (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


def test_collect_makes_one_table_and_one_picture_of_several_machines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    write_machine(tmp_path / "fast.csv", model="small-1b", factor=1.0)
    write_machine(tmp_path / "slow.csv", model="large-8b", factor=3.0)

    status = collect(
        tmp_path / "all.png", tmp_path / "fast.csv", tmp_path / "slow.csv", tmp_path / "no.csv"
    )

    printed = capsys.readouterr()
    assert status == 0
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")
    fast, slow = (line.split(" | ") for line in printed.out.splitlines()[2:4])
    assert fast[1:3] == ["a made-up fast", "small-1b"]
    assert slow[1:3] == ["a made-up slow", "large-8b"]
    assert (fast[-1], slow[-1]) == ("3.02 |", "9.06 |")
    assert "left out" in printed.err
    assert "no.csv" in printed.err


def test_collect_without_any_usable_file_ends_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.csv").write_text("nonsense\n")

    status = collect(tmp_path / "all.png", tmp_path / "bad.csv")

    assert status == 2
    assert "bad.csv" in capsys.readouterr().err
    assert not (tmp_path / "all.png").exists()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
class TestScripts:
    @pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
    def test_bash_can_read_it(self, script: Path) -> None:
        done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)

        assert done.returncode == 0, done.stderr

    def test_each_task_of_the_array_asks_for_a_gpu_type_of_its_own(self, tmp_path: Path) -> None:
        env = write_stand_in(tmp_path / "bin", "sbatch", 'echo "$NAME $*"')
        asked = []
        for task in range(7):
            done = subprocess.run(
                ["bash", EXAMPLES / "calibrate_array.sbatch"],
                env={**env, "SLURM_ARRAY_TASK_ID": str(task)},
                capture_output=True,
                text=True,
                check=True,
            )
            asked.append(done.stdout)

        assert len({line.split()[0] for line in asked}) == 7
        assert all("--wait" in line and "--gres=gpu:" in line for line in asked)
        assert all((REPOSITORY / line.split()[-1]).is_file() for line in asked)

    def test_outside_of_a_job_the_array_submits_every_type(self, tmp_path: Path) -> None:
        env = write_stand_in(tmp_path / "bin", "sbatch", 'echo "$NAME $*"')
        env.pop("SLURM_ARRAY_TASK_ID", None)

        done = subprocess.run(
            ["bash", EXAMPLES / "calibrate_array.sbatch"],
            env=env,
            capture_output=True,
            text=True,
            check=True,
        )

        assert len(done.stdout.splitlines()) == 7
        assert "--wait" not in done.stdout

    def test_the_job_calibrates_fits_and_plots_in_the_site_s_environment(
        self, tmp_path: Path
    ) -> None:
        env = write_stand_in(tmp_path / "bin", "vllm-penalty", 'echo "$WITHIN:$*"')
        write_stand_in(tmp_path / "bin", "container", 'WITHIN=$1 "${@:2}"')
        (tmp_path / "site.sh").write_text("OUT=$OUT/$NAME\n")
        settings = {
            "NAME": "l40s",
            "MODEL": "a-model",
            "OUT": str(tmp_path / "out"),
            "SITE_SETUP": str(tmp_path / "site.sh"),
            "CONTAINER": "container image",
            "CALIBRATE": "--quick",
        }

        done = subprocess.run(
            ["bash", EXAMPLES / "calibrate_gpu.sbatch"],
            env={**env, **settings},
            capture_output=True,
            text=True,
            check=True,
        )

        out = tmp_path / "out" / "l40s" / "l40s"
        assert done.stdout.splitlines() == [
            f"image:calibrate a-model --out {out}.csv --quick -- --dtype float16",
            f"image:fit {out}.csv --form curve",
            f"image:fit {out}.csv --form step --out {out}.json",
            f"image:plot {out}.csv --out {out}.png",
        ]

    def test_the_job_says_what_it_needs(self) -> None:
        env = {name: value for name, value in os.environ.items() if name != "NAME"}

        done = subprocess.run(
            ["bash", EXAMPLES / "calibrate_gpu.sbatch"],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )

        assert done.returncode != 0
        assert "set NAME" in done.stderr
