"""Numbers of single tokens are exact against plain transformers, equal in every layout, and whole
or refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from support.models import save_model
from support.ranks import RankPool
from support.steps import log_prob_pass
from test_methods_in_training import TEMPERATURE, batch_of, config_of, scored
from transformers import AutoModelForCausalLM

from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.records.batch_statistics import top_k_count
from megatron_stare.records.token_numbers import TokenNumbers, of_responses, spread

AMPLIFY, ATTENUATE, SHARE = 3.0, 0.2, 0.3
STARE = {
    "name": "stare",
    "variant": "C2",
    "amplify": AMPLIFY,
    "attenuate": ATTENUATE,
    "share": SHARE,
    "entropy_target": None,
}
WATCHED = (0, 1, 5, 8, 10, 12)  # in both mini-batches; 8 is cut off, 10 to 12 hold an observation
FORECAST = {"observability": {"entropy_forecast": True, "measured_every": 0}}


def numbers_of(rank: int, init: str, config: Config, watched: Sequence[int]) -> list[TokenNumbers]:
    """Numbers that this rank has of the watched samples after all updates of a batch."""
    trainer = Trainer(resolve_run(config), rank, init)
    log_prob_pass(trainer, trainer.method.judge(batch_of(1)))
    trainer.measure(trainer.method.initial_state())
    for number in range(config.batch.updates):
        trainer.update(number, None, watched)
    found = trainer.token_numbers()
    trainer.close()
    return found


def joined(
    ranks: RankPool, world: int, config: Config, watched: Sequence[int]
) -> dict[int, TokenNumbers]:
    """The numbers of whole responses, as the driver joins them."""
    found = ranks.run(numbers_of, world, config, watched)
    masks = {sample: batch_of(1).trajectories[sample].loss_mask for sample in watched}
    return of_responses([part for parts in found for part in parts], masks)


@pytest.mark.distributed
def test_numbers_are_those_of_the_model_and_of_the_method(ranks: RankPool, tmp_path: Path) -> None:
    save_model(tmp_path, "qwen2")
    config = config_of(tmp_path, STARE, 1.0, **FORECAST)
    batch = resolve_run(config).method.judge(batch_of(1))
    every = range(batch.size)
    found = joined(ranks, 1, config, every)
    policy = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    log_prob, entropy = (
        each.split(batch.response_lengths.tolist()) for each in scored(policy, batch)[:2]
    )
    assert batch.advantages is not None and batch.carries_loss is not None
    for mini_batch in (range(7), range(7, 13)):  # what is selected is selected within one
        surprisals: dict[tuple[float, bool], list[float]] = {}
        for sample in mini_batch:
            numbers, trajectory = found[sample], batch.trajectories[sample]
            trained, counts = trajectory.loss_mask, bool(batch.carries_loss[sample])
            torch.testing.assert_close(
                numbers.log_prob[trained].double(), log_prob[sample][trained], atol=2e-5, rtol=1e-4
            )
            torch.testing.assert_close(
                numbers.entropy[trained].double(), entropy[sample][trained], atol=2e-5, rtol=1e-4
            )
            assert numbers.log_prob[~trained].isnan().all() and not numbers.selected[~trained].any()
            advantage = batch.advantages[sample].float()
            assert (numbers.advantage[trained] == advantage).all()
            side = {1: AMPLIFY, 0: 1.0, -1: ATTENUATE}
            for number in trained.nonzero().squeeze(1).tolist():
                chosen, weight = int(numbers.selected[number]), float(numbers.weight[number])
                if not advantage:
                    assert weight != weight and chosen == 0
                    continue
                assert chosen in (0, advantage.sign()) and (counts or not chosen)
                assert weight == pytest.approx(side[chosen] if counts else 0.0, rel=1e-5)
                if counts:
                    key = float(advantage.sign()), bool(chosen)
                    surprisals.setdefault(key, []).append(-float(numbers.log_prob[number]))
        for sign in (1.0, -1.0):
            picked, left = surprisals[sign, True], surprisals[sign, False]
            assert len(picked) == int(top_k_count(torch.tensor(len(picked) + len(left)), SHARE))
            assert min(picked) >= max(left)
    rare = torch.cat([found[s].rare[batch.trajectories[s].loss_mask] for s in every])
    assert set(rare.tolist()) == {0, 1}
    assert TEMPERATURE != 1  # the numbers are those of the distribution that is sampled


@pytest.mark.distributed
@pytest.mark.parametrize(
    "layout",
    [
        {"tensor": 2, "context": 2},
        pytest.param({"pipeline": 2, "data": 2}, marks=pytest.mark.slow),
        pytest.param({"context": 2, "data": 2}, marks=pytest.mark.slow),
        pytest.param({"tensor": 2, "pipeline": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_layout_finds_what_one_rank_finds(
    ranks: RankPool, tmp_path: Path, layout: dict[str, int]
) -> None:
    save_model(tmp_path, "qwen2")
    alone = joined(ranks, 1, config_of(tmp_path, STARE, 1.0, **FORECAST), WATCHED)
    found = joined(ranks, 4, config_of(tmp_path, STARE, 1.0, **FORECAST, parallel=layout), WATCHED)
    assert list(found) == list(alone) == list(WATCHED)
    for sample, want in alone.items():
        for field in fields(TokenNumbers):
            got, wanted = getattr(found[sample], field.name), getattr(want, field.name)
            torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4, equal_nan=True)


@pytest.mark.distributed
def test_a_lagged_gate_gives_the_numbers_of_the_training_pass(
    ranks: RankPool, tmp_path: Path
) -> None:
    """There is no log-prob pass before the update: its log-probs are known after it alone."""
    save_model(tmp_path, "qwen2")
    once = {"batch": {"mini_batch_prompts": None, "epochs": 1}}
    lagged = {"statistics": {"surprisal": "rollout", "gate": "lagged"}}
    alone = joined(ranks, 1, config_of(tmp_path, {"name": "grpo"}, 1.0, **once), WATCHED)
    found = joined(ranks, 1, config_of(tmp_path, {"name": "grpo"}, 1.0, **once, **lagged), WATCHED)
    for sample, want in alone.items():
        for field in fields(TokenNumbers):
            torch.testing.assert_close(
                getattr(found[sample], field.name), getattr(want, field.name), equal_nan=True
            )
        # GRPO leaves every advantage as it is, or out of the loss
        known = want.weight[~want.weight.isnan()]
        assert (known.sub(known.round()).abs() < 1e-5).all() and (
            want.rare[~want.log_prob.isnan()] == -1
        ).all()


def part(positions: list[int], sample: int = 3) -> TokenNumbers:
    m = len(positions)
    numbers = [torch.arange(m, dtype=torch.float32) for _ in range(4)]
    flags = [torch.zeros(m, dtype=torch.int8) for _ in range(2)]
    return TokenNumbers(torch.full((m,), sample), torch.tensor(positions), *numbers, *flags)


def test_parts_that_lack_a_token_or_hold_one_twice_are_refused() -> None:
    mask = torch.tensor([True, True, False, True])
    whole = of_responses([part([3]), part([1, 0]), part([0], sample=4)], {3: mask})
    assert whole[3].log_prob[[0, 1, 3]].tolist() == [1.0, 0.0, 0.0] and bool(
        whole[3].log_prob[2].isnan()
    )
    for parts in ([part([0, 1])], [part([0, 1, 3]), part([3])], [part([0, 1, 2, 3])]):
        with pytest.raises(RuntimeError, match="sample 3"):
            of_responses(parts, {3: mask})


def test_samples_are_spread_over_the_batch() -> None:
    assert spread(10, 4) == [0, 2, 5, 7] and spread(2, 4) == [0, 1] and spread(3, 0) == []
