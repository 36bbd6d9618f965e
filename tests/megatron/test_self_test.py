"""A resume proves that all of the saved state came back: in any layout it passes, and what did not
is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import random_batch, save_model
from support.ranks import RankPool
from support.steps import take_step

from megatron_stare.cluster.trainer_group import StateProof, TrainerGroup, plan_rules
from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.driver.checkpoint_proof import SelfTest, canary_of, differences, layout_of
from megatron_stare.errors import DataError
from megatron_stare.megatron.checkpoint import checkpoint
from megatron_stare.megatron.step.state_sums import RankProof
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.process.versions import COMPILED, computes_on
from megatron_stare.process.workers import Workers
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.rollout.agreement.agreement import canary_batch

pytestmark = pytest.mark.distributed
REFERENCE = {"name": "grpo", "reference_kl": {"coef": 0.1}}


def config_of(path: Path, layout: dict[str, Any], **sections: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(path / "model"), **sections.pop("model", {})},
            "parallel": layout,
            "batch": {"micro_batch_tokens": 128},
            "optimizer": {"lr": 1e-2, "eps": 1e-4, **sections.pop("optimizer", {})},
            "algorithm": {"name": "grpo"},
            **sections,
        }
    )


class Told(Workers):
    """Workers whose answers to each call were given before, and are told as if the ranks were asked
    now."""

    def __init__(self, answers: dict[str, list[Any]]) -> None:
        self._answers = answers

    def __len__(self) -> int:
        return len(self._answers["stage"])

    def start_on(self, worker: int, method: str, *args: Any) -> Any:
        return self._answers[method][worker]

    def wait(self, handles: Any, on_done: Any = None, timeout_s: Any = None) -> list[Any]:
        return list(handles)

    async def result(self, handle: Any) -> Any:
        return handle

    def share(self, value: Any) -> Any:
        return value

    def close(self) -> None: ...


def answers(trainer: Trainer, batch: RolloutBatch) -> dict[str, Any]:
    """Answers of one rank to what `TrainerGroup.prove` and `layout_of` ask."""
    plan = TrainerGroup(
        Told({"stage": [0], "data_rank": [0]}), plan_rules(resolve_run(trainer.config))
    )._plan(batch)
    proof: RankProof = trainer.prove(batch.share(plan.branches_of(trainer.data_rank())), plan)
    return {
        "stage": trainer.stage(),
        "data_rank": trainer.data_rank(),
        "place": trainer.place(),
        "prove": proof,
    }


def group(config: Config, told: list[dict[str, Any]]) -> TrainerGroup:
    merged = {name: [each[name] for each in told] for name in told[0]}
    return TrainerGroup(Told(merged), plan_rules(resolve_run(config)))


def saved(
    rank: int, init: str, config: Config, folder: str, steps: int, refresh: bool
) -> dict[str, Any]:
    trainer = Trainer(resolve_run(config), rank, init)
    for number in range(1, steps + 1):
        take_step(trainer, random_batch(number, size=8))
        if refresh:
            trainer.refresh_reference()
    if refresh:
        take_step(trainer, random_batch(steps + 1, size=8))  # the policy goes on from its reference
    told = answers(trainer, canary_batch(canary_of(random_batch(1, size=8))))
    trainer.save(folder)
    trainer.finish_save()
    trainer.close()
    return told


def loaded(
    rank: int, init: str, config: Config, folder: str, harm: Callable[[Trainer, str], None] | None
) -> dict[str, Any]:
    trainer = Trainer(resolve_run(config), rank, init)
    if harm is None:
        trainer.load(folder)
    else:
        harm(trainer, folder)
    told = answers(trainer, canary_batch(canary_of(random_batch(1, size=8))))
    trainer.close()
    return told


def all_but_the_weights(trainer: Trainer, folder: str) -> None:
    """The optimizer and all else are loaded; the weights are those the run started from."""
    before = [
        weight.detach().clone() for chunk in trainer.policy.model for weight in chunk.parameters()
    ]
    trainer.load(folder)
    now = [weight for chunk in trainer.policy.model for weight in chunk.parameters()]
    with torch.no_grad():
        for weight, kept in zip(now, before, strict=True):
            weight.copy_(kept)


def weights_alone(trainer: Trainer, folder: str) -> None:
    """The optimizer is a fresh one."""
    checkpoint.load_weights(folder, trainer.policy.model)


def one_rank_of_another_step(trainer: Trainer, folder: str) -> None:
    """The last rank keeps its moments of a step that it took by itself."""
    trainer.load(folder)
    inner = trainer.policy.optimizer.chained_optimizers[-1].optimizer
    if trainer.policy.layout.rank == trainer.policy.layout.world - 1:
        state = next(iter(inner.state.values()))
        state["exp_avg"].mul_(1.001)


def reference_as_it_began(trainer: Trainer, folder: str) -> None:
    assert trainer.policy.reference is not None
    before = [
        weight.detach().clone()
        for chunk in trainer.policy.reference.model
        for weight in chunk.parameters()
    ]
    trainer.load(folder)
    for weight, kept in zip(
        [weight for chunk in trainer.policy.reference.model for weight in chunk.parameters()],
        before,
        strict=True,
    ):
        weight.data.copy_(kept)


def reference_of_other_weights(trainer: Trainer, folder: str) -> None:
    """The folder that a fixed reference is read from has changed."""
    trainer.load(folder)
    assert trainer.policy.reference is not None
    for chunk in trainer.policy.reference.model:
        for weight in chunk.parameters():
            weight.data.mul_(1.01)


def padding_that_counts(trainer: Trainer, folder: str) -> None:
    """The rows that pad the vocabulary are words that can be said."""
    trainer.load(folder)
    head = trainer.policy.head
    object.__setattr__(head, "vocab_size", head.vocab_size + 2)


def checked(
    writers: RankPool,
    tmp_path: Path,
    save: Config,
    load: Config,
    harm: Any = None,
    refresh: bool = False,
) -> tuple[list[str], SelfTest]:
    """Saves a run with its self-test and loads it. Returned are the differences that the self-test
    finds, and the self-test."""
    save_model(tmp_path / "model", "qwen2_tied")
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    before = writers.run(saved, save.parallel.world_size, save, str(folder), 2, refresh)
    test = SelfTest.make(group(save, before), save, random_batch(1, size=8))
    (folder / "self_test.json").write_bytes(test.to_bytes())
    read = SelfTest.read(folder)
    assert read == test  # bit for bit
    after = writers.run(loaded, load.parallel.world_size, load, str(folder), harm)
    now = SelfTest.make(group(load, after), load, random_batch(1, size=8))
    same = test.layout == now.layout
    assert same == (save.parallel == load.parallel)
    return differences(test.proof, now.proof, same_layout=same, dtype=load.model.dtype), test


LAYOUTS = [
    pytest.param({"tensor": 2}, {"tensor": 2}, False, marks=pytest.mark.slow),
    ({"data": 2}, {"data": 2}, True),
    ({"tensor": 2}, {"pipeline": 2}, False),
    pytest.param({"data": 2}, {}, True, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(
    ("save", "load", "distributed"), LAYOUTS, ids=["tp2-tp2", "dp2-dp2", "tp2-pp2", "dp2-one"]
)
def test_what_came_back_passes_in_any_layout(
    writers: RankPool, tmp_path: Path, save: dict[str, int], load: dict[str, int], distributed: bool
) -> None:
    optimizer = {"distributed": distributed}
    found, test = checked(
        writers,
        tmp_path,
        config_of(tmp_path, save, optimizer=optimizer),
        config_of(tmp_path, load, optimizer=optimizer),
    )
    assert found == []
    assert len(test.proof.log_probs["policy"]) == sum(len(each) - 1 for each in test.sequences) > 16
    assert test.proof.counts == {"steps of Adam": 2, "updates of the schedule": 2}
    sums = test.proof.sums
    assert {"policy", "optimizer"} == {name.partition(":")[0] for name in sums}
    assert sum("exp_avg_sq" in name for name in sums) == sum(
        name.startswith("policy: ") for name in sums
    )
    assert all(
        one > 0 for name, (one, _) in sums.items() if "exp_avg" in name and "bias" not in name
    )


@pytest.mark.wide
@pytest.mark.parametrize(
    ("harm", "load", "said"),
    [
        (
            all_but_the_weights,
            {"data": 2},
            ["log-probs of the policy differ at", "policy: decoder."],
        ),
        (weights_alone, {"data": 2}, ["steps of Adam: 2 were saved, 0 are there", "exp_avg"]),
        (one_rank_of_another_step, {"data": 2}, ["optimizer: optimizer.state.exp_avg."]),
        (padding_that_counts, {"tensor": 2}, ["log-probs of the policy differ at"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_did_not_come_back_is_named(
    writers: RankPool, tmp_path: Path, harm: Any, load: dict[str, int], said: list[str]
) -> None:
    save = config_of(tmp_path, {"data": 2}, optimizer={"distributed": True})
    found, _ = checked(
        writers, tmp_path, save, config_of(tmp_path, load, optimizer={"distributed": True}), harm
    )
    for each in said:
        assert any(each in line for line in found), found
    if harm is one_rank_of_another_step:  # nothing but one tensor of one rank
        assert len(found) == 1


def test_a_reference_that_moved_and_was_not_restored(writers: RankPool, tmp_path: Path) -> None:
    config = config_of(tmp_path, {}, algorithm=REFERENCE, model={"reference_refresh_every": 1})
    found, test = checked(writers, tmp_path, config, config, reference_as_it_began, refresh=True)
    assert test.proof.log_probs.keys() == {"policy", "reference policy"}
    assert test.proof.log_probs["policy"] != test.proof.log_probs["reference policy"]
    assert any("log-probs of the reference policy differ at" in line for line in found)
    assert all("reference policy" in line for line in found)


def test_a_fixed_reference_that_changed_is_named(writers: RankPool, tmp_path: Path) -> None:
    config = config_of(tmp_path, {}, algorithm=REFERENCE)
    (found,), test = checked(writers, tmp_path, config, config, reference_of_other_weights)
    assert "log-probs of the reference policy differ at" in found
    assert not any("reference" in name for name in test.proof.sums)  # read from its folder


def test_other_code_is_held_to_rounding_and_the_same_to_the_bit(tmp_path: Path) -> None:
    """An upgrade of this package or of what it computes with makes sums in another order, in the
    same layout."""
    save_model(tmp_path / "model", "qwen2_tied")
    config = config_of(tmp_path, {})
    moved = StateProof({"policy": [-1.0, -2.0]}, {}, {})

    def told(place: str, log_probs: list[float]) -> TrainerGroup:
        proof = RankProof({"policy": (torch.arange(2), torch.tensor(log_probs))}, {}, {})
        return group(config, [{"stage": 0, "data_rank": 0, "place": place, "prove": proof}])

    before = SelfTest(layout_of(told("a CPU, code 1", [0, 0]), config), [[1, 2, 3]], moved)
    before.check(told("a CPU, code 2", [-1.0 + 5e-6, -2.0]), config, "step 2")
    before.check(told("a CPU, code 1", [-1.0, -2.0]), config, "step 2")
    with pytest.raises(DataError, match="in the same layout all must be equal"):
        before.check(told("a CPU, code 1", [-1.0 + 5e-6, -2.0]), config, "step 2")
    with pytest.raises(DataError, match="log-probs of the policy differ"):
        before.check(told("a CPU, code 2", [-1.0 + 5e-5, -2.0]), config, "step 2")
    place = f"a GPU, {COMPILED}, code 1"
    compiled = SelfTest(layout_of(told(place, [0, 0]), config), [[1, 2, 3]], moved)
    compiled.check(told(place, [-1.0 + 5e-6, -2.0]), config, "step 2")
    with pytest.raises(DataError, match="log-probs of the policy differ"):
        compiled.check(told(place, [-1.0 + 5e-5, -2.0]), config, "step 2")


def test_a_device_with_compiled_functions_is_described_as_such() -> None:
    assert COMPILED in computes_on(compiled=True) and COMPILED not in computes_on()
