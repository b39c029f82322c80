"""Print the figures of a step trace on one page."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_penalty_sched.step_log.advice import Advice
    from vllm_penalty_sched.step_log.summary import PredictionError, StepSummary

_WIDTH, _INDENT = 92, 22


def format_step_report(summary: StepSummary, advice: Sequence[Advice], *, source: str) -> str:
    """Return the page.

    Args:
        summary: The trace's figures.
        advice: What to change, for its end.
        source: The trace's name.
    """
    sections = [
        _steps(summary, source),
        _slo(summary),
        _prefill(summary),
        _decisions(summary),
        _predictions(summary),
        _changes(advice),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections)


def _steps(summary: StepSummary, source: str) -> list[str]:
    notes = [f"{summary.runs} runs of the engine"] if summary.runs > 1 else []
    notes += [f"cut lines: {summary.cut_lines}"] if summary.cut_lines else []
    note = f" ({', '.join(notes)})" if notes else ""
    return [
        _line("trace", source),
        _line("steps", f"{summary.steps} in {summary.span_s:.2f} s{note}"),
        _line("decodes ran", f"{summary.decode_time_share:.1%} of the time"),
    ]


def _slo(summary: StepSummary) -> list[str]:
    slo = summary.slo
    if slo is None:
        return [_line("SLO", "none in force in any step with decodes")]
    worst = slo.worst
    predicted = "" if worst.predicted_s is None else f", predicted {_ms(worst.predicted_s)}"
    return [
        _line("SLO in force", _range_ms(slo.least_s, slo.most_s)),
        _line(
            "SLO held",
            f"{slo.held_share:.2%} of {slo.steps} steps with decodes, {slo.overruns} overran "
            f"(mixed {_share(slo.mixed_held_share)}, "
            f"decode-only {_share(slo.decode_only_held_share)})",
        ),
        _line(
            "worst step",
            f"number {worst.number} at {worst.done_s:.2f} s on the engine's clock: "
            f"{_ms(worst.observed_s)}{predicted}, SLO {_ms(worst.slo_s)}, "
            f"{worst.decode_seqs} decodes + {worst.prefill_tokens} prefill tokens, "
            f"{worst.reason or 'not steered'}",
        ),
    ]


def _prefill(summary: StepSummary) -> list[str]:
    penalty = summary.penalty
    if penalty.mean_s is None:
        paid = "unknown: nothing tells what the mixed steps would have taken alone"
        if not penalty.mixed_steps:
            paid = "none: no prefill ran beside decodes"
    else:
        paid = (
            f"{penalty.penalty_s:.2f} s, {penalty.share:.1%} of the time with decodes; "
            f"{_ms(penalty.mean_s)} a mixed step ({penalty.estimated_steps} of "
            f"{penalty.mixed_steps} estimated)"
        )
    use = "-" if summary.budget_use is None else f"{summary.budget_use:.1%}"
    return [
        _line("penalty paid", paid),
        _line(
            "prefill",
            f"{summary.prefill_tokens} tokens, {summary.prefill_tokens_per_s:.0f} a second; "
            f"{use} of the budgets used",
        ),
        _line("longest wait", f"{summary.longest_wait_s:.2f} s without a prefill token"),
    ]


def _decisions(summary: StepSummary) -> list[str]:
    rows = [f"{'decisions':<{_INDENT}}{'steps':>8}{'of steps':>10}{'of time':>10}"]
    rows += [
        f"  {share.reason or 'not steered':<{_INDENT - 2}}{share.steps:>8}"
        f"{share.step_share:>10.1%}{share.time_share:>10.1%}"
        for share in summary.reasons
    ]
    return rows


def _predictions(summary: StepSummary) -> list[str]:
    return [
        _line("prediction, mixed", _error(summary.mixed_error)),
        _line("  decode-only", _error(summary.decode_only_error)),
        _line("margin", f"{summary.least_margin:.1%} to {summary.most_margin:.1%}"),
    ]


def _changes(advice: Sequence[Advice]) -> list[str]:
    if not advice:
        return ["what to change", "  nothing to change"]
    return [
        "what to change",
        *(
            textwrap.fill(
                str(one),
                _WIDTH,
                initial_indent="  - ",
                subsequent_indent="    ",
                break_on_hyphens=False,
            )
            for one in advice
        ),
    ]


def _line(name: str, text: str) -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=f"{name:<{_INDENT}}",
        subsequent_indent=" " * _INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _error(error: PredictionError | None) -> str:
    if error is None:
        return "none"
    return f"MAPE {error.mape:.1%}, bias {error.bias:+.1%}, {error.steps} steps"


def _share(share: float | None) -> str:
    return "none ran" if share is None else f"{share:.2%}"


def _range_ms(least_s: float, most_s: float) -> str:
    least, most = f"{1e3 * least_s:.1f}", f"{1e3 * most_s:.1f}"
    return f"{least} ms" if least == most else f"{least} to {most} ms"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
