"""Recorded exchanges of the unit tests are what a server says: they are recorded anew, and
compared."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support import sglang_servers as servers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(servers.MISSING is not None, reason=str(servers.MISSING)),
]

# of another length in every recording: how far a response is when it is aborted, or when weights
# are swapped
CUT = {"abort", "two versions"}


def shape(value: Any) -> Any:
    """Names and kinds, not values; a list is the kinds it has."""
    if isinstance(value, dict):
        return {name: shape(each) for name, each in sorted(value.items())}
    if isinstance(value, list):
        return sorted({json.dumps(shape(each)) for each in value})
    return "number" if type(value) in (int, float) else type(value).__name__


def test_a_server_says_what_was_recorded() -> None:
    from support.record_sglang import OUT, record_all

    recorded = json.loads(OUT.read_text())
    again = json.loads(json.dumps(record_all()))
    assert again["sampling_fields"] == recorded["sampling_fields"]
    assert again["answers"]["/server_info"] == recorded["answers"]["/server_info"], (
        "another release, or other flags"
    )
    assert shape(again["answers"]) == shape(recorded["answers"])
    # the same weights
    assert again["answers"]["/weights_checker"] == recorded["answers"]["/weights_checker"]
    assert again["generate"].keys() == recorded["generate"].keys()
    for name, exchange in recorded["generate"].items():
        new = again["generate"][name]
        assert new["body"] == exchange["body"] and new["means"] == exchange["means"]
        assert shape(new["answer"]) == shape(exchange["answer"]), name
        reason = exchange["answer"]["meta_info"]["finish_reason"]
        assert new["answer"]["meta_info"]["finish_reason"] == reason, name
        if name not in CUT:
            assert new["answer"]["output_ids"] == exchange["answer"]["output_ids"], name
            assert log_probs(new["answer"], "output") == alike(
                log_probs(exchange["answer"], "output")
            )
    versions = [
        each["version"]
        for each in again["generate"]["two versions"]["answer"]["meta_info"]["weight_versions"]
    ]
    assert versions == ["2", "3"]
    assert again["score"]["body"] == recorded["score"]["body"]
    assert shape(again["score"]["answer"]) == shape(recorded["score"]["answer"])
    scored = [log_probs(each["score"]["answer"], "input") for each in (again, recorded)]
    assert scored[0] == alike(scored[1])


def alike(recorded: list[float]) -> Any:
    """These log-probs to 1e-5 nats, or to a few units of float32 where that is more: one of a token
    that is impossible is about -960, where two machines differ by 1e-4."""
    return pytest.approx(recorded, abs=1e-5, rel=5e-7)


def log_probs(answer: dict[str, Any], of: str) -> list[float]:
    return [each[0] for each in answer["meta_info"][f"{of}_token_logprobs"] if each[0] is not None]
