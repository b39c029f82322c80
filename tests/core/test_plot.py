import subprocess
import sys
from pathlib import Path

import pytest

from vllm_penalty_sched.errors import MissingDependencyError
from vllm_penalty_sched.metrics import RequestTrace
from vllm_penalty_sched.plot import GapPanel, draw_gaps

TRACE = RequestTrace(sent_s=0.0, arrivals_s=(0.1, 0.12, 0.14, 0.5, 0.52), output_tokens=5)
PANELS = [
    GapPanel(name="stock", traces=[TRACE], injections_s=[0.13]),
    GapPanel(name="ours", traces=[TRACE], injections_s=[]),
]


def test_the_picture_is_written_in_the_format_of_its_suffix(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    draw_gaps(tmp_path / "gaps.png", PANELS, tbt_slo_s=0.05, title="two loads")
    draw_gaps(tmp_path / "gaps.svg", PANELS, tbt_slo_s=0.05, title="two loads")

    assert (tmp_path / "gaps.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "gaps.svg").read_text()


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
