"""What a scheduler reports adds up to what happened, and reaches Prometheus through vLLM's code."""

import logging
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

from prometheus_client import REGISTRY, generate_latest  # noqa: E402
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402
from vllm.compilation.cuda_graph import CUDAGraphStat  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler as StockScheduler  # noqa: E402
from vllm.v1.engine import EngineCoreOutputs  # noqa: E402
from vllm.v1.metrics.loggers import load_stat_logger_plugin_factories  # noqa: E402
from vllm.v1.metrics.stats import SchedulerStats  # noqa: E402
from vllm.v1.request import RequestStatus  # noqa: E402
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder  # noqa: E402

from tests.engine.virtual import add, make_engine, play, start_decodes  # noqa: E402
from vllm_penalty_sched import Scheduler  # noqa: E402
from vllm_penalty_sched.engine import stats_transport  # noqa: E402
from vllm_penalty_sched.engine.stat_logger import PenaltyStatLogger  # noqa: E402
from vllm_penalty_sched.engine.virtual_config import make_scheduler, make_vllm_config  # noqa: E402
from vllm_penalty_sched.engine.virtual_engine import VirtualEngine  # noqa: E402
from vllm_penalty_sched.telemetry import StepReport  # noqa: E402

SLO_MS = 56.0


class Frontend:
    """Takes each step's statistics over vLLM's own wire format, as an API server does."""

    def __init__(self, engine: VirtualEngine) -> None:
        self.stats: list[tuple[float, SchedulerStats]] = []
        self._engine = engine
        self._update: Callable[..., dict[int, EngineCoreOutputs]] = (
            engine.scheduler.update_from_output
        )
        engine.scheduler.update_from_output = self._take

    def _take(self, *args: object) -> dict[int, EngineCoreOutputs]:
        outputs = self._update(*args)
        for sent in outputs.values():
            frames = MsgpackEncoder().encode(sent)
            received = MsgpackDecoder(EngineCoreOutputs).decode(frames)
            if received.scheduler_stats is not None:
                self.stats.append((self._engine.now_s, received.scheduler_stats))
        return outputs

    def reports(self) -> list[tuple[float, StepReport]]:
        texts = [(now_s, stats_transport.take(stats)) for now_s, stats in self.stats]
        return [(now_s, StepReport.from_json(text)) for now_s, text in texts if text is not None]


def ran(engine: VirtualEngine) -> VirtualEngine:
    start_decodes(engine, 6, output=400)
    play(engine, 40)
    for index in range(8):
        add(engine, f"prompt-{index}", 700, 30)
        play(engine, 20)
    play(engine, 5000)
    assert not engine.is_busy
    return engine


def decisions(engine: VirtualEngine) -> Counter[str]:
    """Decisions by reason without those for the steps without tokens that end a run."""
    made = Counter({reason.value: count for reason, count in engine.scheduler.reasons.items()})
    made["no_prefill"] -= made.total() - len(engine.steps)
    return made


@pytest.mark.parametrize("is_async", [False, True])
def test_the_reports_add_up_to_the_steps_that_ran(is_async: bool) -> None:
    engine = make_engine(Scheduler, {"tbt_slo_ms": SLO_MS}, async_scheduling=is_async)
    frontend = Frontend(engine)

    ran(engine)

    reports = [report for _, report in frontend.reports()]
    observed_s = [time_s for report in reports for time_s in report.observed_s]
    ratios = [ratio for report in reports for ratio in report.prefill_ratios]
    assert sum((Counter(report.decisions) for report in reports), Counter()) == decisions(engine)
    assert len(observed_s) == len(engine.steps)
    assert sorted(ratios) == sorted(step.shape.prefill_ratio for step in engine.steps)
    assert sum(observed_s) == pytest.approx(engine.now_s, rel=0.02)
    assert sum(report.slo_overruns for report in reports) == sum(
        step.seconds > SLO_MS / 1e3 and step.shape.decode_seqs > 0 for step in engine.steps
    )
    # Under async scheduling the next prefill is planned behind a step in flight.
    penalty_s = sum(step.seconds - 14e-3 for step in engine.steps if step.shape.prefills)
    assert sum(report.penalty_s for report in reports) == pytest.approx(penalty_s, rel=0.1)
    assert sum(report.faults for report in reports) == 0


def test_overruns_that_no_budget_could_prevent_are_counted() -> None:
    rng = np.random.default_rng(0)
    engine = make_engine(
        Scheduler,
        {"tbt_slo_ms": SLO_MS},
        step_time_s=lambda _: 0.2 if rng.random() < 0.05 else 0.014,
    )
    frontend = Frontend(engine)

    ran(engine)

    slow = [step for step in engine.steps if step.seconds > 0.1 and step.shape.decode_seqs]
    assert sum(report.slo_overruns for _, report in frontend.reports()) == len(slow) > 10


def test_a_report_comes_about_once_a_second_and_one_more_when_the_engine_falls_idle() -> None:
    engine = make_engine(Scheduler, {"tbt_slo_ms": SLO_MS})
    frontend = Frontend(engine)

    ran(engine)

    times_s = [now_s for now_s, _ in frontend.reports()]
    gaps_s = np.diff(times_s)
    assert all(gaps_s[:-1] >= 1.0)
    assert max(gaps_s) <= 1.0 + 0.1
    assert times_s[-1] == pytest.approx(engine.now_s, abs=2e-3)


