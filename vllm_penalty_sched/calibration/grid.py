"""The compositions that a calibration measures, as far as an engine can run them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from vllm_penalty_sched.errors import ConfigError

CURVE_SERIES, STEP_SERIES = "curve", "step"

CURVE_CHUNK_TOKENS = 8
"""Longest chunk of the curve's series: with 8 requests it ends at 64 prefill tokens, up to which
a quadratic in the prefill ratio describes steps (``PenaltyCurve``)."""

LONG_PROMPT_TOKENS = 1024
"""Prompts from this length on take most of a calibration's time."""

# A one-token chunk runs as a decode in vLLM's attention (0.28-0.33), so the shortest has two.
_SHORTEST_CHUNK = 2
# Decodes may have outgrown their planned context by this much before they are replaced.
_DRIFT_TOKENS, _DRIFT_SHARE = 64, 0.25
# Tokens that a decode gains while one point is measured, with room to spare.
_POINT_STEPS = 128
_KV_SHARE = 0.9
# To estimate what is left, in prefill tokens: a point's steps, and what it takes at the least.
_STEPS_A_POINT, _LEAST_WORK = 4, 3000


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What an engine can run at once.

    Attributes:
        max_model_len: Longest request, tokens.
        max_num_seqs: Most requests in a step.
        max_num_batched_tokens: Most tokens in a step.
        kv_tokens: Tokens that fit into its KV cache.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GridPoint:
    """One composition to measure.

    Attributes:
        series: ``curve`` or ``step``.
        repetition: Tells apart points of one composition.
        prefills: ``(new, cached)`` of each chunk; at most one has cached tokens, the first.
        decode_seqs: Requests that decode.
        decode_context: Context of each of them, tokens.

    Raises:
        ConfigError: If a later chunk than the first has cached tokens.
    """

    series: str = STEP_SERIES
    repetition: int = 0
    prefills: tuple[tuple[int, int], ...] = ()
    decode_seqs: int = 0
    decode_context: int = 0

    def __post_init__(self) -> None:
        if any(cached for _, cached in self.prefills[1:]):
            raise ConfigError(f"only the first chunk may have cached tokens, got {self.prefills}")

    @property
    def composition(self) -> str:
        """What the repetitions of a point have in common."""
        chunks = "".join(f"+{new}@{cached}" for new, cached in self.prefills)
        return f"{self.decode_seqs}x{self.decode_context}{chunks}"

    @property
    def name(self) -> str:
        """The point's name in its series, one line."""
        return f"{self.repetition}:{self.composition}" if self.repetition else self.composition

    @property
    def allowed_context(self) -> int:
        """Longest mean context of the decodes with which the point still is what it says."""
        drift = max(_DRIFT_TOKENS, int(_DRIFT_SHARE * self.decode_context))
        return self.decode_context + drift


@dataclass(frozen=True, slots=True, kw_only=True)
class GridSpec:
    """The axes of a grid; combinations that the engine cannot run are left out.

    Attributes:
        decode_counts: Requests that decode, besides the points without any.
        decode_contexts: Context of each of them, tokens.
        most_decode_context: Most tokens of context of all decodes together.
        chunks: New tokens of a single chunk; the largest that a step can hold is added.
        cached_chunks: ``(new, cached)`` of a single chunk on cached tokens.
        several_chunks: ``(count, new)`` of several chunks in one step.
        step_passes: How often these are measured, at different times.
        curve_passes: How often the curve's series is measured, between these.
        curve_context: Context of each decode there, tokens.
        long_prompt_every: A prompt of ``LONG_PROMPT_TOKENS`` or more is measured beside every so
            many-th combination of decodes only, beside others in each pass.
        longest_s: Longest time of a calibration, the engine's start included, seconds; points
            that are left then are left out. None: no limit.
    """

    decode_counts: tuple[int, ...]
    decode_contexts: tuple[int, ...]
    most_decode_context: int
    chunks: tuple[int, ...]
    cached_chunks: tuple[tuple[int, int], ...]
    several_chunks: tuple[tuple[int, int], ...]
    step_passes: int
    curve_passes: int
    curve_context: int = 256
    long_prompt_every: int = 1
    longest_s: float | None = None


QUICK = GridSpec(
    decode_counts=(1, 4, 8, 16, 32),
    decode_contexts=(128, 1024),
    most_decode_context=8192,
    chunks=(16, 64, 256, 1024),
    cached_chunks=((256, 1024),),
    several_chunks=((4, 64),),
    step_passes=2,
    curve_passes=3,
    long_prompt_every=3,
    longest_s=165.0,  # three minutes with the engine's end
)
FULL = GridSpec(
    decode_counts=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    decode_contexts=(128, 512, 2048, 8192, 32_768),
    most_decode_context=262_144,
    chunks=(2, 8, 16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192),
    cached_chunks=(
        (64, 1024), (512, 1024), (64, 4096), (512, 4096), (2048, 4096), (512, 16_384),
    ),
    several_chunks=((4, 64), (8, 32), (2, 512), (4, 256)),
    step_passes=2,
    curve_passes=5,
)  # fmt: skip


