"""vLLM's own benchmark client, ``vllm bench serve``, with random prompts."""

import os
import subprocess
import sys


def run_bench(
    url: str, model: str, *options: str, input_tokens: int, output_tokens: int, range_ratio: float
) -> None:
    """Send a load to a server and wait for its end; further options are the client's."""
    subprocess.run(
        [
            sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve",
            "--backend", "openai", "--base-url", url, "--model", model, "--ignore-eos",
            "--dataset-name", "random", "--random-range-ratio", str(range_ratio),
            "--random-input-len", str(input_tokens), "--random-output-len", str(output_tokens),
            *options,
        ],
        check=True, stdout=subprocess.DEVNULL, env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
