"""What the mixed steps of a trace would have taken without their prefill."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vllm_penalty_sched.step_log.records import StepTable

# So many decode-only steps are compared with: enough to even out noise.
NEIGHBOURS = 9
# Steps whose decode tokens or contexts differ by more than this share are no neighbours.
MOST_DISTANCE = 0.25


def estimate_decode_only_s(table: StepTable) -> NDArray[np.float64]:
    """Return what each step with decodes would have taken without its prefill.

    A decode-only step is its own estimate. A mixed step's is the median of up to ``NEIGHBOURS``
    of the trace's decode-only steps: those with the nearest number of decode tokens that occurs,
    and among them those nearest in context, both within ``MOST_DISTANCE``. Where there is none,
    as under a backlog that leaves no decode-only step, it is what the plugin's model expected
    when it planned the step. Drift of the machine's speed is not taken out.

    Returns:
        Seconds, shape (n,); NaN for steps without decodes, and where neither is known.
    """
    estimates_s = np.where(table.is_mixed, table.decode_only_s, np.nan)
    estimates_s[table.is_decode_only] = table.observed_s[table.is_decode_only]
    known = np.flatnonzero(table.is_decode_only)
    if not known.size:
        return estimates_s
    known = known[np.lexsort((table.decode_context[known], table.decode_tokens[known]))]
    counts, starts = np.unique(table.decode_tokens[known], return_index=True)
    groups = np.split(known, starts[1:])
    for count in np.unique(table.decode_tokens[table.is_mixed]):
        nearest = int(np.argmin(np.abs(counts - count)))
        if abs(counts[nearest] - count) <= MOST_DISTANCE * count:
            asked = np.flatnonzero(table.is_mixed & (table.decode_tokens == count))
            medians_s = _medians_near(table, groups[nearest], asked)
            estimates_s[asked] = np.where(np.isnan(medians_s), estimates_s[asked], medians_s)
    return estimates_s


def _medians_near(
    table: StepTable, group: NDArray[np.int64], asked: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the median time of those of a group, sorted by context, that are near each, or NaN."""
    contexts, own = table.decode_context[group], table.decode_context[asked][:, None]
    width = min(NEIGHBOURS, group.size)
    # The nearest lie side by side: of all windows of that width, take the one that reaches least.
    places = np.searchsorted(contexts, own)
    firsts = np.clip(places - np.arange(width + 1), 0, group.size - width)
    reach = np.maximum(np.abs(own - contexts[firsts]), np.abs(own - contexts[firsts + width - 1]))
    best = np.take_along_axis(firsts, np.argmin(reach, axis=1)[:, None], axis=1)
    places = best + np.arange(width)
    is_near = np.abs(contexts[places] - own) <= MOST_DISTANCE * own
    medians_s = np.full(asked.size, np.nan)
    some = is_near.any(axis=1)
    times_s = np.where(is_near, table.observed_s[group[places]], np.nan)
    medians_s[some] = np.nanmedian(times_s[some], axis=1)
    return medians_s
