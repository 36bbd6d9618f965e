"""Defines `RolloutBatch`, the trajectories of one step as flat tensors, and `RankShare`, the part
of this batch that one data-parallel rank receives. Torch is the only library that this module
imports.

A sample is a response. A sample has one or several branches, and each branch has its own context
(trajectory.Branch). The model processes each branch as one sequence. RL methods treat all branches
of a sample as one response.

Shape legend of a RolloutBatch:
    B = number of samples;
    S = number of branches;
    N = number of response tokens in all samples;
    T = number of context and response tokens in all branches;
    R = number of version runs in all branches;
    L = number of layers of the model;
    K = number of experts per token in a mixture of experts.

A version run is a sequence of consecutive tokens of one branch that have the same weight version.

A tensor with one entry per token or version run contains the entries of all branches, one branch
after another. Samples are in canonical order: by prompt cursor, then by sample number. Branches are
ordered by sample, then by the position of their first token in the response.

A RankShare holds only the branches of one rank. Shape legend of a RankShare:
    n = number of response tokens in the branches of the rank;
    t = number of context and response tokens in the branches of the rank;
    r = number of version runs in the branches of the rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_stare.errors import DataError
from megatron_stare.records.trajectory import Trajectory, VersionRuns, runs_between, unknown


@dataclass(frozen=True)
class Branches:
    """The branches of a batch's samples. Each sample has at least one branch."""

    samples: Tensor  # [S] int64, ascending
    contexts: Tensor  # [S] int64 tokens before the branch's part of the response
    responses: Tensor  # [S] int64 tokens of the branch's part of the response
    of_prompt: Tensor  # [S] bool, True if the branch's context is the sample's prompt

    @property
    def size(self) -> int:
        """S."""
        return self.samples.numel()

    @property
    def starts(self) -> Tensor:
        """[S] int64: for each branch, the index of its first token in the sample's response."""
        before = self.responses.cumsum(0) - self.responses
        return before - before[self.first][self.samples]

    @property
    def first(self) -> Tensor:
        """[S] bool: True for the first branch of each sample."""
        first = torch.ones_like(self.samples, dtype=torch.bool)
        first[1:] = self.samples[1:] != self.samples[:-1]
        return first

    def of(self, samples: int) -> Branches:
        """Returns the branches of the first `samples` samples."""
        end = int((self.samples < samples).sum())
        return Branches(**{each.name: getattr(self, each.name)[:end] for each in fields(self)})


class _Columns:
    """Properties that RolloutBatch and RankShare both have. The shape [N] holds for a RolloutBatch.
    In a RankShare, the same property has the shape [n], where n is the number of response positions
    of the rank's branches."""

    prompt_lengths: Tensor
    response_lengths: Tensor
    groups: Tensor
    run_versions: Tensor
    run_lengths: Tensor
    branched: Branches | None

    @property
    def size(self) -> int:
        """B, the number of samples of the whole batch."""
        return self.prompt_lengths.numel()

    @property
    def branches(self) -> Branches:
        """The branches of all samples."""
        if self.branched is not None:
            return self.branched
        return Branches(
            torch.arange(self.size),
            self.prompt_lengths,
            self.response_lengths,
            torch.ones(self.size, dtype=torch.bool),
        )

    @property
    def lengths(self) -> Tensor:
        """[S] number of tokens of every branch, including the branch's context."""
        branches = self.branches
        return branches.contexts + branches.responses

    @property
    def branch_groups(self) -> Tensor:
        """[S] int64: for each branch, the index of its prompt group."""
        return self.groups if self.branched is None else self.groups[self.branched.samples]

    @property
    def weight_versions(self) -> Tensor:
        """[N] int64 weight version of every token, computed from `run_versions` and `run_lengths`.
        The tensor has one entry per token, so use this property only for small batches."""
        return torch.repeat_interleave(self.run_versions, self.run_lengths)


