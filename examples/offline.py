"""Generate offline with the scheduler.

    python examples/offline.py MODEL

Running decodes keep their pace while long prompts are prefilled; without an SLO of your own it is
tbt_slo_scale times the decode-only time that the scheduler measures.
"""

import os
import random
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that the scheduler can be looked at
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB; on a CPU vLLM takes most of the memory

from vllm import LLM, SamplingParams


def main(model: str) -> None:
    llm = LLM(
        model=model,
        dtype="float32",
        max_model_len=4096,
        enforce_eager=True,
        scheduler_cls="vllm_penalty_sched.Scheduler",
        additional_config={"penalty_sched": {"tbt_slo_scale": 3.0}},
    )
    prompts = [
        {"prompt_token_ids": random.choices(range(10, 2000), k=length)}
        for length in [16] * 8 + [1500] * 8
    ]
    outputs = llm.generate(
        prompts, SamplingParams(max_tokens=100, ignore_eos=True, temperature=0.0)
    )
    print(f"{sum(len(output.outputs[0].token_ids) for output in outputs)} tokens generated")

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    learned = scheduler.planner.model
    print(f"learned from {learned.samples} steps, mean error {learned.mape:.1%}")
    print("steps by reason:", {str(reason): steps for reason, steps in scheduler.reasons.items()})


if __name__ == "__main__":
    main(sys.argv[1])
