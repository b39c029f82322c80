import json
import logging
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

from tests.core.test_latency import learned  # noqa: E402
from tests.engine.virtual import make_engine  # noqa: E402
from vllm_penalty_sched import ConfigError, ModelFileError, Scheduler  # noqa: E402
from vllm_penalty_sched.engine.configuration import ranked_path  # noqa: E402


def test_settings_come_inline_or_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"tbt_slo_ms": 42}))

    for settings in ({"tbt_slo_ms": 42}, str(path)):
        planner = make_engine(Scheduler, settings).scheduler.planner
        assert planner.slo_s(None, None) == 0.042


def test_without_settings_the_defaults_rule() -> None:
    planner = make_engine(Scheduler, None).scheduler.planner

    assert planner.slo_s(None, 0.010) == pytest.approx(0.020)


def test_all_wrong_settings_stop_the_start_with_one_message(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"tbt_slo_ms": -1, "tbt_slos": 5, "mode": "go"}))

    with pytest.raises(ConfigError) as error:
        make_engine(Scheduler, str(path))

    for part in ("settings.json", "tbt_slo_ms", "got -1", "tbt_slos", "mode", "got 'go'"):
        assert part in str(error.value)


@pytest.mark.parametrize("settings", ["missing.json", 5, ["tbt_slo_ms"]])
def test_settings_that_are_none_stop_the_start(settings: object) -> None:
    with pytest.raises(ConfigError, match="penalty_sched"):
        make_engine(Scheduler, settings)


def test_a_saved_model_spares_the_cold_start(tmp_path: Path) -> None:
    learned(200).save(tmp_path / "model.json")

    warm = make_engine(Scheduler, {"model": str(tmp_path / "model.json")}).scheduler.planner

    assert not warm.is_cold
    assert warm.model.samples == 200


def test_a_model_that_cannot_be_used_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text("{}")

    with pytest.raises(ModelFileError, match="schema"):
        make_engine(Scheduler, {"model": str(tmp_path / "model.json")})


def test_settings_that_do_nothing_are_told_at_the_start_in_a_line_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"mode": "observe", "pacing": "deadline", "tbt_slo_ms": 50, "tbt_slo_scale": 3}
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(settings))

    for source in (settings, str(path)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "vllm.penalty_sched"):
            make_engine(Scheduler, source)
        told = [r.getMessage() for r in caplog.records if "has no effect" in r.getMessage()]

        assert len(told) == 2
        assert "tbt_slo_scale (3)" in told[0]
        assert "pacing (deadline)" in told[1]


@pytest.mark.parametrize(
    ("path", "rank", "own"),
    [
        ("logs/steps.jsonl", 0, "logs/steps.jsonl"),
        ("logs/steps.jsonl", 2, "logs/steps.2.jsonl"),
        ("logs/steps", 1, "logs/steps-1"),  # steps.1 is the first rank's rotated file
    ],
)
def test_each_rank_has_a_path_of_its_own(path: str, rank: int, own: str) -> None:
    assert ranked_path(path, rank) == own
