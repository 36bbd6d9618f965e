"""Log-probs of a split vocabulary beside Megatron's cross-entropy, which training with Megatron
alone would use."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.ranks import RankPool
from torch import Tensor

from megatron_stare.ops.vocab_parallel import log_prob_and_entropy

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

ROWS, VOCABULARY = 37, 256


def logits_and_targets() -> tuple[Tensor, Tensor]:
    """[ROWS, VOCABULARY] as sharp as a trained model's, and targets that every rank has some of."""
    generator = torch.Generator().manual_seed(8)
    logits = 6 * torch.randn(ROWS, VOCABULARY, generator=generator) + 15
    return logits, torch.arange(ROWS) * (VOCABULARY - 1) // (ROWS - 1)


def _rank(rank: int, init: str, world: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    try:
        logits, targets = logits_and_targets()
        weights = torch.linspace(-1, 2, ROWS)
        found = []
        for log_probs in (
            lambda x: log_prob_and_entropy(
                x, targets, vocab_size=VOCABULARY, group=dist.group.WORLD
            )[0],
            # it works in place, and reads [sequence, batch, vocabulary]
            lambda x: -vocab_parallel_cross_entropy(x[:, None].clone(), targets[:, None])[:, 0],
        ):
            mine = logits.chunk(world, dim=1)[rank].clone().requires_grad_()
            value = log_probs(mine)
            (value @ weights).backward()
            found += [value.detach(), mine.grad]
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    return tuple(found)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_log_probs_and_gradients_are_megatrons(ranks: RankPool, world: int) -> None:
    logits, targets = logits_and_targets()
    truth = logits.double().requires_grad_()
    exact = truth.log_softmax(1).gather(1, targets[:, None])[:, 0]
    (exact @ torch.linspace(-1, 2, ROWS).double()).backward()
    shares = truth.grad.chunk(world, dim=1)
    for share, (ours, our_slope, theirs, their_slope) in zip(
        shares, ranks.run(_rank, world, world), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=5e-6)
        torch.testing.assert_close(our_slope, their_slope, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ours.double(), exact, rtol=1e-6, atol=5e-6)
        torch.testing.assert_close(our_slope.double(), share, rtol=1e-5, atol=1e-6)
