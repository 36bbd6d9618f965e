"""A real SGLang server started as a run starts one: seconds until it answers, one token, memory,
and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import time
from functools import partial
from typing import Any

import psutil
from servers import CALL_S, START_S, device_used, libraries, served
from small_model import small_model
from verdict import Bound

from megatron_stare.process.interruption import run_on
from megatron_stare.records.batch import SamplingParams
from megatron_stare.rollout.engines.engine import GenerateRequest
from megatron_stare.rollout.engines.sglang.client import SGLangClient
from megatron_stare.rollout.engines.sglang.protocol import generate_body
from megatron_stare.rollout.engines.sglang.replica import server_options
from megatron_stare.rollout.engines.sglang.server import ServerProcess

GPU_ONLY = ("seconds until it answers", "device memory left taken, GB")
BOUNDS: dict[str, Bound] = {
    "tokens answered": (">=", 1.0),
    "processes left": ("<=", 0.0),
    "seconds until it answers": ("<=", START_S),
    "device memory left taken, GB": ("<=", 0.5),
}
GONE_S = 30.0  # that killed processes are given until the device's memory is back
ASKED = ("attention_backend", "sampling_backend", "mem_fraction_static", "max_total_num_tokens")


def run(cpu: bool) -> dict[str, Any]:
    with small_model(cpu) as model:
        config = served(model, cpu)
        versions = libraries(config)
        before, start = device_used(), time.perf_counter()
        process, loop = ServerProcess(server_options(config)), asyncio.new_event_loop()
        client = SGLangClient(process.url, process.api_key, CALL_S)
        try:
            process.wait_ready(client, partial(run_on, loop))
            ready = time.perf_counter()
            request = GenerateRequest("one", (2, 3, 4), prompt_cursor=0, sample_index=0)
            params = SamplingParams(1.0, 1, seed=1, step=1, stop_token_ids=())
            answer = run_on(loop, lambda: client.generate(generate_body(request, params, "one")))
            answered = time.perf_counter()
            info = run_on(loop, client.server_info)
            memory, taken = process.memory_mb(), device_used() - before
            ending = time.perf_counter()
        finally:
            run_on(loop, client.close)
            loop.close()
            process.close()
        ended = time.perf_counter()
        left = _members(process.process_group)
        while device_used() - before > 0.5e9 and time.perf_counter() - ended < GONE_S:
            time.sleep(0.5)
    return {
        "figures": {
            "tokens answered": float(len(answer["output_ids"])),
            "processes left": float(left),
            "seconds until it answers": ready - start,
            "seconds of the first token": answered - ready,
            "seconds until it has ended": ended - ending,
            "host memory, GB": memory / 1e3,
            "device memory, GB": taken / 1e9,
            "device memory left taken, GB": (device_used() - before) / 1e9,
        },
        "libraries": versions,
        "server": {name: info.get(name) for name in ASKED},
    }


def _members(group: int) -> int:
    """Processes of a process group that have not ended."""
    found = 0
    for process in psutil.process_iter(["status"]):
        try:
            alive = process.info["status"] != psutil.STATUS_ZOMBIE
            found += int(alive and os.getpgid(process.pid) == group)
        except ProcessLookupError:
            continue
    return found
