"""The states of an engine's weights, pure: which there are and which may follow which.

Every engine keeps its own, in the process that it lives in, and refuses what it does not allow.
There is no way from DIRTY, RELEASED or DEAD to HEALTHY or UNPROVED but through UPDATING, that is
through a complete weight sync. Beside its state an engine has memory that may be released in parts.

A run's view of the same engine is FleetHealth (rollout/fleet/health.py). It reads an EngineState
once, when a replica comes up, and from then on goes by what calls of the replica return: an engine
that is lost cannot say so.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum


class EngineState(Enum):
    DIRTY = "dirty"  # the weights are not those of any version; refuses to generate
    UPDATING = "updating"  # a weight-update session is open
    HEALTHY = "healthy"  # holds all weights of one published version
    # has received all weights of one published version; their values have not been compared
    UNPROVED = "unproved"
    # has released the memory of its weights; takes neither requests nor weights
    RELEASED = "released"
    DEAD = "dead"  # closed or lost; after a restart it is DIRTY


_AFTER_AN_UPDATE = frozenset(
    {EngineState.UPDATING, EngineState.RELEASED, EngineState.DIRTY, EngineState.DEAD}
)
_NEXT: dict[EngineState, frozenset[EngineState]] = {
    EngineState.DIRTY: frozenset({EngineState.UPDATING, EngineState.RELEASED, EngineState.DEAD}),
    EngineState.UPDATING: frozenset(
        {EngineState.HEALTHY, EngineState.UNPROVED, EngineState.DIRTY, EngineState.DEAD}
    ),
    EngineState.HEALTHY: _AFTER_AN_UPDATE,
    EngineState.UNPROVED: _AFTER_AN_UPDATE,
    EngineState.RELEASED: frozenset({EngineState.DIRTY, EngineState.DEAD}),
    EngineState.DEAD: frozenset({EngineState.DIRTY}),
}


class EngineStateError(RuntimeError):
    """An engine was asked for something its state does not allow; a fault of the caller, not of the
    user."""


def advance(state: EngineState, to: EngineState) -> EngineState:
    """`to`, where it may follow `state`.

    Raises:
        EngineStateError: it may not.
    """
    if to not in _NEXT[state]:
        legal = ", ".join(sorted(s.name for s in _NEXT[state]))
        raise EngineStateError(
            f"an engine cannot go from {state.name} to {to.name}; from there it goes to {legal}"
        )
    return to


def publishes(state: EngineState) -> bool:
    """True where an engine in this state generates, with the weights of one version."""
    return state in (EngineState.HEALTHY, EngineState.UNPROVED)


def require(state: EngineState, needed: EngineState, action: str) -> None:
    """Refuses `action` unless `state` is `needed`, or UNPROVED where HEALTHY is needed.

    Raises:
        EngineStateError: naming the state and how the engine gets out of it.
    """
    if state is needed or (needed is EngineState.HEALTHY and publishes(state)):
        return
    way_out = {
        EngineState.DIRTY: "it needs a complete weight sync first",
        EngineState.UPDATING: "a weight update is open; end it first",
        EngineState.HEALTHY: "no weight update is open; begin one first",
        EngineState.UNPROVED: "no weight update is open; begin one first",
        EngineState.RELEASED: "resume its memory, then sync all weights",
        EngineState.DEAD: "it is closed; make a new engine and sync it",
    }[state]
    if state is EngineState.DIRTY and needed is EngineState.UPDATING:
        way_out = "no weight update is open, or the last one failed; begin a new one"
    raise EngineStateError(f"cannot {action}: the engine is {state.name}, {way_out}")


# in the order in which they come back, so that a weight sync finds the cache's room free
MEMORY = ("weights", "cache")


def release(released: Collection[str], parts: Collection[str]) -> frozenset[str]:
    """The parts of MEMORY that are released once `parts` are as well.

    Raises:
        EngineStateError: one of them is released already.
    """
    if twice := [part for part in MEMORY if part in parts and part in released]:
        raise EngineStateError(
            f"cannot release {' and '.join(twice)}: released already, resume it first"
        )
    return frozenset(released) | frozenset(parts)


def resume(released: Collection[str], parts: Collection[str]) -> frozenset[str]:
    """The parts of MEMORY that are still released once `parts` are back.

    Raises:
        EngineStateError: one of them was not released, or the cache would come before the weights.
    """
    if here := [part for part in MEMORY if part in parts and part not in released]:
        raise EngineStateError(f"cannot resume {' and '.join(here)}: not released")
    left = frozenset(released) - frozenset(parts)
    if "weights" in left and "cache" not in left:
        raise EngineStateError("cannot resume the cache: the weights come first")
    return left
