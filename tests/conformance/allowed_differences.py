"""The tests of vLLM that cannot pass with our class, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping

from tests.conformance.comparison import ENFORCE, OBSERVE

_FIXED_STEPS: Mapping[str, str] = {
    "tests/v1/core/test_deferred_block_free.py::"
    "test_allocation_retry_waits_for_fence_then_succeeds[priority-2]": (
        "fails the second allocation of a step: ours serves the most urgent decode first, so that "
        "the second one is another request's"
    ),
}

ALLOWED: Mapping[str, Mapping[str, str]] = {OBSERVE: {}, ENFORCE: _FIXED_STEPS}
