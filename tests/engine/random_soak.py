"""Walk the real scheduler for many random steps: ``python -m tests.engine.random_soak``."""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from tests.engine.random_steps import Walk, WalkError
from tests.engine.walk_plan import FEATURES, WalkPlan
from vllm_penalty_sched import Scheduler
from vllm_penalty_sched.files import write_json
from vllm_penalty_sched.serving.run_record import record_run

STEPS_A_WALK = 300
_PROGRESS_PERIOD_S = 20.0


def walk_many(
    steps: int,
    *,
    first_seed: int = 0,
    scheduler_cls: type[Scheduler] = Scheduler,
    tell: Callable[[str], None] = lambda _line: None,
) -> Counter[str]:
    """Walk seed after seed until so many steps are made, and return what was seen.

    Raises:
        WalkError: Of the first walk that went wrong, without the features that it does not need.
    """
    seen: Counter[str] = Counter()
    told_s = began_s = time.monotonic()
    while seen["steps"] < steps:
        plan = WalkPlan.of_seed(first_seed + seen["walks"])
        try:
            seen += Walk(plan, scheduler_cls).run(STEPS_A_WALK)
        except WalkError as error:
            raise shrink(error, scheduler_cls) from error
        seen["walks"] += 1
        seen["async_walks"] += plan.is_async
        seen["observing_walks"] += plan.settings["mode"] == "observe"
        if time.monotonic() - told_s > _PROGRESS_PERIOD_S:
            told_s = time.monotonic()
            tell(f"{seen['steps']} of {steps} steps, {told_s - began_s:.0f} s")
    return seen


def shrink(error: WalkError, scheduler_cls: type[Scheduler] = Scheduler) -> WalkError:
    """Leave out one feature after the other as long as the same law is broken."""
    for name in sorted(error.plan.features):
        plan = WalkPlan.of_seed(error.plan.seed, without=(FEATURES - error.plan.features) | {name})
        try:
            Walk(plan, scheduler_cls).run(STEPS_A_WALK)
        except WalkError as smaller:
            if _law(smaller) == _law(error):
                error = smaller
    return error


def _law(error: WalkError) -> str:
    return error.problem.partition(":")[0].partition("(")[0]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5000, help="steps in all (%(default)s)")
    parser.add_argument("--seed", type=int, help="replay this one walk instead")
    parser.add_argument("--without", action="append", default=[], choices=sorted(FEATURES))
    parser.add_argument("--first-seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was seen")
    return parser


def main() -> int:
    arguments = make_parser().parse_args()
    logging.getLogger("vllm").setLevel(logging.ERROR)
    began_s = time.monotonic()
    if arguments.seed is not None:
        plan = WalkPlan.of_seed(arguments.seed, without=frozenset(arguments.without))
        print(plan)
        print(dict(Walk(plan).run(STEPS_A_WALK)))
        return 0
    seen = walk_many(arguments.steps, first_seed=arguments.first_seed, tell=print)
    for name, count in sorted(seen.items()):
        print(f"{name:20} {count}")
    if arguments.json:
        command = shlex.join(["python", "-m", "tests.engine.random_soak", *sys.argv[1:]])
        write_json(
            arguments.json,
            {
                **record_run(command, seed=arguments.first_seed),
                "seconds": round(time.monotonic() - began_s, 1),
                "failures": 0,
                "steps_a_walk": STEPS_A_WALK,
                "first_plan": {
                    name: sorted(value) if isinstance(value, frozenset) else value
                    for name, value in asdict(WalkPlan.of_seed(arguments.first_seed)).items()
                },
                "seen": dict(sorted(seen.items())),
            },
        )
        print(f"wrote {arguments.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
