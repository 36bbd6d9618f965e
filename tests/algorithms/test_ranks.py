"""Every method, its tokens spread over four ranks: loss and gradient of one rank that holds them
all.

By response, as data ranks hold them; and by token, every response on several ranks, as
context-parallel ones do.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from support.token_batches import loss_and_gradient, state_of, token_batch
from test_family import MIXED, built, with_everything

from megatron_stare.algorithms import METHODS
from megatron_stare.megatron.batching.microbatch import sum_over_ranks
from megatron_stare.ops.statistics_executor import gather_statistics

# settings besides the methods' own, of those whose selections and gates are read from other
# statistics
VARIANTS = {
    "stare C1, gate by sample": (
        "stare",
        {"variant": "C1", "gate": "sample", "entropy_target": 1.0},
    ),
    "stare C3 at the bottom, gate by token": (
        "stare",
        {"variant": "C3", "common": "bottom", "share": 0.3, "gate": "token", "entropy_target": 1.0},
    ),
    "stapo_stare C4, gate by sample": (
        "stapo_stare",
        {"variant": "C4", "gate": "sample", "entropy_target": 1.0},
    ),
    "stare below a bound": ("stare", {"variant": "C2", "rare_below": 0.3}),
    "twenty_entropy of all": ("twenty_entropy", {"candidates": "all"}),
}
CASES = {name: (name, {}) for name in METHODS} | VARIANTS
OWNER = torch.tensor([2, 0, 1, 1, 0, 2, 1, 0])  # of eight responses; the last rank holds none


def _part(
    rank: int, init: str, world: int, by_token: bool
) -> dict[str, tuple[float, torch.Tensor, torch.Tensor]]:
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world)
    results = {}
    for case, (name, settings) in CASES.items():
        for make in (built, with_everything):
            method = make(name, **settings)
            whole = token_batch(MIXED, method=method)
            # by token, two by two: a short response is not on all ranks, and one of twelve on two
            # of them twice
            owner = (whole.position // 2) % world if by_token else OWNER[whole.sequence]
            here = whole.select((owner == rank).nonzero().squeeze(1))
            leaf = here.log_prob.detach().clone().requires_grad_()
            everyone = partial(sum_over_ranks, group=dist.group.WORLD) if by_token else None
            here = replace(here, log_prob=leaf, over_ranks=everyone)
            statistics = gather_statistics(
                lambda known, m=method, b=here: m.requests(b, known), dist.group.WORLD
            )
            loss = method.token_loss(here, statistics, state_of(method, statistics)).loss
            total = (method.coefficients(here, statistics) * loss).sum()
            (gradient,) = torch.autograd.grad(total, leaf)
            results[f"{case} {make.__name__}"] = (float(total), here.index, gradient)
    dist.destroy_process_group()
    return results


@pytest.mark.wide
@pytest.mark.distributed
@pytest.mark.parametrize("by_token", [False, True], ids=["by response", "by token"])
def test_four_ranks_train_as_one_would(ranks, by_token: bool) -> None:
    parts = ranks.run(_part, 4, 4, by_token)
    for case, (name, settings) in CASES.items():
        for make in (built, with_everything):
            key, method = f"{case} {make.__name__}", make(name, **settings)
            loss, gradient = loss_and_gradient(method, token_batch(MIXED, method=method))
            assert sum(part[key][0] for part in parts) == pytest.approx(
                float(loss), rel=1e-5, abs=1e-6
            ), key
            got = torch.zeros_like(gradient)
            for part in parts:
                got[part[key][1]] = part[key][2]
            torch.testing.assert_close(got, gradient, msg=key)
