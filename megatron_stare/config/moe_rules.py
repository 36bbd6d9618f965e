"""What can be asked of a mixture of experts, said before any process is started."""

from __future__ import annotations

from megatron_stare.config.moe_section import MoeConfig
from megatron_stare.config.schema import Config
from megatron_stare.errors import ConfigError
from megatron_stare.models.shape import ModelShape

_OF_THE_LAYOUT = (
    "the gradient would depend on how a batch is cut, and a step is the same in every layout here: Megatron's loss is "
)
# why each way to balance experts that Megatron has is not done
REFUSED = {
    "aux_loss": _OF_THE_LAYOUT + "of the shares of experts in a micro-batch, padding included",
    "seq_aux_loss": _OF_THE_LAYOUT + "of a row of the micro-batch, which packed is all of its sequences together",
    "global_aux_loss": _OF_THE_LAYOUT + "of the shares in the micro-batches so far, in whatever order they come",
    "expert_bias": "no supported family's checkpoints or servers hold such a bias, so engines would choose experts "
    "without it (those of DeepSeek V3 and GLM 4.5 do, as e_score_correction_bias); and Megatron adds it to sigmoid "
    "scores alone, where Qwen3-MoE's are a softmax",
}


def check_moe(config: Config, shape: ModelShape) -> None:
    """Raises ConfigError for settings of experts where the model has none, and for what no run can have yet."""
    if not shape.experts:
        for name, default in MoeConfig():
            if getattr(config.moe, name) != default:
                raise ConfigError("the model has no experts", where=f"moe.{name}", fix="leave it out")
    if reason := REFUSED.get(config.moe.balance):
        raise ConfigError(reason, where="moe.balance", fix="use none")
