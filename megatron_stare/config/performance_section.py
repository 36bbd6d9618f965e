"""The section `performance`, and what all sections of a configuration have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class PerformanceConfig(Section):
    """What makes training faster or smaller and changes no result but in the last bits. null: on where it is proven and
    the device has it; see docs/gpu.md."""

    rope_fusion: bool | None = Field(None, description="rotary embedding in one kernel; needs Transformer Engine")
    swiglu_fusion: bool | None = Field(None, description="SwiGLU in one compiled kernel")
    bias_fusion: bool | None = Field(None, description="bias and residual addition in one compiled kernel")
    wgrad_fusion: bool | None = Field(
        None, description="weight gradients added to their buffer by the product; needs Transformer Engine or Apex"
    )
    overlap_grad_reduce: bool | None = Field(None, description="gradients are reduced by bucket while backward runs")
    gradient_bucket: int | None = Field(
        None, ge=1, description="parameters a bucket of `overlap_grad_reduce`; null: as Megatron has it, 40 million"
    )
    overlap_param_gather: bool | None = Field(
        None,
        description="updated parameters are gathered while the next forward runs; needs optimizer.distributed and "
        "`overlap_grad_reduce`",
    )
    batched_p2p: bool | None = Field(None, description="pipeline stages exchange tensors in batches; needs NCCL")
    precision_aware_optimizer: bool | None = Field(
        None, description="masters and moments in Transformer Engine's fused Adam; needs optimizer.distributed"
    )
    optimizer_offload: bool | None = Field(
        None, description="masters and moments in host memory; needs Transformer Engine and optimizer.distributed"
    )
    keep_graph: bool = Field(
        True,
        description="where a rank's rollout batch is one micro-batch and one update, training goes on from the "
        "log-prob pass instead of running the model's forward again: the same numbers in no more memory",
    )
    share_prompts: bool = Field(
        True,
        description="a prompt is passed through the model once for all its responses of a packed micro-batch; not with "
        "Transformer Engine's attention, context parallelism, virtual pipeline stages or replayed routing",
    )
    tp_comm_overlap: bool | None = Field(
        None, description="tensor-parallel communication within products, which is not offered: true is refused"
    )
    cuda_connections: int | None = Field(
        None, ge=1, description="CUDA_DEVICE_MAX_CONNECTIONS of trainer ranks; 1 lets tensor parallelism overlap"
    )
    cuda_allocator: str | None = Field(None, description="PYTORCH_CUDA_ALLOC_CONF of trainer ranks")
