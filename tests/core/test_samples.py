from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import shapes
from vllm_penalty_sched.batch import BatchShape
from vllm_penalty_sched.calibration.samples import (
    COLUMNS,
    LEAST_S,
    MOST_S,
    Sample,
    SamplesOrigin,
    read_samples,
    write_origin,
    write_sample,
    write_samples,
)
from vllm_penalty_sched.errors import ConfigError

ORIGIN = SamplesOrigin(
    hardware="H200; Xeon, 16 cores",
    vllm_version="0.32.0",
    model="build/tiny-llama",
    engine_args=("--dtype", "float32"),
    concurrency=8,
    grid="quick",
    plugin_version="0.1.0",
    date="2026-01-02T03:04:05+00:00",
)
SAMPLE = Sample(
    series="curve",
    point="7x256+8@0",
    shape=BatchShape(prefills=((8, 0),), decode_seqs=7, decode_tokens=7, decode_context=1800),
    seconds=0.02,
)
HEADER = write_origin(ORIGIN)
FIRST_ROW = HEADER.count("\n") + 1

lines = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), max_size=20)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
samples = st.builds(
    Sample,
    series=lines,
    point=lines,
    shape=shapes().map(lambda shape: replace(shape, encoder_tokens=0)),  # of text alone
    seconds=st.floats(LEAST_S, MOST_S),
)
origins = st.builds(
    SamplesOrigin,
    hardware=texts,
    vllm_version=texts,
    model=texts,
    engine_args=st.lists(texts, max_size=3).map(tuple),
    concurrency=st.integers(1, 1000),
    grid=texts,
    plugin_version=texts,
    date=texts,
)


def row(**changes: str) -> str:
    good = dict(zip(COLUMNS, write_sample(SAMPLE).strip().split(","), strict=True))
    return ",".join({**good, **changes}.values()) + "\n"


@given(origins, st.lists(samples, max_size=5))
def test_what_is_written_is_read_again(origin: SamplesOrigin, written: list[Sample]) -> None:
    text = write_samples(origin, written)

    assert read_samples(text, source="s.csv") == (origin, written)


def test_samples_may_be_appended_one_by_one_and_lines_may_end_as_on_windows() -> None:
    text = (HEADER + write_sample(SAMPLE) + write_sample(SAMPLE)).replace("\n", "\r\n")

    assert read_samples(text, source="s.csv") == (ORIGIN, [SAMPLE, SAMPLE])


@pytest.mark.parametrize(
    ("column", "text"),
    [
        ("prefills", "8"),
        ("prefills", "8:"),
        ("prefills", "0:16"),
        ("prefills", "8:0;"),
        ("prefills", "8:0;-1:2"),
        ("prefills", "1" * 5000 + ":0"),
        ("decode_seqs", "-1"),
        ("decode_seqs", "seven"),
        ("decode_seqs", ""),
        ("decode_seqs", "\u0667"),
        ("decode_tokens", "7.0"),
        ("decode_context", "1e3"),
        ("decode_context", "NaN"),
        ("prefill_ratio", "half"),
        ("prefill_ratio", "0.5"),
        ("prefill_ratio", "nan"),
        ("seconds", "0"),
        ("seconds", "-1"),
        ("seconds", "nan"),
        ("seconds", "inf"),
        ("seconds", "20 ms"),
        ("seconds", "1e300"),
        ("seconds", "1e-300"),
        ("seconds", "1.1e9"),
    ],
)
def test_a_wrong_value_is_told_with_file_line_and_column(column: str, text: str) -> None:
    content = HEADER + write_sample(SAMPLE) + row(**{column: text})

    with pytest.raises(ConfigError) as error:
        read_samples(content, source="s.csv")

    message = str(error.value)
    assert message.startswith(f"s.csv, line {FIRST_ROW + 1}, column {column}: must be ")
    assert "got" in message
    assert "\n" not in message
    assert len(message) < 300


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("", ["s.csv", "none"]),
        ("1,2,3\n", ["s.csv", "none"]),
        ("# {\n", ["s.csv", "not JSON"]),
        ("# [1]\n", ["s.csv", "schema"]),
        ('# {"schema": "another/1"}\n', ["s.csv", "schema", "another/1"]),
        (HEADER.replace('"hardware"', '"hard"'), ["s.csv", "hardware"]),
        (HEADER.replace('"concurrency": 8', '"concurrency": 0'), ["s.csv", "concurrency", "0"]),
        (HEADER.replace('"concurrency": 8', '"concurrency": true'), ["s.csv", "concurrency"]),
        (HEADER.replace('"--dtype"', "1"), ["s.csv", "engine_args"]),
        (HEADER.replace("seconds", "ms"), ["s.csv", "columns", "seconds"]),
        (HEADER[:-1].rpartition("\n")[0], ["s.csv", "columns"]),
        (HEADER + "curve,1,2\n", ["s.csv", f"line {FIRST_ROW}", "8 columns"]),
        (HEADER + '"curve,1\n', ["s.csv", f"line {FIRST_ROW}", "CSV"]),
        (
            HEADER + row(prefills="", decode_seqs="0", decode_tokens="0", prefill_ratio="0.0"),
            ["s.csv", f"line {FIRST_ROW}", "token"],
        ),
    ],
)
def test_a_file_that_is_none_is_told_in_one_line(content: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        read_samples(content, source="s.csv")

    assert "\n" not in str(error.value)
    for part in parts:
        assert part in str(error.value)


@given(st.text(max_size=200))
def test_no_text_at_all_raises_anything_else(text: str) -> None:
    for content in (text, f"# {text}", HEADER + text):
        with suppress(ConfigError):
            read_samples(content, source="s.csv")


def test_a_name_of_two_lines_is_refused() -> None:
    with pytest.raises(ConfigError, match="one line"):
        write_sample(replace(SAMPLE, point="a\nb"))


def test_a_later_call_continues_whatever_its_date_and_version() -> None:
    later = replace(ORIGIN, date="2027", plugin_version="0.2.0")

    later.check_continues(ORIGIN, source="s.csv")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hardware", "A100"),
        ("vllm_version", "0.33.0"),
        ("model", "other"),
        ("engine_args", ()),
        ("concurrency", 4),
        ("grid", "full"),
    ],
)
def test_steps_of_another_set_up_are_kept_out_of_a_file(name: str, value: object) -> None:
    other = replace(ORIGIN, **{name: value})

    with pytest.raises(ConfigError) as error:
        other.check_continues(ORIGIN, source="s.csv")

    assert "s.csv" in str(error.value)
    assert f"{name} is {getattr(ORIGIN, name)!r} there and {value!r} here" in str(error.value)


def test_the_origin_names_what_a_fitted_model_carries_along() -> None:
    provenance = ORIGIN.provenance

    assert (provenance.hardware, provenance.model, provenance.vllm_version) == (
        ORIGIN.hardware,
        ORIGIN.model,
        ORIGIN.vllm_version,
    )


@pytest.mark.parametrize("seconds", [LEAST_S / 2, MOST_S * 2, float("nan"), 0.0])
def test_a_time_that_could_not_be_read_again_is_no_sample(seconds: float) -> None:
    with pytest.raises(ConfigError, match="seconds must be a number from"):
        replace(SAMPLE, seconds=seconds)