def test_headroom_shrinks_while_prompts_wait_and_is_back_when_the_engine_is_idle() -> None:
    engine = make_engine(Scheduler, {"tbt_slo_ms": SLO_MS})
    frontend = Frontend(engine)
    start_decodes(engine, 6)
    add(engine, "teaches", 2000, 2)
    play(engine, 300)
    quiet_s = engine.now_s
    for index in range(8):
        add(engine, f"long-{index}", 4000, 2)
    play(engine, 150)
    busy_s = engine.now_s

    reports = frontend.reports()
    before = [report for now_s, report in reports if now_s <= quiet_s][-1]
    during = [report for now_s, report in reports if now_s <= busy_s][-1]
    # 14 ms of 56 ms are the decodes' own, a prefill token takes 0.35 ms.
    most_per_s = (SLO_MS - 14.0) / 0.35 / (SLO_MS / 1e3)
    assert 0.5 * most_per_s < before.headroom_tokens_per_s <= most_per_s
    assert during.headroom_tokens_per_s < 0.2 * before.headroom_tokens_per_s
    engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    add(engine, "last", 10, 2)
    play(engine, 100)
    idle = frontend.reports()[-1][1]
    assert idle.decode_only_s is None
    assert idle.headroom_tokens_per_s > before.headroom_tokens_per_s


def test_a_scheduler_that_only_observes_reports_steps_and_headroom() -> None:
    engine = make_engine(Scheduler, {"tbt_slo_ms": SLO_MS, "mode": "observe"})
    frontend = Frontend(engine)

    ran(engine)

    reports = [report for _, report in frontend.reports()]
    assert sum(len(report.observed_s) for report in reports) == len(engine.steps)
    assert sum(report.slo_overruns for report in reports) > 0
    assert reports[-1].headroom_tokens_per_s > 0


@pytest.mark.parametrize(
    ("obstacle", "level", "told"),
    [
        ("cudagraph_metrics", logging.WARNING, "--cudagraph-metrics"),
        ("other fields", logging.WARNING, "no field"),
        ("log_stats", logging.INFO, "log_stats"),
    ],
)
def test_where_nothing_can_carry_reports_none_is_made_and_it_is_told_once(
    obstacle: str,
    level: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = make_vllm_config(settings={"tbt_slo_ms": SLO_MS})
    config.observability_config.cudagraph_metrics = obstacle == "cudagraph_metrics"
    if obstacle == "other fields":
        monkeypatch.setattr(stats_transport, "_CARRIER_FIELDS", {"other"})
    with caplog.at_level(logging.INFO, "vllm.penalty_sched"):
        scheduler = make_scheduler(Scheduler, config, log_stats=obstacle != "log_stats")
        engine = VirtualEngine(scheduler, lambda _: 0.01)
        frontend = Frontend(engine)

        ran(engine)

    messages = [record for record in caplog.records if "penalty_sched_ metrics" in record.message]
    assert [record.levelno for record in messages] == [level]
    assert told in messages[0].message
    assert frontend.reports() == []


def test_a_field_that_somebody_else_filled_is_left_alone() -> None:
    theirs = CUDAGraphStat(
        num_unpadded_tokens=1, num_padded_tokens=2, num_paddings=1, runtime_mode="FULL"
    )
    stats = SchedulerStats(cudagraph_stats=theirs)

    assert stats_transport.find_carrier({0: SimpleNamespace(scheduler_stats=stats)}) is None
    assert stats_transport.take(stats) is None
    assert stats.cudagraph_stats is theirs


@pytest.fixture
def stat_logger() -> PenaltyStatLogger:
    return PenaltyStatLogger(make_vllm_config(), [0])


def scraped(engine: str) -> dict[tuple[str, str], float]:
    families = text_string_to_metric_families(generate_latest(REGISTRY).decode())
    return {
        (sample.name, sample.labels.get("reason", sample.labels.get("le", ""))): sample.value
        for family in families
        if family.name.startswith("penalty_sched_")
        for sample in family.samples
        if sample.labels.get("engine") == engine
    }


def test_vllm_finds_the_logger_and_it_shows_what_was_reported(
    stat_logger: PenaltyStatLogger,
) -> None:
    engine = make_engine(Scheduler, {"tbt_slo_ms": SLO_MS})
    frontend = Frontend(engine)
    ran(engine)
    silent_before = scraped("7")

    for _, stats in frontend.stats:
        stat_logger.record(stats, None, mm_cache_stats=None, engine_idx=7)

    shown = scraped("7")
    assert PenaltyStatLogger in load_stat_logger_plugin_factories()
    assert silent_before == {}
    assert shown["penalty_sched_observed_step_seconds_count", ""] == len(engine.steps)
    assert shown["penalty_sched_prefill_ratio_bucket", "0.0"] == sum(
        not step.shape.prefills for step in engine.steps
    )
    assert {
        reason: count
        for (name, reason), count in shown.items()
        if name == "penalty_sched_decisions_total" and count
    } == decisions(engine)
    assert shown["penalty_sched_slo_seconds", ""] == SLO_MS / 1e3
    assert shown["penalty_sched_prefill_headroom_tokens_per_second", ""] > 0
    assert all(stats.cudagraph_stats is None for _, stats in frontend.stats)


def test_stocks_statistics_and_foreign_texts_show_nothing_and_raise_nothing(
    stat_logger: PenaltyStatLogger, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(StockScheduler)
    frontend = Frontend(engine)
    ran(engine)
    broken = SchedulerStats()
    stats_transport.put(broken, '{"observed_s": "soon"}')

    for stats in (*(stats for _, stats in frontend.stats), None, broken, broken):
        stat_logger.record(stats, None, engine_idx=8)

    assert scraped("8") == {}
    assert len([record for record in caplog.records if "metrics end here" in record.message]) == 1
