"""Every method, its tokens spread over four ranks by response: loss and gradient of one rank that holds them all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from support.token_batches import loss_and_gradient, state_of, token_batch
from test_family import MIXED, built, with_everything

from megatron_stare.algorithms import METHODS
from megatron_stare.ops.statistics_executor import gather_statistics

OWNER = torch.tensor([2, 0, 1, 1, 0, 2, 1, 0])  # of eight responses; the last rank holds none


def _part(rank: int, init: str, world: int) -> dict[str, tuple[float, torch.Tensor, torch.Tensor]]:
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world)
    results = {}
    for name in METHODS:
        for make in (built, with_everything):
            method = make(name)
            whole = token_batch(MIXED, method=method)
            here = whole.select((OWNER[whole.sequence] == rank).nonzero().squeeze(1))
            leaf = here.log_prob.detach().clone().requires_grad_()
            here = replace(here, log_prob=leaf)
            statistics = gather_statistics(lambda known, m=method, b=here: m.requests(b, known), dist.group.WORLD)
            loss = method.token_loss(here, statistics, state_of(method, statistics)).loss
            total = (method.coefficients(here, statistics) * loss).sum()
            (gradient,) = torch.autograd.grad(total, leaf)
            results[f"{name} {make.__name__}"] = (float(total), here.index, gradient)
    dist.destroy_process_group()
    return results


@pytest.mark.distributed
def test_four_ranks_train_as_one_would(ranks) -> None:
    parts = ranks.run(_part, 4, 4)
    for name in METHODS:
        for make in (built, with_everything):
            key, method = f"{name} {make.__name__}", make(name)
            loss, gradient = loss_and_gradient(method, token_batch(MIXED, method=method))
            assert sum(part[key][0] for part in parts) == pytest.approx(float(loss), rel=1e-5, abs=1e-6), key
            got = torch.zeros_like(gradient)
            for part in parts:
                got[part[key][1]] = part[key][2]
            torch.testing.assert_close(got, gradient, msg=key)
