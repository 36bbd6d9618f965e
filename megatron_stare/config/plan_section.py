"""The section `plan`: what a run predicts of itself."""

from __future__ import annotations

from pydantic import Field

from megatron_stare.config.performance_section import Section


class PlanConfig(Section):
    """What `megatron-stare plan` says of this run, logged beside what the run measures; see docs/planning.md. The
    command reads these settings, too, where it is not told otherwise."""

    enabled: bool = Field(True, description="predict memory and time as a run starts, and log both with what it took")
    gpu: str | None = Field(
        None,
        description="kind of GPU, as in `plan --gpu`; null: this machine's, without one cpu-core",
    )
    prompt_tokens: float | None = Field(
        None, ge=1, description="mean tokens of a prompt; null: a quarter of rollout.max_prompt_tokens"
    )
    response_tokens: float | None = Field(
        None, ge=1, description="mean tokens of a response; null: half of rollout.max_new_tokens"
    )
    coefficients: str = Field(
        "plan_coefficients.json",
        description="file of calibrations by GPU, that `plan --calibrate` writes; read where it exists",
    )
