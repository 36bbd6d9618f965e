"""Defines the states of an engine's weights and the legal transitions. Pure.

Every engine tracks its own state, in its own process, and rejects calls that the state does not
allow. An engine that is DIRTY, RELEASED or DEAD becomes HEALTHY or UNPROVED only through UPDATING.
In the state UPDATING, the engine receives a complete weight sync. This module also tracks which
parts of an engine's memory are released.

FleetHealth (rollout/fleet/health.py) records what the run knows about the health of each engine.
The fleet reads an engine's EngineState only when the engine's replica starts. After the start,
FleetHealth relies on the results of calls to the engine, because a lost engine cannot report its
own loss.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum


class EngineState(Enum):
    DIRTY = "dirty"  # the weights are of no single version; refuses to generate
    UPDATING = "updating"  # a weight-update session is open
    HEALTHY = "healthy"  # holds all weights of one published version
    # holds all weights of one published version, whose values were not verified
    UNPROVED = "unproved"
    # has released the memory of its weights; accepts neither requests nor weights
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
    """Raised if a caller requests an action that the engine's state does not allow. An
    EngineStateError reports a bug, not a user's error."""


def advance(state: EngineState, to: EngineState) -> EngineState:
    """Checks the transition from the old state (`state`) to the new state (`to`). Returns the new
    state if the transition is legal.

    Raises:
        EngineStateError: the transition is not legal.
    """
    if to not in _NEXT[state]:
        legal = ", ".join(sorted(s.name for s in _NEXT[state]))
        raise EngineStateError(
            f"an engine cannot go from {state.name} to {to.name}; from there it goes to {legal}"
        )
    return to


def publishes(state: EngineState) -> bool:
    """Returns True if an engine in this state holds all weights of one version and can generate."""
    return state in (EngineState.HEALTHY, EngineState.UNPROVED)


def require(state: EngineState, needed: EngineState, action: str) -> None:
    """Checks that an engine's `state` equals `needed`. If `needed` is HEALTHY, the state UNPROVED
    is accepted too.

    Raises:
        EngineStateError: the state differs. The message names the state and says how the engine can
            leave the state.
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


# in resume order, so that during a weight sync the cache's memory is still free
MEMORY = ("weights", "cache")


def release(released: Collection[str], parts: Collection[str]) -> frozenset[str]:
    """Adds `parts` to the set of released memory parts (see MEMORY). Returns all released parts.
    `released` contains the parts that were released before this call.

    Raises:
        EngineStateError: one of `parts` is released already.
    """
    if twice := [part for part in MEMORY if part in parts and part in released]:
        raise EngineStateError(
            f"cannot release {' and '.join(twice)}: released already, resume it first"
        )
    return frozenset(released) | frozenset(parts)


def resume(released: Collection[str], parts: Collection[str]) -> frozenset[str]:
    """Removes `parts` from the set of released memory parts (see MEMORY). Returns the memory parts
    that are still not allocated.

    Raises:
        EngineStateError: one of `parts` was not released, or the cache would be resumed before the
            weights.
    """
    if here := [part for part in MEMORY if part in parts and part not in released]:
        raise EngineStateError(f"cannot resume {' and '.join(here)}: not released")
    left = frozenset(released) - frozenset(parts)
    if "weights" in left and "cache" not in left:
        raise EngineStateError("cannot resume the cache: the weights come first")
    return left
