"""How much of the time engines generate, and steps a second, with rollouts sampled ahead of
training and without.

Servers are played by a process of its own, over HTTP: a response takes its number of tokens times a
token's time, lengths are log-normal with sigma 1, and a paused server makes none. Their time,
training's and the weight sync's stand as 1 : 0.7 : 0.05, where 1 is what the synchronous source
waits for a batch, measured first. Clients, weight updates, pool and sources are the product's;
training is a sleep. What is measured is the order of things, not their speed.

Servers have few slots, so that a batch keeps all of them busy for most of its time; or so many that
a step waits for its longest responses alone, and even servers that begin the next step at once have
little to do. Beside each run stands what the same servers would do without any time in between
(asynchrony_ideal.py).

    python benchmarks/asynchrony.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import tempfile
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # of the server that answers

import orjson
from aiohttp import web
from asynchrony_ideal import Servers, ideal
from driver import KEY, Prompts, Weights, save_model
from machine import machine
from support.sglang_fake import FakeServer
from support.threads import Threads

from megatron_stare.config.schema import Config
from megatron_stare.environments.single_turn import SingleTurn
from megatron_stare.records.batch import SamplingParams
from megatron_stare.rewards.verdicts import verdicts
from megatron_stare.rewards.verifier_pool import VerifierPool
from megatron_stare.rollout.engines.engine_worker import EngineWorker
from megatron_stare.rollout.engines.model_folder import load_tokenizer
from megatron_stare.rollout.fleet.engine_pool import EnginePool
from megatron_stare.rollout.sources.asynchronous_source import AsynchronousSource
from megatron_stare.rollout.sources.group_sampling import EveryGroup
from megatron_stare.rollout.sources.rollout_source import Rollouts, RolloutSource
from megatron_stare.rollout.sources.synchronous_source import SynchronousSource

RESULT = Path(__file__).parent / "results/asynchrony.json"
TRAINING, SYNC = 0.7, 0.05  # of what the synchronous source waits for a batch
# at staleness 1, at least
TARGETS = {"generating": 0.85, "steps_a_second_against_synchronous": 1.6}
LONGEST = 400  # tokens


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--prompts", type=int, default=16, help="a step")
    parser.add_argument("--samples", type=int, default=4, help="a prompt")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument(
        "--slots",
        type=int,
        nargs="+",
        default=[2, 4, 16],
        help="responses a replica generates at a time; a table each",
    )
    parser.add_argument("--median", type=float, default=12, help="tokens of a response")
    parser.add_argument("--token-s", type=float, default=0.01, help="seconds a token")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    tables = {}
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), LONGEST)
        for slots in args.slots:
            tables[f"{slots} slots"] = table(
                argparse.Namespace(**{**vars(args), "slots": slots}), Path(folder)
            )
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    result = {"machine": machine(), "settings": settings, "targets": TARGETS, **tables}
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def table(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A run with each source."""
    alone = play(args, folder, None, 0.0, 0.0)["wait_s"]
    runs = {"synchronous": play(args, folder, None, TRAINING * alone, SYNC * alone)}
    for bound in args.staleness:
        runs[f"staleness {bound}"] = play(args, folder, bound, TRAINING * alone, SYNC * alone)
    servers = servers_of(args)
    for name, run in runs.items():
        bound = None if name == "synchronous" else int(name.split()[1])
        run["ideal"] = ideal(servers, args.steps, bound, TRAINING * alone, SYNC * alone)
    rate = runs["synchronous"]["steps_a_second"]
    for run in runs.values():
        run["steps_a_second_against_synchronous"] = round(run["steps_a_second"] / rate, 3)
    return {"generation_s": round(alone, 3), "load_average": os.getloadavg()[0], "runs": runs}


def servers_of(args: argparse.Namespace) -> Servers:
    return Servers(
        args.replicas, args.slots, args.prompts, args.samples, args.median, LONGEST, args.token_s
    )


