"""GSPO (arXiv 2507.18071) uses one importance ratio and one clip for a whole response.

    s_i = exp((1 / n_i) sum_t (ln p - ln p_old))
    J = mean_i min(s_i A, clip(s_i, 1 - 3e-4, 1 + 4e-4) A)

The setting `form: token` selects GSPO-token. For a token with the probability p, the ratio of
GSPO-token is s_{i,t} = sg[s_i] p / sg[p], where sg stops the gradient. GSPO-token's loss has the
same value as GSPO's loss. If all tokens of a response have the same advantage, the gradients of
GSPO-token and GSPO are equal. The upper bound of ln s_{i,t} is 10, as in verl. The clip bounds of
s_i are far smaller than the usual bounds of a token ratio, because bounds at a distance of 0.2 from
1 would never clip s_i.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from megatron_stare.algorithms.grpo import Grpo
from megatron_stare.algorithms.grpo_s import refuse_by_token
from megatron_stare.algorithms.surrogate import LOG_RATIO_LIMIT, Surrogate, clip, response_mean
from megatron_stare.records.batch import TokenBatch

TOKEN_FORM_LIMIT = 10.0  # as in verl


@dataclass(frozen=True, kw_only=True)
class Gspo(Grpo):
    """Settings of GSPO, with the paper's defaults.

    `form`: 'sequence' or 'token'.
    """

    coupling: ClassVar[Literal["token", "sequence"]] = "sequence"

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    form: Literal["sequence", "token"] = "sequence"

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_by_token(self.aggregation, self.correction)

    @property
    def reads_log_prob_pass(self) -> str | None:
        return "GSPO's ratio is that of a whole response to its old log-probs"

    def surrogate(self, batch: TokenBatch, advantage: Tensor) -> Surrogate:
        return clip(
            self.ratio(batch),
            advantage,
            low=self.clip_low,
            high=self.clip_high,
            dual=self.dual_clip,
        )

    def ratio(self, batch: TokenBatch) -> Tensor:
        """Returns for each token the importance ratio s of its response, [N]. The ratio is
        differentiable."""
        mean = response_mean(batch.log_prob - batch.old_log_prob, batch)
        if self.form == "token":
            own = batch.log_prob - batch.log_prob.detach()  # 0, with the gradient of ln p
            return (mean.detach() + own).clamp_max(TOKEN_FORM_LIMIT).exp()
        return mean.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
