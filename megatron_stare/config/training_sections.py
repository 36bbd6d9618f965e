"""The sections about training: the policy, its layout over ranks, batches, the optimizer, and what
makes it fast."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from megatron_stare.config.section import Section


class ModelConfig(Section):
    """The policy."""

    path: str = Field(description="Hugging Face folder the policy starts from")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32",
        description=(
            "parameters and activations in training, and of the local engine; beside the two short"
            " ones the optimizer keeps float32 parameters and moments. float16 scales the loss, see"
            " optimizer.initial_loss_scale"
        ),
    )
    reference_path: str | None = Field(
        None,
        description=(
            "Hugging Face folder of the reference policy of a KL term; null: the same as `path`"
        ),
    )
    reference_offload: bool = Field(
        False, description="keep the reference in host memory between its passes"
    )
    reference_refresh_every: int | None = Field(
        None,
        ge=1,
        description="steps after which the current policy becomes the reference; null: never",
    )
    recompute: Literal["none", "selective", "full"] = Field(
        "none",
        description=(
            "activations computed again in backward instead of kept: of the parts in"
            " `recompute_modules`, or of whole layers"
        ),
    )
    recompute_method: Literal["uniform", "block"] = Field(
        "uniform",
        description=(
            "`recompute: full` keeps the input of every `recompute_layers` layers alone, or"
            " recomputes only the first `recompute_layers` layers of a stage's chunk"
        ),
    )
    recompute_layers: int = Field(1, ge=1, description="layers of `recompute_method`")
    recompute_modules: list[Literal["core_attn", "mlp", "moe"]] = Field(
        ["core_attn"],
        min_length=1,
        description="parts of a layer that `recompute: selective` computes again",
    )
    head: Literal["auto", "materialised", "gradient_in_forward", "recompute"] = Field(
        "auto",
        description=(
            "logits of a micro-batch at once, by chunks whose gradient is taken in the forward"
            " (where the loss of a token depends on its own log-prob), or by chunks that are"
            " computed again in backward; auto: by the free memory at the start"
        ),
    )
    head_chunk_tokens: int = Field(
        1024, ge=1, description="tokens whose logits a chunked head holds at a time"
    )


class ParallelConfig(Section):
    """How the trainer is laid out over ranks. World size = tensor * pipeline * context * data."""

    tensor: int = Field(1, ge=1, description="tensor-parallel ranks")
    pipeline: int = Field(1, ge=1, description="pipeline stages")
    virtual_pipeline: int = Field(1, ge=1, description="model chunks a pipeline stage holds")
    first_stage_layers: int | None = Field(
        None,
        ge=1,
        description=(
            "layers of the first pipeline stage; the others share the rest. null: all alike"
        ),
    )
    context: int = Field(
        1, ge=1, description="context-parallel ranks, which hold parts of every sequence"
    )
    context_comm: Literal["p2p", "all_gather", "a2a"] = Field(
        "p2p", description="how GPUs exchange keys and values"
    )
    expert: int = Field(1, ge=1, description="expert-parallel ranks")
    data: int = Field(1, ge=1, description="data-parallel replicas")
    sequence: bool = Field(False, description="sequence parallelism over the tensor-parallel ranks")

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def replicas(self) -> int:
        """Ranks that hold the same parameters: those of other data and of other chunks of
        sequences."""
        return self.data * self.context

    @property
    def sequence_multiple(self) -> int:
        """The number whose multiples sequences are padded to: a context-parallel rank holds two
        chunks."""
        return 2 * self.context if self.context > 1 else 1


class BatchConfig(Section):
    """The rollout batch and how training walks through it."""

    prompts: int = Field(32, ge=1, description="prompt groups a rollout batch, that is a step")
    mini_batch_prompts: int | None = Field(
        None,
        ge=1,
        description="prompt groups an optimizer step, a divisor of `prompts`; null: all of them",
    )
    epochs: int = Field(
        1, ge=1, description="times the optimizer steps walk through the rollout batch"
    )
    generate_prompts: int | None = Field(
        None,
        ge=1,
        description=(
            "dynamic sampling: prompt groups a round; those whose rewards are all equal are"
            " dropped, and rounds follow until `prompts` are left. null: every group is trained on"
        ),
    )
    max_rounds: int = Field(
        10,
        ge=1,
        description=(
            "rounds of dynamic sampling a step; one that is still short then takes dropped groups"
        ),
    )
    samples_per_prompt: int = Field(8, description="responses a prompt (the group size of GRPO)")
    micro_batch_tokens: int = Field(
        8192, ge=1, description="tokens a micro-batch, padding included"
    )
    packed: bool = Field(
        True, description="lay the sequences of a micro-batch end to end instead of padding them"
    )

    @property
    def updates(self) -> int:
        """Optimizer steps a rollout batch."""
        return self.epochs * (self.prompts // (self.mini_batch_prompts or self.prompts))

    @field_validator("samples_per_prompt")
    @classmethod
    def _a_group_needs_two(cls, value: int) -> int:
        if value < 2:
            raise ValueError(
                "a group of one response has no spread, so its advantage is always zero; use at"
                " least 2"
            )
        return value


class StatisticsConfig(Section):
    """The passes that the selection of tokens, and a method's gate, are read from."""

    surprisal: Literal["old", "current", "rollout"] = Field(
        "old",
        description=(
            "surprisals, and the entropies that STAPO and 20-Entropy select by, are those of the"
            " log-prob pass; of the policy before each optimizer step, whose mini-batch passes"
            " through it again; or (surprisals alone) of the engine"
        ),
    )
    gate: Literal["exact", "lagged"] = Field(
        "exact",
        description=(
            "the gate reads this step's log-prob pass, or the training pass of the step before,"
            " which saves the log-prob pass: with surprisal `rollout`, one optimizer step a rollout"
            " batch, and a method that needs no other old log-probs or entropies"
        ),
    )
    scope: Literal["global", "micro_batch"] = Field(
        "global",
        description=(
            "tokens are selected over the optimizer step's batch, or by micro-batch and rank, only"
            " to compare with published code"
        ),
    )


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    name: Literal["adam", "sgd"] = Field(
        "adam",
        description=(
            "adam is AdamW; sgd is for the single steps of tools/check_invariance.py and refused in"
            " a run, whose checkpoints could not hold it"
        ),
    )
    lr: float = Field(1e-6, gt=0, description="peak learning rate")
    min_lr: float = Field(0.0, ge=0, description="learning rate at the end of the decay")
    warmup_steps: int = Field(
        0,
        ge=0,
        description=(
            "optimizer steps of linear warm-up from 0; a rollout batch takes epochs * prompts / "
            "mini_batch_prompts of them"
        ),
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant",
        description=(
            "shape after the warm-up, up to the last optimizer step of run.steps rollout batches"
        ),
    )
    weight_decay: float = Field(0.01, ge=0, description="decoupled; norms and biases are spared")
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of the first moment")
    beta2: float = Field(0.999, ge=0, lt=1, description="decay of the second moment")
    eps: float = Field(1e-8, gt=0, description="added to the root of the second moment")
    clip_grad: float = Field(1.0, gt=0, description="largest global gradient norm")
    distributed: bool = Field(
        False, description="Megatron's DistributedOptimizer: states sharded over data ranks"
    )
    initial_loss_scale: float = Field(
        2.0**16,
        gt=0,
        description=(
            "float16: the loss is multiplied by it before backward, the gradient divided by it"
            " before clipping"
        ),
    )
    min_loss_scale: float = Field(
        1.0,
        gt=0,
        description=(
            "float16: the scale falls no lower; a gradient that overflows at it counts as not"
            " finite"
        ),
    )
    loss_scale_window: int = Field(
        400,
        ge=1,
        description=(
            "float16: optimizer steps in a row without overflow after which the scale grows"
        ),
    )
    hysteresis: int = Field(
        1,
        ge=1,
        description=(
            "float16: of the overflows since the scale last grew, the first one that lowers it"
        ),
    )
    growth_factor: float = Field(2.0, gt=1, description="float16: what the scale grows by")
    backoff_factor: float = Field(0.5, gt=0, lt=1, description="float16: what the scale falls by")

    @model_validator(mode="after")
    def _the_scale_starts_above_its_floor(self) -> OptimizerConfig:
        if self.min_loss_scale > self.initial_loss_scale:
            raise ValueError(
                f"min_loss_scale {self.min_loss_scale:g} is above initial_loss_scale"
                f" {self.initial_loss_scale:g}"
            )
        return self


