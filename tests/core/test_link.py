import math

import pytest

from vllm_penalty_sched.errors import ConfigError
from vllm_penalty_sched.simulation.link import Link, LinkSpec, kv_bytes_per_token

SPEC = LinkSpec(kv_bytes_per_token=1000, bandwidth_bytes_per_s=1e6, latency_s=0.5)


def test_a_transfer_takes_the_latency_and_the_time_of_its_bytes() -> None:
    assert SPEC.transfer_s(2000) == pytest.approx(0.5 + 2.0)


def test_one_kv_cache_crosses_after_the_other_and_latencies_overlap() -> None:
    link = Link(SPEC)

    arrivals_s = [link.send(1000, 10.0), link.send(1000, 10.0), link.send(1000, 20.0)]

    assert arrivals_s == pytest.approx([11.5, 12.5, 21.5])


def test_the_size_of_a_kv_cache_is_known_by_the_models_name() -> None:
    assert kv_bytes_per_token("a100-llama3-8b-tp1.csv") == 131_072
    assert kv_bytes_per_token("profile:a40-llama2-7b") == 4 * 131_072
    assert kv_bytes_per_token("h100-llama2-70b-tp4") == 327_680
    assert kv_bytes_per_token("mine.csv") is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_bytes_per_token": 0}, "kv_bytes_per_token must be >= 1"),
        ({"bandwidth_bytes_per_s": 0.0}, "bandwidth must be > 0"),
        ({"bandwidth_bytes_per_s": math.nan}, "bandwidth must be > 0"),
        ({"latency_s": -1.0}, "latency must be >= 0"),
    ],
)
def test_a_link_that_makes_no_sense_is_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LinkSpec(**{"kv_bytes_per_token": 1, **options})  # type: ignore[arg-type]
