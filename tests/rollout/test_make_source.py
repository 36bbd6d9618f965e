"""Which groups and which source a configuration asks for, and what is refused before anything
starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_stare.config.schema import Config
from megatron_stare.data.prompt_source import PromptQueue
from megatron_stare.errors import ConfigError, DataError
from megatron_stare.rollout.sources.ages import Ages
from megatron_stare.rollout.sources.asynchronous_source import AsynchronousSource
from megatron_stare.rollout.sources.group_sampling import EveryGroup, InformativeGroups
from megatron_stare.rollout.sources.make_source import check_staleness, make_groups, make_source
from megatron_stare.rollout.sources.partial_sampling import PartialGroups
from megatron_stare.rollout.sources.synchronous_source import SynchronousSource

MODEL = str(Path(__file__).parents[2] / "assets" / "tiny-adder")
CORRECTED = {"name": "stare", "correction": {"mode": "truncate"}}
PLAIN = {"name": "stare"}
CUT = {"tokens": 16}
MASK = {"stale_tokens": "mask"}


def config(algorithm: dict[str, Any] = PLAIN, **sections: dict[str, Any]) -> Config:
    tree: dict[str, Any] = {
        "model": {"path": MODEL},
        "batch": {"prompts": 8},
        "rollout": {"max_new_tokens": 64},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return Config.model_validate({**tree, "algorithm": algorithm})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"partial": CUT},
            "partial.tokens: .* older than those a step trains, and nothing corrects the loss",
        ),
        (
            {"rollout": {"staleness": 2}},
            "rollout.staleness: .* 2 steps old, and nothing corrects the loss",
        ),
        # those of age 1 still carry loss
        ({"partial": CUT, "rollout": {**MASK, "stale_from": 2}}, "nothing corrects the loss"),
        ({"rollout": {"staleness": 2, **MASK, "stale_from": 2}}, "nothing corrects the loss"),
        ({"rollout": {"stale_from": 2}}, "rollout.stale_from: no token is masked for its age"),
        (
            {"partial": CUT, "rollout": {"staleness": 0}},
            "partial.tokens: responses that are sampled ahead .* never cut",
        ),
        (
            {"partial": {"tokens": 64}},
            "partial.tokens: responses of up to 64 tokens are never cut after 64",
        ),
        (
            {"partial": {**CUT, "prompts": 7}},
            "partial.prompts: a step takes 8 prompt groups, but only 7 are under way",
        ),
        (
            {"partial": {**CUT, "prompts": 9}, "batch": {"generate_prompts": 9}},
            "partial.prompts: with dynamic sampling batch.generate_prompts sets",
        ),
        (
            {"partial": CUT, "batch": {"generate_prompts": 7}},
            "batch.generate_prompts: .* but only 7 are under way",
        ),
    ],
)
def test_what_cannot_be_is_refused(sections: dict[str, Any], message: str) -> None:
    refused = config(**sections)
    with pytest.raises(ConfigError, match=message):
        check_staleness(refused, refused.algorithm.method)


@pytest.mark.parametrize(
    ("algorithm", "sections"),
    [
        (PLAIN, {}),
        (CORRECTED, {"partial": CUT}),
        (PLAIN, {"partial": CUT, "rollout": MASK}),
        (PLAIN, {"rollout": {"staleness": 3, **MASK}}),
        (CORRECTED, {"rollout": {"staleness": 3, **MASK, "stale_from": 2}}),
        (CORRECTED, {"partial": {**CUT, "prompts": 8}}),
    ],
)
def test_what_may_be(algorithm: dict[str, Any], sections: dict[str, Any]) -> None:
    allowed = config(algorithm, **sections)
    check_staleness(allowed, allowed.algorithm.method)


@pytest.mark.parametrize(
    ("sections", "under_way", "refills"),
    [
        ({"partial": CUT}, 16, None),
        ({"partial": {**CUT, "prompts": 11}}, 11, None),
        ({"partial": CUT, "batch": {"generate_prompts": 24, "max_rounds": 5}}, 24, 5),
    ],
)
def test_how_many_groups_are_under_way(
    sections: dict[str, Any], under_way: int, refills: int | None
) -> None:
    queue: Any = PromptQueue(None)  # type: ignore[arg-type]
    groups = make_groups(config(CORRECTED, **sections), queue)
    assert isinstance(groups, PartialGroups)
    assert (groups._most, groups._groups, groups._tokens, groups._refills) == (
        under_way,
        8,
        16,
        refills,
    )


@pytest.mark.parametrize(
    ("sections", "kind", "ages"),
    [
        ({}, SynchronousSource, None),
        ({"rollout": MASK}, SynchronousSource, None),  # every token is of the newest weights
        ({"partial": CUT}, SynchronousSource, Ages(None, None)),
        ({"partial": CUT, "rollout": {**MASK, "stale_from": 3}}, SynchronousSource, Ages(None, 3)),
        ({"rollout": {"staleness": 2}}, AsynchronousSource, Ages(2, None)),
        ({"rollout": {"staleness": 2, **MASK}}, AsynchronousSource, Ages(2, 1)),
    ],
)
def test_what_is_done_about_older_tokens(
    sections: dict[str, Any], kind: type, ages: Ages | None
) -> None:
    nothing: Any = None
    source = make_source(
        config(CORRECTED, **sections), nothing, nothing, nothing, nothing, nothing, nothing
    )
    source.close()
    assert isinstance(source, kind) and source._ages == ages


def test_a_run_that_cuts_nothing_takes_nothing_that_was_cut() -> None:
    queue: Any = PromptQueue(None)  # type: ignore[arg-type]
    for groups, kind in (
        (make_groups(config(), queue), EveryGroup),
        (make_groups(config(batch={"generate_prompts": 9}), queue), InformativeGroups),
    ):
        assert isinstance(groups, kind) and groups.kept()() == b""
        groups.restore(b"")
        with pytest.raises(DataError, match="this run does not cut responses"):
            groups.restore(b"something")
