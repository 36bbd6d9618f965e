"""Tracks the state of each replica. This module defines the states and the legal transitions
between them. This module also decides how many requests a replica may receive and when a lost
replica is restarted. This module is pure. Callers report events and times. The modules fleet.py and
dispatch.py call and restart replicas according to the replicas' states.

This module holds everything that the run knows about a replica's health. In addition, each engine
tracks the state of its own weights (engines/state.py), often in another process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum

from megatron_stare.config.schema import Config
from megatron_stare.errors import UserError

RESTART_DOUBLINGS = 5  # the longest back-off of a restart is 2^5 times the first
REQUEST_DOUBLINGS = 8  # the longest back-off of a request is 2^8 times the first


class Health(Enum):
    STARTING = "starting"  # coming up, for the first time or after a loss
    # alive, but without a complete, verified set of weights: takes weights, not requests
    DIRTY = "dirty"
    HEALTHY = "healthy"  # takes requests
    SUSPECT = "suspect"  # has lost a request since it last answered; see FleetHealth.room
    RELEASED = "released"  # has released the memory of its weights
    DEAD = "dead"  # lost, together with its requests in flight


_NEXT: dict[Health, frozenset[Health]] = {
    Health.STARTING: frozenset({Health.DIRTY, Health.DEAD}),
    Health.DIRTY: frozenset({Health.HEALTHY, Health.RELEASED, Health.DEAD}),
    Health.HEALTHY: frozenset({Health.SUSPECT, Health.DIRTY, Health.RELEASED, Health.DEAD}),
    Health.SUSPECT: frozenset({Health.HEALTHY, Health.DIRTY, Health.RELEASED, Health.DEAD}),
    Health.RELEASED: frozenset({Health.DIRTY, Health.DEAD}),
    Health.DEAD: frozenset({Health.STARTING}),
}
SERVING = (Health.HEALTHY, Health.SUSPECT)
SYNCED = (Health.DIRTY, *SERVING)  # states that take part in a weight update


class NoEngineError(UserError):
    """Raised if no replica is in a state that the caller needs, or if no replica returns a
    result."""


class HealthError(RuntimeError):
    """Raised if a caller reports an event that the replica's state does not allow. A HealthError
    indicates a bug in the program, not a mistake of the user."""


@dataclass(frozen=True)
class RestartRule:
    """Limits on the restarts of a replica; see the configuration section `faults.engines`.

    `most`: maximum number of restarts within any `window_s` seconds. None means no limit. `most` is
        None for servers that the run did not start.
    `back_off_s`: seconds to wait before the second restart. The wait doubles with each further
        restart within `window_s` seconds.
    `losses`: number of consecutive lost requests after which a replica itself counts as lost. If
        only one replica of the run serves, this replica does not count as lost, however many
        requests the replica loses.
    `held`: True if the fleet restarts a lost replica only with permission (Fleet.allow_restarts). A
        server chooses the size of its cache from the memory that is free when the server starts. A
        server must therefore not start while the trainer occupies the device.
    """

    most: int | None = 3
    window_s: float = 3600.0
    back_off_s: float = 10.0
    losses: int = 5
    held: bool = False

    @classmethod
    def of(cls, config: Config) -> RestartRule:
        """Reads the limits on restarts from a run's configuration."""
        asked = config.faults.engines
        most = None if config.sglang.urls else asked.most
        held = config.sglang.colocated and not config.sglang.urls
        return cls(most, asked.window_s, asked.back_off_s, asked.losses, held)


# for pools in which a restarted replica would never receive weights
NO_RESTARTS = RestartRule(most=0)


@dataclass(frozen=True)
class Transition:
    """Change of a replica's state. `why` is the reason that is shown to the user, or "" if the
    change is not shown."""

    replica: int
    before: Health
    after: Health
    why: str = ""

    def __str__(self) -> str:
        return (
            f"engine {self.replica} is {self.after.value} (it was {self.before.value}): {self.why}"
        )


@dataclass
class _Standing:
    """State and history of one replica. All times are in seconds of one monotonic clock, which the
    caller reads."""

    state: Health = Health.STARTING
    begun: list[float] = field(default_factory=list)  # times of its restarts within the window
    again_at: float = 0.0  # earliest time of the next restart
    lost: str = ""  # reason of its loss, until it serves again
    proof: bool = True  # its next weights must be verified
    in_a_row: int = 0  # consecutive lost requests
    lost_last: float = 0.0  # time of the newest loss
    closed_until: float = 0.0  # receives no request before this time
    # until then it receives only requests that no other replica can take
    avoided_until: float = 0.0

    def believe(self) -> None:
        """Sets the number of consecutive lost requests to 0. Ends the back-off, in which the
        replica receives no requests. Ends the time in which the fleet avoids the replica."""
        self.in_a_row, self.closed_until, self.avoided_until = 0, 0.0, 0.0


