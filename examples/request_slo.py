"""Ask a running server for a TBT SLO of your own.

    python examples/request_slo.py [URL]

The stock OpenAI client sends it in vllm_xargs. While the request decodes, the tightest SLO among
all running requests rules each step.
"""

import sys
import time
from itertools import pairwise

from openai import OpenAI


def longest_gap_ms(stream) -> float:
    times_s = [time.perf_counter() for chunk in stream if chunk.choices]
    return 1e3 * max(after - before for before, after in pairwise(times_s))


def main(url: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    own_slo = {"vllm_xargs": {"tbt_slo_ms": 30}, "ignore_eos": True}

    completion = client.completions.create(
        model=model, prompt="Once upon a time", max_tokens=50, stream=True, extra_body=own_slo
    )
    print(f"completion: longest gap {longest_gap_ms(completion):.1f} ms, asked for 30 ms")

    chat = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Tell me a story."}],
        max_tokens=50,
        stream=True,
        extra_body=own_slo,
    )
    print(f"chat: longest gap {longest_gap_ms(chat):.1f} ms, asked for 30 ms")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
