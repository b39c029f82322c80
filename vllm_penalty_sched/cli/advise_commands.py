"""The subcommand ``advise``."""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vllm_penalty_sched.cli.simulation_arguments import DEFAULT_SYNTHETIC_S, read_trace
from vllm_penalty_sched.disaggregation.advice import LEAST_PER_S, Advice, advise
from vllm_penalty_sched.disaggregation.fluid import Service
from vllm_penalty_sched.disaggregation.traffic import Traffic
from vllm_penalty_sched.errors import ConfigError
from vllm_penalty_sched.files import write_json
from vllm_penalty_sched.learning.latency import load_model
from vllm_penalty_sched.serving.live_traffic import watch_server
from vllm_penalty_sched.serving.progress import elapsed_time
from vllm_penalty_sched.serving.run_record import record_run
from vllm_penalty_sched.simulation.link import DEFAULT_BANDWIDTH_BYTES_PER_S, kv_bytes_per_token
from vllm_penalty_sched.simulation.plan import BLOCK_TOKENS, EngineSize
from vllm_penalty_sched.simulation.traces import cut_window, draw_poisson

if TYPE_CHECKING:
    from vllm_penalty_sched.learning.latency import StepTimeModel

_MOST_GPUS = 64
# Requests are counted in windows as long as the TTFT SLO; more would fill the memory.
_MOST_WINDOWS = 10_000_000