class FleetHealth:
    """States of a run's replicas. Every replica begins in the state STARTING.

    A DEAD replica becomes HEALTHY only through a restart and a complete, verified weight update.

    A replica that lost a request receives no requests during a back-off. For a time after a lost
    request, the fleet avoids the replica that lost the request. If the lost request was in flight
    for n seconds, the fleet avoids the replica for n seconds or for the length of the back-off,
    whichever is longer. If the replica answers a request before this time is over, the fleet stops
    avoiding the replica at once. An avoided replica receives a request only if all serving replicas
    are avoided. A hanging replica delays each of its requests by the full request timeout. The
    fleet avoids every replica that lost a request, because such a replica may be hanging. At the
    start of the next rollout, all back-offs end and no replica is avoided any more.

    After a lost request, a replica is suspected until the replica answers a request. A suspected
    replica receives only one request at a time. When the fleet no longer avoids a suspected
    replica, the fleet tests this replica with one request. For the test request, the fleet prefers
    the suspected replica to healthy replicas. If the fleet preferred healthy replicas, a suspected
    replica might never receive a request again, and would stay suspected.

    Args:
        back_off_s: seconds after a lost request in which the replica receives no other request. The
            back-off doubles for each consecutive lost request.

    Raises (its methods):
        HealthError: a replica's state does not allow the event.
    """

    def __init__(self, replicas: int, rule: RestartRule, back_off_s: float) -> None:
        self._rule, self._back_off_s = rule, back_off_s
        self._standings = [_Standing() for _ in range(replicas)]
        self.transitions: deque[Transition] = deque()  # consumed by callers

    def state(self, replica: int) -> Health:
        return self._standings[replica].state

    def among(self, states: Collection[Health]) -> list[int]:
        """Returns the replicas whose state is in `states`."""
        return [
            number for number, standing in enumerate(self._standings) if standing.state in states
        ]

    @property
    def needs_proof(self) -> bool:
        """True if the next weight update includes a replica whose weights must be verified."""
        return any(self._standings[number].proof for number in self.among(SYNCED))

    def came_up(self, replica: int) -> None:
        """Records that the replica is up. The weights that the replica loaded at its start do not
        count as verified."""
        standing = self._standings[replica]
        told = "it is up, and waits for a weight update" if standing.lost else ""
        self._move(replica, Health.DIRTY, told, Health.STARTING)
        standing.proof = True

    def synced(self, replica: int, version: int | None, proved: bool) -> None:
        """Updates the replica's state after the replica has received all weights of a version. The
        weights must be verified if the replica has just come up, or if its previous weight update
        failed."""
        standing = self._standings[replica]
        if standing.proof and not proved:
            raise HealthError(f"engine {replica} cannot serve weights that it has not proved")
        if standing.state not in SERVING:
            back = f"it holds all weights of version {version}, proved" if standing.lost else ""
            self._move(replica, Health.HEALTHY, back)
        standing.lost, standing.proof = "", False

    def mixed(self, replica: int, why: str) -> None:
        """Records that a weight update of the replica failed. A replica whose weight update failed
        may hold weights of two versions."""
        self._standings[replica].proof = True
        if self.state(replica) in SERVING:
            self._move(replica, Health.DIRTY, why)

    def lost_request(self, replica: int, why: str, given: float, now: float) -> bool:
        """Records that the replica lost a request. Returns True if the replica has lost so many
        consecutive requests that the replica itself now counts as lost.

        Args:
            given: time at which the request was assigned to the replica. If this time is before the
                previous loss at this replica, the two losses count as one.
        """
        standing = self._standings[replica]
        if standing.state is Health.HEALTHY:
            self._move(replica, Health.SUSPECT, why)
        standing.in_a_row += given >= standing.lost_last
        standing.lost_last = now
        pause = self._back_off_s * 2.0 ** min(standing.in_a_row - 1, REQUEST_DOUBLINGS)
        standing.closed_until = now + pause
        standing.avoided_until = now + max(pause, now - given)
        return standing.in_a_row >= self._rule.losses and len(self.among(SERVING)) > 1

    def answered(self, replica: int) -> None:
        """Records that the replica answered a request."""
        self._standings[replica].believe()
        if self.state(replica) is Health.SUSPECT:
            self._move(replica, Health.HEALTHY, "it answers again")

    def room(self, replica: int, capacity: int, under_way: int, now: float) -> int:
        """Returns the number of requests that the replica can take now.

        Args:
            capacity: the replica's limit of concurrent requests in normal operation.
            under_way: number of requests in flight at the replica.
        """
        standing = self._standings[replica]
        if now < standing.closed_until:
            return 0
        return (1 if standing.in_a_row else capacity) - under_way

    def end_back_offs(self) -> None:
        """Ends all back-offs at the start of a rollout."""
        for standing in self._standings:
            standing.closed_until = standing.avoided_until = 0.0

    def open_again(self, replica: int) -> float:
        """Returns the time at which the replica's back-off ends, or a time in the past if the
        replica has no back-off."""
        return self._standings[replica].closed_until

    def avoided(self, now: float) -> set[int]:
        """Returns the avoided replicas. An avoided replica receives a request only if all serving
        replicas are avoided."""
        return {
            number
            for number, standing in enumerate(self._standings)
            if now < standing.avoided_until
        }

    def suspected(self) -> set[int]:
        """Returns the suspected replicas, which receive only one request at a time until they
        answer."""
        return {number for number, standing in enumerate(self._standings) if standing.in_a_row}

    def trusted(self, replica: int, now: float) -> bool:
        """Returns True if the replica serves and has lost no request since its last answer. A
        trusted replica can still be full."""
        standing = self._standings[replica]
        return standing.state in SERVING and now >= standing.avoided_until and not standing.in_a_row

    def released(self, replica: int) -> None:
        """Sets the replica's state to RELEASED after the replica has released the memory of its
        weights."""
        self._move(replica, Health.RELEASED)

    def resumed(self, replica: int) -> None:
        """Records that the memory of the replica's weights is allocated again, with undefined
        contents."""
        self._move(replica, Health.DIRTY, "", Health.RELEASED)

    def lost(self, replica: int, why: str, now: float) -> None:
        """Records that the replica has ended, no longer answers, or failed to start."""
        standing = self._standings[replica]
        self._move(replica, Health.DEAD, why)
        standing.lost, standing.lost_last = why, 0.0
        # it is restarted before it receives requests, so earlier losses do not count
        standing.believe()
        times = len(self._counting(standing, now))
        standing.again_at = now + (
            self._rule.back_off_s * 2.0 ** min(times - 1, RESTART_DOUBLINGS) if times else 0.0
        )

    def due(self, now: float) -> list[int]:
        """Returns the lost replicas that may be restarted now."""
        most = self._rule.most
        return [
            number
            for number, standing in enumerate(self._standings)
            if standing.state is Health.DEAD
            and now >= standing.again_at
            and (most is None or len(self._counting(standing, now)) < most)
        ]

    def begun_again(self, replica: int, now: float) -> None:
        """Records that a lost replica is restarting."""
        standing = self._standings[replica]
        self._move(replica, Health.STARTING, "it is begun again")
        standing.begun = [*self._counting(standing, now), now]

    def require(self, states: Collection[Health]) -> list[int]:
        """Returns the replicas whose state is in `states`. Raises NoEngineError if no replica's
        state is in `states`."""
        if found := self.among(states):
            return found
        told = "; ".join(
            f"engine {number} is {standing.state.value}"
            + (f", {standing.lost}" if standing.lost else "")
            for number, standing in enumerate(self._standings)
        )
        raise NoEngineError(
            f"no engine is left: {told}",
            where="rollout.engines",
            fix="check the servers, and continue with --resume",
        )

    def _counting(self, standing: _Standing, now: float) -> list[float]:
        return [when for when in standing.begun if now - when < self._rule.window_s]

    def _move(self, replica: int, to: Health, why: str = "", only: Health | None = None) -> None:
        """Changes the replica's state to `to`. Raises HealthError if this transition is not legal,
        or if the replica is not in the state that the argument `only` requires.

        Args:
            only: state that the replica must have before the change. None allows every state from
                which the change is legal.
        """
        standing = self._standings[replica]
        if to not in _NEXT[standing.state] or only not in (None, standing.state):
            raise HealthError(f"engine {replica} cannot go from {standing.state.name} to {to.name}")
        self.transitions.append(Transition(replica, standing.state, to, why))
        standing.state = to
