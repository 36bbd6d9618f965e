"""Which replica is asked for a response, and what becomes of a request that one has lost. Pure: it is told the time.

A lost request is asked of another replica, where there is one. Its tokens come from one attempt alone, because an
engine that has called a request lost never answers it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_stare.config.schema import Config
from megatron_stare.errors import DataError
from megatron_stare.rollout.engines.engine import LostRequest, RequestLostError

LONGEST_DOUBLING = 8  # 2^8 times the first back-off


@dataclass(frozen=True)
class RequestRule:
    """What is done for a response; see the section `faults.requests`.

    attempts: times it is asked for.
    back_off_s: for which a replica that lost a request is given no other; doubled by each it loses in a row.
    rollout_s: in which all that are made together must have ended; None: no limit.
    """

    attempts: int = 3
    back_off_s: float = 0.5
    rollout_s: float | None = None

    @classmethod
    def of(cls, config: Config) -> RequestRule:
        """As a run's configuration has it."""
        asked = config.faults.requests
        return cls(asked.attempts, asked.back_off_s, asked.rollout_s)


@dataclass
class _Standing:
    """Of a replica. Times are seconds of any clock that only goes forward."""

    lost_in_a_row: int = 0
    lost_last: float = 0.0
    closed_until: float = 0.0  # it is given nothing
    avoided_until: float = 0.0  # it is given what no other could take


class Retries:
    """The requests that are under way at some replicas, and how those stand that lost some.

    A replica that has lost a request is given nothing for a while, then one at a time until it has answered. While
    there is another, it is left alone for as long as it took to lose the request, so that one that hangs does not hold
    up what it is given for the limit of a request again and again.

    Args:
        metrics: what is counted is added to it.
    """

    def __init__(self, rule: RequestRule, replicas: int, metrics: Counter[str] | None = None) -> None:
        self._rule = rule
        self._standings = [_Standing() for _ in range(replicas)]
        self._given: dict[str, tuple[int, float]] = {}  # to which replica, and when
        self._lost: dict[str, list[tuple[int, LostRequest]]] = {}  # of requests that are not answered yet
        self.metrics: Counter[str] = Counter() if metrics is None else metrics

    def room(self, replica: int, capacity: int, under_way: int, now: float) -> int:
        """How many more requests a replica may be given."""
        standing = self._standings[replica]
        if now < standing.closed_until:
            return 0
        return (1 if standing.lost_in_a_row else capacity) - under_way

    def trusted(self, replica: int, now: float) -> bool:
        """Whether a replica has lost nothing since it last answered; it may have no room for all that."""
        return now >= self._standings[replica].avoided_until and not self._standings[replica].lost_in_a_row

    def choose(self, rid: str, rooms: Sequence[int | None], now: float) -> int | None:
        """The replica with the most room among those that should be asked; None: none of them has any.

        Args:
            rooms: of each replica; None: it is not there.
        """
        lost_by = {replica for replica, _ in self._lost.get(rid, ())}
        there = {n: room for n, room in enumerate(rooms) if room is not None}
        usable = [n for n in there if now >= self._standings[n].avoided_until]
        candidates = [n for n in usable if n not in lost_by] or usable or list(there)
        best = max(candidates, key=lambda n: there[n], default=None)
        return best if best is not None and there[best] > 0 else None

    def under_way(self, replica: int) -> list[str]:
        """The requests that it was given and has neither answered nor lost."""
        return [rid for rid, (given_to, _) in self._given.items() if given_to == replica]

    def given(self) -> Mapping[str, tuple[int, float]]:
        """The requests under way: to which replica each was given, and when."""
        return self._given

    def in_a_row(self, replica: int) -> int:
        """How many it lost one after the other."""
        return self._standings[replica].lost_in_a_row

    def renew(self, replica: int) -> None:
        """What it lost is no longer held against it: it is made anew before it is given anything."""
        self._standings[replica] = _Standing()

    def give(self, rid: str, replica: int, now: float) -> None:
        """The request goes to the replica."""
        self._given[rid] = (replica, now)

    def take(self, rid: str, replica: int) -> float:
        """The replica has answered the request, or lost it; when it was given.

        Raises:
            DataError: it does not have the request.
        """
        given_to, when = self._given.pop(rid, (None, 0.0))
        if given_to != replica:
            raise DataError("an engine answered a request that was not made of it, or twice", where=f"request {rid}")
        return when

    def answered(self, rid: str, replica: int) -> None:
        """The replica has answered a request that it was given. Raises DataError where it was not."""
        self.take(rid, replica)
        self._lost.pop(rid, None)
        self._standings[replica] = _Standing(lost_last=self._standings[replica].lost_last)

    def lost(self, lost: LostRequest, replica: int, now: float) -> float:
        """The replica has lost a request that it was given, which is to be given to one anew; when the replica may be
        given anything again.

        Raises:
            RequestLostError: it was asked for as often as allowed.
            DataError: the replica was not given it.
        """
        given = self.take(lost.rid, replica)
        standing = self._standings[replica]
        if given >= standing.lost_last:  # not of those that were under way when it lost another
            standing.lost_in_a_row += 1
        standing.lost_last = now
        doubled = self._rule.back_off_s * 2.0 ** min(standing.lost_in_a_row - 1, LONGEST_DOUBLING)
        standing.closed_until = now + doubled
        standing.avoided_until = now + max(doubled, now - given)
        before = self._lost.setdefault(lost.rid, [])
        before.append((replica, lost))
        if len(before) >= self._rule.attempts:
            told = "; ".join(f"attempt {n}: {each.reason}" for n, (_, each) in enumerate(before, 1))
            raise RequestLostError(
                f"a response was asked for {len(before)} times and did not come: {told}",
                where=f"request {lost.rid}",
                fix="see to the servers; faults.requests.attempts and faults.requests.request_s say how often and how "
                "long one is asked",
            )
        self.metrics["rollout/retried"] += 1
        self.metrics["rollout/retried_late"] += lost.late
        return standing.closed_until

    def forget(self, lost: LostRequest) -> None:
        """Nobody waits for the answer to a lost request any more: it is not made again."""
        del self._lost[lost.rid]
        self.metrics["rollout/retried"] -= 1
        self.metrics["rollout/retried_late"] -= lost.late
