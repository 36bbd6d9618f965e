"""The section `partial`: long responses that are cut at the end of a step and continued in a later one."""

from __future__ import annotations

from pydantic import Field

from megatron_stare.config.performance_section import Section


class PartialConfig(Section):
    """Long responses are cut at the end of a step, kept, and continued in a later one; see docs/partial_rollouts.md."""

    tokens: int | None = Field(
        None,
        ge=1,
        description="tokens by which the responses under way grow at a time, until enough groups of them are whole for "
        "a step; fewer than rollout.max_new_tokens. null: every response is waited for",
    )
    prompts: int | None = Field(
        None,
        ge=1,
        description="prompt groups under way at a time, at least batch.prompts; null: twice batch.prompts, with "
        "dynamic sampling batch.generate_prompts",
    )

    def groups_under_way(self, prompts: int, generate_prompts: int | None) -> int:
        """How many at a time; the arguments are those of the section `batch`."""
        return self.prompts or generate_prompts or 2 * prompts
