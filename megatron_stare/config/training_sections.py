"""Defines the configuration sections about training. The sections are `model`, `parallel`, `batch`,
`statistics`, `optimizer`, `moe`, `performance` and `memory`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from megatron_stare.config.section import Section, expand_path


class ModelConfig(Section):
    """The policy."""

    path: str = Field(description="Hugging Face folder the policy starts from")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32",
        description=(
            "dtype of parameters and activations, in training and in the local engine. With"
            " bfloat16 or float16 the optimizer keeps float32 parameters and moments. float16"
            " scales the loss, see optimizer.initial_loss_scale"
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
            "activations that backward recomputes: those of the parts in `recompute_modules`"
            " (selective), or of whole layers (full)"
        ),
    )
    recompute_method: Literal["uniform", "block"] = Field(
        "uniform",
        description=(
            "`recompute: full` keeps only the input of every `recompute_layers` layers (uniform),"
            " or recomputes only the first `recompute_layers` layers of a stage's chunk (block)"
        ),
    )
    recompute_layers: int = Field(1, ge=1, description="layers of `recompute_method`")
    recompute_modules: list[Literal["core_attn", "mlp", "moe"]] = Field(
        ["core_attn"],
        min_length=1,
        description="parts of a layer that `recompute: selective` recomputes",
    )
    head: Literal["auto", "materialised", "gradient_in_forward", "recompute"] = Field(
        "auto",
        description=(
            "logits of a micro-batch: all at once (materialised), in chunks whose gradient is"
            " computed in forward (gradient_in_forward; a token's loss must depend on no other"
            " token's log-prob), or in chunks that backward recomputes (recompute); auto: chosen by"
            " the free memory at the start"
        ),
    )
    head_chunk_tokens: int = Field(
        1024, ge=1, description="tokens whose logits a chunked head holds at a time"
    )

    _paths = field_validator("path", "reference_path")(expand_path)


class ParallelConfig(Section):
    """Parallel layout of the trainer. World size = tensor * pipeline * context * data."""

    tensor: int = Field(1, ge=1, description="tensor-parallel ranks")
    pipeline: int = Field(1, ge=1, description="pipeline stages")
    virtual_pipeline: int = Field(1, ge=1, description="model chunks a pipeline stage holds")
    first_stage_layers: int | None = Field(
        None,
        ge=1,
        description=(
            "layers of the first pipeline stage; the others share the rest equally. null: all equal"
        ),
    )
    context: int = Field(
        1, ge=1, description="context-parallel ranks, which each hold a part of every sequence"
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
        """Number of ranks that hold the same parameters: the number of data-parallel ranks times
        the number of context-parallel ranks."""
        return self.data * self.context

    @property
    def sequence_multiple(self) -> int:
        """Number of tokens by which every padded sequence length must be divisible. Each
        context-parallel rank holds two chunks of a sequence."""
        return 2 * self.context if self.context > 1 else 1


class BatchConfig(Section):
    """Rollout batch, and its division into mini-batches and micro-batches."""

    prompts: int = Field(32, ge=1, description="prompt groups per rollout batch, that is per step")
    mini_batch_prompts: int | None = Field(
        None,
        ge=1,
        description="prompt groups per optimizer step, a divisor of `prompts`; null: all",
    )
    epochs: int = Field(1, ge=1, description="passes of training over the rollout batch")
    generate_prompts: int | None = Field(
        None,
        ge=1,
        description=(
            "dynamic sampling: prompt groups per round; groups with all rewards equal are dropped,"
            " and rounds repeat until `prompts` groups remain. null: every group is trained on"
        ),
    )
    max_rounds: int = Field(
        10,
        ge=1,
        description=(
            "most rounds of dynamic sampling per step; a step that still lacks groups takes dropped"
            " ones"
        ),
    )
    samples_per_prompt: int = Field(
        8,
        ge=1,
        description=(
            "responses per prompt (the group size of GRPO), at least 2; 1 in supervised fine-tuning"
        ),
    )
    micro_batch_tokens: int = Field(8192, ge=1, description="tokens per micro-batch, with padding")
    packed: bool = Field(
        True, description="concatenate the sequences of a micro-batch instead of padding them"
    )

    @property
    def updates(self) -> int:
        """Optimizer steps per rollout batch."""
        return self.epochs * (self.prompts // (self.mini_batch_prompts or self.prompts))


class StatisticsConfig(Section):
    """Configures the statistics that select tokens and decide whether a method's gate is open. The
    settings choose the source of each statistic, and the set of tokens from which the statistic is
    computed."""

    surprisal: Literal["old", "current", "rollout"] = Field(
        "old",
        description=(
            "source of surprisals, and of the entropies that methods select or weigh tokens by: the"
            " log-prob pass (old); an extra pass over the mini-batch before each further optimizer"
            " step (current); or, for surprisals only, the engine (rollout)"
        ),
    )
    gate: Literal["exact", "lagged"] = Field(
        "exact",
        description=(
            "source of the gate: this step's log-prob pass (exact), or the previous step's training"
            " pass (lagged), which saves the log-prob pass. lagged needs surprisal `rollout`, one"
            " optimizer step per rollout batch, and a method without other old log-probs or"
            " entropies"
        ),
    )
    scope: Literal["global", "micro_batch"] = Field(
        "global",
        description=(
            "tokens are selected over the batch of an optimizer step (global), or by micro-batch"
            " and rank (only to compare with published code)"
        ),
    )


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    name: Literal["adam", "sgd"] = Field(
        "adam",
        description=(
            "adam is AdamW; sgd is refused in a run, since checkpoints cannot store its state: it"
            " serves the single steps of tools/check_invariance.py"
        ),
    )
    lr: float = Field(1e-6, gt=0, description="peak learning rate")
    min_lr: float = Field(0.0, ge=0, description="learning rate at the end of the decay")
    warmup_steps: int = Field(
        0,
        ge=0,
        description=(
            "optimizer steps of linear warm-up from 0; a rollout batch has epochs * prompts / "
            "mini_batch_prompts of them"
        ),
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant",
        description=(
            "shape of the learning rate from the warm-up to the last optimizer step of the run"
        ),
    )
    weight_decay: float = Field(0.01, ge=0, description="decoupled; not for norms and biases")
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
            "float16: factor of the loss in backward; the gradient is divided by it before clipping"
        ),
    )
    min_loss_scale: float = Field(
        1.0,
        gt=0,
        description=(
            "float16: least loss scale; a gradient that overflows at this scale counts as"
            " non-finite"
        ),
    )
    loss_scale_window: int = Field(
        400,
        ge=1,
        description=(
            "float16: consecutive optimizer steps without overflow after which the scale grows"
        ),
    )
    hysteresis: int = Field(
        1,
        ge=1,
        description=("float16: overflows since the scale last grew that are needed to lower it"),
    )
    growth_factor: float = Field(2.0, gt=1, description="float16: factor when the scale grows")
    backoff_factor: float = Field(
        0.5, gt=0, lt=1, description="float16: factor when the scale falls"
    )

    @model_validator(mode="after")
    def _the_scale_starts_above_its_floor(self) -> OptimizerConfig:
        if self.min_loss_scale > self.initial_loss_scale:
            raise ValueError(
                f"min_loss_scale {self.min_loss_scale:g} is above initial_loss_scale"
                f" {self.initial_loss_scale:g}"
            )
        return self

    @model_validator(mode="after")
    def _the_rate_decays(self) -> OptimizerConfig:
        # else every rank would end with Megatron's AssertionError, which has no message
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr:g} is above lr {self.lr:g}")
        return self


class MoeConfig(Section):
    """Settings of mixtures of experts; see docs/moe.md."""

    router_dtype: Literal["model", "float32", "float64"] = Field(
        "float32",
        description=(
            "dtype of the router's logits, the gates and the weighting of experts' outputs; model:"
            " model.dtype"
        ),
    )
    routing_replay: bool = Field(
        False,
        description=(
            "servers return the experts chosen for each token, and the trainer routes it to the"
            " same experts"
        ),
    )
    balance: Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss", "expert_bias"] = Field(
        "none",
        description=(
            "Megatron's name of the expert load balancing; all values but none raise an error with"
            " the reason"
        ),
    )


class PerformanceConfig(Section):
    """Settings that save time or memory and change results only in the last bits. With CUDA, the
    value null turns a setting on if the setting was tested, and if the device and the run meet the
    requirements of the setting; see docs/gpu.md."""

    automatic: bool = Field(
        True, description="false: every setting of this section that is null is off"
    )
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
            "matrix products add weight gradients directly to their buffer; needs Apex, beside"
            " Transformer Engine too"
        ),
    )
    overlap_grad_reduce: bool | None = Field(
        None, description="reduce gradients by bucket during backward"
    )
    gradient_bucket: int | None = Field(
        None,
        ge=1,
        description=(
            "parameters per bucket of `overlap_grad_reduce`; null: Megatron's default of 40 million"
        ),
    )
    overlap_param_gather: bool | None = Field(
        None,
        description=(
            "gather updated parameters during the next forward; needs optimizer.distributed and"
            " `overlap_grad_reduce`"
        ),
    )
    batched_p2p: bool | None = Field(
        None, description="pipeline stages exchange tensors in batches; needs NCCL"
    )
    precision_aware_optimizer: bool | None = Field(
        None,
        description=(
            "keep master parameters and moments in Transformer Engine's fused Adam; needs"
            " optimizer.distributed"
        ),
    )
    optimizer_offload: bool | None = Field(
        None,
        description=(
            "keep master parameters and moments in host memory; needs Transformer Engine and"
            " optimizer.distributed"
        ),
    )
    keep_graph: bool = Field(
        True,
        description=(
            "if a rank's rollout batch is one micro-batch and one update, training reuses the"
            " forward of the log-prob pass, with the same results and no more memory"
        ),
    )
    share_prompts: bool = Field(
        True,
        description=(
            "run a prompt through the model once for all its responses in a packed micro-batch; not"
            " with Transformer Engine's attention, context parallelism, virtual pipeline stages or"
            " replayed routing"
        ),
    )
    tp_comm_overlap: bool | None = Field(
        None,
        description=(
            "tensor-parallel communication overlapped with products; not supported, true raises an"
            " error"
        ),
    )
    cuda_connections: int | None = Field(
        None,
        ge=1,
        description=(
            "CUDA_DEVICE_MAX_CONNECTIONS of trainer ranks; 1 lets tensor-parallel communication"
            " overlap. Default: 1 with `parallel.tensor` or `parallel.context` above 1, else CUDA's"
        ),
    )
    cuda_allocator: str | None = Field(None, description="PYTORCH_CUDA_ALLOC_CONF of trainer ranks")


class MemoryConfig(Section):
    """Use of GPU memory in each phase; see docs/colocation.md."""

    offload: Literal["all", "optimizer", "none"] | None = Field(
        None,
        description=(
            "trainer state to offload to host memory while servers use the device"
            " (`sglang.colocated`): everything (all), only gradients and optimizer state"
            " (optimizer), or nothing (none); null: all"
        ),
    )
    device_gb: float | None = Field(
        None,
        gt=0,
        description=(
            "memory of a GPU, 10^9 bytes, that a run must fit into before it starts; null: that of"
            " the GPU the driver sees, or no check without a GPU"
        ),
    )
