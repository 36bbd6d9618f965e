"""The section `recovery`: how often a run that lost a process is opened again by itself, and when."""

from __future__ import annotations

from pydantic import Field

from megatron_stare.config.performance_section import Section


class RecoveryConfig(Section):
    """What becomes of a run that lost a process, a node or all its engines; see docs/recovery.md. It is opened again
    from its newest checkpoint: by the driver, or by `train --supervise` where it was the driver that was lost."""

    attempts: int = Field(
        3,
        ge=0,
        description="restarts while the run has not come `window_steps` steps further; after them it ends with the "
        "error. 0: it ends with the first loss",
    )
    window_steps: int = Field(
        10, ge=1, description="steps beyond all that were made before it, after which a restart no longer counts"
    )
    back_off_s: float = Field(
        2.0, ge=0, description="seconds before a restart, doubled by each one before it that still counts"
    )
    longest_back_off_s: float = Field(300.0, ge=0, description="seconds that this wait never exceeds")
    nodes_s: float = Field(
        600.0,
        ge=0,
        description="seconds in which a restart waits for nodes that were lost, or others in their place, where those "
        "that are left lack GPUs",
    )