class MoeConfig(Section):
    """Settings of mixtures of experts; see docs/moe.md."""

    router_dtype: Literal["model", "float32", "float64"] = Field(
        "float32",
        description=(
            "of the router's logits, the gates and the weighting of experts' outputs; model:"
            " model.dtype"
        ),
    )
    routing_replay: bool = Field(
        False,
        description=(
            "servers name the experts that each token went to, and the trainer sends it to the same"
            " ones"
        ),
    )
    balance: Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss", "expert_bias"] = Field(
        "none",
        description=(
            "what keeps experts evenly used beside the policy's own loss, as Megatron calls it; all"
            " but none are refused, each with its reason"
        ),
    )


class PerformanceConfig(Section):
    """Settings that make training faster or smaller and change no result but in the last bits.
    null: on where it is proven and the device has it; see docs/gpu.md."""

    rope_fusion: bool | None = Field(
        None, description="rotary embedding in one kernel; needs Transformer Engine"
    )
    swiglu_fusion: bool | None = Field(None, description="SwiGLU in one compiled kernel")
    bias_fusion: bool | None = Field(
        None, description="bias and residual addition in one compiled kernel"
    )
    wgrad_fusion: bool | None = Field(
        None,
        description=(
            "weight gradients added to their buffer by the product; needs Transformer Engine or"
            " Apex"
        ),
    )
    overlap_grad_reduce: bool | None = Field(
        None, description="gradients are reduced by bucket while backward runs"
    )
    gradient_bucket: int | None = Field(
        None,
        ge=1,
        description=(
            "parameters a bucket of `overlap_grad_reduce`; null: as Megatron has it, 40 million"
        ),
    )
    overlap_param_gather: bool | None = Field(
        None,
        description=(
            "updated parameters are gathered while the next forward runs; needs"
            " optimizer.distributed and `overlap_grad_reduce`"
        ),
    )
    batched_p2p: bool | None = Field(
        None, description="pipeline stages exchange tensors in batches; needs NCCL"
    )
    precision_aware_optimizer: bool | None = Field(
        None,
        description=(
            "masters and moments in Transformer Engine's fused Adam; needs optimizer.distributed"
        ),
    )
    optimizer_offload: bool | None = Field(
        None,
        description=(
            "masters and moments in host memory; needs Transformer Engine and optimizer.distributed"
        ),
    )
    keep_graph: bool = Field(
        True,
        description=(
            "where a rank's rollout batch is one micro-batch and one update, training goes on from"
            " the log-prob pass instead of running the model's forward again: the same numbers in"
            " no more memory"
        ),
    )
    share_prompts: bool = Field(
        True,
        description=(
            "a prompt is passed through the model once for all its responses of a packed"
            " micro-batch; not with Transformer Engine's attention, context parallelism, virtual"
            " pipeline stages or replayed routing"
        ),
    )
    tp_comm_overlap: bool | None = Field(
        None,
        description=(
            "tensor-parallel communication within products, which is not offered: true is refused"
        ),
    )
    cuda_connections: int | None = Field(
        None,
        ge=1,
        description=(
            "CUDA_DEVICE_MAX_CONNECTIONS of trainer ranks; 1 lets tensor parallelism overlap"
        ),
    )
    cuda_allocator: str | None = Field(None, description="PYTORCH_CUDA_ALLOC_CONF of trainer ranks")


class MemoryConfig(Section):
    """The parts that lie on a GPU in each phase; see docs/colocation.md."""

    offload: Literal["all", "optimizer", "none"] | None = Field(
        None,
        description=(
            "what of the trainer leaves for host memory while servers have the device"
            " (`sglang.colocated`): everything, or gradients and optimizer state alone, or nothing;"
            " null: all"
        ),
    )
    device_gb: float | None = Field(
        None,
        gt=0,
        description=(
            "memory of a GPU, 10^9 bytes, that a run is held against before it starts; null: of the"
            " GPU that the driver sees, and without one nothing is held against it"
        ),
    )
