"""Which GPU should prefill and which should decode, by what steps cost on each?

python benchmarks/roles_by_gpu.py [--json benchmarks/results/roles_by_gpu.json]

The measured GPUs run the same model, Llama-2-7B. H200 and L40S are not measured here: their rows
scale a measured relative by the data sheets (memory-bound terms by bandwidth, the others by dense
bf16 compute), and say so.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_penalty_sched import BatchShape
from vllm_penalty_sched.files import write_json
from vllm_penalty_sched.serving.run_record import record_run
from vllm_penalty_sched.simulation.cost_profiles import PROFILES, ProfileCosts

TBT_SLO_S, CONTEXT_TOKENS, CHUNK_TOKENS = 0.05, 1024, 2048
# Llama-2-7B: keys and values of 32 layers of 4,096 in 16 bits; 13.5 GB of weights.
KV_BYTES_PER_TOKEN, WEIGHT_BYTES, MEMORY_SHARE = 2 * 32 * 4096 * 2, 13.5e9, 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Data sheet: memory in GB, bandwidth in GB/s, dense bf16 TFLOP/s; and whose costs it has."""

    memory_gb: float
    bandwidth_gbs: float
    tflops: float
    profile: str = ""
    scaled_from: str = ""


GPUS = {
    "H200": Gpu(memory_gb=141, bandwidth_gbs=4800, tflops=989, scaled_from="H100"),
    "H100": Gpu(memory_gb=80, bandwidth_gbs=3350, tflops=989, profile="h100-llama2-7b"),
    "A100": Gpu(memory_gb=80, bandwidth_gbs=2039, tflops=312, profile="a100-llama2-7b"),
    "L40S": Gpu(memory_gb=48, bandwidth_gbs=864, tflops=362, scaled_from="A40"),
    "A40": Gpu(memory_gb=48, bandwidth_gbs=696, tflops=150, profile="a40-llama2-7b"),
}


def costs_of(name: str) -> ProfileCosts:
    gpu = GPUS[name]
    if gpu.profile:
        return PROFILES[gpu.profile]
    relative = GPUS[gpu.scaled_from]
    memory = relative.bandwidth_gbs / gpu.bandwidth_gbs
    compute = relative.tflops / gpu.tflops
    costs = PROFILES[relative.profile]
    return replace(
        costs,
        floor_s=costs.floor_s * memory,
        decode_context_s=costs.decode_context_s * memory,
        token_s=costs.token_s * compute,
        token_over_128_s=costs.token_over_128_s * compute,
        token_over_256_s=costs.token_over_256_s * compute,
        attention_work_s=costs.attention_work_s * compute,
        cached_token_s=costs.cached_token_s * memory,
    )


def decodes(seqs: int) -> BatchShape:
    return BatchShape(decode_seqs=seqs, decode_tokens=seqs, decode_context=seqs * CONTEXT_TOKENS)


def row_of(name: str) -> dict[str, Any]:
    gpu, costs = GPUS[name], costs_of(name)
    kv_bytes = MEMORY_SHARE * gpu.memory_gb * 1e9 - WEIGHT_BYTES
    fit = int(kv_bytes / (KV_BYTES_PER_TOKEN * CONTEXT_TOKENS))
    seqs = max(n for n in range(1, fit + 1) if costs.step_s(decodes(n)) <= TBT_SLO_S)
    prefill_s = costs.step_s(BatchShape(prefills=((CHUNK_TOKENS, 0),)))
    prefill_rate = CHUNK_TOKENS / prefill_s
    decode_rate = seqs / costs.step_s(decodes(seqs))
    mixed = decodes(8).with_prefill(CHUNK_TOKENS, 0)
    return {
        "gpu": name,
        "costs": gpu.profile or f"{GPUS[gpu.scaled_from].profile}, scaled from the data sheet",
        "is_measured": bool(gpu.profile),
        "prefill_tokens_per_s": round(prefill_rate),
        "decode_seqs": seqs,
        "decode_limited_by": "memory" if seqs == fit else "TBT SLO",
        "decode_tokens_per_s": round(decode_rate),
        "prefill_per_decode_token": round(prefill_rate / decode_rate, 2),
        "penalty_ms": round(1e3 * (costs.step_s(mixed) - costs.step_s(decodes(8))), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    rows = [row_of(name) for name in GPUS]
    for row in rows:
        print(*row.values(), sep="\t")
    if arguments.json:
        write_json(
            arguments.json,
            {
                "question": (__doc__ or "").partition("\n")[0],
                "model": "Llama-2-7B",
                "tbt_slo_s": TBT_SLO_S,
                "context_tokens": CONTEXT_TOKENS,
                "chunk_tokens": CHUNK_TOKENS,
                "rows": rows,
                "run": record_run("python " + " ".join(sys.argv), seed=0),
            },
        )


if __name__ == "__main__":
    main()
