import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.core.test_latency import gpu_like_s, learned, random_shape
from vllm_penalty_sched import ModelFileError, load_model
from vllm_penalty_sched.learning.features import TERMS
from vllm_penalty_sched.learning.model_state import Provenance, state_to_json

pytestmark = pytest.mark.slow

MODEL = learned(200)
GOOD = state_to_json(MODEL.state())
TEXTS = ("hardware", "model", "vllm_version")


def leaves(content: Any, path: tuple = ()) -> Iterator[tuple]:
    if isinstance(content, dict):
        for key, value in content.items():
            yield (*path, key)
            yield from leaves(value, (*path, key))
    elif isinstance(content, list) and content:
        yield (*path, len(content) // 2)


def changed(path: tuple, change: Callable[[Any, Any], None]) -> Callable[[], str]:
    """Return what makes the file's text: making hundreds of them takes seconds."""

    def text() -> str:
        content = json.loads(json.dumps(GOOD))
        place = content
        for key in path[:-1]:
            place = place[key]
        change(place, path[-1])
        return json.dumps(content)

    return text


def spoiled_files() -> Iterator[tuple[Callable[[], str], str]]:
    for text, field in (
        ("", "JSON"),
        (json.dumps(GOOD)[:-40], "JSON"),
        ("[1, 2]", "object"),
        ("null", "object"),
        ("\x00\x01", "JSON"),
    ):
        yield partial(str, text), field
    for path in leaves(GOOD):
        if path[0] == "samples":  # a figure for readers: the sums carry their own counts
            continue
        field = [part for part in path if isinstance(part, str)][-1]
        drop = changed(path, lambda place, key: place.pop(key))
        yield drop, "coefficients_s" if path[0] == "coefficients_s" else field
        for bad in (float("nan"), float("inf"), "1", [[]], True):
            if bad == "1" and path[0] in TEXTS:
                continue
            spoil = changed(path, lambda place, key, bad=bad: place.__setitem__(key, bad))
            yield spoil, field
    for path in (("speed",), ("mape",), ("coefficients_s", TERMS[3]), ("mixed", "samples")):
        negative = changed(path, lambda place, key: place.__setitem__(key, -1.0))
        yield negative, path[-1]
    for name in ("gram_upper", "moment"):
        longer = changed(("mixed", name), lambda place, key: place[key].append(0.0))
        yield longer, name


SPOILED = list(spoiled_files())


def test_a_saved_model_predicts_the_same_and_goes_on_learning(tmp_path: Path) -> None:
    model = learned(300)
    model.provenance = Provenance(hardware="H200", model="llama", vllm_version="0.32.0")
    model.save(tmp_path / "model.json")

    loaded = load_model(tmp_path / "model.json")

    rng = np.random.default_rng(5)
    tried = [random_shape(rng) for _ in range(100)]
    for shape in tried:
        assert loaded.predict_s(shape) == model.predict_s(shape)
    for shape in tried:
        loaded.observe(shape, gpu_like_s(shape))
        model.observe(shape, gpu_like_s(shape))
    for shape in tried:
        # Relative: the file does not tell the latest steps apart, to weigh them again.
        assert loaded.predict_s(shape) == pytest.approx(model.predict_s(shape), rel=0.02)
    assert loaded.provenance == model.provenance
    assert loaded.samples == model.samples


def test_a_saved_model_is_json_that_names_its_origin_and_quality(tmp_path: Path) -> None:
    MODEL.save(tmp_path / "model.json")

    content = json.loads((tmp_path / "model.json").read_text())

    assert content["schema"].startswith("vllm_penalty_sched/")
    assert {"hardware", "model", "vllm_version", "samples", "mape", "r_squared"} <= set(content)
    assert list(content["coefficients_s"]) == list(TERMS)


@pytest.mark.parametrize(("make_text", "field"), SPOILED)
def test_a_spoiled_file_gives_one_error_that_names_the_field(
    tmp_path: Path, make_text: Callable[[], str], field: str
) -> None:
    path = tmp_path / "model.json"
    path.write_text(make_text())

    with pytest.raises(ModelFileError) as error:
        load_model(path)

    assert field in str(error.value)
    assert "model.json" in str(error.value)
    assert "\n" not in str(error.value)


def test_at_least_fifty_spoiled_files_were_tried() -> None:
    assert len(SPOILED) >= 50


def test_a_file_with_the_terms_of_an_older_version_is_refused_as_such(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    older = GOOD | {"schema": "vllm_penalty_sched/step-time-model/1", "coefficients_s": {}}
    path.write_text(json.dumps(older))

    with pytest.raises(ModelFileError, match=r"schema must be .*step-time-model/3"):
        load_model(path)


def test_a_missing_file_gives_the_same_kind_of_error(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="cannot read"):
        load_model(tmp_path / "none.json")


def test_a_name_that_no_file_can_have_is_refused_as_such() -> None:
    with pytest.raises(ModelFileError, match="cannot read"):
        load_model("a\0b")
