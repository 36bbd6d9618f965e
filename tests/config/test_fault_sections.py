"""Limits that leave each other time, and those that do not."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_stare.config.load import validate
from megatron_stare.config.schema import Config
from megatron_stare.errors import ConfigError
from megatron_stare.rollout.fleet.retries import RequestRule


def config(timeout_s: float = 600.0, **limits: Any) -> Config:
    return validate(
        {
            "model": {"path": "m"},
            "runtime": {"timeout_s": timeout_s},
            "faults": {"requests": limits},
        },
        "a.yaml",
    )


def test_what_is_not_set_follows_from_the_limit_of_a_remote_call() -> None:
    limits = config().faults.requests
    assert (limits.request_limit(600.0), limits.collective_limit(600.0)) == (200.0, 600.0)
    assert [limits.collective_limit(remote) for remote in (1199.0, 1200.0, 7200.0)] == [
        1199.0,
        1200.0,
        1200.0,
    ]
    limits = config(request_s=7.0, collective_s=30.0, attempts=2).faults.requests
    assert (limits.request_limit(600.0), limits.collective_limit(600.0)) == (7.0, 30.0)
    assert RequestRule.of(config(attempts=5, back_off_s=0.25, rollout_s=6e3)) == RequestRule(
        5, 0.25, 6e3
    )


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (
            {"collective_s": 601.0},
            r"faults\.requests\.collective_s 601 exceeds runtime\.timeout_s 600",
        ),
        ({"rollout_s": 599.0}, r"3 attempts of 200 s each exceed faults\.requests\.rollout_s 599"),
        ({"rollout_s": 50.0, "request_s": 26.0, "attempts": 2}, "2 attempts of 26 s each exceed"),
        ({"attempts": 0}, "must be at least 1"),
    ],
)
def test_a_limit_that_leaves_another_no_time_is_refused(
    limits: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**limits)


def test_limits_that_just_fit() -> None:
    config(collective_s=600.0, rollout_s=600.0)
    config(rollout_s=52.0, request_s=26.0, attempts=2)
