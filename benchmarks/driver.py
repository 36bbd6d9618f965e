"""Measures what the driver spends on a step's replies, from servers' JSON to the first micro-batch.

By default a step has 8,192 replies of 16,384 tokens each.

A process of its own plays the servers, over HTTP: its answers are shaped as recorded ones, with
token ids and log-probs of all digits, and their bytes are made as they are sent. Everything after
that is the product: engines' workers (Ray's actors; with --inline objects of the driver) read the
JSON, check it and decode the text, the driver makes trajectories, has each verified by the
verifier's processes, lays them end to end, judges, plans and gives every data rank its share, of
which the first rank makes its micro-batches.

Processor seconds are those of whole processes, above what they had spent before the first request;
a machine that is shared makes them longer by its caches alone, but seconds of the clock by whatever
else runs: see load_average. Memory is the peak of the driver's resident memory (VmHWM: shared pages
of the object store included) above what it held before.

    python benchmarks/driver.py
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # of the server that answers

import numpy as np
import orjson
import torch
from aiohttp import web
from machine import forget_peak, machine, process_memory
from support.sglang_fake import FakeServer
from tiny import save_tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from megatron_stare.cluster.inline import InlineWorkers
from megatron_stare.config.schema import Config
from megatron_stare.environments.single_turn import SingleTurn
from megatron_stare.megatron.batching.microbatch import RankBatch
from megatron_stare.megatron.batching.sequence_layout import WholeSequences
from megatron_stare.ops.plan import PlanRules, plan_mini_batches
from megatron_stare.process.workers import Handle, Workers
from megatron_stare.records.batch import MicroBatchPlan, Prompt, SamplingParams
from megatron_stare.records.rollout_batch import RankShare, RolloutBatch
from megatron_stare.rewards.verdicts import verdicts
from megatron_stare.rewards.verifier_pool import VerifierPool
from megatron_stare.rollout.engines.engine_worker import EngineWorker
from megatron_stare.rollout.engines.model_folder import load_tokenizer
from megatron_stare.rollout.fleet.engine_pool import EnginePool
from megatron_stare.rollout.sources.group_sampling import EveryGroup
from megatron_stare.rollout.sources.rollout_source import Rollouts
from megatron_stare.rollout.sources.synchronous_source import SynchronousSource
from megatron_stare.weights.sync.stream import Bucket, tensor_checksum
from megatron_stare.weights.sync.stream_plan import BucketLayout, Slot
from megatron_stare.weights.sync.target import SyncTarget

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results/driver.json"
TARGETS = {"driver_cpu_s": 40, "driver_memory_gb": 6, "last_reply_to_micro_batch_s": 5}
KEY = "key"  # FakeServer asks for it
PROMPT, VERSION = 64, 1
TEMPLATES = 8  # different replies; every one is written anew
VOCAB = 32_000  # at most: as many as the project's own pages and sources make
DATA_RANKS = (1, 2, 4, 8, 16)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replies", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=16_384, help="of every reply")
    parser.add_argument("--samples", type=int, default=16, help="replies a prompt")
    parser.add_argument(
        "--replicas", type=int, default=2, help="servers, and workers that speak to them"
    )
    parser.add_argument(
        "--data-ranks",
        type=int,
        default=16,
        help="of the run whose first micro-batch is waited for",
    )
    parser.add_argument(
        "--inline", action="store_true", help="everything but the servers in one process"
    )
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    result = {
        "machine": machine(),
        "settings": {k: v for k, v in vars(args).items() if k != "out"},
        "targets": TARGETS,
    }
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), args.tokens)
        result |= measure(args, Path(folder))
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One step's rollouts and what comes of them; raises where what was decoded is not what was
    sent."""
    context = multiprocessing.get_context("spawn")
    last_sent = context.Value("d", 0.0)
    here, there = context.Pipe()
    servers = context.Process(
        target=serve, args=(there, str(folder), args.replicas, args.tokens, last_sent)
    )
    servers.start()
    there.close()  # or `recv` would wait for ever for servers that have ended
    try:
        ports, sent = here.recv()
        return measure_from(
            args, folder, [f"http://127.0.0.1:{port}" for port in ports], sent, last_sent
        )
    finally:
        servers.terminate()
        servers.join()