@dataclass
class RolloutBatch(_Columns):
    """Trajectories as flat tensors, in canonical order.

    Method.judge sets `advantages`, `carries_loss`, `baseline_mask` and `penalties`.
    """

    tokens: Tensor  # [T] int32, each branch's context, then its part of the response
    loss_mask: Tensor  # [N] bool, positions that carry loss according to the environment
    rollout_log_probs: Tensor  # [N] float32, nats
    # [R] int64 weight version of each version run; see trajectory.NOT_SAMPLED
    run_versions: Tensor
    # [R] int64 tokens of each version run; the runs cover all N positions, and none spans two
    # branches
    run_lengths: Tensor
    runs: Tensor  # [S] int64 number of version runs of each branch
    prompt_lengths: Tensor  # [B] int64
    response_lengths: Tensor  # [B] int64, of all branches of a sample together
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
    branched: Branches | None = None  # None: every sample is one branch, after its prompt
    step: int = 0  # keys seeded draws of methods
    # in canonical order; they stay on the driver, for logging
    trajectories: Sequence[Trajectory] = ()

    def first(self, samples: int) -> RolloutBatch:
        """Returns the batch of the first `samples` samples."""
        branches = self.branches.of(samples)
        columns: dict[str, Any] = {
            **self._flat(range(branches.size)),
            "runs": self.runs[: branches.size],
            "branched": None if self.branched is None else branches,
        }
        for name, x in vars(self).items():
            if isinstance(x, Tensor) and name not in columns:
                columns[name] = x[:samples]
        return replace(self, trajectories=self.trajectories[:samples], **columns)

    def share(self, branches: Sequence[int]) -> RankShare:
        """Returns the RankShare of one rank. `branches` lists the branches of this rank, in
        ascending order.

        The returned RankShare contains copies of the batch's tensors instead of views, because
        serialising a view would serialise the whole tensor behind the view. If the rank has all
        branches, nothing is copied and the RankShare uses the batch's own columns.
        """
        (share,) = self.shares([branches])
        return share

    def shares(self, ranks: Iterable[Sequence[int]]) -> Iterator[RankShare]:
        """Yields the shares of all ranks, in order. Values that are the same in all shares are
        computed only once. See `share`."""
        loss_lengths = self.loss_lengths
        return (self._share(branches, loss_lengths) for branches in ranks)

    def _share(self, branches: Sequence[int], loss_lengths: Tensor) -> RankShare:
        return RankShare(
            own=torch.tensor(branches, dtype=torch.int64),
            **self._flat(branches),
            prompt_lengths=self.prompt_lengths,
            response_lengths=self.response_lengths,
            loss_lengths=loss_lengths,
            groups=self.groups,
            rewards=self.rewards,
            advantages=self.advantages,
            carries_loss=self.carries_loss,
            baseline_mask=self.baseline_mask,
            penalties=self.penalties,
            branched=self.branched,
            step=self.step,
        )

    @property
    def loss_lengths(self) -> Tensor:
        """[B] int64: for each sample, the number of positions at which the loss mask is True."""
        # [N + 1] number of loss positions before each position
        up_to = torch.nn.functional.pad(self.loss_mask.cumsum(0), (1, 0))
        ends = self.response_lengths.cumsum(0)
        return up_to[ends] - up_to[ends - self.response_lengths]

    def _flat(self, branches: Sequence[int]) -> dict[str, Tensor]:
        """Selects the column entries that belong to the branches in `branches`, and returns these
        entries as a dict. The keys of the dict are the columns' names. The dict contains all
        columns with one entry per token. The dict also contains the columns `run_versions` and
        `run_lengths`. Each entry of these two columns describes a sequence of consecutive tokens
        that have the same weight version. `run_versions` gives the weight version, and
        `run_lengths` gives the number of tokens."""
        lengths, responses, runs = (
            x.tolist() for x in (self.lengths, self.branches.responses, self.runs)
        )
        columns = {
            "tokens": _taken(self.tokens, lengths, branches),
            "loss_mask": _taken(self.loss_mask, responses, branches),
            "rollout_log_probs": _taken(self.rollout_log_probs, responses, branches),
            "run_versions": _taken(self.run_versions, runs, branches),
            "run_lengths": _taken(self.run_lengths, runs, branches),
        }
        if self.experts is not None:
            columns["experts"] = _taken(self.experts, lengths, branches)
        return columns

    @classmethod
    def from_trajectories(cls, trajectories: Iterable[Trajectory], step: int = 0) -> RolloutBatch:
        """Builds a batch. The trajectories are sorted into canonical order and concatenated. The
        column `experts`, by far the largest column, is moved from the trajectories into the batch.

        Raises:
            DataError: the columns of a trajectory have different lengths, its branches are not in
                order, two prompts share a cursor, or only some trajectories name their experts.
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
        laid = [
            branch for sample, t in enumerate(ordered) for branch in _laid_out(sample, t, prompts)
        ]
        runs = [run for branch in laid for run in branch.versions]
        several = len(laid) > len(ordered) or not all(branch.of_prompt for branch in laid)
        return cls(
            tokens=_joined(
                [part for branch in laid for part in (branch.context, branch.tokens)], torch.int32
            ),
            loss_mask=_joined([t.loss_mask for t in ordered], torch.bool),
            rollout_log_probs=_joined([t.log_probs for t in ordered], torch.float32),
            run_versions=torch.tensor([version for version, _ in runs], dtype=torch.int64),
            run_lengths=torch.tensor([length for _, length in runs], dtype=torch.int64),
            runs=torch.tensor([len(branch.versions) for branch in laid], dtype=torch.int64),
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
            branched=Branches(
                torch.tensor([branch.sample for branch in laid], dtype=torch.int64),
                torch.tensor([len(branch.context) for branch in laid], dtype=torch.int64),
                torch.tensor([branch.tokens.numel() for branch in laid], dtype=torch.int64),
                torch.tensor([branch.of_prompt for branch in laid], dtype=torch.bool),
            )
            if several
            else None,
            step=step,
            trajectories=ordered,
        )


@dataclass(frozen=True)
class RankShare(_Columns):
    """Share of a rollout batch for one data-parallel rank.

    Columns with one entry per token contain only the tokens of the rank's own branches. Columns
    with one entry per sample or per branch cover the whole batch, because the rank needs them for
    counts, prompt groups and canonical indices.
    """

    own: Tensor  # [s] int64, ascending, numbers of the rank's own branches among the S
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
    branched: Branches | None = None  # None: every sample is one branch, after its prompt

    def starts(self, lengths: Tensor) -> Tensor:
        """[S] int64: for each branch of the batch, the index of the branch's first entry in a
        column of this RankShare. For a branch that belongs to another rank, the returned index is
        0. `lengths` [S] contains each branch's number of entries in this column."""
        own = lengths[self.own]
        return torch.zeros_like(lengths).index_copy_(0, self.own, own.cumsum(0) - own)


