"""Implements routing replay. In the log-prob pass and in the training pass, the trainer sends each
token to the experts that the rollout engine chose for the token.

The rollout engine and the trainer round numbers differently. If two experts have nearly equal
router logits for a token, the engine and the trainer may choose different experts. A different
choice of experts changes the token's log-prob by far more than rounding does ("R3", Ma et al. 2025,
arXiv:2510.11370). If the trainer replays the engine's choice of experts, the log-probs of engine
and trainer differ only by rounding. The gate values come from the trainer's own logits at the
replayed experts, so the router still learns.

Shape legend: a micro-batch has b rows, and this rank holds s positions of each row. A router of
this rank therefore processes t = s b tokens. L = layers of the model, K = experts per token, E =
experts.
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
        "experts chosen by the engine that the trainer's routers would not have chosen with the"
        " same weights",
        "small and steady; 0 in float32; a jump: different weights on one side",
    ),
)


TopK = Callable[..., tuple[Tensor, Tensor]]


class GivenExperts(RouterReplay):
    """Makes one router replay the experts that the engine chose, one micro-batch at a time.

    Megatron's RouterReplay cannot distinguish a forward pass from a recomputation of this forward
    pass during backward. The caller of RouterReplay must therefore state whether a forward pass or
    a recomputation comes next. In a pipeline, forward passes of some micro-batches alternate with
    backward passes of other micro-batches. GivenExperts therefore detects recomputations without
    help from the caller. If a forward pass is recomputed during backward, the first run of the
    forward pass has gradients disabled, and the recomputation has gradients enabled. Backward
    recomputes the forward passes in the same order in which these forward passes first ran.
    """

    def __init__(self) -> None:
        # skips Megatron's constructor, which adds every router of the process to a list that never
        # shrinks
        self._given: Tensor | None = None
        self._trains = False
        self._again: deque[Tensor | None] = deque()
        # [2]: experts given in a pass without backward, and how many of them the router also chose
        self.counts: Tensor | None = None

    def begin(self, trains: bool) -> None:
        """Forgets the experts and counts of the last pass, and begins a new pass over
        micro-batches. If `trains` is True, the new pass also runs backward for each micro-batch."""
        self._given, self._trains, self.counts = None, trains, None
        self._again.clear()

    def give(self, experts: Tensor | None) -> None:
        """Sets the experts [t, K] of the next micro-batch. If `experts` is None, the router chooses
        the experts."""
        self._given = experts

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the scores [t, K] and the indices [t, K] of the experts for each token. The
        argument `scores` [t, E] contains the scores of all experts. If `give` has set experts for a
        token, the token gets these experts. If `give` has set no experts for a token, Megatron's
        default rule chooses the experts with the highest scores. Overrides Megatron's method."""
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
    """Adds replay to every router of the model."""
    for chunk in model:
        for router, _ in _routers(chunk):
            router.router_replay = GivenExperts()


def begin_pass(model: list[nn.Module], *, trains: bool) -> None:
    """Prepares every router for a pass over micro-batches."""
    for chunk in model:
        for router, _ in _routers(chunk):
            if router.router_replay is not None:
                router.router_replay.begin(trains)


def give_experts(chunk: nn.Module, experts: Tensor | None) -> None:
    """Sets the experts for the next forward pass of a model chunk. Does nothing if `install` was
    not called.

    Args:
        experts: [L, s, b, K] expert numbers on the host, for all layers of the model. s counts the
            positions of all tensor-parallel ranks.
    """
    for router, layer in _routers(chunk):
        if router.router_replay is None:
            continue
        given = None
        if experts is not None:
            given = experts[layer]
            # with sequence parallelism Megatron cuts the positions, the first dimension
            if router.config.sequence_parallel:
                given = given.chunk(router.tp_group.size())[router.tp_group.rank()]
            given = given.flatten(0, 1)
        router.router_replay.give(given)


@torch.no_grad()
def routing_metrics(model: list[nn.Module], device: torch.device) -> dict[str, Tensor]:
    """Returns the 0-dim metric `routing/differs` over all tokens and layers of the last pass. The
    metric is the fraction of the engine's experts that the trainer's routers would not have chosen,
    or NaN if the engine gave no experts.

    Call `routing_metrics` only after `install`, and only after a pass without backward. All ranks
    must call `routing_metrics`.
    """
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    for chunk in model:
        for router, _ in _routers(chunk):
            if router.router_replay.counts is not None:
                counts += router.router_replay.counts
    dist.all_reduce(counts)  # each rank has different tokens or layers: experts are never cut
    return {"routing/differs": 1 - counts[1] / counts[0]}


def _routers(chunk: nn.Module) -> Iterator[tuple[Any, int]]:
    """Yields every router with its layer's number in the whole model."""
    for layer in unwrap(chunk).decoder.layers:
        if (router := getattr(layer.mlp, "router", None)) is not None:
            yield router, layer.layer_number - 1
