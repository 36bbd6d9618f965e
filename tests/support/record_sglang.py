"""Records real exchanges with an SGLang server for the unit tests, which then run without one.

    python tests/support/record_sglang.py  # after scripts/setup_sglang.sh

writes tests/rollout/sglang_exchanges.json.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from support import sglang_servers as servers

from megatron_stare.models import read_shape
from megatron_stare.records.batch import SamplingParams
from megatron_stare.rollout.engines.engine import GenerateRequest
from megatron_stare.rollout.engines.sglang.client import SGLangClient
from megatron_stare.rollout.engines.sglang.protocol import generate_body, prompt_body
from megatron_stare.rollout.engines.sglang.replica import make_sync
from megatron_stare.rollout.engines.sglang.update import WeightUpdate
from megatron_stare.rollout.engines.state import MEMORY

OUT = Path(__file__).parents[1] / "rollout" / "sglang_exchanges.json"
SHAPE = read_shape(servers.MODEL)
STOP, A, B = 1, 5, 9
PARAMS = SamplingParams(1.0, 6, seed=1, step=1, stop_token_ids=(STOP,))
SCORED = (3, 15, 4)  # the last id of the vocabulary among them
REQUEST = GenerateRequest("0:0", (3, 14, 4), 0, 0)
# filled in by the server, or of releases after the first that is supported
INTERNAL = (
    "stop_strs",
    "stop_regex_strs",
    "stop_str_max_len",
    "stop_regex_max_len",
    "is_normalized",
)
INTERNAL += ("ebnf_full_assistant", "stream_interval", "beam_width", "watermark")
READ_OF_INFO = (
    "version",
    "max_total_num_tokens",
    "device",
    "tp_size",
    "ep_size",
    "pp_size",
    "dp_size",
)
READ_OF_INFO += ("enable_memory_saver", "enable_deterministic_inference")


class Recorder(SGLangClient):
    """Keeps the newest answer of every path."""

    def __init__(self, url: str, api_key: str) -> None:
        super().__init__(url, api_key, 120)
        self.answers: dict[str, Any] = {}

    async def _call(self, method: str, path: str, body: Any) -> Any:
        content = await super()._call(method, path, body)
        try:
            self.answers[path] = json.loads(content)
        except ValueError:
            self.answers[path] = content.decode()
        return content


async def record(client: Recorder) -> dict[str, Any]:
    """Exchanges that end in every way a response can."""
    sync = make_sync("tensor", [client], str(servers.MODEL), 120)

    async def update(version: int, token: int, mode: Any = "abort") -> None:
        new = WeightUpdate([client], sync, version, SHAPE, torch.float32, mode)
        await new.begin()
        for bucket in servers.buckets(servers.says_only(token)):
            await new.send(bucket)
        await new.end()

    async def ask(name: str, means: str, params: SamplingParams = PARAMS) -> dict[str, Any]:
        body = generate_body(REQUEST, params, name)
        return {"body": body, "answer": await client.generate(body), "means": means}

    await update(1, STOP)
    found = {"stop": await ask("stop", "stop")}
    found["stop in the last place"] = await ask("last", "stop", replace(PARAMS, max_new_tokens=1))
    await update(2, A)
    found["length"] = await ask("length", "length")
    long = replace(PARAMS, max_new_tokens=100)
    cut = asyncio.create_task(ask("abort", "abort", long))
    await ask("before", "length")
    await client.abort("abort")
    found["abort"] = await cut
    swapped = asyncio.create_task(ask("swap", "length", long))
    await ask("before the swap", "length")
    await update(3, B, "retract")
    found["two versions"] = await swapped
    body = prompt_body(SCORED, "score")
    scored = {"body": body, "answer": await client.generate(body)}
    await client.server_info()
    await client.pause("abort")
    await client.flush()
    await client.release_memory(MEMORY)
    await client.resume_memory(("weights",))
    await client.resume_memory(("cache",))
    del client.answers["/generate"]
    info = client.answers["/server_info"]
    client.answers["/server_info"] = {name: info[name] for name in READ_OF_INFO}
    await client.close()
    return {"generate": found, "score": scored, "answers": client.answers}


def record_all() -> dict[str, Any]:
    """Records what a server that is started for it says; the whole file."""
    code = (
        # before transformers asks for torchvision
        "import megatron_stare.rollout.engines.sglang.serve\nfrom"
        " sglang.srt.sampling.sampling_params import SamplingParams as"
        " S\nprint(*S.__struct_fields__)"
    )
    fields = (
        subprocess.run([servers.PYTHON, "-c", code], check=True, capture_output=True, text=True)
        .stdout.splitlines()[-1]
        .split()
    )
    with servers.running() as engine:
        process = engine.process
        exchanges = asyncio.run(record(Recorder(process.url, process.api_key)))
    return {"sampling_fields": fields, "sampling_fields_not_sent": INTERNAL, **exchanges}


if __name__ == "__main__":
    OUT.write_text(json.dumps(record_all(), indent=1) + "\n")
