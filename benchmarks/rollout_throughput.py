"""Rollout throughput of the SGLang engine against a bare asyncio client of the same server.

Both send the same requests and keep as many of them under way, turn by turn, so that a change of
the machine's speed meets both. The bare client is the least there can be: asyncio streams that are
kept open, bodies made beforehand, answers read as JSON and thrown away. The engine makes the
bodies, validates ids, balances, and turns answers into tokens with log-probs and weight versions.
Every response has the same length.

    python benchmarks/rollout_throughput.py        # needs scripts/setup_sglang.sh
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from machine import machine
from safetensors.torch import load_file

from megatron_stare.config.schema import Config
from megatron_stare.records.batch import SamplingParams
from megatron_stare.rollout.engines.engine import GenerateRequest
from megatron_stare.rollout.engines.sglang.protocol import generate_body
from megatron_stare.rollout.engines.sglang.replica import SGLangReplica
from megatron_stare.rollout.engines.sglang.server_engine import SGLangEngine

RESULT = Path(__file__).parent / "results/rollout_throughput.json"
MODEL = Path(__file__).parents[1] / "assets" / "tiny-adder"
SAID = 5  # the one token that the weights leave
TARGET = 0.95  # of the bare client's throughput


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument(
        "--under-way", type=int, default=64, help="requests a server is given at a time"
    )
    parser.add_argument("--threads", type=int, default=1, help="of a server")
    parser.add_argument("--repeats", type=int, default=6)
    args = parser.parse_args()
    torch.set_num_threads(1)
    measure(args)


def measure(args: argparse.Namespace) -> None:
    """Writes the result after every pair."""
    params = SamplingParams(1.0, args.new_tokens, seed=1, step=1, stop_token_ids=(1,))
    requests = [
        GenerateRequest(f"{i}:0", (3, 14, 4, 2 + i % 10, 15), i, 0) for i in range(args.requests)
    ]
    config = Config.model_validate(
        {
            "model": {"path": str(MODEL)},
            "rollout": {
                "engine": "sglang",
                "max_prompt_tokens": 8,
                "max_new_tokens": args.new_tokens,
                "max_batch": args.under_way,
                "threads": args.threads,
            },
        }
    )
    engine = SGLangReplica(config, 0).engine()
    try:
        say_one_token(engine)

        def ours(_: int) -> int:
            return sum(result.completion_tokens for result in engine.generate(requests, params))

        def theirs(turn: int) -> int:
            return asyncio.run(bare(engine, requests, params, args.under_way, turn))

        ours(-1), theirs(-1)  # warm up
        pairs = []
        # who goes first changes, so that neither always meets a server just rested
        for turn in range(args.repeats):
            order = (ours, theirs) if turn % 2 else (theirs, ours)
            rates = {call: tokens_per_s(call, turn) for call in order}
            pairs.append((rates[ours], rates[theirs]))
            save(result_of(args, pairs))
    finally:
        engine.close()


def save(result: dict[str, Any]) -> None:
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["tokens_per_s"]), result["ratio"], flush=True)


def result_of(args: argparse.Namespace, pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """Median tokens a second of both clients, and their ratio pair by pair."""
    return {
        "machine": machine(),
        "settings": vars(args),
        "tokens_per_s": {
            "engine": round(statistics.median(p[0] for p in pairs)),
            "bare_client": round(statistics.median(p[1] for p in pairs)),
        },
        "ratio": [round(ours / theirs, 3) for ours, theirs in pairs],
        "ratio_median": round(statistics.median(ours / theirs for ours, theirs in pairs), 3),
        "target": TARGET,
    }


def say_one_token(engine: SGLangEngine) -> None:
    """Brings the server weights that only ever say SAID."""
    tensors = {
        name: torch.zeros_like(t) for name, t in load_file(MODEL / "model.safetensors").items()
    }
    for name, tensor in tensors.items():
        if name.endswith("norm.weight") or name == "model.embed_tokens.weight":
            tensor.fill_(1.0)
    tensors["lm_head.weight"][SAID] = 10.0
    engine.begin_weight_update(1)
    engine.update_weights(list(tensors.items()))
    engine.end_weight_update()


def tokens_per_s(call: Callable[[int], int], turn: int) -> float:
    gc.collect()
    start = time.perf_counter()
    tokens = call(turn)
    return tokens / (time.perf_counter() - start)


async def bare(
    engine: SGLangEngine,
    requests: list[GenerateRequest],
    params: SamplingParams,
    under_way: int,
    turn: int,
) -> int:
    """Sends the requests over `under_way` connections; the tokens that came back."""
    bodies = [
        json.dumps(generate_body(r, params, f"bare{turn}-{r.rid}")).encode() for r in requests
    ]
    waiting = iter(bodies)
    tokens = 0

    async def connection(url: str, key: str) -> None:
        nonlocal tokens
        where = urlsplit(url)
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        head = f"POST /generate HTTP/1.1\r\nHost: {where.netloc}\r\nAuthorization: Bearer {key}\r\n"
        head += "Content-Type: application/json\r\nContent-Length: "
        for body in waiting:
            writer.write(f"{head}{len(body)}\r\n\r\n".encode() + body)
            status = await reader.readline()
            if b" 200 " not in status:
                raise RuntimeError(f"the server answered {status!r}")
            length = 0
            while (line := await reader.readline()) != b"\r\n":
                name, _, value = line.partition(b":")
                if name.lower() == b"content-length":
                    length = int(value)
            answer = json.loads(await reader.readexactly(length))
            tokens += answer["meta_info"]["completion_tokens"]
        writer.close()
        await writer.wait_closed()

    assert engine.process is not None
    await asyncio.gather(
        *(connection(engine.process.url, engine.process.api_key) for _ in range(under_way))
    )
    return tokens


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
