import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import nonsense, settings_mappings
from vllm_penalty_sched import ConfigError, Settings
from vllm_penalty_sched.settings import RequestSlo, inert_settings


@given(settings_mappings)
def test_valid_settings_are_taken_over_as_they_are(values: dict) -> None:
    settings = Settings.from_mapping(values)

    assert {name: getattr(settings, name) for name in values} == values


@given(settings_mappings)
def test_a_file_may_hold_the_settings_bare_or_under_the_plugins_name(values: dict) -> None:
    bare = Settings.from_json(json.dumps(values), source="s.json")
    named = Settings.from_json(json.dumps({"penalty_sched": values}), source="s.json")

    assert bare == named == Settings.from_mapping(values)


def test_every_wrong_key_and_value_is_in_the_one_message() -> None:
    wrong = {
        "tbt_slo_ms": -5,
        "tbt_slo_scale": "2",
        "miss_rate": 0.9,
        "mode": "fast",
        "order": "random",
        "tbt_slo": 50,
        "": 1,
    }

    with pytest.raises(ConfigError) as error:
        Settings.from_mapping(wrong)

    message = str(error.value)
    assert "\n" not in message
    for name in wrong:
        assert name in message
    for got in ("-5", "'2'", "0.9", "'fast'", "'random'"):
        assert f"got {got}" in message


@given(st.sampled_from(["tbt_slo_scale", "miss_rate", "max_defer_s", "mode"]), nonsense)
def test_nonsense_is_refused_with_the_settings_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        Settings.from_mapping({name: value})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        '"x"',
        '{"penalty_sched": 5}',
        "[" * 100_000,
        '{"mode":' * 100_000,
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_file_that_holds_no_settings_is_refused_by_its_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"s\.json"):
        Settings.from_json(text, source="s.json")


def test_a_request_brings_its_slos_as_numbers_or_as_text() -> None:
    slo, problems = RequestSlo.from_extra_args({"tbt_slo_ms": 30, "ttft_slo_ms": "800", "other": 1})

    assert (slo.tbt_slo_s, slo.ttft_slo_s) == (0.030, 0.800)
    assert not problems


@given(st.dictionaries(st.sampled_from(["tbt_slo_ms", "ttft_slo_ms"]), nonsense, min_size=1))
def test_a_nonsense_slo_is_ignored_and_told(extra_args: dict) -> None:
    slo, problems = RequestSlo.from_extra_args(extra_args)

    assert slo == RequestSlo()
    assert len(problems) == len(extra_args)
    assert all(name in " ".join(problems) for name in extra_args)


def test_a_wrong_value_does_not_cost_the_right_one_beside_it() -> None:
    slo, problems = RequestSlo.from_extra_args({"tbt_slo_ms": [1], "ttft_slo_ms": 500})

    assert (slo.tbt_slo_s, slo.ttft_slo_s) == (None, 0.5)
    assert len(problems) == 1


@pytest.mark.parametrize(
    ("given", "inert"),
    [
        ({}, []),
        ({"tbt_slo_ms": 50, "ttft_slo_ms": 900, "order": "slack", "pacing": "deadline"}, []),
        ({"tbt_slo_ms": 50, "tbt_slo_scale": 2.0}, ["tbt_slo_scale"]),
        ({"tbt_slo_ms": None, "tbt_slo_scale": 3.0}, []),
        ({"ttft_slo_ms": 900, "order": "fcfs"}, ["ttft_slo_ms"]),
        ({"ttft_slo_ms": None, "order": "fcfs"}, []),
        ({"mode": "observe", "order": "slack"}, ["order"]),
        ({"mode": "observe", "order": "fcfs", "pacing": "gap"}, []),
        ({"mode": "observe", "pacing": "deadline", "max_defer_s": 1}, ["pacing", "max_defer_s"]),
        ({"mode": "observe", "ttft_slo_ms": 900, "order": "fcfs"}, ["ttft_slo_ms"]),
        ({"mode": "enforce", "max_defer_s": 1, "pacing": "deadline"}, []),
    ],
)
def test_a_setting_that_does_nothing_beside_the_others_is_told_in_one_line(
    given: dict, inert: list[str]
) -> None:
    Settings.from_mapping(given)

    lines = inert_settings(given)

    assert [line.split()[0] for line in lines] == inert
    assert all("has no effect: " in line and "\n" not in line for line in lines)
