"""Methods of megatron_stare/algorithms for many seeds at once.

A method's own code reads one batch. A twin does the same arithmetic for K batches side by side;
tests/test_laboratory.py holds each twin to the method's own code. A twin returns for every token
the derivative of the objective in its log-prob, so one update needs no autograd.

Shape legend: K seeds; N tokens of a batch, response by response; all floats are float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_stare.records.batch_statistics import top_k_count

State = dict[str, Tensor]  # [K] each


@dataclass(frozen=True)
class Tokens:
    """The tokens of a mini-batch of each seed, [K, N].

    log_prob: of the policy that is updated.
    old_log_prob, entropy: of the policy that sampled.
    advantage: of each token's response.
    critical: s*, the surprisal past which a token is rare at its own state
        (algorithms/sensitivity.py); None unless a twin needs it.
    phi: sensitivity of the entropy (algorithms/sensitivity.py), of the policy that sampled; None
        unless a twin needs it.
    """

    log_prob: Tensor
    old_log_prob: Tensor
    entropy: Tensor
    advantage: Tensor
    critical: Tensor | None = None
    phi: Tensor | None = None


def group_advantages(rewards: Tensor) -> Tensor:
    """Returns (r - mean) / (std + 1e-6) of rewards [..., G] within each group, std with G - 1; 0 if
    all rewards of a group are equal (algorithms/advantage.py)."""
    centred = rewards - rewards.mean(-1, keepdim=True)
    std = rewards.std(-1, keepdim=True, unbiased=True)
    equal = rewards.amax(-1, keepdim=True) == rewards.amin(-1, keepdim=True)
    return torch.where(equal, 0.0, centred / (std + 1e-6))


def top(key: Tensor, mask: Tensor, count: Tensor) -> Tensor:
    """[K, N] bool: the `count` [K] masked tokens of largest key, compared as float32; of equal keys
    the first."""
    ordered = torch.where(mask, key.float(), -torch.inf)
    order = ordered.sort(dim=-1, descending=True, stable=True).indices
    rank = torch.empty_like(order).scatter_(
        -1, order, torch.arange(order.shape[-1]).expand_as(order)
    )
    return mask & (rank < count[:, None])


@dataclass(frozen=True)
class Twin:
    """GRPO with the clips of PPO, and the base of the others.

    micro_batches: pieces of the batch in which a selection is made; 1: over the whole batch, as in
        this project. The public code of STARE selects in every micro-batch of every rank.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    micro_batches: int = 1

    @property
    def needs_critical(self) -> bool:
        """Tells whether the twin reads `Tokens.critical`."""
        return False

    @property
    def needs_phi(self) -> bool:
        """Tells whether the twin reads `Tokens.phi`."""
        return False

    def start(self, seeds: int) -> State:
        """Returns the state before the first step."""
        return {}

    def control(self, state: State, entropy: Tensor) -> State:
        """Returns the state of this step.

        Args:
            entropy: [K], mean over the batch's tokens.
        """
        return state

    def bonus(self, state: State) -> Tensor | None:
        """Returns the factor [K] on the mean entropy in the objective, or None."""
        return None

    def slope(self, tokens: Tokens, state: State) -> Tensor:
        """[K, N] derivative of the objective in each token's log-prob."""
        return self.surrogate_slope(tokens) / tokens.advantage.shape[-1]

    def surrogate_slope(self, tokens: Tokens) -> Tensor:
        """[K, N] derivative of min(rho A, clip(rho) A) in the log-prob, and of the dual clip."""
        ratio = (tokens.log_prob - tokens.old_log_prob).exp()
        up, down = tokens.advantage > 0, tokens.advantage < 0
        clipped = (up & (ratio > 1 + self.clip_high)) | (down & (ratio < 1 - self.clip_low))
        if self.dual_clip is not None:
            clipped |= down & (ratio > self.dual_clip)
        return torch.where(clipped, 0.0, ratio * tokens.advantage)

    def in_micro_batches(self, tokens: Tokens, selected: Callable[[Tokens], Tensor]) -> Tensor:
        """[K, N] bool: applies a selection to each micro-batch."""
        if self.micro_batches == 1:
            return selected(tokens)
        columns = [
            each.chunk(self.micro_batches, -1)
            for each in (
                tokens.log_prob,
                tokens.old_log_prob,
                tokens.entropy,
                tokens.advantage,
            )
        ]
        return torch.cat([selected(Tokens(*piece)) for piece in zip(*columns, strict=True)], -1)


