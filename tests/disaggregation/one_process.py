"""A vLLM engine and a small HTTP server in one process, which starts in a third of the time.

    python one_process.py PORT '{"model": ..., further arguments of vLLM's EngineArgs}'

It answers to token prompts at /v1/completions as `vllm serve` does, to /health and to /metrics; at
/blocks it says how many are free. POST /die_after_answer makes the next answer its last act; /slow
lets each step take longer; /misread hands over the KV cache of the prompt read backwards; /side has
every prompt prefilled on one side, whatever the price.
"""

import json
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Empty, SimpleQueue
from typing import Any

# One process holds the API, the engine and the worker; NIXL's repairs need one core each.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from prometheus_client import generate_latest
from vllm import EngineArgs, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.v1.engine.llm_engine import LLMEngine

from vllm_penalty_sched.disaggregation.pricing import Choice, ChoiceReason, Side, choose
from vllm_penalty_sched.engine import prefill_sides
from vllm_penalty_sched.engine.stat_logger import PenaltyStatLogger

IDLE_S = 0.005


@dataclass
class Job:
    body: dict[str, Any]
    done: threading.Event = field(default_factory=threading.Event)
    is_dropped: bool = False
    answer: dict[str, Any] = field(default_factory=dict)
    token_s: list[float] = field(default_factory=list)


class Instance:
    def __init__(self, engine_args: dict[str, Any]) -> None:
        args = EngineArgs(**engine_args)
        self.engine = LLMEngine.from_engine_args(args, stat_loggers=[PenaltyStatLogger])
        self.jobs: SimpleQueue[Job] = SimpleQueue()
        self.running: dict[str, Job] = {}
        self.dies_after_answer = False
        self.misreads = False
        self.pause_s = 0.0
        self.count = 0

    @property
    def scheduler(self) -> Any:
        return self.engine.engine_core.engine_core.scheduler

    def run(self) -> None:
        while True:
            busy = self.engine.has_unfinished_requests() or self.scheduler.has_requests()
            self.take_in(wait=not busy)
            if busy:
                self.step()

    def take_in(self, *, wait: bool) -> None:
        try:
            job = self.jobs.get(timeout=IDLE_S) if wait else self.jobs.get_nowait()
        except Empty:
            self.drop()
            return
        self.count += 1
        name, body = f"{os.getpid()}-{self.count}", job.body
        extra = dict(body.get("vllm_xargs") or {})
        if body.get("kv_transfer_params") is not None:
            extra["kv_transfer_params"] = body["kv_transfer_params"]
        params = SamplingParams(
            max_tokens=body["max_tokens"],
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            extra_args=extra or None,
        )
        self.running[name] = job
        tokens = body["prompt"]
        if self.misreads and body.get("kv_transfer_params"):
            tokens = tokens[::-1]
        prompt = TokensPrompt(prompt_token_ids=tokens)
        self.engine.add_request(name, prompt, params, priority=body.get("priority", 0))

    def drop(self) -> None:
        for name, job in list(self.running.items()):
            if job.is_dropped:
                self.engine.abort_request([name])
                del self.running[name]

    def step(self) -> None:
        time.sleep(self.pause_s)
        outputs = self.engine.step()
        now_s = time.monotonic()
        if not outputs:
            time.sleep(IDLE_S / 5)  # as vLLM's own loop does, to let other threads run
        self.drop()
        for output in outputs:
            job = self.running.get(output.request_id)
            if job is None:
                continue
            tokens = list(output.outputs[0].token_ids)
            job.token_s.extend([now_s] * (len(tokens) - len(job.token_s)))
            if output.finished:
                del self.running[output.request_id]
                job.answer = {
                    "choices": [
                        {"token_ids": tokens, "finish_reason": output.outputs[0].finish_reason}
                    ],
                    "kv_transfer_params": output.kv_transfer_params,
                    "token_s": job.token_s,
                }
                job.done.set()


INSTANCE: Instance


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/metrics":
            self.reply(generate_latest())
        elif self.path == "/blocks":
            pool = INSTANCE.scheduler.kv_cache_manager.block_pool
            self.reply({"free": pool.get_num_free_blocks(), "all": pool.num_gpu_blocks - 1})
        else:
            self.reply({})

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path in SWITCHES:
            SWITCHES[self.path](json.loads(content))
            self.reply({})
            return
        job = Job(json.loads(content))
        INSTANCE.jobs.put(job)
        while not job.done.wait(0.01):
            if self.is_gone():
                job.is_dropped = True
                return
        self.reply(job.answer)
        if INSTANCE.dies_after_answer:
            self.connection.shutdown(socket.SHUT_WR)
            os._exit(9)

    def is_gone(self) -> bool:
        readable = select.select([self.connection], [], [], 0)[0]
        return bool(readable) and self.connection.recv(1, socket.MSG_PEEK) == b""

    def reply(self, content: Any) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def force_side(body: dict[str, Any]) -> None:
    def forced(*_: Any, **__: Any) -> Choice:
        return Choice(side=Side(body["side"]), reason=ChoiceReason.CHEAPER_THERE)

    prefill_sides.choose = choose if body["side"] is None else forced


def misread(body: dict[str, Any]) -> None:
    INSTANCE.misreads = body["on"]


def slow_down(body: dict[str, Any]) -> None:
    INSTANCE.pause_s = body["step_s"]


def die_after_answer(_: dict[str, Any]) -> None:
    INSTANCE.dies_after_answer = True


SWITCHES: dict[str, Callable[[dict[str, Any]], None]] = {
    "/side": force_side,
    "/misread": misread,
    "/slow": slow_down,
    "/die_after_answer": die_after_answer,
}


def main() -> None:
    global INSTANCE
    INSTANCE = Instance(json.loads(sys.argv[2]))
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    INSTANCE.run()


main()
