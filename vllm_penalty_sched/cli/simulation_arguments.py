"""Options of ``simulate`` and ``capacity``: load, engine, device and schedulers."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vllm_penalty_sched.errors import ConfigError
from vllm_penalty_sched.files import read_text
from vllm_penalty_sched.simulation.cost_files import parse_costs
from vllm_penalty_sched.simulation.cost_profiles import find_profile
from vllm_penalty_sched.simulation.device import DeviceSpec
from vllm_penalty_sched.simulation.link import (
    DEFAULT_BANDWIDTH_BYTES_PER_S,
    LinkSpec,
    kv_bytes_per_token,
)
from vllm_penalty_sched.simulation.plan import EngineSize, SimulationPlan
from vllm_penalty_sched.simulation.scheduler_spec import SchedulerSpec
from vllm_penalty_sched.simulation.traces import (
    TraceRequest,
    cut_window,
    draw_poisson,
    drop_too_long,
    parse_trace,
    scale_rate,
    spread_ticks,
    tick_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_penalty_sched.simulation.table_costs import StepCosts

PROFILE_PREFIX = "profile:"
DEFAULT_COSTS = f"{PROFILE_PREFIX}a100-llama3-8b"
DEFAULT_SYNTHETIC_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A part of the trace, under one seed.

    Attributes:
        start_s: Where it starts in the trace.
        seed: Seed of the noise, of a synthetic load and of what is drawn within ticks.
        plan: What to simulate.
        left_out: Requests above ``max_model_len``.
        tick_s: Width of the grid that its arrivals were spread over; None if on no grid.
    """

    start_s: float
    seed: int
    plan: SimulationPlan
    left_out: int
    tick_s: float | None

    @property
    def requests_per_s(self) -> float:
        """Arrival rate in the trace's own time."""
        requests = self.plan.requests
        return len(requests) / max(requests[-1].arrival_s, 1e-3)

    def at_rate(self, rate: float) -> SimulationPlan:
        """Return the plan with the requests arriving ``rate`` times as fast."""
        return replace(self.plan, requests=tuple(scale_rate(self.plan.requests, rate)))

    def __str__(self) -> str:
        requests = self.plan.requests
        span_s = requests[-1].arrival_s
        start = f"from {self.start_s:g} s, seed {self.seed}"
        words = [f"{len(requests)} requests in {span_s:.0f} s {start}"]
        if self.tick_s is not None:
            words.append(f"arrivals spread over their {self.tick_s:g} s ticks")
        if self.left_out:
            limit = self.plan.engine.max_model_len
            words.append(f"{self.left_out} above max_model_len {limit} left out")
        return "; ".join(words)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add everything that ``simulate`` and ``capacity`` share."""
    _add_load(parser.add_argument_group("load"))
    _add_engine(parser.add_argument_group("schedulers and engine"))
    _add_device(parser.add_argument_group("device"))
    _add_pair(parser.add_argument_group("prefill and decode instance (pair:...)"))
    add = parser.add_argument_group("run").add_argument
    add(
        "--seed",
        type=int,
        action="append",
        help="of noise, synthetic arrivals and places within ticks; may be repeated (0)",
    )
    add("--jobs", type=int, default=1, help="processes to run in (%(default)s)")
    add("--json", type=Path, metavar="OUT", help="write the results")


def read_schedulers(arguments: argparse.Namespace) -> list[SchedulerSpec]:
    """Return the schedulers to simulate.

    Raises:
        ConfigError: If none is given, or one is wrong.
    """
    if arguments.jobs < 1:
        raise ConfigError(f"--jobs must be >= 1, got {arguments.jobs}")
    if not arguments.scheduler:
        raise ConfigError("give at least one --scheduler, such as stock:2048 or penalty")
    return [SchedulerSpec.parse(text) for text in arguments.scheduler]


def read_windows(arguments: argparse.Namespace) -> list[Window]:
    """Return one window for each start and seed.

    Raises:
        ConfigError: If an option, the trace or the costs break a rule.
        OSError: If a file cannot be read.
    """
    seeds = arguments.seed or [0]
    if min(seeds) < 0:
        raise ConfigError(f"--seed must be >= 0, got {min(seeds)}")
    device = _read_device(arguments, arguments.costs)
    engine = EngineSize(
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        kv_blocks=arguments.kv_blocks,
        async_scheduling=not arguments.sync,
        prefix_caching=arguments.prefix_caching,
    )
    trace = None if arguments.trace is None else read_trace(arguments.trace)
    return [
        _make_window(arguments, trace, device, engine, start_s=start_s, seed=seed)
        for start_s in arguments.start or [0.0]
        for seed in seeds
    ]


def _add_load(group: argparse._ArgumentGroup) -> None:
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="CSV with arrival_s, prompt_tokens, output_tokens; Azure's CSV; Mooncake's JSON "
        "lines; each possibly gzipped",
    )
    source.add_argument(
        "--synthetic", metavar="poisson:RATE:PROMPT:OUTPUT", help="requests a second, tokens each"
    )
    group.add_argument(
        "--start",
        type=float,
        action="append",
        metavar="S",
        help="start of the window in the trace; may be repeated for several windows (0)",
    )
    group.add_argument(
        "--duration",
        type=float,
        metavar="S",
        help=f"length of the window in the trace's time (all; synthetic: {DEFAULT_SYNTHETIC_S:g})",
    )
    group.add_argument("--ttft-slo-ms", type=float, default=2000.0, help="(%(default)g)")
    group.add_argument("--tbt-slo-ms", type=float, default=50.0, help="(%(default)g)")
    group.add_argument(
        "--drain",
        type=float,
        metavar="S",
        help="end this long after the last arrival (TTFT SLO + longest output x TBT SLO)",
    )


def _add_engine(group: argparse._ArgumentGroup) -> None:
    size = EngineSize()
    group.add_argument(
        "--scheduler",
        action="append",
        metavar="SPEC",
        help="stock:BUDGET, stock:BUDGET:LONG_PREFILL_THRESHOLD, penalty[:BUDGET] or "
        "oracle[:BUDGET] (ours with the true costs), unguarded[:BUDGET] (ours without admission "
        "guard) or static:BUDGET (our order, vLLM's budget), all but stock with settings such as "
        "penalty,miss_rate=0.01; 2x:SPEC for two such engines behind a balancer; pair:RULE for a "
        "prefill and a decode instance with ours: RULE is priced, always, never or the least "
        "prompt tokens to prefill remotely; may be repeated",
    )
    group.add_argument("--order", help="our setting of that name (its default)")
    group.add_argument("--pacing", help="our setting of that name (its default)")
    for name in ("max_model_len", "max_num_seqs", "kv_blocks"):
        option = "--" + name.replace("_", "-")
        group.add_argument(option, type=int, default=getattr(size, name), help="(%(default)s)")
    group.add_argument("--sync", action="store_true", help="without async scheduling")
    group.add_argument(
        "--prefix-caching", action="store_true", help="share what the trace's hash ids say is equal"
    )


def _add_device(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--costs",
        default=DEFAULT_COSTS,
        metavar="FILE",
        help="CSV with table, x, y, ms (FILE-attn_mixed.csv.gz beside it is read too), or "
        f"{PROFILE_PREFIX}NAME (%(default)s)",
    )
    group.add_argument(
        "--noise", type=float, default=0.0, metavar="CV", help="lognormal, of each step (0)"
    )
    group.add_argument(
        "--drift", metavar="TIME:FACTOR", help="steps take FACTOR times as long from TIME s on"
    )
    group.add_argument(
        "--mixed-decode-factor",
        type=float,
        default=1.0,
        metavar="F",
        help="how much dearer a decode's attention is in a step with prefill (%(default)g)",
    )
    group.add_argument(
        "--overhead-ms", type=float, default=1.0, help="added to every step (%(default)g)"
    )


def _add_pair(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--prefill-costs", metavar="FILE", help="of the prefill instance's device (as --costs)"
    )
    group.add_argument(
        "--bandwidth-gbs",
        type=float,
        default=DEFAULT_BANDWIDTH_BYTES_PER_S / 1e9,
        metavar="GB/S",
        help="between the two instances, all GPUs of one together (%(default)g)",
    )
    group.add_argument(
        "--kv-bytes-per-token",
        type=int,
        metavar="N",
        help="size of a token's KV cache, over all GPUs of an instance (from the costs' name)",
    )


def _make_window(
    arguments: argparse.Namespace,
    trace: Sequence[TraceRequest] | None,
    device: DeviceSpec,
    engine: EngineSize,
    *,
    start_s: float,
    seed: int,
) -> Window:
    rng = np.random.default_rng(seed)
    duration_s = arguments.duration
    if trace is None:
        duration_s = DEFAULT_SYNTHETIC_S if duration_s is None else duration_s
        requests = draw_poisson(arguments.synthetic, rng, duration_s=start_s + duration_s)
    else:
        requests = list(trace)
    requests = cut_window(
        requests, start_s=start_s, duration_s=math.inf if duration_s is None else duration_s
    )
    tick_s = tick_of(requests)
    if tick_s is not None:
        requests = spread_ticks(requests, tick_s, rng)
    requests, left_out = drop_too_long(requests, engine.max_model_len)
    if not requests:
        raise ConfigError(
            f"all {left_out} requests are longer than max_model_len {engine.max_model_len}"
        )
    settings = {"order": arguments.order, "pacing": arguments.pacing}
    plan = SimulationPlan(
        requests=tuple(requests),
        device=device,
        engine=engine,
        prefill_device=(
            _read_device(arguments, arguments.prefill_costs) if arguments.prefill_costs else None
        ),
        link=_read_link(arguments),
        ttft_slo_s=arguments.ttft_slo_ms / 1e3,
        tbt_slo_s=arguments.tbt_slo_ms / 1e3,
        settings={name: value for name, value in settings.items() if value is not None},
        seed=seed,
        drain_s=arguments.drain,
    )
    return Window(start_s=start_s, seed=seed, plan=plan, left_out=left_out, tick_s=tick_s)


def _read_link(arguments: argparse.Namespace) -> LinkSpec | None:
    size = arguments.kv_bytes_per_token
    if size is None:
        size = kv_bytes_per_token(Path(arguments.costs).name)
    if size is None:
        return None
    return LinkSpec(kv_bytes_per_token=size, bandwidth_bytes_per_s=1e9 * arguments.bandwidth_gbs)


def _read_device(arguments: argparse.Namespace, costs: str) -> DeviceSpec:
    drift_start_s, drift_factor = 0.0, 1.0
    if arguments.drift is not None:
        time_text, _, factor_text = arguments.drift.partition(":")
        try:
            drift_start_s, drift_factor = float(time_text), float(factor_text)
        except ValueError as error:
            raise ConfigError(
                f"--drift must be TIME:FACTOR, two numbers, got {arguments.drift}"
            ) from error
    return DeviceSpec(
        costs=_read_costs(arguments, costs),
        noise_cv=arguments.noise,
        drift_start_s=drift_start_s,
        drift_factor=drift_factor,
    )


def _read_costs(arguments: argparse.Namespace, costs: str) -> StepCosts:
    factor, overhead_s = arguments.mixed_decode_factor, arguments.overhead_ms / 1e3
    if not 0.0 <= overhead_s < math.inf:
        raise ConfigError(f"--overhead-ms must be a number >= 0, got {arguments.overhead_ms}")
    if costs.startswith(PROFILE_PREFIX):
        name = costs.removeprefix(PROFILE_PREFIX)
        return find_profile(name, mixed_decode_factor=factor, overhead_s=overhead_s)
    path = Path(costs)
    mixed_path = path.with_name(f"{path.name.removesuffix('.csv')}-attn_mixed.csv.gz")
    return parse_costs(
        read_text(path),
        source=str(path),
        mixed_text=read_text(mixed_path) if mixed_path.exists() else None,
        mixed_source=str(mixed_path),
        mixed_decode_factor=factor,
        overhead_s=overhead_s,
    )


def read_trace(path: Path) -> list[TraceRequest]:
    """Return the requests of a trace file, possibly gzipped; see ``parse_trace``."""
    return parse_trace(read_text(path), source=str(path))
