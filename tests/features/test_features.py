"""vLLM's features beside a steered step, on real engines: what the requests get, and when."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

from vllm_penalty_sched.serving.server import serves_on_cpu  # noqa: E402

LONGEST_S = 1200.0
# Runs in which our scheduler plans beside decodes; prompts that stay whole are not cut by it.
CHUNKED = ("lora", "prefix_caching", "structured_output", "speculative_decoding")
WHOLE = ("without_chunking", "encoder_decoder")
STEERED = (*CHUNKED, *WHOLE, "audio", "unchunked_audio")


@dataclass(frozen=True)
class Run:
    """What one run left: see ``FeatureEngine.finish``."""

    ends: Mapping[str, Mapping[str, Any]]
    steps: list[dict[str, Any]]
    reasons: Mapping[str, int]
    metrics: Mapping[str, float]
    coefficients_s: Mapping[str, float]
    budget_kept: bool
    left: int

    def granted(self, name: str) -> list[int]:
        return [step["granted"][name] for step in self.steps if name in step["granted"]]

    def beside_decodes(self) -> list[dict[str, Any]]:
        """Steps in which somebody decodes and somebody else gets tokens."""
        return [
            step
            for step in self.steps
            if any(step["decode_needs"].values()) and step["granted"].keys() - step["decode_needs"]
        ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not serves_on_cpu():
        pytest.skip("a CUDA context does not survive the forks of these runs")
    folder = tmp_path_factory.mktemp("features")
    command = [sys.executable, "-m", "tests.features.engine_runs", str(folder)]
    with (folder / "engines.log").open("w") as log:
        subprocess.run(
            command,
            cwd=Path(__file__).parents[2],
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=LONGEST_S,
            check=True,
        )
    return folder


@pytest.fixture
def run(folder: Path, request: pytest.FixtureRequest) -> Run:
    return read_run(folder, request.param)


def read_run(folder: Path, name: str) -> Run:
    facts = json.loads((folder / f"{name}.json").read_text())
    assert "error" not in facts, facts["error"]
    return Run(**facts)


def of(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("run", names, indirect=True)


@of(*STEERED)
def test_every_decode_gets_its_tokens_in_every_step(run: Run) -> None:
    short = [
        (step, name)
        for step in run.steps
        for name, needed in step["decode_needs"].items()
        if step["granted"].get(name, 0) < needed
    ]

    assert run.beside_decodes()
    assert run.reasons.keys() - {"no_decode", "no_prefill"}
    assert short == []


@of(*STEERED, "pooling")
def test_every_request_ends_and_leaves_nothing_behind(run: Run) -> None:
    assert run.left == 0
    assert run.budget_kept
    assert len(run.ends) == len({name for step in run.steps for name in step["granted"]})


@of(*CHUNKED)
def test_prompts_are_cut_to_what_the_slo_allows(run: Run) -> None:
    largest = max(
        sum(tokens for name, tokens in step["granted"].items() if name not in step["decode_needs"])
        for step in run.beside_decodes()
    )

    longest_prompt = max(end["prompt_tokens"] for end in run.ends.values())
    assert 0 < largest < longest_prompt  # stock vLLM fills its budget of 2,048 tokens


@of("lora")
def test_each_adapter_says_what_it_says_and_runs_without_the_other(run: Run) -> None:
    texts = {name: end["tokens"] for name, end in run.ends.items() if name.startswith("adapter")}
    at_once = [
        {name.split("-")[1] for name in step["granted"] if name.startswith("adapter")}
        for step in run.steps
    ]

    assert len(texts) == 6
    # Pairs of adapters on one prompt.
    for one in range(0, 6, 2):
        assert texts[f"adapter-1-{one}"] != texts[f"adapter-2-{one + 1}"]
    assert set().union(*at_once) == {"1", "2"}
    assert max(map(len, at_once)) == 1


@of("prefix_caching")
def test_a_cached_prompt_is_computed_but_for_its_last_block(run: Run) -> None:
    first, second = run.ends["first"], run.ends["second"]

    assert second["tokens"] == first["tokens"]
    assert first["cached_tokens"] == 0
    assert second["cached_tokens"] > 0.8 * second["prompt_tokens"]
    computed = sum(run.granted("second")) - len(second["tokens"]) + 1
    assert computed == second["prompt_tokens"] - second["cached_tokens"]


@of("structured_output")
def test_answers_follow_their_schema_beside_requests_that_have_none(run: Run) -> None:
    for index in range(4):
        place = json.loads(run.ends[f"place-{index}"]["text"])
        assert place["floor"] in (1, 2)
        assert place["door"] in ("a", "b")
    assert len(run.ends["plain"]["tokens"]) == 30


@of("speculative_decoding")
def test_drafts_are_verified_whole_beside_prefills(run: Run) -> None:
    with_drafts = [
        step
        for step in run.beside_decodes()
        if any(needed > 1 for needed in step["decode_needs"].values())
    ]

    assert with_drafts
    assert run.metrics["vllm:spec_decode_num_accepted_tokens"] > 0


@of("audio", "unchunked_audio", "encoder_decoder")
def test_each_sound_is_encoded_once(run: Run) -> None:
    encoded = [name for step in run.steps for name in step["encoded"]]

    assert sorted(encoded) == sorted(run.ends)


@of("audio", "unchunked_audio")
def test_what_the_encoder_takes_is_learned(run: Run) -> None:
    assert run.coefficients_s["encoder_tokens"] > 0.0


@of("unchunked_audio")
def test_a_sound_that_must_not_be_cut_is_not(run: Run) -> None:
    late = {name: end for name, end in run.ends.items() if name.startswith("late")}

    assert len(late) == 4
    for name, end in late.items():
        chunks = run.granted(name)[: 1 - len(end["tokens"])]
        assert max(chunks) >= 125, chunks  # 5 s of sound


@of(*WHOLE)
def test_prompts_that_cannot_be_cut_run_whole(run: Run) -> None:
    for name, end in run.ends.items():
        chunks = run.granted(name)
        assert chunks[0] == end["prompt_tokens"]
        assert len(chunks) == len(end["tokens"])


def test_a_pooling_model_gives_the_vectors_and_takes_the_steps_of_stock_vllm(folder: Path) -> None:
    ours, stock = read_run(folder, "pooling"), read_run(folder, "stock_pooling")

    assert [list(step["granted"].values()) for step in ours.steps] == [
        list(step["granted"].values()) for step in stock.steps
    ]
    assert len(ours.ends) == 12
    for name, end in stock.ends.items():
        assert ours.ends[name]["vector"] == pytest.approx(end["vector"], abs=1e-4)
