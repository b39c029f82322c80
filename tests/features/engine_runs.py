"""Run vLLM's features on real engines with our scheduler and write down what came of it.

    python -m tests.features.engine_runs FOLDER

vLLM is imported once. Each run is a process of its own, forked from that one, and leaves
``FOLDER/RUN.json``: what the requests got, what each step gave to whom, what failed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# The scheduler must be within reach, and no thread may run when a process is forked.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["PENALTY_SCHED_STRICT"] = "1"
# Where other programs run, threads that wait for each other in every layer take minutes.
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
from vllm import EngineArgs, PoolingParams, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine.llm_engine import LLMEngine

from tests.features.model_folders import (
    LORA_RANK,
    SAMPLING_RATE,
    write_adapter,
    write_encoder_decoder,
    write_hearing_model,
)
from vllm_penalty_sched.engine.composition import read_composition
from vllm_penalty_sched.serving.tiny_model import TinyModelSpec, make_tiny_model

OURS = "vllm_penalty_sched.Scheduler"
# Of the decode-only time that the engine learns: room for chunks, none for whole prompts.
SETTINGS = {"tbt_slo_scale": 4.0, "max_defer_s": 0.3}
LONGEST_RUN_S = 240.0
# Tokens of each request that decodes: enough to go on for longer than max_defer_s.
DECODED = 250
LONG = 700  # tokens of a prompt that takes several steps under the SLO
LLAMA = TinyModelSpec()
PLACE = {"type": "object", "properties": {"floor": {"enum": [1, 2]}, "door": {"enum": ["a", "b"]}}}
PLACE |= {"required": ["floor", "door"], "additionalProperties": False}


class FeatureEngine:
    """A real engine that notes for each step who needed and who got how many tokens."""

    def __init__(self, model: Path, *, scheduler_cls: str | None = OURS, **options: Any) -> None:
        args = EngineArgs(
            model=str(model),
            dtype="float32",
            enforce_eager=True,
            scheduler_cls=scheduler_cls,
            additional_config={"penalty_sched": SETTINGS},
            **{"max_model_len": 2048, **options},
        )
        self._engine = LLMEngine.from_engine_args(args)
        self._ends: dict[str, dict[str, Any]] = {}
        self._steps: list[dict[str, Any]] = []
        self.scheduler = self._engine.engine_core.engine_core.scheduler
        self._schedule, self.scheduler.schedule = self.scheduler.schedule, self._noting_schedule

    def _noting_schedule(self, *args: Any, **kwargs: Any) -> Any:
        needs = read_composition(self.scheduler).decode_needs
        output = self._schedule(*args, **kwargs)
        self._steps.append(
            {
                "decode_needs": {given_name(key): count for key, count in needs.items()},
                "granted": {given_name(k): n for k, n in output.num_scheduled_tokens.items()},
                "encoded": [given_name(key) for key in output.scheduled_encoder_inputs],
            }
        )
        return output

    def add(self, name: str, prompt: Any, output: int, **options: Any) -> None:
        lora = options.pop("lora", None)
        params = SamplingParams(max_tokens=output, temperature=0, **{"ignore_eos": True, **options})
        self._engine.add_request(name, prompt, params, lora_request=lora)

    def embed(self, name: str, prompt: Any) -> None:
        self._engine.add_request(name, prompt, PoolingParams(task="embed"))

    def decode(self, prompts: Sequence[Any]) -> None:
        """Start a request on each prompt and run until the engine knows what its steps take."""
        for index, prompt in enumerate(prompts):
            self.add(f"decode-{index}", prompt, DECODED)
        for _ in range(50):
            self.step()

    def step(self) -> None:
        for output in self._engine.step():
            if output.finished:
                self._ends[output.request_id] = self._end(output)

    @staticmethod
    def _end(output: Any) -> dict[str, Any]:
        if hasattr(output.outputs, "data"):
            return {"vector": output.outputs.data.tolist()}
        (completion,) = output.outputs
        return {
            "prompt_tokens": len(output.prompt_token_ids),
            "cached_tokens": output.num_cached_tokens,
            "tokens": list(completion.token_ids),
            "text": completion.text,
        }

    def finish(self) -> dict[str, Any]:
        """Run until every request has ended and return what was noted."""
        budget = self.scheduler.max_num_scheduled_tokens
        while self._engine.has_unfinished_requests():
            self.step()
        planner = getattr(self.scheduler, "planner", None)
        metrics = {one.name: getattr(one, "value", None) for one in self._engine.get_metrics()}
        return {
            "ends": self._ends,
            "steps": self._steps,
            "reasons": dict(getattr(self.scheduler, "reasons", Counter())),
            "metrics": metrics,
            "coefficients_s": planner.model.coefficients() if planner else {},
            "budget_kept": self.scheduler.max_num_scheduled_tokens == budget,
            "left": len(self.scheduler.requests),
        }


def given_name(request_id: str) -> str:
    """Return the name that a request was added under: the engine appends random letters."""
    return request_id.rpartition("-")[0]


def tokens(length: int, seed: int) -> TokensPrompt:
    ids = np.random.default_rng([length, seed]).integers(10, 2000, length).tolist()
    return TokensPrompt(prompt_token_ids=ids)


def short_prompts() -> list[TokensPrompt]:
    return [tokens(20 + index, index) for index in range(6)]


def sound(seconds: float, seed: int) -> dict[str, Any]:
    samples = np.random.default_rng(seed).standard_normal(int(seconds * SAMPLING_RATE))
    return {"audio": (samples.astype(np.float32), SAMPLING_RATE)}


def llama_in(folder: Path) -> Path:
    model = folder / "llama"
    make_tiny_model(model, LLAMA)
    return model


def run_lora(folder: Path) -> dict[str, Any]:
    for number in (1, 2):
        write_adapter(folder / f"adapter-{number}", LLAMA, seed=number)
    engine = FeatureEngine(
        llama_in(folder), enable_lora=True, max_loras=1, max_cpu_loras=2, max_lora_rank=LORA_RANK
    )
    engine.decode(short_prompts())
    for index in range(6):
        number = 1 + index % 2
        lora = LoRARequest(f"adapter-{number}", number, str(folder / f"adapter-{number}"))
        engine.add(f"adapter-{number}-{index}", tokens(LONG, index // 2), 30, lora=lora)
    return engine.finish()


def run_prefix_caching(folder: Path) -> dict[str, Any]:
    engine = FeatureEngine(llama_in(folder))
    engine.decode(short_prompts())
    for name in ("first", "second"):
        engine.add(name, tokens(LONG, 0), 20)
        for _ in range(60):
            engine.step()
    return engine.finish()


def run_structured_output(folder: Path) -> dict[str, Any]:
    compact = {"backend": "xgrammar", "disable_any_whitespace": True}
    engine = FeatureEngine(llama_in(folder), structured_outputs_config=compact)
    engine.decode(short_prompts())
    for index in range(4):
        place = StructuredOutputsParams(json=PLACE)
        prompt = tokens(LONG, index)
        engine.add(f"place-{index}", prompt, 60, structured_outputs=place, ignore_eos=False)
    engine.add("plain", tokens(LONG, 9), 30)
    return engine.finish()


def run_speculative_decoding(folder: Path) -> dict[str, Any]:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    engine = FeatureEngine(llama_in(folder), speculative_config={**drafts, "prompt_lookup_min": 1})
    repeated = [tokens(8, index)["prompt_token_ids"] for index in range(6)]
    engine.decode([TokensPrompt(prompt_token_ids=5 * ids) for ids in repeated])
    for index in range(4):
        engine.add(f"late-{index}", tokens(LONG, index), 30)
    return engine.finish()


def run_without_chunking(folder: Path) -> dict[str, Any]:
    engine = FeatureEngine(
        llama_in(folder), enable_chunked_prefill=False, max_num_batched_tokens=2048
    )
    engine.decode(short_prompts())
    for index, length in enumerate((300, 40, 250)):
        engine.add(f"whole-{index}", tokens(length, index), 20)
    return engine.finish()


def run_audio(folder: Path, *, disable_chunked_mm_input: bool = False) -> dict[str, Any]:
    write_hearing_model(folder / "hearing")
    engine = FeatureEngine(
        folder / "hearing",
        load_format="dummy",
        disable_chunked_mm_input=disable_chunked_mm_input,
    )

    def heard(seconds: float, seed: int) -> dict[str, Any]:
        text = "what is it? " * 8 + "<|audio_bos|><|AUDIO|><|audio_eos|>"
        return {"prompt": text, "multi_modal_data": sound(seconds, seed)}

    engine.decode([heard(1.0, seed) for seed in range(4)])
    for index in range(4):
        engine.add(f"late-{index}", heard(5.0, 10 + index), 20)
    return engine.finish()


def run_unchunked_audio(folder: Path) -> dict[str, Any]:
    return run_audio(folder, disable_chunked_mm_input=True)


def run_encoder_decoder(folder: Path) -> dict[str, Any]:
    write_encoder_decoder(folder / "whisper")
    engine = FeatureEngine(folder / "whisper", load_format="dummy", max_model_len=448)

    def spoken(seed: int) -> dict[str, Any]:
        encoder = {"prompt": "", "multi_modal_data": sound(3.0, seed)}
        return {"encoder_prompt": encoder, "decoder_prompt": "<|startoftranscript|>"}

    engine.decode([spoken(seed) for seed in range(4)])
    for index in range(4):
        engine.add(f"late-{index}", spoken(10 + index), 20)
    return engine.finish()


def run_pooling(folder: Path, *, scheduler_cls: str | None = OURS) -> dict[str, Any]:
    engine = FeatureEngine(llama_in(folder), runner="pooling", scheduler_cls=scheduler_cls)
    for index in range(12):
        engine.embed(f"text-{index}", tokens(100 + 90 * index, index))
    return engine.finish()


def run_stock_pooling(folder: Path) -> dict[str, Any]:
    return run_pooling(folder, scheduler_cls=None)


RUNS: Mapping[str, Callable[[Path], dict[str, Any]]] = {
    "lora": run_lora,
    "prefix_caching": run_prefix_caching,
    "structured_output": run_structured_output,
    "speculative_decoding": run_speculative_decoding,
    "without_chunking": run_without_chunking,
    "audio": run_audio,
    "unchunked_audio": run_unchunked_audio,
    "encoder_decoder": run_encoder_decoder,
    "pooling": run_pooling,
    "stock_pooling": run_stock_pooling,
}


def write_run(name: str, folder: Path) -> None:
    """Run one feature in a folder of its own and write what came of it, be it an error."""
    models = folder / f"models-{name}"
    models.mkdir()
    try:
        facts = RUNS[name](models)
    except Exception:  # noqa: BLE001  # the test tells it
        facts = {"error": traceback.format_exc()}
    write_facts(name, folder, facts)


def write_facts(name: str, folder: Path, facts: Mapping[str, Any]) -> None:
    (folder / f"{name}.json").write_text(json.dumps(facts))


def main(folder: Path) -> None:
    forked = multiprocessing.get_context("fork")
    for name in RUNS:
        process = forked.Process(target=write_run, args=(name, folder))
        process.start()
        process.join(LONGEST_RUN_S)
        if process.is_alive():
            process.kill()
            process.join()
        if process.exitcode:
            error = f"exit status {process.exitcode}, at most {LONGEST_RUN_S:.0f} s: see the log"
            write_facts(name, folder, {"error": error})
        print(f"{name}: exit status {process.exitcode}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
