"""The example of docs/algorithms/own_method.md: a method in a file of its own, named by its dotted path."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from token_batches import by_sequence, loss_and_gradient, token_batch

from megatron_stare.errors import ConfigError
from megatron_stare.methods import build_method

NAME = "my_method.MyMethod"
REWARDS = [1.0, 0.0, 0.0, 1.0]


def test_it_is_found_by_its_dotted_path_and_refuses_what_it_does_not_know() -> None:
    assert build_method({"name": NAME, "strength": 2}).strength == 2  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="did you mean 'strength'"):
        build_method({"name": NAME, "strenght": 2})


def test_strength_0_is_grpo() -> None:
    mine, grpo = build_method({"name": NAME, "strength": 0}), build_method({"name": "grpo"})
    batch = token_batch(REWARDS, method=grpo)
    torch.testing.assert_close(loss_and_gradient(mine, batch), loss_and_gradient(grpo, batch))


def test_it_weighs_by_surprisal_and_is_exact_over_micro_batches() -> None:
    method = build_method({"name": NAME})
    batch = token_batch(REWARDS, method=method, off_policy=0.0)
    loss, gradient = loss_and_gradient(method, batch)
    _, plain = loss_and_gradient(build_method({"name": "grpo"}), batch)
    surprisal = batch.surprisal
    torch.testing.assert_close(gradient, plain / (1 + surprisal / surprisal.max()))
    torch.testing.assert_close(loss_and_gradient(method, batch, by_sequence(batch))[0], loss)


def test_the_page_shows_the_file() -> None:
    here = Path(__file__).parent
    page = (here.parent.parent / "docs/algorithms/own_method.md").read_text()
    assert (here / "my_method.py").read_text().strip() in page