class _Branch(NamedTuple):
    """Data of one branch of a trajectory. `sample` is the index of the trajectory in the batch.
    `of_prompt` is True if the branch's context is the prompt."""

    sample: int
    context: Tensor
    tokens: Tensor
    versions: VersionRuns
    of_prompt: bool


def _laid_out(
    sample: int, trajectory: Trajectory, prompts: Mapping[int, Tensor]
) -> Iterator[_Branch]:
    """Yields the branches of a trajectory, and skips every branch without response tokens. If no
    branch has response tokens, only the first branch is yielded."""
    prompt = prompts[trajectory.prompt.cursor]
    if not trajectory.branches:
        yield _Branch(sample, prompt, trajectory.tokens, trajectory.versions, of_prompt=True)
        return
    contexts = [
        prompt,
        *(torch.tensor(branch.context, dtype=torch.int32) for branch in trajectory.branches),
    ]
    for number, (start, end) in enumerate(trajectory.spans):
        if start < end or not (number or len(trajectory)):
            tokens = trajectory.tokens[start:end]
            versions = runs_between(trajectory.versions, start, end)
            yield _Branch(sample, contexts[number], tokens, versions, of_prompt=not number)


def _taken(column: Tensor, lengths: list[int], branches: Sequence[int]) -> Tensor:
    """Selects the entries of the given branches from a flat column, and concatenates them."""
    if len(branches) == len(lengths):
        return column
    ends = [0, *accumulate(lengths)]
    return _joined([column[ends[branch] : ends[branch + 1]] for branch in branches], column.dtype)


def _joined(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat(
        [
            torch.zeros(0, dtype=dtype),
            *(part if part.dtype == dtype else part.to(dtype) for part in parts),
        ]
    )


def _experts(ordered: Sequence[Trajectory]) -> Tensor | None:
    """Moves the expert numbers of all tokens from the trajectories into one tensor [T, L, K]. For a
    large batch, this tensor takes tens of gigabytes. To save memory, the function sets a
    trajectory's `experts` to None as soon as the trajectory's expert numbers have been copied.

    An engine does not name the experts of a response's last token, because the engine never runs
    the model on this token. All experts that the engine did not name are marked as unknown."""
    first = next((t for t in ordered if t.experts is not None), None)
    if first is None:
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
    if several := [t for t in ordered if t.branches]:
        raise DataError(
            "the engine's routing cannot be replayed in a response of several branches",
            where=f"prompt {several[0].prompt.id}, sample {several[0].sample_index}",
            fix="moe.routing_replay=false",
        )
    assert first.experts is not None
    (_, *shape), dtype = first.experts.shape, first.experts.dtype
    lengths = [len(t.prompt.token_ids) + len(t) for t in ordered]
    column = torch.empty((sum(lengths), *shape), dtype=dtype)
    for trajectory, rows in zip(ordered, column.split(lengths), strict=True):
        named = 0
        if trajectory.experts is not None:
            named = len(trajectory.experts)
            rows[:named] = trajectory.experts
        rows[named:] = unknown(dtype)
        trajectory.experts = None
    return column


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
    starts = [0, *(branch.start for branch in trajectory.branches), len(trajectory)]
    if starts != sorted(starts) or not all(branch.context for branch in trajectory.branches):
        raise DataError(
            f"the branches of a trajectory of {len(trajectory)} tokens start at {starts[1:-1]}",
            where=f"prompt {trajectory.prompt.id}, sample {trajectory.sample_index}",
            fix="name them in the order of their tokens, each with a context of at least a token",
        )
