"""Hypothesis strategies that the tests share."""

from hypothesis import strategies as st

from vllm_penalty_sched.batch import BatchShape

chunks = st.tuples(st.integers(1, 2048), st.integers(0, 8192))


@st.composite
def shapes(draw: st.DrawFn, *, with_prefill: bool | None = None) -> BatchShape:
    seqs = draw(st.integers(0 if with_prefill else 1, 256))
    least, most = {None: (0, 3), True: (1, 3), False: (0, 0)}[with_prefill]
    prefills = tuple(draw(st.lists(chunks, min_size=least, max_size=most)))
    return BatchShape(
        prefills=prefills,
        decode_seqs=seqs,
        decode_tokens=seqs,
        decode_context=seqs * draw(st.integers(1, 8192)),
        encoder_tokens=draw(st.integers(0, 4096)) if prefills else 0,
    )


def with_more(
    shape: BatchShape, other: BatchShape, more_seqs: int, more_context: int
) -> BatchShape:
    """Return a step with the chunks of another one too, and more decodes with more context."""
    return BatchShape(
        prefills=shape.prefills + other.prefills,
        decode_seqs=shape.decode_seqs + more_seqs,
        decode_tokens=shape.decode_tokens + more_seqs,
        decode_context=shape.decode_context + more_context,
        encoder_tokens=shape.encoder_tokens + other.encoder_tokens,
    )


settings_values = {
    "tbt_slo_ms": st.none() | st.floats(0.001, 3_600_000.0),
    "ttft_slo_ms": st.none() | st.floats(0.001, 3_600_000.0),
    "least_request_tbt_slo_ms": st.none() | st.floats(0.001, 3_600_000.0),
    "tbt_slo_scale": st.floats(1.0, 100.0, exclude_min=True),
    "miss_rate": st.floats(1e-6, 0.5),
    "max_defer_s": st.floats(1e-3, 3600.0),
    "order": st.sampled_from(["fcfs", "slack"]),
    "pacing": st.sampled_from(["gap", "deadline"]),
    "state_path": st.none() | st.just("state.json"),
    "trace_path": st.none() | st.just("trace.jsonl"),
    "mode": st.sampled_from(["enforce", "observe"]),
}
settings_mappings = st.fixed_dictionaries({}, optional=settings_values)

nonsense = (
    st.none()
    | st.booleans()
    | st.text(max_size=5)
    | st.lists(st.integers(), max_size=2)
    | st.sampled_from([0, -1, float("nan"), float("inf"), -float("inf"), 10**400, "1e999", "nan"])
)
