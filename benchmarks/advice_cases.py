"""Does `vllm-penalty advise` say the same as a simulation of both ways, in 40 cases?

python benchmarks/advice_cases.py --json OUT [--advise-again]

Loads x GPUs and SLOs x bandwidths, two GPUs each. The truth is the capacity at 90% of two engines
of ours against a priced pair of prefill and decode instance, both on virtual time; a near tie is a
difference of at most 5%. No file is needed. A run that was cut goes on where it stopped when the
same command runs again; --advise-again keeps what was simulated and asks the advisor anew.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from vllm_penalty_sched.batch import BatchShape
from vllm_penalty_sched.disaggregation.advice import advise
from vllm_penalty_sched.disaggregation.fluid import Service
from vllm_penalty_sched.disaggregation.traffic import Traffic
from vllm_penalty_sched.files import write_json
from vllm_penalty_sched.learning.latency import StepTimeModel
from vllm_penalty_sched.serving.run_record import record_run
from vllm_penalty_sched.simulation.cost_profiles import find_profile
from vllm_penalty_sched.simulation.device import DeviceSpec, VirtualDevice
from vllm_penalty_sched.simulation.link import LinkSpec, kv_bytes_per_token
from vllm_penalty_sched.simulation.plan import BLOCK_TOKENS, EngineSize, SimulationPlan
from vllm_penalty_sched.simulation.scheduler_spec import SchedulerSpec
from vllm_penalty_sched.simulation.traces import TraceRequest, scale_rate

TARGET, NEAR = 0.9, 0.05
# Factor between two rates that are tried; the last one is halved once more.
STEP = 1.12
# Seats are few, so that the load of writing fills them within so long.
ENGINE = EngineSize(max_num_seqs=96)
SECONDS, MOST_REQUESTS = 30.0, 800
SEED = 0
LEARNED_STEPS = 1500
TOGETHER, APART = SchedulerSpec.parse("2x:penalty"), SchedulerSpec.parse("pair:priced")


@dataclass(frozen=True)
class Load:
    """Lognormal lengths: mean and sigma of prompts, mean outputs (sigma 0.5)."""

    prompt: float
    sigma: float
    output: float


@dataclass(frozen=True)
class Place:
    """A GPU with a model, and what is promised there."""

    profile: str
    ttft_slo_s: float
    tbt_slo_s: float


LOADS = {
    "code": Load(2000, 0.8, 16),
    "summaries": Load(3000, 0.5, 60),
    "chat": Load(600, 0.9, 80),
    "writing": Load(200, 0.6, 200),
}
PLACES = (
    Place("a100-llama3-8b", 2.0, 0.050),
    Place("a100-llama3-8b", 1.0, 0.025),
    Place("a40-llama2-7b", 3.0, 0.100),
    Place("rtxpro6000-llama31-8b", 1.0, 0.040),
    Place("h100-llama2-70b-tp4", 2.0, 0.050),
)
BANDWIDTHS_GBS = (25.0, 1.0)


def draw_requests(load: Load, count: int) -> tuple[TraceRequest, ...]:
    """Return requests that arrive once a second on average."""
    rng = np.random.default_rng(SEED)

    def lengths(mean: float, sigma: float, most: int) -> np.ndarray:
        drawn = mean * np.exp(sigma * rng.standard_normal(count) - sigma**2 / 2)
        return np.clip(drawn, 4, most).astype(int)

    arrivals_s = np.cumsum(rng.exponential(1.0, count))
    prompts, outputs = lengths(load.prompt, load.sigma, 7000), lengths(load.output, 0.5, 400)
    return tuple(
        TraceRequest(arrival_s=float(a), prompt_tokens=int(p), output_tokens=int(o))
        for a, p, o in zip(arrivals_s, prompts, outputs, strict=True)
    )


def learn(device: DeviceSpec) -> StepTimeModel:
    """Return a model that learned from steps such as a server runs."""
    rng = np.random.default_rng(SEED)
    noisy = VirtualDevice(replace(device, noise_cv=0.03), rng)
    shapes = []
    for _ in range(LEARNED_STEPS):
        seqs = int(rng.integers(0, 257))
        chunk = (int(2 ** rng.uniform(3, 13)), int(rng.integers(0, 4000)))
        shapes.append(
            BatchShape(
                prefills=(chunk,) if rng.random() < 0.7 or not seqs else (),
                decode_seqs=seqs,
                decode_tokens=seqs,
                decode_context=int(seqs * rng.integers(100, 4000)),
            )
        )
    return StepTimeModel().fit(shapes, [noisy.step_s(shape, 0.0) for shape in shapes])


@dataclass(frozen=True)
class Case:
    """One load on one GPU."""

    load: str
    place: Place
    model: StepTimeModel
    model_path: str
    device: DeviceSpec
    requests: tuple[TraceRequest, ...] = ()

    def advice(self, bandwidth_gbs: float) -> Any:
        """Return what the advisor says."""
        drawn = self.requests or draw_requests(LOADS[self.load], MOST_REQUESTS)
        traffic = Traffic.of_requests(
            [request.arrival_s for request in drawn],
            prompt_tokens=[request.prompt_tokens for request in drawn],
            output_tokens=[request.output_tokens for request in drawn],
            window_s=self.place.ttft_slo_s,
        )
        service = Service(
            ttft_slo_s=self.place.ttft_slo_s,
            tbt_slo_s=self.place.tbt_slo_s,
            max_num_seqs=ENGINE.max_num_seqs,
            kv_tokens=ENGINE.kv_blocks * BLOCK_TOKENS,
            kv_bytes_per_s=1e9 * bandwidth_gbs,
            kv_bytes_per_token=kv_bytes_per_token(self.place.profile) or 0,
            target=TARGET,
        )
        return advise(self.model, traffic, service, gpus=2)

    def share(self, spec: SchedulerSpec, rate: float, bandwidth_gbs: float) -> float:
        """Return the simulated share within both SLOs; a lower bound if it is not enough."""
        from vllm_penalty_sched.engine.simulation import simulate

        plan = SimulationPlan(
            requests=tuple(scale_rate(self.requests, rate)),
            device=self.device,
            engine=ENGINE,
            link=LinkSpec(
                kv_bytes_per_token=kv_bytes_per_token(self.place.profile) or 0,
                bandwidth_bytes_per_s=1e9 * bandwidth_gbs,
            ),
            ttft_slo_s=self.place.ttft_slo_s,
            tbt_slo_s=self.place.tbt_slo_s,
            settings={"model": self.model_path},
            seed=SEED,
        )
        most_misses = (1.0 - TARGET) * len(self.requests)
        result = simulate(spec, plan, most_misses=most_misses)
        return result.goodput.own_p99_gap


def judge(case: Case, found: dict[str, Any], bandwidth_gbs: float) -> dict[str, Any]:
    """Return what the simulation says of a case whose capacity together is known."""
    rate = found["together_rate"]
    share = case.share(APART, rate, bandwidth_gbs)
    pays = share >= TARGET
    beyond = rate * (1 + NEAR) if pays else rate / (1 + NEAR)
    beyond_share = case.share(APART, beyond, bandwidth_gbs)
    return {
        "load": case.load,
        "profile": case.place.profile,
        "slo_s": {"ttft": case.place.ttft_slo_s, "tbt": case.place.tbt_slo_s},
        "bandwidth_gbs": bandwidth_gbs,
        "pays": pays,
        "is_near_tie": (beyond_share >= TARGET) != pays,
        "share_at_together_capacity": round(share, 4),
        "share_beyond": round(beyond_share, 4),
        **advised(case, bandwidth_gbs),
        **found,
    }


def advised(case: Case, bandwidth_gbs: float) -> dict[str, Any]:
    advice = case.advice(bandwidth_gbs)
    return {
        "advised": advice.disaggregate,
        "estimate": {
            "together_per_s": round(advice.together_per_s, 3),
            "apart_per_s": round(advice.apart_per_s, 3),
        },
    }


def advise_again(content: dict[str, Any], folder: str) -> None:
    """Ask the advisor anew about the cases that were simulated."""
    places = {(place.profile, place.tbt_slo_s): place for place in PLACES}
    for row in content["cases"]:
        place = places[row["profile"], row["slo_s"]["tbt"]]
        row |= advised(make_case(row["load"], place, folder), row["bandwidth_gbs"])
    content |= score(content["cases"])


def together_capacity(case: Case) -> dict[str, Any]:
    """Search the highest rate that meets the target, to half a step, from the estimate on."""
    rate = case.advice(BANDWIDTHS_GBS[0]).together_per_s
    share = case.share(TOGETHER, rate, 1.0)
    goes_up = share >= TARGET
    met = (rate, share) if goes_up else (0.0, 0.0)
    while (share >= TARGET) == goes_up:
        rate = rate * STEP if goes_up else rate / STEP
        share = case.share(TOGETHER, rate, 1.0)
        met = (rate, share) if share >= TARGET else met
    middle = met[0] * STEP**0.5
    share = case.share(TOGETHER, middle, 1.0)
    met = (middle, share) if share >= TARGET else met
    return {"together_rate": round(met[0], 4), "together_share": round(met[1], 4)}


def run_all(arguments: argparse.Namespace, folder: str) -> dict[str, Any]:
    content: dict[str, Any] = {
        "question": (__doc__ or "").partition("\n")[0],
        "run": record_run(arguments.command, seed=SEED),
        "target": TARGET,
        "near_tie": NEAR,
        "cases": [],
    }
    if arguments.json.exists():
        content["cases"] = json.loads(arguments.json.read_text())["cases"]
    if arguments.advise_again:
        advise_again(content, folder)
        write_json(arguments.json, content)
        return content
    done = {(c["load"], c["profile"], c["slo_s"]["tbt"]) for c in content["cases"]}
    for load, place in product(LOADS, PLACES):
        if (load, place.profile, place.tbt_slo_s) in done:
            continue
        started_s = time.perf_counter()
        case = make_case(load, place, folder)
        found = together_capacity(case)
        content["cases"] += [judge(case, found, bandwidth) for bandwidth in BANDWIDTHS_GBS]
        content |= score(content["cases"])
        write_json(arguments.json, content)
        for row in content["cases"][-len(BANDWIDTHS_GBS) :]:
            print(line(row), f"{time.perf_counter() - started_s:.0f} s", file=sys.stderr)
    return content


def make_case(load: str, place: Place, folder: str) -> Case:
    device = DeviceSpec(costs=find_profile(place.profile, overhead_s=1e-3))
    model = learn(device)
    path = f"{folder}/{place.profile}.json"
    model.save(path)
    case = Case(load, place, model, path, device)
    count = min(MOST_REQUESTS, int(SECONDS * case.advice(BANDWIDTHS_GBS[0]).together_per_s))
    return replace(case, requests=draw_requests(LOADS[load], max(100, count)))


def score(cases: list[dict[str, Any]]) -> dict[str, int]:
    agree = [case for case in cases if case["advised"] == case["pays"]]
    others = [case for case in cases if case["advised"] != case["pays"]]
    return {
        "count": len(cases),
        "agree": len(agree),
        "disagree_near_tie": sum(case["is_near_tie"] for case in others),
        "disagree": sum(not case["is_near_tie"] for case in others),
    }


def line(row: dict[str, Any]) -> str:
    tie = " (near tie)" if row["is_near_tie"] else ""
    estimate = row["estimate"]
    return (
        f"{row['load']:<10} {row['profile']:<22} {1e3 * row['slo_s']['tbt']:>4.0f} ms "
        f"{row['bandwidth_gbs']:>4g} GB/s: simulated {row['pays']}{tie}, advised {row['advised']}; "
        f"together {row['together_rate']:.2f}/s, estimated {estimate['together_per_s']:.2f} "
        f"and {estimate['apart_per_s']:.2f}/s"
    )


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    parser.add_argument("--advise-again", action="store_true")
    arguments = parser.parse_args(argv)
    told = [Path(word).name if Path(word).is_absolute() else word for word in argv]
    arguments.command = shlex.join(["python", "benchmarks/" + Path(__file__).name, *told])
    logging.getLogger("vllm").setLevel(logging.ERROR)  # else a line for each configuration made
    os.environ.setdefault("PENALTY_SCHED_STRICT", "1")  # an error of ours must end a simulation
    with tempfile.TemporaryDirectory() as folder:
        content = run_all(arguments, folder)
    print(json.dumps(score(content["cases"])))


if __name__ == "__main__":
    main(sys.argv[1:])
