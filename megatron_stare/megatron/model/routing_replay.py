"""Routing replay: tokens go to the experts that the rollout engine chose, in the log-prob pass and
in training alike.

Engine and trainer round differently, so now and then a token's k-th and next expert change places
between them, and its log-prob moves by far more than rounding ("R3", Ma et al. 2025,
arXiv:2510.11370). With the engine's choice given, what is left is rounding. Gates are those of the
trainer's own logits at the experts given, so the router still learns.

Shape legend: s positions and b rows of a micro-batch on this rank, t = s b tokens of a router, L
layers, K experts a token, E experts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor, nn

from megatron_stare.megatron.model.model import unwrap
from megatron_stare.records.metric import Metric
from megatron_stare.records.trajectory import unknown

METRICS = (
    Metric(
        "routing/differs",
        "share",
        "experts of the engine that the trainer's routers would not have chosen with the same"
        " weights",
        "small and steady; 0 in float32; a jump: other weights on one side",
    ),
)


TopK = Callable[..., tuple[Tensor, Tensor]]


class GivenExperts(RouterReplay):
    """Replay for one router: takes the experts of a micro-batch as it enters the layer.

    Megatron's own is told from outside whether a forward is backward's, made again for recomputed
    activations. In a pipeline forwards and backwards take turns, so here a router tells by itself:
    a forward that will be made again runs without gradients, and what is made again comes in the
    order in which it was.
    """

    def __init__(self) -> None:
        # not Megatron's, which enters every router of the process into one list for ever
        self._given: Tensor | None = None
        self._trains = False
        self._again: deque[Tensor | None] = deque()
        # [2] experts given in a pass without backward, and those of them that the router chose too
        self.counts: Tensor | None = None

    def begin(self, trains: bool) -> None:
        """Before a pass. trains: its backward follows."""
        self._given, self._trains, self.counts = None, trains, None
        self._again.clear()

    def give(self, experts: Tensor | None) -> None:
        """The experts [t, K] of the micro-batch that comes next; None: the router chooses."""
        self._given = experts

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores [t, K] and numbers [t, K] of the experts that are given, of `scores` [t, E]; where
        none is, of those with the highest scores. See Megatron's."""
        assert default_compute_topk is not None
        experts = self._next()
        highest, chosen = default_compute_topk(
            scores, topk, num_groups=num_groups, group_topk=group_topk
        )
        if experts is None:
            return highest, chosen
        given = experts.to(scores.device, non_blocking=True)
        named = given != unknown(given.dtype)
        if not self._trains:
            same = named & (given[:, :, None] == chosen[:, None]).any(-1)
            counts = torch.stack([named.sum(), same.sum()])
            self.counts = counts if self.counts is None else self.counts + counts
        chosen = torch.where(named, given.to(chosen.dtype), chosen)
        return scores.gather(1, chosen), chosen

    def _next(self) -> Tensor | None:
        if not self._trains:
            return self._given
        if not torch.is_grad_enabled():
            self._again.append(self._given)
            return self._given
        return self._again.popleft() if self._again else self._given


def install(model: list[nn.Module]) -> None:
    """Lets every router of the model be given its experts."""
    for chunk in model:
        for router, _ in _routers(chunk):
            router.router_replay = GivenExperts()


def begin_pass(model: list[nn.Module], *, trains: bool) -> None:
    """Before a pass over micro-batches."""
    for chunk in model:
        for router, _ in _routers(chunk):
            if router.router_replay is not None:
                router.router_replay.begin(trains)


def give_experts(chunk: nn.Module, experts: Tensor | None) -> None:
    """Before a chunk's forward of a micro-batch; does nothing where `install` was not called.

    Args:
        experts: [L, s, b, K] on the host, of all layers of the model, s those of all
            tensor-parallel ranks.
    """
    for router, layer in _routers(chunk):
        if router.router_replay is None:
            continue
        given = None
        if experts is not None:
            given = experts[layer]
            # with sequence parallelism Megatron cuts the positions, which are the first dimension
            if router.config.sequence_parallel:
                given = given.chunk(router.tp_group.size())[router.tp_group.rank()]
            given = given.flatten(0, 1)
        router.router_replay.give(given)


@torch.no_grad()
def routing_metrics(model: list[nn.Module], device: torch.device) -> dict[str, Tensor]:
    """`routing/differs`, 0-dim: the share of the experts that were given in the last pass, which
    had no backward, that the trainer's own routers would not have chosen, over all tokens and
    layers; NaN where none was given. All ranks must call it, after `install`."""
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    for chunk in model:
        for router, _ in _routers(chunk):
            if router.router_replay.counts is not None:
                counts += router.router_replay.counts
    dist.all_reduce(counts)  # every rank has other tokens or other layers: experts are never cut
    return {"routing/differs": 1 - counts[1] / counts[0]}


def _routers(chunk: nn.Module) -> Iterator[tuple[Any, int]]:
    """Every router, and the number of its layer in the whole model."""
    for layer in unwrap(chunk).decoder.layers:
        if (router := getattr(layer.mlp, "router", None)) is not None:
            yield router, layer.layer_number - 1
