"""The states of a run's replicas: which follow which, what brings a lost one back, and when."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support import sglang_servers as servers

from megatron_stare.config.schema import Config
from megatron_stare.rollout.fleet.health import (
    SERVING,
    FleetHealth,
    Health,
    HealthError,
    NoEngineError,
    RestartRule,
)

STARTING, DIRTY, HEALTHY, SUSPECT, RELEASED, DEAD = (
    Health.STARTING,
    Health.DIRTY,
    Health.HEALTHY,
    Health.SUSPECT,
    Health.RELEASED,
    Health.DEAD,
)
# what brings replica 0 of two into each state; the other one is healthy
WAYS: dict[Health, Callable[[FleetHealth], object]] = {
    STARTING: lambda fleet: None,
    DIRTY: lambda fleet: fleet.came_up(0),
    HEALTHY: lambda fleet: (fleet.came_up(0), fleet.synced(0, 1, True)),
    SUSPECT: lambda fleet: (
        fleet.came_up(0),
        fleet.synced(0, 1, True),
        fleet.lost_request(0, "cut", 0.0, 0.5),
    ),
    RELEASED: lambda fleet: (fleet.came_up(0), fleet.released(0)),
    DEAD: lambda fleet: (fleet.came_up(0), fleet.lost(0, "killed", 0.0)),
}
# what may be said of a replica, and where it leads from each state; from any other it is refused,
# or changes nothing
SAID: dict[str, tuple[Callable[[FleetHealth], object], dict[Health, Health]]] = {
    "came up": (lambda fleet: fleet.came_up(0), {STARTING: DIRTY}),
    "synced and proved": (
        lambda fleet: fleet.synced(0, 2, True),
        {DIRTY: HEALTHY, HEALTHY: HEALTHY, SUSPECT: SUSPECT},
    ),
    "synced unproved": (
        lambda fleet: fleet.synced(0, 2, False),
        {HEALTHY: HEALTHY, SUSPECT: SUSPECT},
    ),
    "mixed": (lambda fleet: fleet.mixed(0, "failed"), {HEALTHY: DIRTY, SUSPECT: DIRTY}),
    "lost a request": (lambda fleet: fleet.lost_request(0, "cut", 0.0, 0.5), {HEALTHY: SUSPECT}),
    "answered": (lambda fleet: fleet.answered(0), {SUSPECT: HEALTHY}),
    "released": (
        lambda fleet: fleet.released(0),
        {DIRTY: RELEASED, HEALTHY: RELEASED, SUSPECT: RELEASED},
    ),
    "resumed": (lambda fleet: fleet.resumed(0), {RELEASED: DIRTY}),
    "lost": (lambda fleet: fleet.lost(0, "killed", 1.0), dict.fromkeys(set(Health) - {DEAD}, DEAD)),
    "begun again": (lambda fleet: fleet.begun_again(0, 1.0), {DEAD: STARTING}),
}
SPEECHLESS = ("mixed", "lost a request", "answered")  # say nothing of a replica in another state


def fleet_of(replicas: int = 2, rule: RestartRule = RestartRule()) -> FleetHealth:  # noqa: B008 - frozen
    fleet = FleetHealth(replicas, rule, 0.5)
    for number in range(1, replicas):
        fleet.came_up(number)
        fleet.synced(number, 1, True)
    return fleet


@pytest.mark.parametrize("state", Health)
@pytest.mark.parametrize("said", SAID)
def test_every_word_leads_where_it_may_and_nowhere_else(state: Health, said: str) -> None:
    fleet = fleet_of()
    WAYS[state](fleet)
    assert fleet.state(0) is state
    fleet.transitions.clear()
    act, leads = SAID[said]
    if state in leads:
        act(fleet)
        moved = [(t.replica, t.before, t.after) for t in fleet.transitions]
        assert fleet.state(0) is leads[state]
        assert moved == ([(0, state, leads[state])] if leads[state] is not state else [])
        return
    if said in SPEECHLESS:
        act(fleet)
    else:
        with pytest.raises(HealthError, match="engine 0"):
            act(fleet)
    assert fleet.state(0) is state and not fleet.transitions
    assert fleet.state(1) is HEALTHY


def test_a_lost_replica_serves_again_by_restart_and_proof_alone() -> None:
    """Tries all ways of five steps: only restart, coming up and proved sync, in this order, lead
    back to service."""
    found = []

    def go(done: list[str]) -> None:
        fleet = fleet_of()
        WAYS[DEAD](fleet)
        try:
            for said in done:
                SAID[said][0](fleet)
        except HealthError:
            return
        if fleet.state(0) in SERVING:
            found.append(done)
            return
        if len(done) < 5:
            for said in set(SAID) - set(SPEECHLESS):
                go([*done, said])

    go([])
    assert ["begun again", "came up", "synced and proved"] in found
    for way in found:
        assert (
            way.index("begun again")
            < way.index("came up")
            < way.index("synced and proved")
            == len(way) - 1
        )


def test_weights_that_were_released_are_proved_as_often_as_others_and_mixtures_always() -> None:
    fleet = fleet_of()
    WAYS[HEALTHY](fleet)
    assert not fleet.needs_proof
    fleet.released(0)
    fleet.resumed(0)
    assert not fleet.needs_proof
    fleet.synced(0, 2, False)
    fleet.mixed(0, "failed")
    assert fleet.needs_proof
    with pytest.raises(HealthError, match="has not proved"):
        fleet.synced(0, 3, False)
    fleet.synced(0, 3, True)
    assert not fleet.needs_proof and fleet.state(0) is HEALTHY


def test_restarts_back_off_are_bounded_and_are_forgiven() -> None:
    """The first at once, then after 10, 20, 40 s; no fourth within the window of 1000 s."""
    fleet = fleet_of(rule=RestartRule(most=3, window_s=1000.0, back_off_s=10.0))
    WAYS[DIRTY](fleet)
    now = 100.0
    for pause in (0.0, 10.0, 20.0):
        fleet.lost(0, "killed", now)
        assert fleet.due(now + pause) == [0]
        assert not pause or fleet.due(now + pause - 0.1) == []
        now += pause
        fleet.begun_again(0, now)
        assert fleet.due(now) == []
        now += 5.0
    fleet.lost(0, "killed", now)
    assert fleet.due(now + 40.0) == [] == fleet.due(1099.9)  # begun at 100, 115 and 140
    assert fleet.due(1100.0) == [0]
    fleet.begun_again(0, 1100.0)
    fleet.lost(0, "killed", 1101.0)
    assert fleet.due(1101.0 + 1000.0) == [0]


def test_servers_of_others_are_waited_for_without_bound_and_none_where_most_is_zero() -> None:
    patient = fleet_of(rule=RestartRule(most=None, back_off_s=1.0))
    never = fleet_of(rule=RestartRule(most=0))
    for number in range(40):
        WAYS[DEAD](patient) if number == 0 else patient.lost(0, "refused", 1e4 * number)
        (again,) = patient.due(1e4 * number + 32.0)  # no pause is longer
        patient.begun_again(again, 1e4 * number + 32.0)
    WAYS[DEAD](never)
    assert never.due(1e9) == []


@pytest.mark.parametrize(
    ("settings", "most", "held"),
    [
        ({}, 5, False),
        ({"sglang": {"urls": ["http://localhost:1"]}}, None, False),
        ({"sglang": {"colocated": True}}, 5, True),
        # nobody could wait for a server that somebody else starts
        ({"sglang": {"colocated": True, "urls": ["http://localhost:1"]}}, None, False),
    ],
)
def test_the_rule_is_that_of_the_configuration(
    settings: dict[str, object], most: int | None, held: bool
) -> None:
    config = Config.model_validate(
        {
            "model": {"path": str(servers.MODEL)},
            "rollout": {"engine": "sglang"},
            "faults": {"engines": {"most": 5, "window_s": 60, "back_off_s": 2, "losses": 7}},
            **settings,
        }
    )
    assert RestartRule.of(config) == RestartRule(most, 60.0, 2.0, 7, held)


def test_losing_one_request_after_the_other_is_being_lost_where_another_is_left() -> None:
    """Losses of requests that were under way together count as one. An answer in between begins the
    count anew, and so does being lost."""
    fleet = fleet_of(rule=RestartRule(losses=3))
    WAYS[HEALTHY](fleet)
    assert [
        fleet.lost_request(0, "500", given, now) for given, now in ((0, 3), (1, 4), (3, 5), (6, 7))
    ] == [False] * 4
    fleet.answered(0)
    assert [fleet.lost_request(0, "500", now, now) for now in (8, 9, 10)] == [False, False, True]
    assert fleet.state(0) is SUSPECT
    fleet.lost(1, "killed", 0.0)
    assert fleet.lost_request(0, "500", 11, 11) is False  # it is the last
    fleet.begun_again(1, 0.0)
    fleet.came_up(1)
    fleet.synced(1, 2, True)
    assert fleet.lost_request(0, "500", 12, 12) is True
    fleet.lost(0, "500", 1.0)
    fleet.begun_again(0, 1.0)
    fleet.came_up(0)
    fleet.synced(0, 2, True)
    assert fleet.lost_request(0, "500", 13, 13) is False
    # nor is it left alone for longer
    assert fleet.open_again(0) == 13.5 and fleet.avoided(13.4) == {0}


def test_the_run_goes_on_with_one_and_ends_by_name_with_none() -> None:
    fleet = fleet_of()
    WAYS[HEALTHY](fleet)
    fleet.lost(0, "the server ended with -9", 0.0)
    assert fleet.require(SERVING) == [1]
    fleet.begun_again(0, 0.0)
    fleet.lost(1, "the server says nothing for 20 s", 1.0)
    with pytest.raises(NoEngineError) as error:
        fleet.require(SERVING)
    assert (
        "no engine is left: engine 0 is starting, the server ended with -9; engine 1 is dead, the"
        " server says" in str(error.value)
    )


def test_what_goes_without_saying_is_not_told() -> None:
    """A run without a loss has no news; one with a loss tells each step of the way back."""
    fleet = fleet_of()
    WAYS[HEALTHY](fleet)
    fleet.synced(0, 2, False)
    fleet.released(0)
    fleet.resumed(0)
    fleet.synced(0, 3, True)
    assert [str(t) for t in fleet.transitions if t.why] == []
    fleet.transitions.clear()
    fleet.lost(0, "killed", 0.0)
    fleet.begun_again(0, 0.0)
    fleet.came_up(0)
    fleet.synced(0, 4, True)
    fleet.mixed(0, "failed")
    fleet.synced(0, 5, True)
    assert [str(t) for t in fleet.transitions if t.why] == [
        "engine 0 is dead (it was healthy): killed",
        "engine 0 is starting (it was dead): it is begun again",
        "engine 0 is dirty (it was starting): it is up, and waits for a weight update",
        "engine 0 is healthy (it was dirty): it holds all weights of version 4, proved",
        "engine 0 is dirty (it was healthy): failed",
    ]
