"""STARE (arXiv 2606.19236) reweights advantages by surprisal while its target-entropy gate is open.

While the mean entropy of the batch is below the target, STARE rescales the advantages of the tokens
that change the entropy most. Among the tokens with positive advantage, the fraction P with the
highest surprisal forms the set L+. Among the tokens with negative advantage, the fraction P with
the highest surprisal forms the set L-. A variant of STARE reweights L+, L- or both.

    w = 1 + g (W - 1) on L+      w = 1 - g (1 - M) on L-      w = 1 elsewhere
    g = 1[mean H < target]
    J = (1 / N) sum_{i,t} w min(rho A, clip(rho, 1 - low, 1 + high) A)

The paper and this file select the tokens of L+ and L- from the whole batch. The released code
selects these tokens from each micro-batch of each rank separately. With `adaptive`, every step
changes the factors W and M, even while the gate is closed. By default, a step changes W and M
before the trainer computes the loss of the step. The paper and the released code use the same
order. If `statistics.gate` is `lagged`, a step changes W and M after the trainer has computed the
loss of the step. The module token_sets.py defines all operators of the paper's ablation. Some of
the paper's operators act on tokens of U+ and U-. The tokens of U+ and U- are not rare. In the
ablation, a gate per sample uses the mean entropy of the response, and a gate per token uses the
entropy at the token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from megatron_stare.algorithms.aggregate import Aggregation
from megatron_stare.algorithms.entropy_bonus import refuse_two_targets
from megatron_stare.algorithms.grpo import Grpo
from megatron_stare.algorithms.method import State, TokenTerms
from megatron_stare.algorithms.token_sets import Common, Selection, TokenSet, Variant, token_sets
from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import (
    Mean,
    Request,
    SegmentSum,
    Statistics,
    scalar,
    tensor,
)
from megatron_stare.records.metric import Metric

METRICS = (
    Metric(
        "stare/gate",
        "0 or 1",
        "1: the gate is open, and L+ and L- are reweighted",
        "switches; always 0: the target lies below the policy's entropy, always 1: the weights are"
        " too weak",
    ),
    Metric(
        "stare/amplify",
        "factor",
        "W, factor on the advantages of L+ while the gate is open",
        "1 to algorithm.amplify_max; at its bound for long: raise it, or lower the target",
    ),
    Metric(
        "stare/attenuate",
        "factor",
        "M, factor on the advantages of L- while the gate is open",
        "algorithm.attenuate_min to 1; at its bound for long: as stare/amplify",
    ),
    Metric(
        "stare/selected_plus",
        "tokens",
        "size of L+",
        "algorithm.share of the tokens of positive advantage, rounded up",
    ),
    Metric(
        "stare/selected_minus",
        "tokens",
        "size of L-",
        "algorithm.share of the tokens of negative advantage, rounded up",
    ),
    Metric(
        "stare/threshold_plus",
        "nats",
        "lowest surprisal in L+; with algorithm.rare_below, its surprisal",
        "above entropy/mean; near forecast/critical_surprisal or beyond",
    ),
    Metric(
        "stare/threshold_minus",
        "nats",
        "lowest surprisal in L-; with algorithm.rare_below, its surprisal",
        "as stare/threshold_plus",
    ),
    *(
        metric
        for name, of, sign in (("plus", "U+", "positive"), ("minus", "U-", "negative"))
        for metric in (
            Metric(
                f"stare/selected_common_{name}",
                "tokens",
                f"size of {of}, for variants that weigh the common tokens",
                f"algorithm.share of the tokens of {sign} advantage with `common: bottom`, else all"
                " that are not rare",
            ),
            Metric(
                f"stare/threshold_common_{name}",
                "nats",
                f"upper bound of the surprisal in {of}",
                f"at most stare/threshold_{name}",
            ),
        )
    ),
    Metric(
        "stare/open",
        "share",
        "tokens whose own gate is open, if algorithm.gate is sample or token",
        "between 0 and 1; always 0 or 1: as stare/gate",
    ),
    Metric(
        "entropy/target",
        "nats",
        "algorithm.entropy_target, which a gate or controller compares with entropy/mean",
        "fixed",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Stare(Grpo):
    """Settings of STARE, with the paper's defaults.

    `variant`: the name of a variant in the paper. While the gate is open, 'O1' multiplies the
        advantages of L+ by W, 'O4' multiplies the advantages of L- by M, and 'C2' does both. The
        other variants come from the paper's ablation. 'O2' multiplies the advantages of U+ by M,
        and 'O3' multiplies the advantages of U- by W. 'C1' combines O1 and O3, 'C3' combines O2 and
        O3, and 'C4' combines O2 and O4.
    `share`: the fraction P. The size of L+ is P times the number of tokens with positive advantage,
        rounded up. The size of L- is P times the number of tokens with negative advantage, rounded
        up. Each set contains the tokens of its advantage sign whose surprisal is highest.
    `rare_below`: a probability, or null. If `rare_below` is a probability, each token with a lower
        probability is rare. If `rare_below` is null, the setting `share` determines which tokens
        are rare.
    `common`: the definition of U+ and U-. With 'complement', U+ and U- contain all tokens that are
        not rare. With 'bottom', U+ and U- contain the tokens whose surprisal is lowest. With
        'bottom', U+ is as large as L+, and U- is as large as L-.
    `amplify`: the factor W, which multiplies amplified advantages. The factor W must be at least 1.
    `attenuate`: the factor M, which multiplies attenuated advantages. The factor M must lie in (0,
        1].
    `entropy_target`: the target entropy in nats. The gate is open while the entropy is below the
        target. If `entropy_target` is null, the gate is always open.
    `gate`: the entropy that the gate compares with the target. 'batch' is the mean entropy of the
        batch, 'sample' the mean entropy of the token's response, and 'token' the entropy at the
        token.
    `gate_entropy`: the tokens that the gate's mean entropy covers. 'response' covers all response
        tokens. 'kept' covers the tokens that the filters left in the loss.
    `adaptive`: if true, every step changes W and M by `adapt_rate`, to bring the mean entropy of
        the batch closer to the target. The factor W stays within [1, amplify_max], and the factor M
        stays within [attenuate_min, 1].
    """

    clip_high: float = 0.28
    dual_clip: float | None = 10.0
    aggregation: Aggregation = "token_mean"
    variant: Variant = "O1"
    share: float = 0.1
    rare_below: float | None = None
    common: Common = "complement"
    amplify: float = 1.1
    attenuate: float = 0.9
    entropy_target: float | None = 0.3
    gate: Literal["batch", "sample", "token"] = "batch"
    gate_entropy: Literal["response", "kept"] = "response"
    adaptive: bool = False
    adapt_rate: float = 0.01
    amplify_max: float = 1.5
    attenuate_min: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.share <= 1:
            raise ValueError("share must lie in [0, 1]")
        if self.amplify < 1 or not 0 < self.attenuate <= 1:
            raise ValueError("amplify must be at least 1 and attenuate in (0, 1]")
        if self.rare_below is not None and not 0 < self.rare_below < 1:
            raise ValueError("rare_below must lie in (0, 1), or be null")
        if self.rare_below is not None and self.common == "bottom":
            raise ValueError("rare_below parts the tokens in two: common must be complement")
        if self.entropy_target is not None and not self.entropy_target > 0:
            raise ValueError(
                "entropy_target must be above 0 nats, or null: no entropy is below it, so the gate"
                " never opens"
            )
        if self.adaptive and self.entropy_target is None:
            raise ValueError("adaptive moves the weights towards entropy_target, which is null")
        if self.gate != "batch" and self.entropy_target is None:
            raise ValueError(f"gate {self.gate} needs an entropy_target, which is null")
        refuse_two_targets(self.entropy_target, self.entropy_bonus)

    def initial_state(self) -> dict[str, float]:
        return {
            **super().initial_state(),
            "gate": 1.0,
            "amplify": self.amplify,
            "attenuate": self.attenuate,
        }

    @property
    def reads_log_prob_pass(self) -> str | None:
        if self.gate != "batch":
            return f"the gate of every {self.gate} reads the entropies of the log-prob pass"
        return super().reads_log_prob_pass

    @property
    def selects(self) -> tuple[TokenSet, ...]:
        return token_sets(self.variant)

    @property
    def selection(self) -> Selection:
        """Returns the rule that separates rare tokens from common tokens."""
        return Selection(self.share, self.common, self.rare_below)

    def asks(self, batch: TokenBatch, kept: TokenBatch, known: Statistics) -> Mapping[str, Request]:
        gated = batch if self.gate_entropy == "response" else kept
        asked: dict[str, Request] = {"entropy": Mean(gated.entropy, gated.loss_mask)}
        if self.gate == "sample":
            assert batch.sequence_lengths is not None
            whose, number = gated.sequence, batch.sequence_lengths.shape[0]
            ones = torch.ones_like(gated.entropy)
            asked["gate/entropy"] = SegmentSum(gated.entropy, whose, number, gated.loss_mask)
            asked["gate/length"] = SegmentSum(ones, whose, number, gated.loss_mask)
        return asked | {each.name: self.selection.request(each, kept) for each in self.selects}

    def control(self, state: State, statistics: Statistics) -> State:
        """Updates the batch's gate, the factor W and the factor M. The factors W and M change only
        if `adaptive` is true. If `statistics.gate` is `lagged`, the loss of the next step is the
        first loss that uses the new gate and the new factors. If `statistics.gate` is `exact`, the
        loss of the same step already uses the new gate and the new factors."""
        state = super().control(state, statistics)
        if self.entropy_target is None:
            return state
        entropy = scalar(statistics, "entropy")
        gap = self.entropy_target - entropy
        new = {"gate": (gap > 0).to(torch.float64)} if self.gate == "batch" else {}
        if self.adaptive:
            move = self.adapt_rate * torch.sign(gap)
            new["amplify"] = (state["amplify"] + move).clamp(1.0, self.amplify_max)
            new["attenuate"] = (state["attenuate"] - move).clamp(self.attenuate_min, 1.0)
        # without a finite entropy, keep the old value
        return state | {
            name: torch.where(entropy.isfinite(), value, state[name]) for name, value in new.items()
        }

    def gates(self, batch: TokenBatch, statistics: Statistics, state: State) -> Tensor:
        """Returns 1 for an open gate and 0 for a closed gate, float64. The tensor is 0-dim if one
        gate serves the whole batch, and [N] if samples or tokens have their own gates."""
        if self.gate == "batch" or self.entropy_target is None:
            return state["gate"]
        if self.gate == "token":
            entropy = batch.entropy.detach().to(torch.float64)
        else:
            length = tensor(statistics, "gate/length").clamp_min(1)
            mean = tensor(statistics, "gate/entropy") / length
            entropy = mean[batch.sequence]
        return (entropy < self.entropy_target).to(torch.float64)

    def weights(self, batch: TokenBatch, statistics: Statistics, state: State) -> Tensor:
        """Returns the factor that multiplies every token's advantage, [N] float32."""
        weights, gates = torch.ones_like(batch.advantage), self.gates(batch, statistics, state)
        for each in self.selects:
            factor = 1 + gates * (state[each.weight] - 1)
            weights = torch.where(
                self.selection.members(each, batch, statistics), factor.to(weights.dtype), weights
            )
        return weights

    def selected(self, batch: TokenBatch, statistics: Statistics) -> Tensor:
        """Returns a tensor [N] int8 with one integer code for each token. The code tells which
        token set contains the token. The codes do not depend on the gate."""
        found, kept = super().selected(batch, statistics), self.narrowed(batch, statistics).kept
        for each in self.selects:
            found = torch.where(self.selection.members(each, kept, statistics), each.code, found)
        return found

    def policy_loss(self, batch: TokenBatch, statistics: Statistics, state: State) -> TokenTerms:
        base = super().policy_loss(batch, statistics, state)
        shares = dict(base.shares)
        if self.gate != "batch":
            shares["stare/open"] = self.gates(batch, statistics, state)
        return replace(base, loss=self.weights(batch, statistics, state) * base.loss, shares=shares)

    def metrics(self, statistics: Statistics, state: State) -> dict[str, Tensor | float]:
        logged = {
            **super().metrics(statistics, state),
            "stare/amplify": state["amplify"],
            "stare/attenuate": state["attenuate"],
        }
        if self.gate == "batch":
            logged["stare/gate"] = state["gate"]
        for each in self.selects:
            logged[f"stare/selected_{each.name}"] = self.selection.number(each, statistics)
            logged[f"stare/threshold_{each.name}"] = self.selection.bound(each, statistics)
        if self.entropy_target is not None:
            logged["entropy/target"] = self.entropy_target
        return logged
