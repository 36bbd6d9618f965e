"""The trajectories of one step as one flat batch, and each data-parallel rank's share of it.
Imports torch only.

Shape legend: B samples; N response positions of all samples, concatenated; T prompt and response
positions of all samples, concatenated; R runs of consecutive tokens sampled by one weight version;
L layers; K experts a token in a mixture of experts. Samples are in canonical order: by prompt
cursor, then by sample number. For a RankShare, n, t and r count only the samples of the rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megatron_stare.errors import DataError
from megatron_stare.records.trajectory import Trajectory, covering


class _Columns:
    """Properties common to RolloutBatch and RankShare. For a RankShare, n and r count only the
    samples of the rank."""

    prompt_lengths: Tensor
    response_lengths: Tensor
    run_versions: Tensor
    run_lengths: Tensor

    @property
    def size(self) -> int:
        """B, the number of samples of the whole batch."""
        return self.prompt_lengths.numel()

    @property
    def lengths(self) -> Tensor:
        """[B] tokens of prompt plus response."""
        return self.prompt_lengths + self.response_lengths

    @property
    def weight_versions(self) -> Tensor:
        """[N] int64 weight version of every token, expanded from `run_versions` and `run_lengths`.
        Use this property only for small batches."""
        return torch.repeat_interleave(self.run_versions, self.run_lengths)


@dataclass
class RolloutBatch(_Columns):
    """Trajectories as flat tensors, in canonical order.

    Method.judge sets `advantages`, `carries_loss`, `baseline_mask` and `penalties`.
    """

    tokens: Tensor  # [T] int32, each sample's prompt then response
    loss_mask: Tensor  # [N] bool, positions that carry loss according to the environment
    rollout_log_probs: Tensor  # [N] float32, nats
    # [R] int64 weight version that sampled each run; see trajectory.NOT_SAMPLED
    run_versions: Tensor
    # [R] int64 tokens of each run; the runs cover all N positions, and none spans two samples
    run_lengths: Tensor
    runs: Tensor  # [B] int64 number of runs of each sample
    prompt_lengths: Tensor  # [B] int64
    response_lengths: Tensor  # [B] int64
    groups: Tensor  # [B] int64, 0..G-1
    rewards: Tensor  # [B] float64
    verified: Tensor  # [B] bool, False where the verifier failed
    truncated: Tensor  # [B] bool
    advantages: Tensor | None = None  # [B]
    carries_loss: Tensor | None = None  # [B] bool, responses whose loss-mask positions count
    baseline_mask: Tensor | None = None  # [B] bool, responses in the baseline of the advantages
    penalties: Tensor | None = None  # [B] float64, what shaping added to the rewards
    # [T, L, K] experts that the engine routed each token to; see `routing_column`
    experts: Tensor | None = None
    step: int = 0  # keys seeded draws of methods
    # in canonical order; they stay on the driver, for logging
    trajectories: Sequence[Trajectory] = ()

    def first(self, samples: int) -> RolloutBatch:
        """Returns the batch of the first `samples` samples."""
        columns: dict[str, Any] = dict(self._flat(range(samples)))
        for name, x in vars(self).items():
            if isinstance(x, Tensor) and name not in columns:
                columns[name] = x[:samples]
        return replace(self, trajectories=self.trajectories[:samples], **columns)

    def share(self, samples: Sequence[int]) -> RankShare:
        """Returns the share of a rank that takes these samples, given in ascending order.

        Copies tensors, because serialising a view would serialise the view's whole tensor. If the
        rank takes all samples, nothing is copied: the RankShare uses the batch's columns.
        """
        (share,) = self.shares([samples])
        return share

    def shares(self, ranks: Iterable[Sequence[int]]) -> Iterator[RankShare]:
        """Yields the shares of all ranks, in order. Values common to all shares are computed once.
        See `share`."""
        loss_lengths = self.loss_lengths
        return (self._share(samples, loss_lengths) for samples in ranks)

    def _share(self, samples: Sequence[int], loss_lengths: Tensor) -> RankShare:
        return RankShare(
            samples=torch.tensor(samples, dtype=torch.int64),
            **self._flat(samples),
            prompt_lengths=self.prompt_lengths,
            response_lengths=self.response_lengths,
            loss_lengths=loss_lengths,
            groups=self.groups,
            rewards=self.rewards,
            advantages=self.advantages,
            carries_loss=self.carries_loss,
            baseline_mask=self.baseline_mask,
            penalties=self.penalties,
            step=self.step,
        )

    @property
    def loss_lengths(self) -> Tensor:
        """[B] int64 number of loss-mask positions in every sample."""
        # [N + 1] number of loss positions before each position
        up_to = torch.nn.functional.pad(self.loss_mask.cumsum(0), (1, 0))
        ends = self.response_lengths.cumsum(0)
        return up_to[ends] - up_to[ends - self.response_lengths]

    def _flat(self, samples: Sequence[int]) -> dict[str, Tensor]:
        """Returns the columns longer than B, restricted to some of the samples."""
        lengths, responses, runs = (
            x.tolist() for x in (self.lengths, self.response_lengths, self.runs)
        )
        columns = {
            "tokens": _taken(self.tokens, lengths, samples),
            "loss_mask": _taken(self.loss_mask, responses, samples),
            "rollout_log_probs": _taken(self.rollout_log_probs, responses, samples),
            "run_versions": _taken(self.run_versions, runs, samples),
            "run_lengths": _taken(self.run_lengths, runs, samples),
        }
        if self.experts is not None:
            columns["experts"] = _taken(self.experts, lengths, samples)
        return columns

    @classmethod
    def from_trajectories(cls, trajectories: Iterable[Trajectory], step: int = 0) -> RolloutBatch:
        """Builds the batch: sorts the trajectories into canonical order and concatenates them. The
        batch takes over the column of the experts that each token was routed to, and removes this
        column from the trajectories. The column of experts is by far the largest column.

        Raises:
            DataError: the columns of a trajectory have different lengths, two prompts share a
                cursor, or only some trajectories name their experts.
        """
        ordered = sorted(trajectories, key=lambda t: (t.prompt.cursor, t.sample_index))
        prompt_ids: dict[int, tuple[int, ...]] = {}
        for each in ordered:
            _check(each)
            mine = each.prompt
            known = prompt_ids.setdefault(each.prompt.cursor, each.prompt.token_ids)
            if known is not mine.token_ids and known != mine.token_ids:
                raise DataError(
                    "two prompts have the same cursor",
                    where=f"prompt {mine.id}, cursor {mine.cursor}",
                )
        prompts = {
            cursor: torch.tensor(ids, dtype=torch.int32) for cursor, ids in prompt_ids.items()
        }
        group_of = {cursor: group for group, cursor in enumerate(prompts)}
        runs = [run for t in ordered for run in t.versions]
        return cls(
            tokens=_joined(
                [part for t in ordered for part in (prompts[t.prompt.cursor], t.tokens)],
                torch.int32,
            ),
            loss_mask=_joined([t.loss_mask for t in ordered], torch.bool),
            rollout_log_probs=_joined([t.log_probs for t in ordered], torch.float32),
            run_versions=torch.tensor([version for version, _ in runs], dtype=torch.int64),
            run_lengths=torch.tensor([length for _, length in runs], dtype=torch.int64),
            runs=torch.tensor([len(t.versions) for t in ordered], dtype=torch.int64),
            prompt_lengths=torch.tensor(
                [len(prompts[t.prompt.cursor]) for t in ordered], dtype=torch.int64
            ),
            response_lengths=torch.tensor([len(t) for t in ordered], dtype=torch.int64),
            groups=torch.tensor([group_of[t.prompt.cursor] for t in ordered], dtype=torch.int64),
            rewards=torch.tensor(
                [t.reward if t.reward is not None else 0.0 for t in ordered], dtype=torch.float64
            ),
            verified=torch.tensor([t.judged for t in ordered], dtype=torch.bool),
            truncated=torch.tensor([t.truncated for t in ordered], dtype=torch.bool),
            experts=_experts(ordered),
            step=step,
            trajectories=ordered,
        )


@dataclass(frozen=True)
class RankShare(_Columns):
    """Share of a rollout batch for one data-parallel rank.

    Columns with one entry per token contain only the rank's own samples. Columns with one number
    per sample contain all samples of the batch, because counts, groups and canonical numbers refer
    to the whole batch.
    """

    samples: Tensor  # [b] int64, ascending, numbers of the rank's own samples among the B
    tokens: Tensor  # [t] int32
    loss_mask: Tensor  # [n] bool
    rollout_log_probs: Tensor  # [n] float32
    run_versions: Tensor  # [r] int64
    run_lengths: Tensor  # [r] int64
    prompt_lengths: Tensor  # [B] int64
    response_lengths: Tensor  # [B] int64
    loss_lengths: Tensor  # [B] int64, loss-mask positions of every sample
    groups: Tensor  # [B] int64
    rewards: Tensor  # [B] float64
    advantages: Tensor | None  # [B]
    carries_loss: Tensor | None  # [B] bool
    baseline_mask: Tensor | None  # [B] bool
    penalties: Tensor | None  # [B] float64
    step: int
    experts: Tensor | None = None  # [t, L, K]

    def starts(self, lengths: Tensor) -> Tensor:
        """[B] int64: the index at which each of the rank's samples starts in a column of this
        share; 0 for samples of other ranks. `lengths` [B] contains, for each sample, the number of
        entries in the column."""
        own = lengths[self.samples]
        return torch.zeros_like(lengths).index_copy_(0, self.samples, own.cumsum(0) - own)


def _taken(column: Tensor, lengths: list[int], samples: Sequence[int]) -> Tensor:
    """Returns the concatenated entries of the given samples in a flat column."""
    if len(samples) == len(lengths):
        return column
    ends = [0, *accumulate(lengths)]
    return _joined([column[ends[sample] : ends[sample + 1]] for sample in samples], column.dtype)


def _joined(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat(
        [
            torch.zeros(0, dtype=dtype),
            *(part if part.dtype == dtype else part.to(dtype) for part in parts),
        ]
    )


def _experts(ordered: Sequence[Trajectory]) -> Tensor | None:
    named = [t.experts for t in ordered if t.experts is not None]
    if not named:
        return None
    if missing := [t for t in ordered if t.experts is None and t.reward_status != "given_up"]:
        raise DataError(
            f"{len(missing)} of {len(ordered)} trajectories do not name the experts of their"
            " tokens, others do",
            where=f"prompt {missing[0].prompt.id}, sample {missing[0].sample_index}",
            fix=(
                "an environment that makes its own Trajectory must pass on the last turn's"
                " `experts`"
            ),
        )
    known = [named[0][:0] if t.experts is None else t.experts for t in ordered]
    parts = [
        covering(each, len(t.prompt.token_ids) + len(t))
        for each, t in zip(known, ordered, strict=True)
    ]
    for trajectory in ordered:
        trajectory.experts = None
    return _joined(parts, parts[0].dtype)


def _check(trajectory: Trajectory) -> None:
    covered = sum(length for _, length in trajectory.versions)
    sizes = (len(trajectory), trajectory.log_probs.numel(), trajectory.loss_mask.numel(), covered)
    if len(set(sizes)) > 1:
        raise DataError(
            "a trajectory has {} tokens, {} log-probs, {} entries of its loss mask and versions"
            " of {}".format(*sizes),
            where=f"prompt {trajectory.prompt.id}, sample {trajectory.sample_index}",
            fix="whatever appends tokens must append all four columns",
        )
