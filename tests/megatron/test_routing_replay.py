"""Experts that an engine chose are the trainer's: against transformers whose tokens are sent there,
in every layout."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.models import random_batch, save_model
from support.ranks import RankPool
from support.steps import log_prob_pass, take_step
from test_parity import EXPERTS, SEED, SIZE, check, step_of
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config, ParallelConfig
from megatron_stare.driver.agreement_watch import AgreementWatch
from megatron_stare.errors import DataError
from megatron_stare.megatron.step.dump import write_batch
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.rollout.agreement.agreement import AgreementError

LAYERS, NUMBER, EACH = 4, 4, 2  # of the tiny model: layers, experts, experts a token


def some_experts(batch: RolloutBatch) -> Tensor:
    """[T, L, K] other experts for every token and layer; of some tokens unknown, as that of a
    response's last is."""
    generator = torch.Generator().manual_seed(7)
    order = torch.rand(batch.tokens.numel(), LAYERS, NUMBER, generator=generator).argsort(-1)
    experts = order[..., :EACH].to(torch.uint8)
    experts[batch.lengths.cumsum(0) - 1] = 255
    experts[4] = 255
    return experts


FULL, MOE = {"recompute": "full"}, {"recompute": "selective", "recompute_modules": ["moe"]}
BLOCK = {"recompute": "full", "recompute_method": "block", "recompute_layers": 1}


@pytest.mark.wide
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "packed", "recompute"),
    [
        ("one", True, {}),
        ("ep2", False, {}),
        ("tp2-sp-ep2", False, {}),
        ("cp2-ep2", True, {}),
        ("pp2-cp2-ep2", True, FULL),  # forwards and backwards take turns
        pytest.param("pp2-ep2", True, MOE, marks=pytest.mark.slow),
        pytest.param("pp2-ep2", True, BLOCK, marks=pytest.mark.slow),
        pytest.param("pp2-vpp2-cp2-ep2", True, FULL, marks=pytest.mark.slow),
        pytest.param("tp2-sp-pp2-cp2-ep2", True, FULL, marks=pytest.mark.slow),
        pytest.param("tp2-sp-cp2-ep4", False, {}, marks=pytest.mark.slow),
    ],
)
def test_tokens_go_where_the_engine_sent_them(
    ranks: RankPool, tmp_path: Path, name: str, packed: bool, recompute: dict[str, Any]
) -> None:
    save_model(tmp_path, "qwen3_moe")
    experts = some_experts(random_batch(SEED, SIZE))
    check(ranks, tmp_path, EXPERTS[name], 40, packed, experts=experts, recompute=recompute)