def add_advise_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``advise``."""
    size = EngineSize()
    add = parser.add_argument
    add(
        "--model",
        type=Path,
        required=True,
        metavar="FILE",
        help="a step-time model: what fit --out, a calibration or state_path wrote",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, metavar="FILE", help="requests, as for simulate")
    source.add_argument(
        "--synthetic", metavar="poisson:RATE:PROMPT:OUTPUT", help="requests a second, tokens each"
    )
    source.add_argument("--live", metavar="URL", help="watch a running server instead")
    add("--live-seconds", type=float, default=10.0, help="how long (%(default)g)")
    add("--start", type=float, default=0.0, metavar="S", help="of a window in the trace (0)")
    add("--duration", type=float, metavar="S", help="of that window (all)")
    add("--ttft-slo-ms", type=float, default=2000.0, help="(%(default)g)")
    add("--tbt-slo-ms", type=float, default=50.0, help="(%(default)g)")
    add("--gpus", type=int, default=2, help="instances of the model, both ways (%(default)s)")
    add(
        "--bandwidth-gbs",
        type=float,
        default=DEFAULT_BANDWIDTH_BYTES_PER_S / 1e9,
        metavar="GB/S",
        help="between two instances (%(default)g)",
    )
    add(
        "--kv-bytes-per-token",
        type=int,
        metavar="N",
        help="size of a token's KV cache (from the model's name, if that tells)",
    )
    add("--max-num-seqs", type=int, default=size.max_num_seqs, help="(%(default)s)")
    add("--kv-blocks", type=int, default=size.kv_blocks, help="of 16 tokens (%(default)s)")
    add("--json", type=Path, metavar="OUT", help="write the figures")


def run_advise(arguments: argparse.Namespace) -> int:
    """Print whether to disaggregate, and why."""
    model = load_model(arguments.model)
    service = _read_service(arguments, model)
    traffic, penalty_share = _read_traffic(arguments, service)
    with elapsed_time("estimating capacities"):
        advice = advise(model, traffic, service, gpus=arguments.gpus)
    print(format_advice(advice, service, measured_share=penalty_share))
    if arguments.json:
        write_json(
            arguments.json,
            {
                **advice.to_json(),
                "measured_penalty_share": penalty_share,
                **record_run(arguments.command, seed=0),
            },
        )
    return 0


def format_advice(advice: Advice, service: Service, *, measured_share: float | None) -> str:
    """Return the advice as a few lines of text."""
    penalty = advice.penalty
    shortest = advice.break_even_tokens
    prompts = "none of these" if shortest is None else f"those of {shortest} tokens and more"
    gained_ms, mixed_ms = penalty.mean_s * 1e3, (penalty.mixed_s - penalty.decode_only_s) * 1e3
    rows = {
        "capacity together": f"{advice.together_per_s:.2f} requests/s on {advice.gpus} GPUs",
        "capacity apart": f"{advice.apart_per_s:.2f} requests/s, {advice.prefill_gpus} for prefill",
        "arriving": f"{advice.requests_per_s:.2f} requests/s",
        "TBT to be gained": f"{gained_ms:.2f} ms a token on average at that rate, "
        f"{mixed_ms:.2f} ms in a step with prefill",
        "f(1) - f(0)": f"{1e3 * advice.curve_penalty_s:.2f} ms, 8 requests at once",
        "decodes delayed": f"{penalty.delayed_share:.1%} of the time; {penalty.decodes} at once, "
        f"{1e3 * penalty.decode_only_s:.1f} ms without prefill",
        "cheaper away, if idle": prompts,
    }
    if measured_share is not None:
        rows["measured penalty"] = f"{measured_share:.1%} of the steps' time"
    lines = [f"{name + ':':<24}{value}" for name, value in rows.items()]
    return "\n".join([_format_verdict(advice, service), *lines])


def _format_verdict(advice: Advice, service: Service) -> str:
    verdict = "yes: disaggregate" if advice.disaggregate else "no: let every GPU do both"
    together_per_s, apart_per_s = advice.together_per_s, advice.apart_per_s
    target = f"{service.target:.0%}"
    missed = f"under {target} of the requests are within both SLOs, at any rate"
    if max(together_per_s, apart_per_s) < LEAST_PER_S:
        return f"no: either way {missed}"
    if min(together_per_s, apart_per_s) < LEAST_PER_S:
        return f"{verdict} (otherwise {missed})"
    gain = apart_per_s / together_per_s - 1.0
    return f"{verdict} ({gain:+.0%} requests at {target} within both SLOs)"


def _read_service(arguments: argparse.Namespace, model: StepTimeModel) -> Service:
    for name in ("ttft_slo_ms", "tbt_slo_ms", "bandwidth_gbs"):
        value = getattr(arguments, name)
        if not 0.0 < value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} must be a number > 0, got {value}")
    if not 2 <= arguments.gpus <= _MOST_GPUS:
        raise ConfigError(f"--gpus must be from 2 to {_MOST_GPUS}, got {arguments.gpus}")
    for name in ("max_num_seqs", "kv_blocks"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be >= 1")
    size = arguments.kv_bytes_per_token or kv_bytes_per_token(model.provenance.model.lower())
    if size is None or size < 1:
        raise ConfigError(
            f"give --kv-bytes-per-token >= 1, which the model's name ({model.provenance.model}) "
            "does not tell"
        )
    return Service(
        ttft_slo_s=arguments.ttft_slo_ms / 1e3,
        tbt_slo_s=arguments.tbt_slo_ms / 1e3,
        max_num_seqs=arguments.max_num_seqs,
        kv_tokens=arguments.kv_blocks * BLOCK_TOKENS,
        kv_bytes_per_s=1e9 * arguments.bandwidth_gbs,
        kv_bytes_per_token=size,
    )


def _read_traffic(arguments: argparse.Namespace, service: Service) -> tuple[Traffic, float | None]:
    if arguments.live is not None:
        live = watch_server(arguments.live, arguments.live_seconds, sleep=_sleep)
        return live.traffic, live.penalty_share
    if arguments.trace is not None:
        requests = read_trace(arguments.trace)
        length_s = math.inf if arguments.duration is None else arguments.duration
        requests = cut_window(requests, start_s=arguments.start, duration_s=length_s)
    else:
        length_s = DEFAULT_SYNTHETIC_S if arguments.duration is None else arguments.duration
        rng = np.random.default_rng(0)
        requests = draw_poisson(arguments.synthetic, rng, duration_s=length_s)
    span_s = requests[-1].arrival_s
    if span_s > _MOST_WINDOWS * service.ttft_slo_s:
        raise ConfigError(
            f"the requests must arrive within {_MOST_WINDOWS} times --ttft-slo-ms "
            f"({1e3 * service.ttft_slo_s:g}), got {span_s:g} s"
        )
    traffic = Traffic.of_requests(
        [request.arrival_s for request in requests],
        prompt_tokens=[request.prompt_tokens for request in requests],
        output_tokens=[request.output_tokens for request in requests],
        window_s=service.ttft_slo_s,
    )
    return traffic, None


def _sleep(seconds: float) -> None:
    with elapsed_time("watching the server"):
        time.sleep(seconds)
