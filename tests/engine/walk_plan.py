"""What one random walk over the scheduler is made of, drawn from one seed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import vllm

# What happens beside arrivals, and how likely it is before a step.
SHARES = {
    "aborts": 0.02,
    "pauses": 0.01,
    "resets": 0.01,
    "sessions": 0.05,
    "grammars": 0.05,
    "loras": 0.0,  # these are kinds of arrivals
    "images": 0.0,
    "slos": 0.0,
    "outliers": 0.0,
    "clock_jumps": 0.02,
}
FEATURES = frozenset(SHARES)
MODEL_LEN = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class WalkPlan:
    """A walk's configuration; ``seed`` alone gives all of it and every later draw."""

    seed: int
    is_async: bool
    spec_tokens: int
    is_v2_runner: bool
    policy: str
    kv_blocks: int
    prefix_caching: bool
    chunked_prefill: bool
    whole_images: bool
    long_prefill_tokens: int
    step_tokens: int
    seqs: int
    settings: Mapping[str, Any]
    features: frozenset[str]

    @classmethod
    def of_seed(cls, seed: int, *, without: frozenset[str] = frozenset()) -> WalkPlan:
        rng = random.Random(f"plan {seed}")
        chunked = rng.random() < 0.85
        settings = {
            "tbt_slo_ms": rng.choice([None, 10.0, 21.0, 40.0, 200.0]),
            "ttft_slo_ms": rng.choice([None, None, 500.0, 5000.0]),
            "max_defer_s": rng.choice([0.2, 0.5, 1.0]),
            "mode": rng.choice(["enforce"] * 7 + ["observe"]),
            "order": rng.choice(["slack", "slack", "fcfs"]),
            "pacing": rng.choice(["gap", "deadline"]),
        }
        is_async, spec_tokens = rng.random() < 0.5, rng.choice([0, 0, 1, 3])
        features = frozenset(name for name in sorted(FEATURES) if rng.random() < 0.6)
        if spec_tokens and (not is_async or vllm.__version_tuple__[:2] < (0, 31)):
            # When a session's turn ends among drafts, vLLM 0.32 itself fails an assertion, and
            # 0.28 leaves requests waiting for ever.
            features -= {"sessions"}
        return cls(
            seed=seed,
            is_async=is_async,
            spec_tokens=spec_tokens,
            is_v2_runner=rng.random() < 0.5,
            policy=rng.choice(["fcfs", "priority"]),
            # The smallest just holds one longest request: everybody else is preempted.
            kv_blocks=rng.choice([4000, 4000, 300, 160]),
            prefix_caching=rng.random() < 0.7,
            chunked_prefill=chunked,
            whole_images=rng.random() < 0.5,
            long_prefill_tokens=rng.choice([0, 0, 64]) if chunked else 0,
            step_tokens=rng.choice([256, 1024]) if chunked else MODEL_LEN,
            seqs=rng.choice([6, 24]),
            settings=settings,
            features=features - without,
        )
