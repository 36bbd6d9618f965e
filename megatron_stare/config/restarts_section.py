"""The section `restarts`: when an engine counts as lost, and how it is brought back."""

from __future__ import annotations

from pydantic import Field

from megatron_stare.config.performance_section import Section


class RestartsConfig(Section):
    """What becomes of an engine that is lost while others are left; see docs/fleet.md. It is started again, and given
    requests once a weight sync has been proven to be whole."""

    most: int = Field(
        3, ge=0, description="restarts of one engine within `window_s`; after them it stays lost. 0: it stays lost"
    )
    window_s: float = Field(3600.0, gt=0, description="seconds after which a restart no longer counts")
    back_off_s: float = Field(
        10.0, ge=0, description="seconds before a second restart, doubled by each that counts; the first is at once"
    )
    probe_s: float = Field(
        20.0, gt=0, description="seconds in which a server must say that it is there; one that twice does not is lost"
    )
    losses: int = Field(
        5,
        ge=1,
        description="requests that an engine loses one after the other, until it counts as lost though it says that it "
        "is there",
    )