def play(
    args: argparse.Namespace, folder: Path, bound: int | None, training_s: float, sync_s: float
) -> dict[str, Any]:
    """A run of some steps."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    servers = context.Process(target=serve, args=(there, args, sync_s))
    servers.start()
    try:
        return play_on(
            args,
            folder,
            [f"http://127.0.0.1:{port}" for port in here.recv()],
            here,
            bound,
            training_s,
        )
    finally:
        servers.terminate()
        servers.join()


def play_on(
    args: argparse.Namespace,
    folder: Path,
    urls: list[str],
    servers: Connection,
    bound: int | None,
    training_s: float,
) -> dict[str, Any]:
    os.environ["SGLANG_API_KEY"] = KEY
    config = Config.model_validate(
        {
            "model": {"path": str(folder)},
            "rollout": {
                "engine": "sglang",
                "max_prompt_tokens": 64,
                "max_new_tokens": LONGEST,
                "max_batch": args.slots,
            },
            "sglang": {"urls": urls},
        }
    )
    workers = Threads([EngineWorker(config, number) for number in range(len(urls))])
    pool = EnginePool(workers)
    waits: list[float] = []
    ages: list[float] = []
    try:
        with VerifierPool("arithmetic", 1, 60.0) as verifiers:
            made = Rollouts(
                pool, SingleTurn(config, load_tokenizer(str(folder))), lambda _: verdicts(verifiers)
            )
            groups = EveryGroup(Prompts(), args.prompts, args.samples)
            sampling = partial(SamplingParams, 1.0, LONGEST, 1, stop_token_ids=(0,))
            source: RolloutSource
            if bound is None:
                source = SynchronousSource(made, groups, sampling, dict)
            else:
                source = AsynchronousSource(made, groups, sampling, dict, bound, args.steps)
            try:
                source.publish(Weights(), 0)
                servers.send("begin")
                began = time.monotonic()
                for step in range(1, args.steps + 1):
                    asked = time.monotonic()
                    source.next(step)
                    waits.append(time.monotonic() - asked)
                    ages.append(getattr(source, "metrics", {}).get("staleness/mean_age", 0.0))
                    time.sleep(training_s)
                    source.publish(Weights(), step)
                took = time.monotonic() - began
                servers.send("end")
                generating = servers.recv()
            finally:
                source.close()
    finally:
        workers.close()
    return {
        "steps_a_second": round(args.steps / took, 4),
        "wait_s": round(mean(waits), 4),
        "generating": round(generating, 4),
        "mean_age": round(mean(ages), 3),
    }


class Playing(FakeServer):
    """Makes a token of each response it has in every token's time, but not while it is paused."""

    def __init__(self, name: str, args: argparse.Namespace, sync_s: float) -> None:
        super().__init__(name)
        self._args, self._sync_s = args, sync_s
        self._paused = False
        self._active: dict[str, tuple[int, list[tuple[str, int]], asyncio.Future[None]]] = {}
        self.busy_s = 0.0

    def _info(self, body: dict[str, Any]) -> dict[str, Any]:
        return super()._info(body) | {"max_total_num_tokens": 10**6}

    async def tick(self) -> None:
        """Makes tokens until the process ends."""
        last, owed = time.monotonic(), 0.0
        while True:
            await asyncio.sleep(self._args.token_s)
            now = time.monotonic()
            spent, last = now - last, now
            if self._paused or not self._active:
                continue
            self.busy_s += spent
            owed += spent / self._args.token_s
            tokens, owed = int(owed), owed % 1
            for rid, (wanted, spans, done) in list(self._active.items()):
                made = sum(n for _, n in spans)
                new = min(tokens, wanted - made)
                if spans and spans[-1][0] == self.version:
                    spans[-1] = self.version, spans[-1][1] + new
                elif new:
                    spans.append((self.version, new))
                if made + new == wanted:
                    del self._active[rid]
                    done.set_result(None)

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.read()
        if (
            request.path == "/generate"
            and not (asked := orjson.loads(body))["sampling_params"]["logit_bias"]
        ):
            return web.Response(body=await self._response(asked), content_type="application/json")
        if request.path == "/pause_generation":
            self._paused = True
        if request.path == "/end_weight_update":
            await asyncio.sleep(self._sync_s)
        status, content = await self.request(request.method, request.path, request.headers, body)
        if request.path == "/continue_generation":
            self._paused = False
        return web.Response(status=status, body=content)

    async def _response(self, asked: dict[str, Any]) -> bytes:
        rid = asked["rid"]
        # the identifier ends in cursor and sample
        wanted = servers_of(self._args).wanted(rid.split(":", 1)[1])
        spans: list[tuple[str, int]] = []
        done = asyncio.get_running_loop().create_future()
        self._active[rid] = wanted, spans, done
        await done
        ends = [sum(n for _, n in spans[: i + 1]) for i in range(len(spans))]
        meta = {
            "id": rid,
            "finish_reason": {"type": "length", "length": wanted},
            "prompt_tokens": len(asked["input_ids"]),
            "completion_tokens": wanted,
            "weight_version": self.version,
            "weight_versions": [
                {"version": v, "start": end - n, "end": end}
                for (v, n), end in zip(spans, ends, strict=True)
            ],
            "output_token_logprobs": [[-0.5, 5, None]] * wanted,
            "input_token_logprobs": [],
        }
        return orjson.dumps({"output_ids": [5] * wanted, "meta_info": meta})


def serve(pipe: Connection, args: argparse.Namespace, sync_s: float) -> None:
    """Plays the servers until it is terminated; says for which part of the time between two words
    they generated."""

    async def run() -> None:
        players, ports = [Playing(str(number), args, sync_s) for number in range(args.replicas)], []
        ticks = [asyncio.create_task(player.tick()) for player in players]
        for player in players:
            app = web.Application(client_max_size=2**30)
            app.router.add_route("*", "/{path:.*}", player.answer)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            ports.append(runner.addresses[0][1])
        loop = asyncio.get_running_loop()
        pipe.send(ports)
        await loop.run_in_executor(None, pipe.recv)
        began, before = time.monotonic(), sum(player.busy_s for player in players)
        await loop.run_in_executor(None, pipe.recv)
        took = time.monotonic() - began
        pipe.send((sum(player.busy_s for player in players) - before) / took / len(players))
        await asyncio.gather(*ticks)

    asyncio.run(run())


if __name__ == "__main__":
    main()
