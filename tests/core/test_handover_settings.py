from typing import Any

import pytest

from vllm_penalty_sched.disaggregation.handover_settings import HandoverSettings
from vllm_penalty_sched.errors import ConfigError


def read(role: str = "kv_consumer", policy: str = "recompute", **extra: Any) -> HandoverSettings:
    return HandoverSettings.from_extra_config(extra, kv_role=role, load_failure_policy=policy)


def test_without_an_address_nobody_is_asked_and_clients_name_no_kv_cache() -> None:
    settings = read(role="kv_producer", policy="fail", backends=["UCX"])

    assert settings.prefill_url is None
    assert not settings.allow_client_kv_params


def test_values_are_taken_over_and_the_lease_leaves_time_to_read() -> None:
    settings = read(prefill_url="http://10.0.0.7:8100/", prefill_timeout_s=3, kv_lease_duration=20)

    assert settings.prefill_url == "http://10.0.0.7:8100"
    assert settings.prefill_timeout_s == 3.0
    assert settings.read_within_s == 15.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prefill_url", "10.0.0.7:8100"),
        ("prefill_url", "http://10.0.0.7:port"),
        ("prefill_url", "http://10.0.0.7/v1"),
        ("prefill_url", "http://user@10.0.0.7"),
        ("prefill_url", 8100),
        ("prefill_timeout_s", 0),
        ("prefill_timeout_s", True),
        ("prefill_timeout_s", float("nan")),
        ("prefill_timeout_s", "10"),
        ("kv_lease_duration", 5),
        ("kv_lease_duration", None),
        ("allow_client_kv_params", "yes"),
        ("prefill_timeout", 3),
    ],
)
def test_a_wrong_value_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        read(**{name: value})


def test_every_mistake_is_in_one_message() -> None:
    with pytest.raises(ConfigError) as caught:
        read(prefill_url="nowhere", prefill_timeout_s=-1, prefill_urls=[])

    for name in ("prefill_url must", "prefill_timeout_s must", "prefill_urls is not"):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("kv_role", {"role": "kv_producer"}),
        ("kv_load_failure_policy", {"policy": "fail"}),
        ("kv_lease_duration - 5", {"prefill_timeout_s": 26}),
    ],
)
def test_what_would_lose_requests_or_read_too_late_is_refused(
    rule: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=rule):
        read(prefill_url="http://127.0.0.1:8100", **changes)