def plan_grid(spec: GridSpec, limits: EngineLimits, *, concurrency: int) -> list[GridPoint]:
    """Return the points in the order in which to measure them: what matters most comes first.

    Every composition comes several times, far apart, and every other pass over the steps runs
    backwards: a machine that is slower for a while, or slows down, does not tilt what is fitted to
    them. The points of one pass of the curve, which differ by little, follow each other, to be
    measured in turns. Stopping anywhere behind the first passes loses repetitions only.

    Args:
        spec: The axes.
        limits: What the engine can run.
        concurrency: Concurrent requests of the curve's series, >= 2.

    Raises:
        ConfigError: If ``concurrency`` is below 2, or the engine cannot run the curve's series.
    """
    if concurrency < 2:
        raise ConfigError(f"concurrency must be >= 2, got {concurrency}")
    points: list[GridPoint] = []
    for repetition in range(max(spec.curve_passes, spec.step_passes)):
        if repetition < spec.curve_passes:
            points += _curve_pass(concurrency, spec.curve_context, repetition)
        if repetition < spec.step_passes:
            turn = -1 if repetition % 2 else 1
            points += list(_step_pass(spec, limits, repetition))[::turn]
    fitting = [point for point in dict.fromkeys(points) if _fits(point, limits)]
    if any(point.series == CURVE_SERIES for point in set(points).difference(fitting)):
        raise ConfigError(
            f"the engine cannot run {concurrency} concurrent requests of "
            f"{spec.curve_context} tokens ({limits}): lower concurrency or raise its limits"
        )
    return fitting


def estimate_work(points: Sequence[GridPoint]) -> list[int]:
    """Return about how much each point has to compute, in prefill tokens."""
    works = []
    for before, point in pairwise([GridPoint(), *points]):
        kept = before.decode_seqs if before.decode_context == point.decode_context else 0
        starting = max(0, point.decode_seqs - kept) * point.decode_context
        one = sum(new + cached for new, cached in point.prefills) + point.decode_seqs
        works.append(starting + _STEPS_A_POINT * one + _LEAST_WORK)
    return works


def _curve_pass(concurrency: int, context: int, repetition: int) -> list[GridPoint]:
    """Return the way from all requests decoding to all prefilling.

    One request prefills with a growing chunk, then more and more of them do: the ratio rises from
    0 to 1 while the number of requests stays.
    """
    mixes = [(0, 0)]
    mixes += [(1, new) for new in range(_SHORTEST_CHUNK, CURVE_CHUNK_TOKENS + 1)]
    mixes += [(prefilling, CURVE_CHUNK_TOKENS) for prefilling in range(2, concurrency + 1)]
    return [
        GridPoint(
            series=CURVE_SERIES,
            repetition=repetition,
            prefills=((new, 0),) * prefilling,
            decode_seqs=concurrency - prefilling,
            decode_context=context,
        )
        for prefilling, new in mixes
    ]


def _step_pass(spec: GridSpec, limits: EngineLimits, repetition: int) -> Iterator[GridPoint]:
    groups = [(0, 0)]
    groups += [
        (seqs, context)
        for context in spec.decode_contexts
        for seqs in spec.decode_counts
        if seqs * context <= spec.most_decode_context
    ]
    # Every other one, then the rest: the first half covers the axes already.
    for place, (seqs, context) in enumerate(groups[::2] + groups[1::2]):
        largest = min(limits.max_num_batched_tokens - seqs, limits.max_model_len - 1)
        chunks = [(), *(((new, 0),) for new in (*spec.chunks, largest) if 0 < new <= largest)]
        chunks += [((new, cached),) for new, cached in spec.cached_chunks]
        chunks += [((new, 0),) * count for count, new in spec.several_chunks]
        takes_long_prompts = (place + repetition) % spec.long_prompt_every == 0
        for prefills in chunks:
            is_long = any(new + cached >= LONG_PROMPT_TOKENS for new, cached in prefills)
            if (seqs or prefills) and (takes_long_prompts or not is_long):
                yield GridPoint(
                    repetition=repetition,
                    prefills=prefills,
                    decode_seqs=seqs,
                    decode_context=context,
                )


def _fits(point: GridPoint, limits: EngineLimits) -> bool:
    prompts = [new + cached for new, cached in point.prefills]
    tokens = point.decode_seqs + sum(new for new, _ in point.prefills)
    context = point.allowed_context + _POINT_STEPS if point.decode_seqs else 0
    return (
        point.decode_seqs + len(prompts) <= limits.max_num_seqs
        and tokens <= limits.max_num_batched_tokens
        and max(context, *prompts, 0) < limits.max_model_len
        and point.decode_seqs * context + sum(prompts) <= _KV_SHARE * limits.kv_tokens
    )
