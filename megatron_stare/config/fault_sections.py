"""The section `faults`: what happens when something fails, be it a request, an engine, the run, a
figure, or a hang."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal

from pydantic import Field, model_validator

from megatron_stare.config.section import Section

Action = Literal["off", "alert", "stop", "rollback"]
# default limit of a collective; no collective waits for a rollout, see docs/cluster.md
COLLECTIVE_S = 1200.0
SLOW = 5.0  # a phase may take so many times as long as usual, whatever the cap


class RequestFaults(Section):
    """How long a run waits for a response, for a rollout and for a collective, and how often a lost
    request is made again; `runtime.timeout_s` is the limit of a remote call. They are checked
    against each other."""

    request_s: float | None = Field(
        None,
        gt=0,
        description=(
            "limit of one request for a response, of its tokens all together, seconds from when its"
            " server has room for it; a later one is lost. null: runtime.timeout_s / attempts"
        ),
    )
    attempts: int = Field(
        3,
        ge=1,
        description=(
            "times that a response is asked for, of another replica where there is one; 1: once"
        ),
    )
    back_off_s: float = Field(
        0.5,
        ge=0,
        description=(
            "seconds for which a replica that lost a request is given no other, doubled by each it"
            " loses in a row; never shorter than it took to lose it"
        ),
    )
    rollout_s: float | None = Field(
        None,
        gt=0,
        description=(
            "limit of the responses of a step, or of an evaluation, all together; null: none"
        ),
    )
    collective_s: float | None = Field(
        None,
        gt=0,
        description=(
            "limit of one collective of the trainer's ranks, in all of Megatron's groups, seconds;"
            f" null: {COLLECTIVE_S:g}, or runtime.timeout_s where that is less"
        ),
    )

    def request_limit(self, remote_call_s: float) -> float:
        """Seconds of one request; `remote_call_s` is runtime.timeout_s."""
        return remote_call_s / self.attempts if self.request_s is None else self.request_s

    def collective_limit(self, remote_call_s: float) -> float:
        """Seconds of one collective; `remote_call_s` is runtime.timeout_s."""
        return min(COLLECTIVE_S, remote_call_s) if self.collective_s is None else self.collective_s

    def check(self, remote_call_s: float) -> None:
        """Raises ValueError where one limit leaves another no time; `remote_call_s` is
        runtime.timeout_s."""
        if self.collective_limit(remote_call_s) > remote_call_s:
            raise ValueError(
                f"faults.requests.collective_s {self.collective_s:g} exceeds runtime.timeout_s"
                f" {remote_call_s:g}: the call would time out before its collective, and no error"
                " would name the missing rank"
            )
        request = self.request_limit(remote_call_s)
        if self.rollout_s is not None and self.attempts * request > self.rollout_s:
            raise ValueError(
                f"{self.attempts} attempts of {request:g} s each exceed faults.requests.rollout_s"
                f" {self.rollout_s:g}: the rollout would time out before the last attempt of a"
                " late request; lower faults.requests.request_s or faults.requests.attempts"
            )


class EngineFaults(Section):
    """Restarts of an engine that is lost while others are left; see docs/fleet.md. It is started
    again, and given requests once a weight sync has been proven to be whole."""

    most: int = Field(
        3,
        ge=0,
        description=(
            "restarts of one engine within `window_s`; after them it stays lost. 0: it stays lost"
        ),
    )
    window_s: float = Field(
        3600.0, gt=0, description="seconds after which a restart no longer counts"
    )
    back_off_s: float = Field(
        10.0,
        ge=0,
        description=(
            "seconds before a second restart, doubled by each that counts; the first is at once"
        ),
    )
    probe_s: float = Field(
        20.0,
        gt=0,
        description=(
            "seconds in which a server must say that it is there; one that twice does not is lost"
        ),
    )
    losses: int = Field(
        5,
        ge=1,
        description=(
            "requests that an engine loses one after the other, until it counts as lost though it"
            " says that it is there"
        ),
    )


class RunFaults(Section):
    """Restarts of a run that lost a process, a node or all its engines; see docs/recovery.md. It is
    opened again from its newest checkpoint: by the driver, or by `train --supervise` where it was
    the driver that was lost."""

    attempts: int = Field(
        3,
        ge=0,
        description=(
            "restarts while the run has not come `window_steps` steps further; after them it ends"
            " with the error. 0: it ends with the first loss"
        ),
    )
    window_steps: int = Field(
        10,
        ge=1,
        description=(
            "steps beyond all that were made before it, after which a restart no longer counts"
        ),
    )
    back_off_s: float = Field(
        2.0,
        ge=0,
        description="seconds before a restart, doubled by each one before it that still counts",
    )
    longest_back_off_s: float = Field(
        300.0, ge=0, description="seconds that this wait never exceeds"
    )
    nodes_s: float = Field(
        600.0,
        ge=0,
        description=(
            "seconds in which a restart waits for nodes that were lost, or others in their place,"
            " where those that are left lack GPUs"
        ),
    )


class SpikeGuard(Section):
    """When a figure counts as a spike. `spreads` are measured over the steps before it: 1.4826
    times their median absolute deviation from their median, which of normal figures is the standard
    deviation."""

    action: Action = Field(
        "alert",
        description=(
            "say so; stop the run; or roll it back to the newest checkpoint and leave the step's"
            " prompts out"
        ),
    )
    spreads: float = Field(
        20.0, gt=0, description="distance from the median, in spreads, from which on it is a spike"
    )


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
    """Guards against a loss or gradient that is not finite, against spikes, and against an entropy
    out of bounds; see docs/guards.md."""

    not_finite: int = Field(
        3,
        ge=1,
        description=(
            "optimizer steps in a row whose loss or gradient is not finite, which stop the run"
        ),
    )
    dumps: int = Field(
        10, ge=0, description="batches written out, of steps that were left out or ended the run"
    )
    window: int = Field(
        50, ge=5, description="steps before a step that its figures are compared with"
    )
    known: int = Field(
        20, ge=5, description="steps before there is anything to compare with; at most `window`"
    )
    # the size of a policy loss says little, and a gate that opens moves it tenfold
    loss: SpikeGuard = Field(
        SpikeGuard(spreads=50.0), description="of `loss/policy`, both ways; judged after the update"
    )
    grad_norm: SpikeGuard = Field(
        SpikeGuard(),
        description=(
            "of the largest gradient norm of a step's updates; with stop or rollback that update is"
            " not taken"
        ),
    )
    agreement: SpikeGuard = Field(
        SpikeGuard(),
        description=(
            "of the mean difference of engine and trainer; where a log-prob pass compares them,"
            " with stop or rollback no update of the step is taken"
        ),
    )
    entropy: EntropyGuard = Field(
        EntropyGuard(), description="the band of `entropy/mean`; judged after the update"
    )
    rollbacks: int = Field(3, ge=0, description="most in a run; the next one stops it")

    @model_validator(mode="after")
    def _the_window_can_fill(self) -> GuardsConfig:
        if self.known > self.window:
            raise ValueError(
                f"known {self.known} is above window {self.window}: no step would ever be judged"
            )
        return self


class HangsConfig(Section):
    """Limits of a phase that does not end, and what is done then; see docs/black_box.md."""

    enabled: bool = Field(
        True,
        description=(
            "a process beside the run watches its phases, and keeps heartbeat.json in the run"
            " directory"
        ),
    )
    first_s: float = Field(
        900.0,
        gt=0,
        description=(
            "limit of a phase that this process has not ended yet, such as the first step's"
        ),
    )
    factor: float = Field(
        10.0, ge=2, description="limit of a phase, in medians of the newest of its name"
    )
    floor_s: float = Field(60.0, gt=0, description="no such limit is shorter, seconds")
    cap_s: float = Field(
        1800.0,
        gt=0,
        description=(
            "nor longer, seconds, but where a phase usually takes more than a fifth of this"
        ),
    )
    end_run: bool = Field(
        False,
        description=(
            "processes that are found to hold the run up are killed, and the driver where that does"
            " not help"
        ),
    )

    def limit_s(self, recent: Sequence[float]) -> float:
        """Seconds that a phase may take without getting on.

        Args:
            recent: seconds that the newest phases of its name took.
        """
        if not recent:
            return self.first_s
        median = statistics.median(recent)
        return min(
            max(self.factor * median, self.floor_s), max(self.cap_s, self.floor_s, SLOW * median)
        )


class FaultsConfig(Section):
    """Faults, from a lost request to a lost run: limits, retries, restarts and guards."""

    requests: RequestFaults = Field(
        RequestFaults(),
        description="limits of responses, rollouts and collectives; lost requests are made again",
    )
    engines: EngineFaults = Field(
        EngineFaults(), description="when an engine counts as lost; it is started again"
    )
    run: RunFaults = Field(
        RunFaults(),
        description="the run is opened again from its newest checkpoint when a process is lost",
    )
    guards: GuardsConfig = Field(
        GuardsConfig(),
        description="what is done about figures that are not finite or out of the ordinary",
    )
    hangs: HangsConfig = Field(
        HangsConfig(), description="when a phase counts as one that hangs, and what is done"
    )
