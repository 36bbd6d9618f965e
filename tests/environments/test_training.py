"""An environment of two turns trains: what it says is read by the policy, and carries no loss."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.runs import ROOT, metrics, model, train

from megatron_stare.config.load import validate
from megatron_stare.driver.opening import read_inputs
from megatron_stare.errors import ConfigError

NAME = "environments.check_again.CheckAgain"
OBSERVED = 3  # tokens of ";0+", which the environment says once a response
STEPS = 3
TURN = 24  # tokens of the first turn at most, half a response
ALONE = ("runtime.runner=inline", "parallel.tensor=1")

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run in one process, `alone`, and over two tensor-parallel ranks,
    `tensor`."""
    folder = tmp_path_factory.mktemp("two_turns")
    for name, layout in (("alone", ALONE), ("tensor", ())):
        settings = {
            "run.dir": folder / name,
            "run.steps": STEPS,
            "run.rollouts_every": 1,
            "rollout.environment": NAME,
            "rollout.max_new_tokens": 2 * TURN,
            "reward.verifier": "environments.first_turn.verify",
            "batch.prompts": 8,
            "eval.prompts": 0,
        }
        done = train(model(), *layout, cwd=folder, **settings)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.wide
@pytest.mark.parametrize("name", ["alone", "tensor"])
def test_observations_carry_no_loss(trained: Path, name: str) -> None:
    rows = metrics(trained / name)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        lines = (
            (trained / name / "rollouts" / f"step_{row['step']:06d}.jsonl").read_text().splitlines()
        )
        made = [json.loads(line) for line in lines]
        assert len(made) == 32  # all of the batch
        assert all(";0+" in each["response"] for each in made)
        tokens = sum(each["tokens"] for each in made)
        assert row["loss/tokens"] == tokens - OBSERVED * len(made)
        assert max(each["tokens"] for each in made) > TURN + OBSERVED  # there is a second turn
        # on policy, exactly; and what both turns were sampled with is what the trainer makes of the
        # whole
        assert row["ratio/max_abs_log"] == 0.0
        assert 0 < row["rollout/logprob_diff_max"] < 1e-4
        assert row["update/finite"] == 1.0
        assert row["optimizer/grad_norm"] > 0
        assert 0 < row["reward/mean"] < 1


@pytest.mark.wide
def test_two_ranks_learn_the_same(trained: Path) -> None:
    alone, tensor = metrics(trained / "alone"), metrics(trained / "tensor")
    for key in (
        "loss/policy",
        "entropy/mean",
        "optimizer/grad_norm",
        "reward/mean",
        "forecast/entropy_change",
    ):
        assert tensor[0][key] == pytest.approx(alone[0][key], rel=1e-4, abs=1e-7), key
    assert tensor[0]["loss/tokens"] == alone[0]["loss/tokens"]


def test_the_page_shows_the_file_that_trains() -> None:
    page = (ROOT / "docs/environments.md").read_text()
    block, tool = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert block == (Path(__file__).parent / "check_again.py").read_text()
    assert len(block.splitlines()) <= 20
    assert tool in (Path(__file__).parent / "own_tools.py").read_text()


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ("environments.check_again.CheckTwice", "CheckTwice"),
        ("environments.check_again.Response", "not a subclass"),
    ],
)
def test_it_is_checked_before_anything_starts(environment: str, message: str) -> None:
    tree = {
        "model": {"path": str(ROOT / "assets/tiny-adder")},
        "rollout": {"environment": environment, "max_prompt_tokens": 16, "max_new_tokens": 32},
        "data": {"source": "arithmetic"},
        "reward": {"verifier": "arithmetic"},
    }
    with pytest.raises(ConfigError, match=message) as error:
        read_inputs(validate(tree, "test"))
    assert error.value.where == "rollout.environment"