@dataclass(frozen=True)
class StareTwin(Twin):
    """STARE (algorithms/stare.py): O1 amplifies L+, O4 attenuates L-, C2 does both."""

    clip_high: float = 0.28
    dual_clip: float | None = 10.0
    variant: str = "O1"
    share: float = 0.1
    amplify: float = 1.1
    attenuate: float = 0.9
    entropy_target: float | None = 0.3
    adaptive: bool = False
    adapt_rate: float = 0.01
    amplify_max: float = 1.5
    attenuate_min: float = 0.5

    def start(self, seeds: int) -> State:
        ones = torch.ones(seeds, dtype=torch.float64)
        return {"gate": ones, "amplify": ones * self.amplify, "attenuate": ones * self.attenuate}

    def control(self, state: State, entropy: Tensor) -> State:
        if self.entropy_target is None:
            return state
        gap = self.entropy_target - entropy
        new = {**state, "gate": (gap > 0).double()}
        if self.adaptive:
            move = self.adapt_rate * gap.sign()
            new["amplify"] = (state["amplify"] + move).clamp(1.0, self.amplify_max)
            new["attenuate"] = (state["attenuate"] - move).clamp(self.attenuate_min, 1.0)
        return new

    def rare(self, tokens: Tokens, sign: int) -> Tensor:
        """[K, N] bool: L+ (sign 1) or L- (sign -1)."""

        def selected(piece: Tokens) -> Tensor:
            mask = sign * piece.advantage > 0
            return top(-piece.old_log_prob, mask, top_k_count(mask.sum(-1), self.share))

        return self.in_micro_batches(tokens, selected)

    def weights(self, tokens: Tokens, state: State) -> Tensor:
        """[K, N] factor on each token's advantage."""
        weights = torch.ones_like(tokens.advantage)
        for sign, name, variants in (
            (1, "amplify", ("O1", "C2")),
            (-1, "attenuate", ("O4", "C2")),
        ):
            if self.variant in variants:
                factor = 1 + state["gate"] * (state[name] - 1)
                weights = torch.where(self.rare(tokens, sign), factor[:, None], weights)
        return weights

    def slope(self, tokens: Tokens, state: State) -> Tensor:
        return self.weights(tokens, state) * super().slope(tokens, state)


@dataclass(frozen=True)
class CriticalTwin(StareTwin):
    """STARE with another selection, which no method of the project has: a token is rare if its
    surprisal is past the critical surprisal of its own state. To first order amplifying these
    tokens always raises the entropy; the batch's quantile may also select others."""

    @property
    def needs_critical(self) -> bool:
        return True

    def rare(self, tokens: Tokens, sign: int) -> Tensor:
        assert tokens.critical is not None
        return (sign * tokens.advantage > 0) & (-tokens.old_log_prob > tokens.critical + 1e-6)


@dataclass(frozen=True)
class ForksTwin(Twin):
    """20-Entropy (algorithms/twenty_entropy.py): only the tokens of highest entropy learn."""

    clip_high: float = 0.28
    dual_clip: float | None = 10.0
    share: float = 0.2

    def kept(self, tokens: Tokens) -> Tensor:
        """[K, N] bool: the forks."""
        mask = tokens.advantage != 0
        count = (mask.sum(-1).double() * self.share + 0.9999).floor().clamp_min(1)
        return top(tokens.entropy, mask, count)

    def slope(self, tokens: Tokens, state: State) -> Tensor:
        kept = self.kept(tokens)
        number = kept.sum(-1, keepdim=True).clamp_min(1)
        return torch.where(kept, self.surrogate_slope(tokens), 0.0) / number


@dataclass(frozen=True)
class DgTwin(Twin):
    """DG (algorithms/dg.py): a smooth weight from advantage and surprisal."""

    clip_high: float = 0.28
    eta: float = 1.0

    def slope(self, tokens: Tokens, state: State) -> Tensor:
        weights = torch.sigmoid(-tokens.advantage * tokens.old_log_prob / self.eta)
        return weights * super().slope(tokens, state)


