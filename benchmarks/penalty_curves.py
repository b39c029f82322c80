"""What is the penalty curve f(r) of two model sizes on this machine?

python benchmarks/penalty_curves.py [OUT_FOLDER]

Needs vLLM, about seven minutes, and a machine that does nothing else. Writes penalty_curves.json,
.md (the table of examples/slurm/collect.py) and .png; samples and logs go to build/penalty_curves.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from vllm_penalty_sched.files import write_json
from vllm_penalty_sched.serving.run_record import record_run
from vllm_penalty_sched.serving.server import CPU_ENGINE_ARGS, serves_on_cpu

COLLECT = Path(__file__).parents[1] / "examples" / "slurm" / "collect.py"
PROGRAM = str(Path(sys.executable).with_name("vllm-penalty"))
BUILD = Path("build/penalty_curves")
ENGINE_ARGS = CPU_ENGINE_ARGS if serves_on_cpu() else ()
# The small model that make-model writes by default, and the demo's.
MODELS = {
    "llama-4m": "",
    "llama-18m": "--layers 14 --hidden 320 --intermediate 864 --heads 5",
}


def run(*command: str) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    print(done.stdout)
    return done.stdout


def fit(samples: Path, form: str) -> dict[str, Any]:
    figures = samples.with_suffix(f".{form}.json")
    run(PROGRAM, "fit", str(samples), "--form", form, "--json", str(figures))
    return json.loads(figures.read_text())


def measure(name: str, sizes: str) -> dict[str, Any]:
    model, samples = str(BUILD / name), BUILD / f"{name}.csv"
    figures = BUILD / f"{name}.calibration.json"
    samples.unlink(missing_ok=True)
    run(PROGRAM, "make-model", model, *sizes.split())
    load_average = os.getloadavg()[0]
    calibrate = ["calibrate", model, "--out", str(samples), "--quick", "--json", str(figures)]
    run(PROGRAM, *calibrate, "--", *ENGINE_ARGS)
    return {
        "make_model": f"vllm-penalty make-model {model} {sizes}".strip(),
        "load_average_before": load_average,
        "calibration": json.loads(figures.read_text()),
        "curve": fit(samples, "curve"),
        "step": fit(samples, "step"),
    }


def main(out: Path) -> None:
    record = record_run("python benchmarks/penalty_curves.py", seed=0)
    BUILD.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    models = {name: measure(name, sizes) for name, sizes in MODELS.items()}
    files = [str(BUILD / f"{name}.csv") for name in MODELS]
    table = run(sys.executable, str(COLLECT), str(out / "penalty_curves.png"), *files)
    rows = [line for line in table.splitlines() if line.startswith("|")]
    (out / "penalty_curves.md").write_text("\n".join(rows) + "\n")
    question = (__doc__ or "").partition("\n")[0]
    write_json(out / "penalty_curves.json", {"question": question, "run": record, "models": models})


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "benchmarks/results"))