@pytest.mark.distributed
def test_gates_that_are_not_renormalised(ranks: RankPool, tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3_moe", norm_topk_prob=False)
    check(ranks, tmp_path, {}, 40, True, experts=some_experts(random_batch(SEED, SIZE)))


@pytest.mark.wide
@pytest.mark.distributed
@pytest.mark.parametrize("name", ["one", "pp2-cp2-ep2"])
def test_gates_with_a_bias_behind_dense_layers(ranks: RankPool, tmp_path: Path, name: str) -> None:
    """Experts that are given for a dense layer, as servers name some there too, are nobody's."""
    save_model(tmp_path, "glm4_moe_air")
    check(ranks, tmp_path, EXPERTS[name], 40, True, experts=some_experts(random_batch(SEED, SIZE)))


@pytest.mark.distributed
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe_air"])
def test_replaying_the_trainers_own_choice_changes_no_bit(
    ranks: RankPool, tmp_path: Path, family: str
) -> None:
    save_model(tmp_path, family)
    chosen = experts_of_transformers(tmp_path, random_batch(SEED, SIZE))
    found = []
    for experts in (None, chosen):
        given = (
            str(tmp_path),
            ParallelConfig(),
            40,
            True,
            False,
            "materialised",
            experts,
            {},
            False,
        )
        found += ranks.run(step_of, 1, *given)  # prompts are not shared in either
    own, replayed = found
    assert torch.equal(own["log_prob"], replayed["log_prob"])
    for name, gradient in own["gradients"].items():
        assert torch.equal(gradient, replayed["gradients"][name]), name


def experts_of_transformers(path: Path, batch: RolloutBatch) -> Tensor:
    """[T, L, K] that plain transformers sends the batch's tokens to."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    found: list[list[Tensor]] = [[] for _ in range(LAYERS)]
    for number, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(
                lambda _, __, out, number=number: found[number].append(out[2])
            )
        else:
            found[number].append(torch.zeros(batch.tokens.numel(), EACH, dtype=torch.int64))
    with torch.no_grad():
        for tokens in batch.tokens.long().split(batch.lengths.tolist()):
            model(tokens[None])
    return torch.stack([torch.cat(each) for each in found], 1).to(torch.uint8)


def trained_with(
    rank: int, init: str, config: Config, experts: Tensor | None
) -> tuple[dict[str, float], Any]:
    """Takes a step with these experts. Returned are its report here, and the error of a batch
    without experts."""
    trainer = Trainer(resolve_run(config), rank, init)
    batch = random_batch(SEED, SIZE)
    batch.experts = experts
    rows, _ = take_step(trainer, batch)
    batch.experts = None
    try:
        log_prob_pass(trainer, batch)
        refusal = None
    except DataError as error:
        refusal = str(error)
    trainer.close()
    return rows[0] if rows else {}, refusal


def config_of(path: Path, replay: bool, parallel: dict[str, Any]) -> Config:
    tree: dict[str, Any] = {
        "model": {"path": str(path)},
        "moe": {"routing_replay": replay},
        "parallel": parallel,
    }
    return Config.model_validate(
        {**tree, "algorithm": {"name": "grpo", "reference_kl": {"coef": 0.1}}}
    )


@pytest.mark.distributed
def test_a_run_replays_in_both_of_its_passes(ranks: RankPool, tmp_path: Path) -> None:
    """The reference has routers of its own, which choose by themselves."""
    save_model(tmp_path, "qwen3_moe")
    experts = some_experts(random_batch(SEED, SIZE))
    ((plain, nothing),) = ranks.run(trained_with, 1, config_of(tmp_path, False, {}), None)
    ((replayed, refusal),) = ranks.run(trained_with, 1, config_of(tmp_path, True, {}), experts)
    assert plain["ratio/max_abs_log"] == replayed["ratio/max_abs_log"] == 0
    assert abs(plain["surprisal/mean"] - replayed["surprisal/mean"]) > 1e-3
    assert plain["reference/kl"] == 0  # the first step's policy is the reference,
    assert replayed["reference/kl"] > 1e-3  # but for its experts
    assert nothing is None
    assert "does not name the experts" in refusal
    assert "routing/differs" not in plain


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name", ["one", "pp2-cp2-ep2", pytest.param("tp2-sp-cp2-dp2-ep4", marks=pytest.mark.slow)]
)
def test_what_the_trainer_would_have_chosen_otherwise_is_counted(
    ranks: RankPool, tmp_path: Path, name: str
) -> None:
    """Over all tokens but the last of a response, in all layers; what is given in another order is
    no other choice."""
    save_model(tmp_path, "qwen3_moe")
    batch = random_batch(SEED, SIZE)
    experts = experts_of_transformers(tmp_path, batch).flip(-1)
    experts[batch.lengths.cumsum(0) - 1] = 255
    config = config_of(tmp_path, True, EXPERTS[name])

    def differs(given: Tensor) -> float:
        found = [
            rows
            for rows, _ in ranks.run(trained_with, config.parallel.world_size, config, given)
            if rows
        ]
        return found[0]["routing/differs"]

    assert differs(experts) == 0
    # in the last layer, behind which no router sees what another expert made of the token
    for token in (0, 5, 20):
        own = experts[token, -1].tolist()
        experts[token, -1, 0] = next(number for number in range(NUMBER) if number not in own)
    assert differs(experts) == pytest.approx(3 / int((experts != 255).sum()), rel=1e-5)


def said_by_the_watch(rank: int, init: str, config: Config) -> str:
    """Words of the error that stops a run whose engine gave every token another log-prob; empty if
    none does."""
    run = resolve_run(config)
    trainer = Trainer(run, rank, init)
    batch = random_batch(SEED, SIZE)
    batch.experts = some_experts(batch) if config.moe.routing_replay else None
    log_prob_pass(trainer, batch)
    ranks: Any = SimpleNamespace(
        compare=lambda temperature=None: trainer.compare((0,), temperature)
    )
    engines: Any = SimpleNamespace(served=True)
    try:
        AgreementWatch(run, ranks, engines).after_log_probs(1)
    except AgreementError as error:
        return str(error)
    finally:
        trainer.close()
    return ""


@pytest.mark.distributed
def test_a_run_that_disagrees_names_routing_where_it_is_not_replayed(
    ranks: RankPool, tmp_path: Path
) -> None:
    save_model(tmp_path / "moe", "qwen3_moe")
    save_model(tmp_path / "dense", "qwen3")

    def said(folder: str, **moe: Any) -> str:
        tree = {
            "model": {"path": str(tmp_path / folder)},
            "moe": moe,
            "rollout": {"engine": "sglang"},
        }
        return ranks.run(
            said_by_the_watch, 1, Config.model_validate({**tree, "sglang": {"canary_prompts": 0}})
        )[0]

    assert "suspect routing first" in said("moe")
    for other in (said("moe", routing_replay=True), said("dense")):
        assert "to blame" in other and "routing" not in other


def test_a_dumped_step_says_where_its_tokens_went(tmp_path: Path) -> None:
    batch = random_batch(SEED, SIZE)
    write_batch(tmp_path / "dense", batch)
    batch.experts = some_experts(batch)
    write_batch(tmp_path / "moe", batch)
    assert "experts" not in load_file(tmp_path / "dense" / "batch.safetensors")
    assert torch.equal(load_file(tmp_path / "moe" / "batch.safetensors")["experts"], batch.experts)
