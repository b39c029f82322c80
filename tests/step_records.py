"""Build step traces for tests."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from vllm_penalty_sched.batch import BatchShape
from vllm_penalty_sched.policy import Reason
from vllm_penalty_sched.step_log.records import StepLog, StepRecord


def step(
    observed_ms: float,
    *,
    decodes: int = 8,
    prefill: int = 0,
    context: int | None = None,
    reason: Reason | None = None,
    slo_ms: float | None = 50.0,
    alone_ms: float | None = None,
    predicted_ms: float | None = None,
    budget: int | None = None,
    margin: float = 0.1,
    done_s: float = 0.0,
) -> StepRecord:
    """Return a step with decodes of 100 context tokens each, explained as the policy would."""
    usual = Reason.SLO if prefill else Reason.NO_PREFILL
    return StepRecord(
        done_s=done_s,
        shape=BatchShape(
            prefills=((prefill, 0),) if prefill else (),
            decode_seqs=decodes,
            decode_tokens=decodes,
            decode_context=100 * decodes if context is None else context,
        ),
        reason=usual if reason is None else reason,
        budget_tokens=prefill if budget is None else budget,
        slo_s=None if slo_ms is None else slo_ms / 1e3,
        decode_only_s=None if alone_ms is None else alone_ms / 1e3,
        predicted_s=(observed_ms if predicted_ms is None else predicted_ms) / 1e3,
        observed_s=observed_ms / 1e3,
        margin=margin,
    )


def log_of(*parts: StepRecord | Sequence[StepRecord]) -> StepLog:
    """Return a log of steps that follow each other without a pause from time 100 s."""
    steps: list[StepRecord] = []
    now_s = 100.0
    for part in parts:
        for one in [part] if isinstance(part, StepRecord) else part:
            now_s += one.observed_s
            fields = {name: getattr(one, name) for name in one.__dataclass_fields__}
            steps.append(StepRecord(**{**fields, "done_s": now_s}))
    return StepLog(steps=tuple(steps))


def line_of(record: StepRecord, **changes: Any) -> str:
    """Return the line that the engine would write; ``...`` leaves a field out."""
    shape = record.shape
    fields = {
        "done_s": record.done_s,
        "decode_seqs": shape.decode_seqs,
        "decode_tokens": shape.decode_tokens,
        "decode_context": shape.decode_context,
        "prefills": shape.prefills,
        "encoder_tokens": shape.encoder_tokens,
        "prefill_ratio": round(shape.prefill_ratio, 6),
        "reason": record.reason,
        "budget_tokens": record.budget_tokens,
        "slo_s": record.slo_s,
        "decode_only_s": record.decode_only_s,
        "predicted_s": record.predicted_s,
        "observed_s": record.observed_s,
        "margin": record.margin,
        **changes,
    }
    return json.dumps({name: value for name, value in fields.items() if value is not ...})


def text_of(records: Iterable[StepRecord]) -> str:
    """Return a file's content."""
    return "".join(f"{line_of(record)}\n" for record in records)
