"""Chooses the replica for a request, and retries requests that a replica has lost. Pure.

A lost request is sent to another replica. If no other replica is suitable, the lost request can be
sent to the same replica again. All tokens of an answer come from a single attempt, because an
engine never answers a request after reporting the request as lost. The module health.py tracks the
states of the replicas that lost requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from megatron_stare.config.schema import Config
from megatron_stare.errors import DataError
from megatron_stare.rollout.engines.engine import LostRequest, RequestLostError


@dataclass(frozen=True)
class RequestRule:
    """Limits on the retries of a request; see the configuration section `faults.requests`.

    `attempts`: maximum number of attempts per request.
    `back_off_s`: length of the back-off after a replica's first lost request, in seconds. During
        the back-off, the replica receives no requests; see FleetHealth.
    `rollout_s`: time limit for all trajectories of a rollout together. None means no limit.
    """

    attempts: int = 3
    back_off_s: float = 0.5
    rollout_s: float | None = None

    @classmethod
    def of(cls, config: Config) -> RequestRule:
        """Reads the limits on retries from a run's configuration."""
        asked = config.faults.requests
        return cls(asked.attempts, asked.back_off_s, asked.rollout_s)


class Retries:
    """Tracks the requests in flight at each replica, and the lost requests.

    Args:
        metrics: counter that receives the counts of retried requests.
    """

    def __init__(self, rule: RequestRule, metrics: Counter[str] | None = None) -> None:
        self._rule = rule
        self._given: dict[str, tuple[int, float]] = {}  # replica and time of assignment, by request
        # replica and loss for each failed attempt of unanswered requests
        self._lost: dict[str, list[tuple[int, LostRequest]]] = {}
        self.metrics: Counter[str] = Counter() if metrics is None else metrics

    def choose(
        self,
        rid: str,
        rooms: Sequence[int | None],
        avoided: Collection[int],
        suspected: Collection[int] = (),
    ) -> int | None:
        """Returns the replica that should receive the request, or None if no suitable replica has
        room. Replicas that already lost this request are chosen only if no other replica is
        suitable. Prefers a suspected replica that has room, because a suspected replica might
        otherwise never receive a request again. A suspected replica has lost a request and has not
        answered any request since the loss. If no suspected replica has room, `choose` returns the
        replica that has room for the largest number of requests.

        Args:
            rooms: number of requests that each replica can still take; None if the replica does not
                serve.
            avoided: replicas that receive a request only if all serving replicas are avoided.
            suspected: replicas that receive one request at a time until they answer.
        """
        lost_by = {replica for replica, _ in self._lost.get(rid, ())}
        there = {n: room for n, room in enumerate(rooms) if room is not None}
        usable = [n for n in there if n not in avoided]
        candidates = [n for n in usable if n not in lost_by] or usable or list(there)
        best = max(
            candidates, key=lambda n: (n in suspected and there[n] > 0, there[n]), default=None
        )
        return best if best is not None and there[best] > 0 else None

    def under_way(self, replica: int) -> list[str]:
        """Returns the ids of the requests that were assigned to the replica and are neither
        answered nor lost."""
        return [rid for rid, (given_to, _) in self._given.items() if given_to == replica]

    def given(self) -> Mapping[str, tuple[int, float]]:
        """Returns, for each request in flight, the replica to which the request was assigned and
        the time of the assignment."""
        return self._given

    def give(self, rid: str, replica: int, now: float) -> None:
        """Records that the request is assigned to the replica at time `now`."""
        self._given[rid] = (replica, now)

    def take(self, rid: str, replica: int) -> float:
        """Records that the replica answered or lost the request. Returns the time at which the
        request was assigned to the replica.

        Raises:
            DataError: the request is not in flight at the replica.
        """
        given_to, when = self._given.pop(rid, (None, 0.0))
        if given_to != replica:
            raise DataError(
                "an engine answered a request that it was not sent, or answered one twice",
                where=f"request {rid}",
            )
        return when

    def answered(self, rid: str, replica: int) -> None:
        """Records that the replica answered the request. Forgets the failed attempts of the
        request.

        Raises:
            DataError: the request is not in flight at the replica, for example because the replica
                has already answered the request.
        """
        self.take(rid, replica)
        self._lost.pop(rid, None)

    def lost(self, lost: LostRequest, replica: int) -> None:
        """Records that the replica lost the request. The caller must send the request again.

        Raises:
            RequestLostError: no attempt is left.
            DataError: the request is not in flight at the replica.
        """
        self.take(lost.rid, replica)
        before = self._lost.setdefault(lost.rid, [])
        before.append((replica, lost))
        if len(before) >= self._rule.attempts:
            told = "; ".join(f"attempt {n}: {each.reason}" for n, (_, each) in enumerate(before, 1))
            raise RequestLostError(
                f"a response did not come in {len(before)} attempts: {told}",
                where=f"request {lost.rid}",
                fix=(
                    "check the servers; faults.requests.attempts and faults.requests.request_s"
                    " set the number of attempts and their time limit"
                ),
            )
        self.metrics["rollout/retried"] += 1
        self.metrics["rollout/retried_late"] += lost.late

    def forget(self, lost: LostRequest) -> None:
        """Drops a lost request whose caller no longer waits, so that the request is not retried."""
        del self._lost[lost.rid]
        self.metrics["rollout/retried"] -= 1
        self.metrics["rollout/retried_late"] -= lost.late
