"""The standing of a run's replicas: which states there are, which may follow which, how many
requests each may be given, and when one that was lost is begun again. Pure: it is told what
happens, and when. fleet.py and dispatch.py act on it.

All that a run knows of a replica is here. What an engine knows of its own weights is
engines/state.py, which lives with the engine, often in another process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum

from megatron_stare.config.schema import Config
from megatron_stare.errors import UserError

RESTART_DOUBLINGS = 5  # the longest back-off of a restart is 2^5 times the first
REQUEST_DOUBLINGS = 8  # and that of a request 2^8 times


class Health(Enum):
    STARTING = "starting"  # on its way up, for the first time or again
    # alive, without all the proven weights of a version: takes weights, and no requests
    DIRTY = "dirty"
    HEALTHY = "healthy"  # takes requests
    SUSPECT = "suspect"  # has lost a request since it last answered; see FleetHealth.room
    RELEASED = "released"  # has given the memory of its weights back
    DEAD = "dead"  # lost; whatever it had under way is


_NEXT: dict[Health, frozenset[Health]] = {
    Health.STARTING: frozenset({Health.DIRTY, Health.DEAD}),
    Health.DIRTY: frozenset({Health.HEALTHY, Health.RELEASED, Health.DEAD}),
    Health.HEALTHY: frozenset({Health.SUSPECT, Health.DIRTY, Health.RELEASED, Health.DEAD}),
    Health.SUSPECT: frozenset({Health.HEALTHY, Health.DIRTY, Health.RELEASED, Health.DEAD}),
    Health.RELEASED: frozenset({Health.DIRTY, Health.DEAD}),
    Health.DEAD: frozenset({Health.STARTING}),
}
SERVING = (Health.HEALTHY, Health.SUSPECT)
SYNCED = (Health.DIRTY, *SERVING)  # take part in a weight update


class NoEngineError(UserError):
    """Every replica of a run is lost."""


class HealthError(RuntimeError):
    """A replica was said to do what its state does not allow; a fault of the caller, not of the
    user."""


@dataclass(frozen=True)
class RestartRule:
    """Says when a replica is begun again; see the section `faults.engines`.

    most: times in any `window_s` seconds; None: any number, of servers that somebody else restarts.
    back_off_s: before the second time, doubled by each one more in the window.
    losses: requests lost in a row that make a replica lost, where there is another.
    """

    most: int | None = 3
    window_s: float = 3600.0
    back_off_s: float = 10.0
    losses: int = 5

    @classmethod
    def of(cls, config: Config) -> RestartRule:
        """Reads it of a run's configuration. Servers that share the trainer's device are not begun
        again: one sizes its cache by what it finds free, and the trainer may be there."""
        asked = config.faults.engines
        most = None if config.sglang.urls else 0 if config.sglang.colocated else asked.most
        return cls(most, asked.window_s, asked.back_off_s, asked.losses)


# for pools whose restarted replicas would get no weights
NO_RESTARTS = RestartRule(most=0)


@dataclass(frozen=True)
class Transition:
    """A replica has come from one state to another. `why`: to be told to who watches; "": it goes
    without saying."""

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
    """The standing of one replica. Times are seconds of any clock that only goes forward."""

    state: Health = Health.STARTING
    begun: list[float] = field(default_factory=list)  # when it was begun again, within the window
    again_at: float = 0.0  # not begun again before
    lost: str = ""  # why it was, until it serves again
    proof: bool = True  # it must prove the next weights that it takes
    in_a_row: int = 0  # requests that it lost one after the other
    lost_last: float = 0.0  # when it lost the newest of them
    closed_until: float = 0.0  # it is given no request before
    avoided_until: float = 0.0  # before, it is given what no other replica could take

    def believe(self) -> None:
        """Holds what it lost no longer against it."""
        self.in_a_row, self.closed_until, self.avoided_until = 0, 0.0, 0.0


class FleetHealth:
    """The states of a run's replicas, which all begin as STARTING.

    There is one way from DEAD to HEALTHY: begun again, up, and all weights of a version proven.

    A replica that has lost a request is given nothing for a while, then one at a time until it has
    answered, before others that have more room. While there is another, it is left alone for as
    long as it took to lose the request, so that one that hangs does not hold up what it is given
    for the limit of a request again and again. The while ends with the rollout.

    Args:
        back_off_s: for which a replica that lost a request is given no other; doubled by each it
            loses in a row.

    Raises (its methods):
        HealthError: a replica's state does not allow it.
    """

    def __init__(self, replicas: int, rule: RestartRule, back_off_s: float) -> None:
        self._rule, self._back_off_s = rule, back_off_s
        self._standings = [_Standing() for _ in range(replicas)]
        self.transitions: deque[Transition] = deque()  # for who takes them

    def state(self, replica: int) -> Health:
        return self._standings[replica].state

    def among(self, states: Collection[Health]) -> list[int]:
        """The replicas that are in one of the states."""
        return [
            number for number, standing in enumerate(self._standings) if standing.state in states
        ]

    @property
    def needs_proof(self) -> bool:
        """True where a replica that takes weights next must prove them."""
        return any(self._standings[number].proof for number in self.among(SYNCED))

    def came_up(self, replica: int) -> None:
        """Takes down that it is there, with whatever weights it started from."""
        standing = self._standings[replica]
        told = "it is up, and waits for a weight update" if standing.lost else ""
        self._move(replica, Health.DIRTY, told, Health.STARTING)
        standing.proof = True

    def synced(self, replica: int, version: int | None, proved: bool) -> None:
        """Takes down that it took all weights of a version. One that came up, or was left with a
        mixture, must have proved them."""
        standing = self._standings[replica]
        if standing.proof and not proved:
            raise HealthError(f"engine {replica} cannot serve weights that it has not proved")
        if standing.state not in SERVING:
            back = f"it holds all weights of version {version}, proved" if standing.lost else ""
            self._move(replica, Health.HEALTHY, back)
        standing.lost, standing.proof = "", False

    def mixed(self, replica: int, why: str) -> None:
        """Takes down that a weight update of it failed: it may hold weights of two versions."""
        self._standings[replica].proof = True
        if self.state(replica) in SERVING:
            self._move(replica, Health.DIRTY, why)

    def lost_request(self, replica: int, why: str, given: float, now: float) -> bool:
        """Takes down that it lost a request. Returns whether it has lost so many one after the
        other that it is lost itself.

        Args:
            given: when it was given the request. One given before it lost another was lost together
                with that, and counts with it as one.
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
        """Takes down that it answered a request."""
        self._standings[replica].believe()
        if self.state(replica) is Health.SUSPECT:
            self._move(replica, Health.HEALTHY, "it answers again")

    def room(self, replica: int, capacity: int, under_way: int, now: float) -> int:
        """Number of requests it may be given now.

        Args:
            capacity: that it takes at a time where nothing speaks against it.
            under_way: that it has.
        """
        standing = self._standings[replica]
        if now < standing.closed_until:
            return 0
        return (1 if standing.in_a_row else capacity) - under_way

    def end_back_offs(self) -> None:
        """Lets every replica be asked again: a rollout begins."""
        for standing in self._standings:
            standing.closed_until = standing.avoided_until = 0.0

    def open_again(self, replica: int) -> float:
        """Time from which it may be given a request again; past, where it may be now."""
        return self._standings[replica].closed_until

    def avoided(self, now: float) -> set[int]:
        """The replicas that are given nothing that another could take."""
        return {
            number
            for number, standing in enumerate(self._standings)
            if now < standing.avoided_until
        }

    def suspected(self) -> set[int]:
        """Returns the replicas that are given one request at a time until they answer."""
        return {number for number, standing in enumerate(self._standings) if standing.in_a_row}

    def trusted(self, replica: int, now: float) -> bool:
        """True where it serves and has lost nothing since it last answered; it may have no room for
        all that."""
        standing = self._standings[replica]
        return standing.state in SERVING and now >= standing.avoided_until and not standing.in_a_row

    def released(self, replica: int) -> None:
        """Takes down that it gave the memory of its weights back."""
        self._move(replica, Health.RELEASED)

    def resumed(self, replica: int) -> None:
        """Takes down that it has that memory again, and in it nobody knows what."""
        self._move(replica, Health.DIRTY, "", Health.RELEASED)

    def lost(self, replica: int, why: str, now: float) -> None:
        """Takes down that it is gone, does not answer any more, or did not come up."""
        standing = self._standings[replica]
        self._move(replica, Health.DEAD, why)
        standing.lost, standing.lost_last = why, 0.0
        standing.believe()  # it is made anew before it is given anything
        times = len(self._counting(standing, now))
        standing.again_at = now + (
            self._rule.back_off_s * 2.0 ** min(times - 1, RESTART_DOUBLINGS) if times else 0.0
        )

    def due(self, now: float) -> list[int]:
        """The lost replicas that may be begun again now."""
        most = self._rule.most
        return [
            number
            for number, standing in enumerate(self._standings)
            if standing.state is Health.DEAD
            and now >= standing.again_at
            and (most is None or len(self._counting(standing, now)) < most)
        ]

    def begun_again(self, replica: int, now: float) -> None:
        """Takes down that a lost replica is on its way up again."""
        standing = self._standings[replica]
        self._move(replica, Health.STARTING, "it is begun again")
        standing.begun = [*self._counting(standing, now), now]

    def require(self, states: Collection[Health]) -> list[int]:
        """The replicas that are in one of the states. Raises NoEngineError where there is none."""
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
        """`only`: from this state alone."""
        standing = self._standings[replica]
        if to not in _NEXT[standing.state] or only not in (None, standing.state):
            raise HealthError(f"engine {replica} cannot go from {standing.state.name} to {to.name}")
        self.transitions.append(Transition(replica, standing.state, to, why))
        standing.state = to