def by_sign(advantage: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """[K, N] `positive` where the advantage is above 0, `negative` where it is below 0, else 1."""
    return torch.where(advantage > 0, positive, torch.where(advantage < 0, negative, 1.0))


@dataclass(frozen=True)
class ClipBTwin(Twin):
    """Clip_B (algorithms/entropy_clip.py): wrong answers' tokens of very low S do not learn."""

    mu: float = 2.5

    def dropped(self, tokens: Tokens) -> Tensor:
        """[K, N] bool."""
        signal = tokens.old_log_prob.exp() * (tokens.old_log_prob + tokens.entropy)
        mean, std = signal.mean(-1, keepdim=True), signal.std(-1, keepdim=True, correction=0)
        return (tokens.advantage < 0) & (signal - mean < -self.mu * std)

    def slope(self, tokens: Tokens, state: State) -> Tensor:
        kept = ~self.dropped(tokens)
        number = kept.sum(-1, keepdim=True).clamp_min(1)
        return torch.where(kept, self.surrogate_slope(tokens), 0.0) / number


@dataclass(frozen=True)
class ClipVTwin(ClipBTwin):
    """Clip_V (algorithms/entropy_clip.py): wrong answers' tokens of very low Phi do not learn."""

    mu: float = 8.5
    max_share: float = 1e-4

    @property
    def needs_phi(self) -> bool:
        return True

    def dropped(self, tokens: Tokens) -> Tensor:
        assert tokens.phi is not None
        std = tokens.phi.std(-1, keepdim=True, correction=0)
        candidates = (tokens.advantage < 0) & (-tokens.phi > self.mu * std)
        most = max(1, int(self.max_share * tokens.phi.shape[-1]))
        return top(-tokens.phi, candidates, torch.full(tokens.phi.shape[:1], most))


@dataclass(frozen=True)
class RepoTwin(Twin):
    """REPO-R (algorithms/repo_r.py): advantages rescaled by log-prob, zeta steered to a target."""

    clip_high: float = 0.28
    zeta: float = 0.01
    zeta_min: float = 1e-4
    zeta_max: float = 0.05
    target: float | None = 0.3

    def start(self, seeds: int) -> State:
        return {"zeta": torch.full((seeds,), self.zeta, dtype=torch.float64)}

    def control(self, state: State, entropy: Tensor) -> State:
        if self.target is None:
            return state
        way, size = (self.target - entropy).sign(), state["zeta"].abs()
        grown = way * (2 * size).clamp(self.zeta_min, self.zeta_max)
        turned = torch.where(size / 2 < self.zeta_min, way * self.zeta_min, -way * size / 2)
        moved = torch.where(state["zeta"] * way > 0, grown, turned)
        return {"zeta": torch.where(way == 0, state["zeta"], moved)}

    def slope(self, tokens: Tokens, state: State) -> Tensor:
        lean = state["zeta"][:, None] * (tokens.old_log_prob + tokens.entropy)
        weights = by_sign(tokens.advantage, 1 - lean, 1 + lean).clamp_min(0)
        return weights * super().slope(tokens, state)


@dataclass(frozen=True)
class EntropicTwin(Twin):
    """EntroPIC (algorithms/entropic.py): a PI controller weighs tokens of high probability."""

    clip_high: float = 0.28
    target: float = 0.1
    proportional: float = 1.0
    integral: float = 0.01
    probable_above: float = 0.95

    def start(self, seeds: int) -> State:
        zeros = torch.zeros(seeds, dtype=torch.float64)
        return {"sum": zeros, "alpha": zeros}

    def control(self, state: State, entropy: Tensor) -> State:
        error = entropy - self.target
        total = state["sum"] + error
        alpha = (self.proportional * error + self.integral * total).clamp(-1, 1)
        return {"sum": total, "alpha": alpha}

    def slope(self, tokens: Tokens, state: State) -> Tensor:
        alpha = state["alpha"][:, None]
        weights = by_sign(tokens.advantage, 1 + alpha, 1 - alpha)
        probable = -tokens.old_log_prob < -math.log(self.probable_above)
        return torch.where(probable, weights, 1.0) * super().slope(tokens, state)


@dataclass(frozen=True)
class SteerTwin(Twin):
    """STEER (algorithms/steer.py), with the exponential map of its main script."""

    clip_high: float = 0.28
    dual_clip: float | None = 10.0
    weight_min: float = 0.8
    floor: float = 0.02

    def slope(self, tokens: Tokens, state: State) -> Tensor:
        log_prob = tokens.old_log_prob
        change = (tokens.advantage * (1 - log_prob.exp()) * (log_prob + tokens.entropy)).abs()
        rate = -math.log(self.weight_min) / change.amax(-1, keepdim=True).clamp_min(self.floor)
        weights = (-rate * change).exp().clamp(self.weight_min, 1)
        return weights * super().slope(tokens, state)


@dataclass(frozen=True)
class BonusTwin(Twin):
    """GRPO with the adaptive entropy bonus (algorithms/entropy_bonus.py)."""

    target: float | None = 0.3
    coef: float = 0.0
    delta: float = 1e-4
    coef_min: float = 0.0
    coef_max: float = 0.005

    def start(self, seeds: int) -> State:
        ones = torch.ones(seeds, dtype=torch.float64)
        return {"coef": ones * self.coef, "open": ones, "used": ones * self.coef}

    def control(self, state: State, entropy: Tensor) -> State:
        if self.target is None:
            return state
        below = (entropy < self.target).double()
        moved = state["coef"] + self.delta * (2 * below - 1)
        return {
            "used": state["coef"] * state["open"],
            "coef": moved.clamp(self.coef_min, self.coef_max),
            "open": below,
        }

    def bonus(self, state: State) -> Tensor | None:
        return state["used"]


def dapo() -> Twin:
    """DAPO's clips (algorithms/dapo.py); its dynamic sampling is not simulated."""
    return Twin(clip_high=0.28)
