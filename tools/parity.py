"""Comparison of check_parity.py: logits and weights of a checkpoint, by our Megatron model and by
transformers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_stare.config.schema import BatchConfig, Config, ModelConfig, ParallelConfig
from megatron_stare.megatron.backend import layout as parallel_layout
from megatron_stare.megatron.backend.cpu_backend import device
from megatron_stare.megatron.backend.layout import Layout
from megatron_stare.megatron.batching.microbatch import MicroBatch, RankBatch
from megatron_stare.megatron.batching.sequence_layout import sequence_layout
from megatron_stare.megatron.export.export import export_hf
from megatron_stare.megatron.model.head import output_weight, rows_of
from megatron_stare.megatron.model.model import build_model, load_hf
from megatron_stare.megatron.step.passes import compute_log_probs
from megatron_stare.models import cost_of, read_shape
from megatron_stare.models.shape import ModelShape
from megatron_stare.ops.plan import PlanRules, plan_micro_batches
from megatron_stare.records.batch import Prompt
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.records.trajectory import sampled_trajectory
from megatron_stare.weights.files.check import left_out
from megatron_stare.weights.files.hf_folder import HfFolder

TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Task:
    """Settings that every rank is given."""

    path: str
    parallel: ParallelConfig
    sequences: int
    longest: int
    packed: bool
    seed: int


def sequences(task: Task, vocab_size: int) -> RolloutBatch:
    """Random sequences of random lengths: one token of prompt, the rest response."""
    generator = torch.Generator().manual_seed(task.seed)
    samples = []
    for i in range(task.sequences):
        length = int(torch.randint(2, task.longest + 1, (1,), generator=generator))
        first, *rest = torch.randint(0, vocab_size, (length,), generator=generator).tolist()
        prompt = Prompt(i, str(i), "", "", (first,))
        samples.append(sampled_trajectory(prompt, 0, rest, [0.0] * len(rest)))
    return RolloutBatch.from_trajectories(samples)


class Logits:
    """Stands where the log-prob head stands: gives the logits themselves, [n, vocabulary], and
    their row numbers."""

    def __init__(self, shape: ModelShape, layout: Layout) -> None:
        self.shape, self.layout = shape, layout

    def compute_log_probs(
        self, model: GPTModel, hidden: Tensor, micro: MicroBatch, **_: object
    ) -> tuple[Tensor, ...]:
        mine = torch.nn.functional.linear(rows_of(hidden, micro), output_weight(model))
        parts = [torch.empty_like(mine) for _ in range(self.layout.tp)]
        dist.all_gather(parts, mine, group=self.layout.tp_group)
        return torch.cat(parts, dim=1)[:, : self.shape.vocab_size], micro.targets


def one_rank(rank: int, init: str, task: Task) -> dict[str, Any]:
    """This rank's logits of the sequences it was given, and its part of the exported weights."""
    shape = read_shape(task.path)
    layout = parallel_layout.join(task.parallel, rank, init, seed=1, timeout_s=TIMEOUT_S)
    try:
        model = build_model(shape, ModelConfig(path=task.path), task.parallel, layout)
        load_hf(model, HfFolder(task.path), shape, layout)
        batch = sequences(task, shape.vocab_size)
        chunks = task.parallel.virtual_pipeline
        rules = PlanRules(
            data_parallel=layout.dp,
            budget=2 * (task.longest + task.parallel.sequence_multiple),
            packed=task.packed,
            multiple=task.parallel.pipeline if chunks > 1 else 1,
            each=task.parallel.sequence_multiple,
            cost=cost_of(shape),
        )
        plan = plan_micro_batches(batch.lengths.tolist(), rules)
        config = Config(
            model=ModelConfig(path=task.path),
            parallel=task.parallel,
            batch=BatchConfig(packed=task.packed),
        )
        share = batch.share(plan.branches_of(layout.dp_rank))
        rank_batch = RankBatch(
            share, plan, layout.dp_rank, device(), sequence_layout(config, layout)
        )
        logits, _ = compute_log_probs(model, rank_batch, Logits(shape, layout))
        speaks = layout.last_stage and layout.tp_rank == 0
        return {
            "index": rank_batch.index if speaks else None,
            "logits": logits if speaks else None,
            "weights": export_hf(model, shape, layout),
        }
    finally:
        parallel_layout.leave()


@torch.no_grad()
def compare(
    task: Task, shape: ModelShape, ranks: list[dict[str, Any]]
) -> tuple[float, float, list[str]]:
    """The largest difference of two logits, the largest logit, and the weights that came back
    changed, more than once or not at all."""
    model = AutoModelForCausalLM.from_pretrained(
        task.path, dtype=torch.float32, local_files_only=True
    )
    batch = sequences(task, shape.vocab_size)
    want = torch.cat(
        [
            model(tokens[None]).logits[0, :-1]
            for tokens in batch.tokens.split(batch.lengths.tolist())
        ]
    )
    got = torch.full_like(want, float("nan"))
    for rank in ranks:
        if rank["index"] is not None:
            got[rank["index"]] = rank["logits"].to(got)
    folder = HfFolder(task.path)
    held: dict[str, list[Tensor]] = {}
    for rank in ranks:
        for name, weight in rank["weights"].items():
            held.setdefault(name, []).append(weight)
    names = folder.names() - left_out(folder.names(), shape)
    changed = sorted(
        name
        for name in names | held.keys()
        if len(held.get(name, [])) != 1
        or name not in names
        or not torch.equal(held[name][0], folder.slice(name)[:].to(held[name][0].dtype))
    )
    return float((got - want).abs().max()), float(want.abs().max()), changed
