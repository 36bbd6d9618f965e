"""Which way a run goes through the output layer, where the configuration leaves it open: by the memory at hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import psutil
import torch
import torch.distributed as dist

from megatron_stare.config.schema import Config
from megatron_stare.megatron.backend.cpu_backend import device
from megatron_stare.models.shape import ModelShape
from megatron_stare.ops.linear_head import Mode

# Logits are taken whole up to this share of the free memory. The rest is for activations, which live at the same time,
# and for the optimizer's moments, which come with the first step.
SHARE = 1 / 8


@dataclass(frozen=True)
class HeadChoice:
    """A way through the output layer (ops/linear_head.py), and why, for the person who started the run."""

    mode: Mode
    reason: str


def choose_head(coupling: Literal["token", "sequence"], logits_bytes: int, free_bytes: int) -> HeadChoice:
    """Whole logits where they fit, else chunks; of these the one that computes logits once where the loss allows it.

    Args:
        coupling: of the method; see algorithms/method.py.
        logits_bytes: of the largest micro-batch on one rank.
        free_bytes: on the rank that has least.
    """
    size = f"a micro-batch's logits take up to {logits_bytes / 1e9:.3g} GB a rank, {free_bytes / 1e9:.3g} GB are free"
    if logits_bytes <= SHARE * free_bytes:
        return HeadChoice("materialised", size)
    if coupling == "token":
        return HeadChoice("gradient_in_forward", f"{size}, and a token's loss depends on its own log-prob alone")
    return HeadChoice("recompute", f"{size}, and the loss couples the tokens of a response")


def largest_logits(config: Config, shape: ModelShape) -> int:
    """Bytes of the logits [micro_batch_tokens of one rank, V of one rank], as if every token were predicted."""
    columns = shape.padded_vocab(config.parallel.tensor) // config.parallel.tensor
    rows = -(-config.batch.micro_batch_tokens // config.parallel.context)
    return rows * columns * (4 if config.model.dtype == "float32" else 2)


def free_memory() -> int:
    """Bytes that the rank with least of them could still take. All ranks must call it; ranks on CPUs are taken to
    share one machine."""
    if torch.cuda.is_available():
        free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    else:
        free = psutil.virtual_memory().available // dist.get_world_size()
    least = torch.tensor(free, dtype=torch.int64, device=device())
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return int(least)
