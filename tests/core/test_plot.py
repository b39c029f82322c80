import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from vllm_penalty_sched.batch import BatchShape
from vllm_penalty_sched.calibration.fitting import CurveFit, StepFit, fit_step_time
from vllm_penalty_sched.calibration.samples import Sample
from vllm_penalty_sched.errors import MissingDependencyError
from vllm_penalty_sched.learning.curve import PenaltyCurve
from vllm_penalty_sched.metrics import RequestTrace
from vllm_penalty_sched.plot import GapPanel, draw_curves, draw_fit, draw_gaps

TRACE = RequestTrace(sent_s=0.0, arrivals_s=(0.1, 0.12, 0.14, 0.5, 0.52), output_tokens=5)
PANELS = [
    GapPanel(name="stock", traces=[TRACE], injections_s=[0.13]),
    GapPanel(name="ours", traces=[TRACE], injections_s=[]),
]


@pytest.mark.slow
def test_the_picture_is_written_in_the_format_of_its_suffix(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    draw_gaps(tmp_path / "gaps.png", PANELS, tbt_slo_s=0.05, title="two loads")
    draw_gaps(tmp_path / "gaps.svg", PANELS, tbt_slo_s=0.05, title="two loads")

    assert (tmp_path / "gaps.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "gaps.svg").read_text()


@pytest.mark.slow
def test_drawing_leaves_no_global_plotting_state(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code = (
        "import sys; from pathlib import Path;"
        "from vllm_penalty_sched.metrics import RequestTrace;"
        "from vllm_penalty_sched.plot import GapPanel, draw_gaps;"
        "trace = RequestTrace(sent_s=0.0, arrivals_s=(0.1, 0.2), output_tokens=2);"
        "panel = GapPanel(name='a', traces=[trace], injections_s=[]);"
        f"draw_gaps(Path({str(tmp_path / 'a.png')!r}), [panel], tbt_slo_s=0.1, title='t');"
        "print('matplotlib.pyplot' in sys.modules)"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "False"


def test_without_matplotlib_the_message_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    with pytest.raises(MissingDependencyError, match=r"vllm-penalty-sched\[plot\]"):
        draw_gaps(tmp_path / "gaps.png", PANELS, tbt_slo_s=0.05, title="two loads")


def curve_fit(factor: float) -> CurveFit:
    curve = PenaltyCurve.published().scaled_to(factor * 0.01)
    ratios = (0.0, 0.5, 1.0)
    times_s = tuple(curve.predict_s(ratio) for ratio in ratios)
    return CurveFit(
        curve=curve,
        median_ratios=ratios,
        medians_s=times_s,
        ratios=ratios,
        seconds=times_s,
        r_squared_all=1.0,
        most_prefill_tokens=64,
    )


def step_fit() -> StepFit:
    decodes = BatchShape(decode_seqs=8, decode_tokens=8, decode_context=4000)
    return fit_step_time(
        [
            Sample(shape=decodes.with_prefill(n, 0), seconds=0.01 + 1e-5 * n, series="grid")
            for n in range(0, 1000, 50)
        ]
    )


@pytest.mark.slow
def test_a_fit_and_a_comparison_are_drawn_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    many = {f"machine {k}": curve_fit(1.0 + k) for k in range(10)}

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_fit(tmp_path / "fit.png", curve_fit(1.0), step_fit(), title="a model on a machine")
        draw_curves(tmp_path / "all.svg", many, title="ten machines")

    assert (tmp_path / "fit.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "all.svg").read_text()


def test_drawing_fits_without_matplotlib_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    with pytest.raises(MissingDependencyError, match=r"vllm-penalty-sched\[plot\]"):
        draw_curves(tmp_path / "all.png", {"one": curve_fit(1.0)}, title="one machine")