def measure_from(
    args: argparse.Namespace, folder: Path, urls: list[str], sent: list[str], last: Any
) -> dict[str, Any]:
    os.environ["SGLANG_API_KEY"] = KEY
    config = Config.model_validate(
        {
            "model": {"path": str(folder)},
            "rollout": {
                "engine": "sglang",
                "max_prompt_tokens": PROMPT,
                "max_new_tokens": args.tokens,
                "max_batch": 64,
            },
            "sglang": {"urls": urls},
            "batch": {"prompts": args.replies // args.samples, "samples_per_prompt": args.samples},
            "runtime": {"object_store_mb": 4096 if args.replies * args.tokens > 10**7 else 128},
        }
    )
    method = config.algorithm.method
    workers, close = inline_workers(config) if args.inline else ray_workers(config)
    try:
        pool = EnginePool(workers)
        pool.update_weights(VERSION, Weights())
        with VerifierPool("arithmetic", 1, 60.0) as verifiers:
            arrivals = Arrivals()
            source = SynchronousSource(
                Rollouts(
                    pool,
                    SingleTurn(config, load_tokenizer(str(folder))),
                    lambda _: verdicts(verifiers),
                ),
                EveryGroup(Prompts(), config.batch.prompts, args.samples),
                partial(SamplingParams, 1.0, args.tokens, 1, stop_token_ids=(0,)),
                dict,
                arrivals,
            )
            source.version = VERSION
            at_start, workers_at_start = cpu_s(), workers.call("cpu_s")
            forget_peak()
            held = process_memory("VmRSS")
            started = time.monotonic()
            batch = source.next(1)
            rolled, rolled_cpu, rolled_peak = time.monotonic(), cpu_s(), process_memory("VmHWM")
            batch = method.judge(batch)
            judged = time.monotonic()
            plan = planned(batch, args.data_ranks, args.tokens)
            parts = batch.shares(plan.branches_of(rank) for rank in range(args.data_ranks))
            shares = [workers.share(part) for part in parts]
            shared, driver_cpu, peak = time.monotonic(), cpu_s(), process_memory("VmHWM")
            *first, rank_cpu = workers.wait(
                [workers.start_on(0, "first_micro_batch", shares[0], plan)]
            )[0]
            ready = time.monotonic()
            engine_cpu = sum(
                after - before
                for before, after in zip(workers_at_start, workers.call("cpu_s"), strict=True)
            )
        check(batch, args, sent, first)
        del shares
        received = {
            dp: largest_share(batch, args.tokens, dp) for dp in DATA_RANKS if dp <= args.replies
        }
    finally:
        close()
    return {
        "replies": batch.size,
        "tokens": int(batch.response_lengths.sum()),
        "driver_cpu_s": round(driver_cpu - at_start, 2),
        "driver_cpu_s_until_the_batch": round(rolled_cpu - at_start, 2),
        "engine_workers_cpu_s": None if args.inline else round(engine_cpu, 2),
        "driver_memory_gb": round((peak - held) / 1e9, 3),
        "driver_memory_gb_until_the_batch": round((rolled_peak - held) / 1e9, 3),
        "rollout_wall_s": round(rolled - started, 1),
        "last_reply_to_micro_batch_s": round(ready - last.value, 3),
        "last_reply_to_micro_batch_cpu_s": round(driver_cpu - arrivals.cpu_s + rank_cpu, 3),
        "load_average": os.getloadavg()[0],
        "of_which_s": {
            "last reply sent to all verified and laid end to end": round(rolled - last.value, 3),
            "last reply sent to its trajectory": round(arrivals.last - last.value, 3),
            "judge": round(judged - rolled, 3),
            "plan and shares": round(shared - judged, 3),
            "a rank's micro-batches": round(ready - shared, 3),
        },
        "bytes_a_rank_receives": received,
        "times_data_ranks_against_one": {
            dp: round(n * dp / received[1], 4) for dp, n in received.items()
        },
    }


def check(batch: RolloutBatch, args: argparse.Namespace, sent: list[str], first: list[int]) -> None:
    """Every reply came whole, was verified, and is one that was sent: tokens, log-probs and
    text."""
    assert batch.size == args.replies and bool(batch.verified.all()) and bool(batch.loss_mask.all())
    assert set(batch.response_lengths.tolist()) == {args.tokens} and set(
        batch.run_versions.tolist()
    ) == {VERSION}
    found = {digest(t.tokens, t.log_probs, t.text) for t in batch.trajectories}
    assert found <= set(sent) and len(found) == min(TEMPLATES, args.replies), (
        "what was decoded is not what was sent"
    )
    assert first == [PROMPT + args.tokens, args.tokens]  # a budget of one reply a micro-batch


def digest(tokens: Tensor, log_probs: Tensor, text: str) -> str:
    """SHA-256 of a reply's tokens, log-probs and text."""
    return hashlib.sha256(
        tokens.numpy().tobytes() + log_probs.numpy().tobytes() + text.encode()
    ).hexdigest()


def planned(batch: RolloutBatch, data_ranks: int, tokens: int) -> MicroBatchPlan:
    rules = PlanRules(data_ranks, PROMPT + tokens, packed=True)
    return plan_mini_batches(batch.lengths.tolist(), batch.groups.tolist(), rules)


def largest_share(batch: RolloutBatch, tokens: int, data_ranks: int) -> int:
    """Bytes of what the rank that receives most is sent."""
    plan = planned(batch, data_ranks, tokens)
    return max(
        len(pickle.dumps(batch.share(plan.branches_of(rank)), protocol=5))
        for rank in range(data_ranks)
    )


class Worker(EngineWorker):
    """An engine's worker that also says what it has spent, and takes a trainer rank's share where
    that comes first."""

    def cpu_s(self) -> float:
        return cpu_s()

    def first_micro_batch(self, share: RankShare, plan: MicroBatchPlan) -> tuple[int, int, float]:
        """Tokens and scored positions of the first micro-batch of data rank 0, and processor
        seconds until it was there."""
        before = cpu_s()
        batch = RankBatch(share, plan, 0, torch.device("cpu"), WholeSequences(packed=True))
        return (
            batch.micro_batches[0].tokens.numel(),
            batch.micro_batches[0].rows.numel(),
            cpu_s() - before,
        )


def inline_workers(config: Config) -> tuple[Workers, Any]:
    workers = InlineWorkers([Worker(config, number) for number in range(len(config.sglang.urls))])
    return workers, workers.close


def ray_workers(config: Config) -> tuple[Workers, Any]:
    """Starts engines' workers as Ray actors, as a run on Ray does, and no trainers. The second
    value ends them and leaves Ray."""
    from megatron_stare.cluster import ray as on_ray

    on_ray.start_ray(config)
    count = len(config.sglang.urls)
    workers = on_ray.start_actors(
        [{}] * count, config.rollout.threads, "rollout engine", config.runtime.timeout_s
    )
    workers.build(Worker, [(config, number) for number in range(count)])

    def close() -> None:
        workers.close()
        on_ray.leave_ray()

    return workers, close


class Prompts:
    """A stream of prompts whose ids are any."""

    def __init__(self) -> None:
        self._cursor = 0

    def take(self, n: int) -> list[Prompt]:
        first, self._cursor = self._cursor, self._cursor + n
        return [
            Prompt(i, str(i), "", "7", tuple(range(1, PROMPT + 1))) for i in range(first, first + n)
        ]


class Arrivals:
    """Notes when the last trajectory was made, and what the driver had spent."""

    last = cpu_s = 0.0

    def __call__(self, made: int, wanted: int) -> None:
        if made == wanted:
            self.last, self.cpu_s = time.monotonic(), cpu_s()


class Weights:
    """One small tensor on its way to the engines."""

    def __init__(self) -> None:
        self._tensor = torch.ones(8)
        self.layouts = (BucketLayout(torch.float32, (Slot("model.norm.weight", (8,), 0),)),)

    def buckets(self, checksums: bool = True) -> Iterator[tuple[Handle, list[Handle]]]:
        yield self._tensor, []

    def checksums(self) -> dict[str, str]:
        return {"model.norm.weight": tensor_checksum(self._tensor)}

    def prepare(self, target: SyncTarget, prove: bool) -> None:
        """There is nothing to gather."""

    def send_to(self, target: SyncTarget, prove: bool) -> list[Any]:
        sender, bucket = target.sender(0), Bucket(self.layouts[0], self._tensor)
        sender.expect(prove, bucket)
        sender.begin()
        sender.send(bucket)
        told = sender.end()
        sender.close()
        return [told]

    def forget(self) -> None:
        """Nothing was left."""


def save_model(folder: Path, tokens: int) -> None:
    """A model's folder whose tokenizer is a byte-level BPE of the project's own pages and
    sources."""
    files = sorted(
        str(file)
        for name in ("docs", "megatron_stare")
        for file in (ROOT / name).rglob("*.[mp][dy]")
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    tokenizer.train(
        files, trainers.BpeTrainer(vocab_size=VOCAB, show_progress=False, special_tokens=["<end>"])
    )
    save_tiny(folder, tokenizer.get_vocab_size(), 64, 1)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    # transformers loads it as Qwen2's, which cuts text in its own way: tokenizer.json must say so
    AutoTokenizer.from_pretrained(str(folder), local_files_only=True).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"max_position_embeddings": 2 * (PROMPT + tokens), "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))


class Replies(FakeServer):
    """Answers every request for a whole response with one of the templates' replies, as bytes."""

    def __init__(self, name: str, replies: list[dict[str, Any]], last_sent: Any) -> None:
        super().__init__(name)
        self._replies, self._last_sent, self._number = replies, last_sent, 0

    def _info(self, body: dict[str, Any]) -> dict[str, Any]:
        return super()._info(body) | {"max_total_num_tokens": 10**6}

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.read()
        if (
            request.path == "/generate"
            and not (asked := orjson.loads(body))["sampling_params"]["logit_bias"]
        ):
            return web.Response(body=self._reply(asked), content_type="application/json")
        status, content = await self.request(request.method, request.path, request.headers, body)
        return web.Response(status=status, body=content)

    def _reply(self, asked: dict[str, Any]) -> bytes:
        """SGLang's own way of writing it."""
        reply = self._replies[self._number % len(self._replies)]
        self._number += 1
        tokens = len(reply["output_ids"])
        meta = {
            "id": asked["rid"],
            "finish_reason": {"type": "length", "length": tokens},
            "prompt_tokens": len(asked["input_ids"]),
            "weight_version": self.version,
            "num_retractions": 0,
            "input_token_logprobs": [],
            "output_token_logprobs": reply["scored"],
            "output_token_logprobs_length": tokens,
            "reasoning_tokens": 0,
            "completion_tokens": tokens,
            "cached_tokens": 0,
            "weight_versions": [{"version": self.version, "start": 0, "end": tokens}],
            "cached_tokens_details": None,
            "dp_rank": None,
            "e2e_latency": 812.0330894471999702,
            "response_sent_to_client_ts": time.time(),
        }
        content = orjson.dumps({"output_ids": reply["output_ids"], "meta_info": meta})
        self._last_sent.value = time.monotonic()
        return content


def serve(pipe: Connection, folder: str, replicas: int, tokens: int, last_sent: Any) -> None:
    """Plays the servers until it is terminated; sends their ports, and what each reply is when it
    is read rightly."""
    tokenizer = load_tokenizer(folder)
    pages = "".join(file.read_text() for file in sorted((ROOT / "docs").rglob("*.md")))
    text = tokenizer(pages).input_ids
    text *= 1 + TEMPLATES * tokens // len(text)  # enough for all templates
    generator = np.random.default_rng(1)
    replies, sent = [], []
    for number in range(TEMPLATES):
        ids = text[number * tokens : (number + 1) * tokens]
        # float32 as servers compute them
        log_probs = -generator.exponential(0.5, tokens).astype(np.float32)
        replies.append(
            {
                "output_ids": ids,
                "scored": [[x, i, None] for x, i in zip(log_probs.tolist(), ids, strict=True)],
            }
        )
        decoded = tokenizer.decode(ids, skip_special_tokens=True)
        sent.append(
            digest(torch.tensor(ids, dtype=torch.int32), torch.from_numpy(log_probs), decoded)
        )

    async def run() -> None:
        ports = []
        for number in range(replicas):
            app = web.Application(client_max_size=2**30)
            app.router.add_route("*", "/{path:.*}", Replies(str(number), replies, last_sent).answer)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            ports.append(runner.addresses[0][1])
        pipe.send((ports, sent))
        await asyncio.Event().wait()

    asyncio.run(run())


def cpu_s() -> float:
    """Processor seconds of this process, all threads."""
    return time.process_time()


if __name__ == "__main__":
    main()
