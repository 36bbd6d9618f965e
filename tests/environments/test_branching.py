"""An environment whose responses have two branches: each is sampled and trained after its own
context."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from environments.forgets import Forgets
from support.runs import metrics, model, train

from megatron_stare.config.load import validate
from megatron_stare.environments.environment import Response, Turn
from megatron_stare.errors import ConfigError, DataError
from megatron_stare.planning.preflight import check_branches
from megatron_stare.records.batch import Prompt, SamplingParams
from megatron_stare.records.trajectory import Branch
from megatron_stare.rollout.engines.engine import GenerateRequest
from megatron_stare.rollout.engines.model_folder import sampled_text
from megatron_stare.rollout.engines.sglang.protocol import sampling_seed
from megatron_stare.rollout.sources.kept import from_bytes, to_bytes
from megatron_stare.rollout.sources.rollout_source import check_trajectory
from megatron_stare.rollout.sources.turns import Turns
from megatron_stare.rollout.sources.under_way import UnderWay

NAME = "environments.forgets.Forgets"
ALONE = ("runtime.runner=inline", "parallel.tensor=1")
PROMPT = Prompt(0, "p", "", "", (1, 2, 3))


def turn(*tokens: int, version: int = 1) -> Turn:
    ids = torch.tensor(tokens, dtype=torch.int32)
    return Turn(ids, torch.full((len(ids),), -0.5), ((version, len(ids)),), "stop", "said")


def two_branches() -> Response:
    response = Response(PROMPT)
    response.sampled(turn(10, 11))
    response.observed([20], "seen")
    response.begin_branch((1, 50), " ... ")
    response.sampled(turn(12, 13, version=2))
    return response


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "run.dir": folder,
        "run.steps": 4,
        "run.checkpoint_every": 2,
        "run.rollouts_every": 1,
        "rollout.environment": NAME,
        "rollout.max_new_tokens": 24,
        "batch.prompts": 8,
        "eval.prompts": 0,
        **more,
    }


@pytest.mark.wide
@pytest.mark.distributed
@pytest.mark.parametrize("layout", [ALONE, ()], ids=["alone", "tensor"])
def test_engine_and_trainer_agree_after_every_context(
    layout: tuple[str, ...], tmp_path: Path
) -> None:
    """The engine's log-probs are those of the contexts it was given; the trainer's equal them."""
    done = train(model(), *layout, cwd=tmp_path, **settings(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    for row in metrics(tmp_path / "run"):
        assert row["response/branches"] == 2.0
        assert row["rollout/logprob_diff_max"] < 1e-4
        assert row["loss/tokens"] == pytest.approx(32 * row["response/length_mean"])
    lines = (tmp_path / "run/rollouts/step_000001.jsonl").read_text().splitlines()
    assert all(" ... " in json.loads(line)["response"] for line in lines)


@pytest.mark.wide
@pytest.mark.distributed
def test_partial_rollouts_with_branches_are_continued_from_a_checkpoint(tmp_path: Path) -> None:
    partial = {
        "partial.tokens": 9,
        "partial.prompts": 16,
        "algorithm.correction": "{mode: truncate}",
    }
    whole = settings(tmp_path / "whole", **partial)
    assert train(model(), *ALONE, cwd=tmp_path, **whole).returncode == 0
    run = settings(tmp_path / "run", **partial)
    assert train(model(), *ALONE, cwd=tmp_path, **{**run, "run.steps": 2}).returncode == 0
    done = train(model(), *ALONE, "--resume", cwd=tmp_path, **run)
    assert done.returncode == 0, done.stderr
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    policies = [
        (tmp_path / name / "hf/model.safetensors").read_bytes() for name in ("run", "whole")
    ]
    assert policies[0] == policies[1]


def test_a_response_knows_its_context() -> None:
    response = two_branches()
    assert response.context == (1, 50, 12, 13) and response.branch == Branch(3, (1, 50))
    made = response.trajectory()
    assert made.tokens.tolist() == [10, 11, 20, 12, 13] and made.spans == [(0, 3), (3, 5)]
    assert made.loss_mask.tolist() == [True, True, False, True, True]
    assert made.text == "saidseen ... said"


def test_branches_are_read_apart() -> None:
    """The end of one and the start of the next must not form an answer."""
    response = Response(PROMPT)
    response.sampled(turn(4, 1))
    response.begin_branch((9,))
    response.sampled(turn(2, 99))
    tokenizer = SimpleNamespace(decode=lambda ids, **_: "".join(map(str, ids)))
    assert sampled_text(response.trajectory(), {99}, tokenizer) == "41\n2"


def test_branches_are_kept_in_a_checkpoint() -> None:
    under_way = UnderWay(PROMPT, 0, 1)
    under_way.finish(two_branches().trajectory())
    ((again,),) = from_bytes(to_bytes([[under_way]]))
    assert again.trajectory is not None
    assert again.trajectory.branches == (Branch(3, (1, 50)),)


def test_a_branch_that_is_too_long_is_refused() -> None:
    made = two_branches().trajectory()
    check_trajectory(made, 10, 4)
    with pytest.raises(DataError, match=r"a branch has 4 tokens.* allows 3"):
        check_trajectory(made, 10, 3)


def asked(context: tuple[int, ...], branch: Branch | None, longest: int = 40) -> GenerateRequest:
    """The request that a call of `generate` makes first."""

    class Serving:
        async def generate(self, request: GenerateRequest) -> Any:
            raise Heard(request)

    class Heard(Exception):
        pass

    params = SamplingParams(1.0, 20, seed=0, step=1, stop_token_ids=(0,))
    turns: Any = Turns(Serving(), UnderWay(PROMPT, 0, 1), params, None, longest, None, None)  # type: ignore[arg-type]
    with pytest.raises(Heard) as heard:
        asyncio.run(turns(context, branch=branch))
    return heard.value.args[0]  # type: ignore[no-any-return]


def test_a_request_in_a_branch() -> None:
    """Noise goes on where the response does, and a branch may be no longer than any sequence."""
    branch = Branch(7, (1, 50))
    request = asked((1, 50, 9), branch)
    assert request.start == 8 and request.branch == 7 and request.max_new_tokens == 12
    assert asked((1, 50, 9), branch, longest=5).max_new_tokens == 2
    assert asked((1, 2, 3, 9), None).start == 1
    with pytest.raises(DataError, match="does not begin with that of its branch"):
        asked((1, 2, 3), branch)


def test_branches_have_noise_of_their_own_in_sglang() -> None:
    """Its noise depends on the place after the context, which two branches may share."""
    params = SamplingParams(1.0, 20, seed=0, step=1, stop_token_ids=(0,))
    seeds = {sampling_seed(params, GenerateRequest("r", (1,), 0, 0, branch=at)) for at in (0, 3, 4)}
    assert len(seeds) == 3


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"algorithm": {"name": "gspo"}}, "the loss of gspo couples"),
        ({"moe": {"routing_replay": True}}, "cannot be replayed"),
        ({}, None),
    ],
)
def test_what_cannot_train_on_branches_is_refused_before_the_run(
    settings: dict[str, Any], said: str | None
) -> None:
    given = {"rollout": {"environment": NAME}, "model": {"path": "m"}, **settings}
    config = validate(given, "test")
    assert Forgets.branches({})
    if said is None:
        check_branches(config, config.algorithm.method)
        return
    with pytest.raises(ConfigError, match=said):
        check_branches(config, config.algorithm.method)
