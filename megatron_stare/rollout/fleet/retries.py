"""The choice of the replica that is asked for a response, and the retries of requests that one has
lost. Pure.

A lost request is asked of another replica, where there is one. Its tokens come from one attempt
alone, because an engine that has called a request lost never answers it. How a replica stands that
lost some is health.py's matter.
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
    """Bounds on what is done for a response; see the section `faults.requests`.

    attempts: times it is asked for.
    back_off_s: for which a replica that lost a request is given no other; see FleetHealth.
    rollout_s: in which all that are made together must have ended; None: no limit.
    """

    attempts: int = 3
    back_off_s: float = 0.5
    rollout_s: float | None = None

    @classmethod
    def of(cls, config: Config) -> RequestRule:
        """Reads it of a run's configuration."""
        asked = config.faults.requests
        return cls(asked.attempts, asked.back_off_s, asked.rollout_s)


class Retries:
    """The requests that are under way at some replicas, and those that some have lost.

    Args:
        metrics: what is counted is added to it.
    """

    def __init__(self, rule: RequestRule, metrics: Counter[str] | None = None) -> None:
        self._rule = rule
        self._given: dict[str, tuple[int, float]] = {}  # to which replica, and when
        # losses of requests that are not answered yet, by request
        self._lost: dict[str, list[tuple[int, LostRequest]]] = {}
        self.metrics: Counter[str] = Counter() if metrics is None else metrics

    def choose(
        self,
        rid: str,
        rooms: Sequence[int | None],
        avoided: Collection[int],
        suspected: Collection[int] = (),
    ) -> int | None:
        """Chooses among the replicas that should be asked: a suspected one with room before any
        other, or it might never be asked again, else that with the most room; None: none of them
        has any.

        Args:
            rooms: of each replica; None: it is not there.
            avoided: replicas that are given nothing that another could take.
            suspected: replicas that take one request at a time until they answer.
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
        """The requests that it was given and has neither answered nor lost."""
        return [rid for rid, (given_to, _) in self._given.items() if given_to == replica]

    def given(self) -> Mapping[str, tuple[int, float]]:
        """The requests under way: to which replica each was given, and when."""
        return self._given

    def give(self, rid: str, replica: int, now: float) -> None:
        """Takes down that the request goes to the replica."""
        self._given[rid] = (replica, now)

    def take(self, rid: str, replica: int) -> float:
        """Takes down that the replica has answered the request, or lost it. Returns when it was
        given.

        Raises:
            DataError: it does not have the request.
        """
        given_to, when = self._given.pop(rid, (None, 0.0))
        if given_to != replica:
            raise DataError(
                "an engine answered a request that it was not sent, or answered one twice",
                where=f"request {rid}",
            )
        return when

    def answered(self, rid: str, replica: int) -> None:
        """Takes down that the replica has answered a request that it was given. Raises DataError
        where it was not."""
        self.take(rid, replica)
        self._lost.pop(rid, None)

    def lost(self, lost: LostRequest, replica: int) -> None:
        """Takes down that the replica has lost a request that it was given, which is to be given to
        one anew.

        Raises:
            RequestLostError: it was asked for as often as allowed.
            DataError: the replica was not given it.
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
        """Drops a lost request that nobody waits for any more: it is not made again."""
        del self._lost[lost.rid]
        self.metrics["rollout/retried"] -= 1
        self.metrics["rollout/retried_late"] -= lost.late
