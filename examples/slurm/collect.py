"""Compare the penalty curves of several machines: one table and one picture.

    python examples/slurm/collect.py OUT.png a100-80gb.csv l40s.csv ...

Each file is the output of `vllm-penalty calibrate` on one machine, named after it. A file that
holds no usable steps is named and left out.
"""

import sys
from pathlib import Path

from vllm_penalty_sched.calibration.fitting import CurveFit, fit_curve
from vllm_penalty_sched.calibration.samples import read_samples
from vllm_penalty_sched.errors import PenaltySchedError
from vllm_penalty_sched.plot import draw_curves


def row(name: str, header, fit: CurveFit) -> str:
    base, *slopes = (f"{1e3 * value:.2f}" for value in fit.curve.coefficients_s)
    hardware = header.hardware.partition(";")[0]  # the GPU's name, before the processor's
    cells = [name, hardware, header.model, header.vllm_version, base, ", ".join(slopes)]
    over_all = "-" if fit.r_squared_all is None else f"{fit.r_squared_all:.2f}"
    cells += [f"{fit.curve.r_squared:.2f}", over_all, f"{1e3 * fit.curve.penalty_s:.2f}"]
    return f"| {' | '.join(cells)} |"


def main(picture: Path, files: list[Path]) -> int:
    fits = {}
    print(
        "| name | hardware | model | vLLM | f(0), ms | r, r^2, ms | R^2 of medians "
        "| of all measurements | f(1) - f(0), ms |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for path in files:
        try:
            header, samples = read_samples(path.read_text(encoding="utf-8"), source=str(path))
            fits[path.stem] = fit_curve(samples)
        except (PenaltySchedError, OSError) as error:
            print(f"left out: {error}", file=sys.stderr)
        else:
            print(row(path.stem, header, fits[path.stem]))
    if not fits:
        return 2
    draw_curves(picture, fits, title="What prefill adds to the time between tokens")
    print(f"\nwrote {picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]]))
