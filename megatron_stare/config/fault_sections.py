"""Defines the section `faults`, which sets how a run reacts to lost requests, lost engines, lost
processes, abnormal metrics and hangs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal

from pydantic import Field, model_validator

from megatron_stare.config.section import Section

Action = Literal["off", "alert", "stop", "rollback"]
# default timeout of a collective; no collective waits for a rollout, see docs/cluster.md
COLLECTIVE_S = 1200.0
SLOW = 5.0  # a phase may always take this multiple of its median time, even above the cap


class RequestFaults(Section):
    """Sets timeouts for responses, rollouts and collectives, and sets how lost requests are
    retried. The timeouts must be consistent with each other and with `runtime.timeout_s`, the
    timeout of a remote call."""

    request_s: float | None = Field(
        None,
        gt=0,
        description=(
            "timeout of a request for one response, in seconds from when its server admits it;"
            " after that the request is lost. null: runtime.timeout_s / attempts"
        ),
    )
    attempts: int = Field(
        3,
        ge=1,
        description=(
            "attempts per response; a retry goes to another replica if there is one. 1: no retry"
        ),
    )
    back_off_s: float = Field(
        0.5,
        ge=0,
        description=(
            "seconds during which a replica gets no requests after it lost one, doubled by every"
            " further loss in a row; at least the time that the lost request took"
        ),
    )
    rollout_s: float | None = Field(
        None,
        gt=0,
        description=(
            "timeout of all responses of a step or of an evaluation together, seconds; null: none"
        ),
    )
    collective_s: float | None = Field(
        None,
        gt=0,
        description=(
            "timeout of one collective of the trainer's ranks, in all of Megatron's groups,"
            f" seconds; null: {COLLECTIVE_S:g}, or runtime.timeout_s if that is less"
        ),
    )

    def request_limit(self, remote_call_s: float) -> float:
        """Returns the timeout of one request in seconds. `remote_call_s` is runtime.timeout_s."""
        return remote_call_s / self.attempts if self.request_s is None else self.request_s

    def collective_limit(self, remote_call_s: float) -> float:
        """Returns the timeout of one collective in seconds. `remote_call_s` is
        runtime.timeout_s."""
        return min(COLLECTIVE_S, remote_call_s) if self.collective_s is None else self.collective_s

    def check(self, remote_call_s: float) -> None:
        """Raises ValueError if the timeout of a collective exceeds the timeout of a remote call.
        Raises ValueError if all attempts of a request together can take longer than the timeout of
        a rollout. `remote_call_s` is runtime.timeout_s."""
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
    """Rules for restarting a lost engine while other engines still run; see docs/fleet.md. A
    restarted engine gets no requests before its first verified weight sync."""

    most: int = Field(
        3,
        ge=0,
        description=(
            "restarts of one engine within `window_s`; after that many it stays lost. 0: no restart"
        ),
    )
    window_s: float = Field(
        3600.0, gt=0, description="seconds after which a restart no longer counts"
    )
    back_off_s: float = Field(
        10.0,
        ge=0,
        description=(
            "seconds before a second restart, doubled by each restart that counts; the first is"
            " immediate"
        ),
    )
    probe_s: float = Field(
        20.0,
        gt=0,
        description=("timeout of a health probe, seconds; a server that misses two is lost"),
    )
    losses: int = Field(
        5,
        ge=1,
        description=(
            "requests lost in a row after which an engine counts as lost, even if it answers health"
            " probes"
        ),
    )


class RunFaults(Section):
    """Settings for restarting a run that lost a process, a node or all its engines; see
    docs/recovery.md. The driver resumes the run from its newest checkpoint. If the driver itself is
    lost, `train --supervise` resumes the run."""

    attempts: int = Field(
        3,
        ge=0,
        description=(
            "restarts without `window_steps` steps of progress; after that many the run ends with"
            " the error. 0: it ends with the first loss"
        ),
    )
    window_steps: int = Field(
        10,
        ge=1,
        description=(
            "steps beyond the furthest step before a restart, after which that restart no longer"
            " counts"
        ),
    )
    back_off_s: float = Field(
        2.0,
        ge=0,
        description="seconds before a restart, doubled by each earlier restart that still counts",
    )
    longest_back_off_s: float = Field(
        300.0, ge=0, description="longest wait before a restart, seconds"
    )
    nodes_s: float = Field(
        600.0,
        ge=0,
        description=(
            "seconds that a restart waits for lost nodes, or replacements, if the remaining nodes"
            " lack GPUs"
        ),
    )


class SpikeGuard(Section):
    """Rule that decides whether a metric's value in a step is a spike. The rule measures how far
    the value is from the median of the metric over the preceding steps. The unit of this distance
    is called the spread of the metric. The spread is 1.4826 times the median absolute deviation of
    the metric over the preceding steps, but at least 5 % of the median's absolute value. The factor
    1.4826 turns the median absolute deviation of a normally distributed metric into an estimate of
    the standard deviation."""

    action: Action = Field(
        "alert",
        description=(
            "alert; stop the run; or roll it back to the newest checkpoint and leave out the step's"
            " prompts"
        ),
    )
    spreads: float = Field(
        20.0, gt=0, description="least distance of a spike from the median, in spreads"
    )


class EntropyGuard(Section):
    """Lower and upper bound for the mean entropy of a step."""

    action: Action = Field("alert", description="same choices as for a spike")
    low: float | None = Field(None, ge=0, description="least allowed entropy, nats; null: any")
    high: float | None = Field(None, gt=0, description="largest allowed entropy, nats; null: any")

    @model_validator(mode="after")
    def _there_is_room_between(self) -> EntropyGuard:
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"low {self.low:g} is not below high {self.high:g}")
        return self


class GuardsConfig(Section):
    """Configures the guards. A guard reacts to a non-finite loss or gradient, to a spike of a
    metric, or to an entropy out of bounds; see docs/guards.md."""

    not_finite: int = Field(
        3,
        ge=1,
        description=("optimizer steps in a row with non-finite loss or gradient that stop the run"),
    )
    dumps: int = Field(
        10,
        ge=0,
        description="most batches to write out, of steps that were left out or ended the run",
    )
    window: int = Field(
        50, ge=5, description="preceding steps that a step's metrics are compared with"
    )
    known: int = Field(
        20, ge=5, description="fewest preceding steps for a comparison; at most `window`"
    )
    # the size of a policy loss means little, and an opening gate changes it tenfold
    loss: SpikeGuard = Field(
        SpikeGuard(spreads=50.0),
        description="guard of `loss/policy`, in both directions; judged after the update",
    )
    grad_norm: SpikeGuard = Field(
        SpikeGuard(),
        description=(
            "guard of the largest gradient norm of a step's updates; with stop or rollback the"
            " update with the spike is skipped"
        ),
    )
    agreement: SpikeGuard = Field(
        SpikeGuard(),
        description=(
            "guard of the mean log-prob difference of engine and trainer; with stop or rollback,"
            " and a log-prob pass that compares them, all updates of the step are skipped"
        ),
    )
    entropy: EntropyGuard = Field(
        EntropyGuard(), description="guard of `entropy/mean`; judged after the update"
    )
    rollbacks: int = Field(3, ge=0, description="most rollbacks of a run; the next one stops it")

    @model_validator(mode="after")
    def _the_window_can_fill(self) -> GuardsConfig:
        if self.known > self.window:
            raise ValueError(
                f"known {self.known} is above window {self.window}: no step would ever be judged"
            )
        return self


class HangsConfig(Section):
    """Settings for the detection of phases that hang, and for the reaction to a hang; see
    docs/black_box.md."""

    enabled: bool = Field(
        True,
        description=(
            "a separate process watches the run's phases and writes heartbeat.json in the run"
            " directory"
        ),
    )
    first_s: float = Field(
        900.0,
        gt=0,
        description=(
            "limit of a phase that this process has never finished, such as those of the first"
            " step, seconds"
        ),
    )
    factor: float = Field(
        10.0, ge=2, description="limit of a phase, as a multiple of its median recent time"
    )
    floor_s: float = Field(60.0, gt=0, description="least such limit, seconds")
    cap_s: float = Field(
        1800.0,
        gt=0,
        description=(
            "largest such limit, seconds; a phase that usually takes more than a fifth of it gets"
            " five times its median"
        ),
    )
    end_run: bool = Field(
        False,
        description=(
            "kill processes that are found to block the run, and the driver if that does not help"
        ),
    )

    def limit_s(self, recent: Sequence[float]) -> float:
        """Returns the number of seconds after which a phase without progress counts as hanging.

        Args:
            recent: durations of the latest phases of the same name, seconds.
        """
        if not recent:
            return self.first_s
        median = statistics.median(recent)
        return min(
            max(self.factor * median, self.floor_s), max(self.cap_s, self.floor_s, SLOW * median)
        )


class FaultsConfig(Section):
    """Fault handling, from a lost request to a lost run: timeouts, retries, restarts and guards."""

    requests: RequestFaults = Field(
        RequestFaults(),
        description="timeouts of responses, rollouts and collectives; retries of lost requests",
    )
    engines: EngineFaults = Field(
        EngineFaults(), description="when an engine counts as lost, and its restarts"
    )
    run: RunFaults = Field(
        RunFaults(),
        description="restarts of the run from its newest checkpoint after a process is lost",
    )
    guards: GuardsConfig = Field(
        GuardsConfig(),
        description="reactions to metrics that are not finite or out of the ordinary",
    )
    hangs: HangsConfig = Field(
        HangsConfig(), description="when a phase counts as hanging, and the reaction"
    )
