"""Compares the log-probs of engine and trainer token by token, on the ranks that hold these
log-probs.

Shape legend: N = response positions of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_stare.megatron.batching.microbatch import RankBatch
from megatron_stare.ops.statistics_executor import answer
from megatron_stare.records.batch_statistics import Count, Max, Mean, Quantile, Request, scalar
from megatron_stare.records.log_prob_difference import LogProbDifference, Sizes

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}
# first positions of the ranges that are reported separately
POSITIONS = (0, 1, 8, 64, 512, 4096)
# Nats. About one sampled token in a thousand is less likely than this. A logit's rounding error in
# 16 bits grows with its distance from the largest logit, so such tokens show rounding rather than a
# fault.
UNLIKELY = math.log(1e-3)


@dataclass(frozen=True)
class Compared:
    """Holds the log-prob difference of each of this rank's tokens, in nats. The log-prob difference
    is the engine's log-prob minus the trainer's log-prob. Also holds the token properties that
    `summary` uses to group the tokens.

    `versions`: versions of the weights with which the engines sampled this rank's tokens.
        `all_versions` lists the weight versions for the tokens of all ranks.
    `expected`: number of tokens that all ranks together should hold. If the ranks together hold
        fewer tokens than `expected`, `summary` counts the difference of each missing token as NaN.
    `engine_nan`: [N] bool, the engine's log-prob is NaN; None: unknown.
    """

    values: Tensor  # [N] float32
    positions: Tensor  # [N] int64, in the response
    longest: Tensor  # [N] bool, belongs to the longest response of the whole batch
    unlikely: Tensor  # [N] bool, less likely than UNLIKELY for the trainer
    versions: Tensor  # [N] int64
    all_versions: Sequence[int]
    expected: int
    engine_nan: Tensor | None = None

    @classmethod
    def of(
        cls, batch: RankBatch, engine: Tensor, trainer: Tensor, all_versions: Sequence[int]
    ) -> Compared:
        """Compares the engine's log-probs [N] with the trainer's log-probs [N]."""
        share, here = batch.share, trainer.device
        longest = int((share.response_lengths == share.response_lengths.max()).nonzero()[0])
        return cls(
            values=engine.to(here) - trainer.float(),
            positions=batch.position.to(here),
            longest=(batch.sequence == longest).to(here),
            unlikely=trainer < UNLIKELY,
            versions=share.weight_versions[batch.held].to(here),
            all_versions=all_versions,
            expected=int(share.loss_lengths.sum()),
            engine_nan=engine.isnan().to(here),
        )

    def summary(self, group: ProcessGroup | None) -> LogProbDifference:
        """Summarises the log-prob differences of the tokens on all ranks of `group`. All ranks of
        `group` must call `summary` together."""
        size, everyone = self.values.abs(), torch.ones_like(self.values, dtype=torch.bool)
        ranges = {
            first: (self.positions >= first) & (self.positions < end)
            for first, end in zip(
                POSITIONS, (*POSITIONS[1:], torch.iinfo(torch.int64).max), strict=True
            )
        }
        parts = {("all", 0): everyone, ("longest", 0): self.longest}
        parts |= {("likely", 0): ~self.unlikely, ("unlikely", 0): self.unlikely}
        parts |= {("from", first): inside for first, inside in ranges.items()}
        parts |= {("version", version): self.versions == version for version in self.all_versions}
        number = ~size.isnan()
        asked: dict[str, Request] = {"lowest": Max(-self.values, number)}
        asked["engine nan"] = Count(~everyone if self.engine_nan is None else self.engine_nan)
        asked |= {name: Quantile(size, everyone, q, "nearest") for name, q in QUANTILES.items()}
        for (kind, key), part in parts.items():
            # NaN is counted separately, because a maximum over ranks need not propagate it
            asked[f"{kind} {key} tokens"] = Count(part)
            asked[f"{kind} {key} numbers"] = Count(part & number)
            asked[f"{kind} {key} largest"] = Max(size, part & number)
            asked[f"{kind} {key} mean"] = Mean(size, part & number)
        answers = answer(asked, group)
        # a single wait for the device
        table = torch.stack([scalar(answers, name).to(torch.float64) for name in asked]).tolist()
        known = dict(zip(asked, table, strict=True))

        def sizes(kind: str, key: int = 0, missing: int = 0) -> Sizes:
            tokens, numbers = (int(known[f"{kind} {key} {what}"]) for what in ("tokens", "numbers"))
            largest, mean = (
                known[f"{kind} {key} {what}"] if numbers else 0.0 for what in ("largest", "mean")
            )
            return Sizes(tokens, tokens - numbers + missing, largest, mean)

        everywhere = sizes("all", missing=self.expected - int(known["all 0 tokens"]))
        return LogProbDifference(
            everywhere=everywhere,
            lowest=float("nan") if everywhere.not_numbers else -known["lowest"],
            quantiles={name: known[name] for name in QUANTILES},
            from_position={
                first: each for first in ranges if (each := sizes("from", first)).tokens
            },
            of_version={v: each for v in self.all_versions if (each := sizes("version", v)).tokens},
            longest=sizes("longest"),
            likely=sizes("likely"),
            unlikely=sizes("unlikely"),
            engine_nan=int(known["engine nan"]),
        )
