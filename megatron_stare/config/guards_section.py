"""The section `guards`: which figures of a step are out of the ordinary, and what a run does about them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from megatron_stare.config.performance_section import Section

Action = Literal["off", "alert", "stop", "rollback"]


class SpikeGuard(Section):
    """When a figure counts as a spike. `spreads` are measured over the steps before it: 1.4826 times their median
    absolute deviation from their median, which of normal figures is the standard deviation."""

    action: Action = Field(
        "alert",
        description="say so; stop the run; or roll it back to the newest checkpoint and leave the step's prompts out",
    )
    spreads: float = Field(20.0, gt=0, description="distance from the median, in spreads, from which on it is a spike")


class EntropyGuard(Section):
    """A band that the mean entropy of a step may not leave, whatever steers it."""

    action: Action = Field("alert", description="as of a spike")
    low: float | None = Field(None, ge=0, description="nats, the least allowed; null: any")
    high: float | None = Field(None, gt=0, description="nats, the most allowed; null: any")

    @model_validator(mode="after")
    def _there_is_room_between(self) -> EntropyGuard:
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"low {self.low:g} is not below high {self.high:g}")
        return self


class GuardsConfig(Section):
    """What a run does about a loss or gradient that is not finite, about spikes, and about an entropy out of bounds;
    see docs/guards.md."""

    not_finite: int = Field(
        3, ge=1, description="optimizer steps in a row whose loss or gradient is not finite, which stop the run"
    )
    dumps: int = Field(10, ge=0, description="batches written out, of steps that were left out or ended the run")
    window: int = Field(50, ge=5, description="steps before a step that its figures are compared with")
    known: int = Field(20, ge=5, description="steps before there is anything to compare with; at most `window`")
    # the size of a policy loss says little, and a gate that opens moves it tenfold
    loss: SpikeGuard = Field(
        SpikeGuard(spreads=50.0), description="of `loss/policy`, both ways; judged after the update"
    )
    grad_norm: SpikeGuard = Field(
        SpikeGuard(),
        description="of the largest gradient norm of a step's updates; with stop or rollback that update is not taken",
    )
    agreement: SpikeGuard = Field(
        SpikeGuard(),
        description="of the mean difference of engine and trainer; where a log-prob pass compares them, with stop or "
        "rollback no update of the step is taken",
    )
    entropy: EntropyGuard = Field(EntropyGuard(), description="the band of `entropy/mean`; judged after the update")
    rollbacks: int = Field(3, ge=0, description="most in a run; the next one stops it")

    @model_validator(mode="after")
    def _the_window_can_fill(self) -> GuardsConfig:
        if self.known > self.window:
            raise ValueError(f"known {self.known} is above window {self.window}: no step would ever be judged")
        return self
