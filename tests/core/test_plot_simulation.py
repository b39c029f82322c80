from pathlib import Path

import pytest

from vllm_penalty_sched.errors import ConfigError
from vllm_penalty_sched.simulation.goodput import ServedRequest
from vllm_penalty_sched.simulation.plot import draw_simulation

SERVED = {
    "stock:512": [
        ServedRequest(arrival_s=0.0, token_times_s=(0.5 * n, 0.5 * n + 0.04), output_tokens=2)
        for n in range(1, 50)
    ],
    "penalty": [
        ServedRequest(arrival_s=0.0, token_times_s=(0.1,), output_tokens=1),
        ServedRequest(arrival_s=0.0, token_times_s=(), output_tokens=3),
    ],
    "nothing served": [ServedRequest(arrival_s=0.0, token_times_s=(), output_tokens=3)],
}


def draw(path: Path) -> None:
    draw_simulation(path, SERVED, ttft_slo_s=2.0, tbt_slo_s=0.05, title="a load")


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_schedulers_are_drawn_without_warnings_even_where_nothing_was_served(
    tmp_path: Path,
) -> None:
    pytest.importorskip("matplotlib")
    draw(tmp_path / "runs.svg")

    picture = (tmp_path / "runs.svg").read_text()
    assert all(f"<!-- {name} -->" in picture for name in SERVED if name != "nothing served")


def test_a_suffix_that_names_no_format_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    with pytest.raises(ConfigError, match=r"suffix must be one of .* got .*runs\.xyz"):
        draw(tmp_path / "runs.xyz")
