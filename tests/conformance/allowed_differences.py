"""The tests of vLLM that cannot pass with our class, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping

from tests.conformance.comparison import ENFORCE, OBSERVE

_SCHEDULER = "tests/v1/core/test_scheduler.py::"
_REPLAY = "tests/v1/core/test_prefix_replay.py::"

_REFUSED: Mapping[str, str] = dict.fromkeys(
    (
        f"{_SCHEDULER}test_diffusion_scheduler_is_selected_by_default[{is_async}]"
        for is_async in (False, True)
    ),
    "sets up the ordinary scheduler for a diffusion model, which ours refuses",
)
_FIXED_STEPS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            f"{_REPLAY}test_hit_replays_window_without_reallocating",
            f"{_REPLAY}test_replay_only_chunks_make_progress",
            f"{_REPLAY}test_hit_no_longer_than_window_is_ignored[False]",
        ),
        "fixes the tokens of one step: ours takes the whole prefix hit for computed, of which this "
        "model replays a window, so that the rest of the prompt comes a step later",
    ),
    "tests/v1/core/test_deferred_block_free.py::"
    "test_allocation_retry_waits_for_fence_then_succeeds[priority-2]": (
        "fails the second allocation of a step: ours serves the most urgent decode first, so that "
        "the second one is another request's"
    ),
}

ALLOWED: Mapping[str, Mapping[str, str]] = {
    OBSERVE: _REFUSED,
    ENFORCE: {**_REFUSED, **_FIXED_STEPS},
}
