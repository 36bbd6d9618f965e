"""A prompt that goes through the model once for all its responses: the same loss and gradients, and
fewer tokens."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import random_batch, save_model
from support.steps import log_prob_pass, take_step

from megatron_stare.config.performance import shares_prompts
from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.megatron.batching import sequence_layout as sequences
from megatron_stare.megatron.batching.packing import pack, shared_columns
from megatron_stare.megatron.trainer import Trainer

CPU = torch.device("cpu")


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), min_size=1, max_size=9),
    st.sampled_from([1, 2, 4]),
)
def test_every_column_stands_where_its_token_does(
    samples: list[tuple[int, int]], multiple: int
) -> None:
    """Samples are given by group and response length: enough columns are fed, and no more than
    `multiple` asks for."""
    # a length of its own for each group
    prompts = torch.tensor([2 + group for group, _ in samples])
    lengths = [2 + group + response for group, response in samples]
    padding = -sum(lengths) % multiple
    sample = torch.cat(
        [torch.full((n,), i) for i, n in enumerate(lengths)] + [torch.full((padding,), -1)]
    )
    token = torch.cat([torch.arange(n) for n in [*lengths, padding]])
    groups = torch.tensor([group for group, _ in samples])
    shared = shared_columns(sample, token, prompts, groups, multiple)

    def name(column: int) -> tuple[int, ...]:
        """Name of what the model computes at a column: the same for copies of a prompt, else the
        column's own."""
        i, t = int(sample[column]), int(token[column])
        return (int(groups[i]), t) if i >= 0 and t < prompts[i] else (-1, column)

    assert [name(c) for c in range(len(sample))] == [
        name(int(shared.fed[s])) for s in shared.stands
    ]
    assert shared.stands[shared.fed].tolist() == list(range(len(shared.fed)))
    assert (
        shared.fed.tolist() == sorted(set(shared.fed.tolist())) and len(shared.fed) % multiple == 0
    )
    fewest = len({name(c) for c in range(len(sample))})
    assert fewest <= len(shared.fed) < fewest + multiple
    packing = pack([*lengths, *([padding] if padding else [])], CPU, shared=shared)
    assert packing.queries is not None
    fed = torch.arange(len(shared.fed))
    assert torch.equal(
        packing.queries.collect(torch.cat([x.flatten() for x in packing.queries.spread(fed)])), fed
    )


def test_a_shared_token_has_the_gradients_of_all_its_places() -> None:
    sample, token = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([0, 1, 2, 0, 1, 2])
    shared = shared_columns(sample, token, torch.tensor([2, 2]), torch.tensor([7, 7]), 1)
    assert shared.fed.tolist() == [0, 1, 2, 5] and shared.stands.tolist() == [0, 1, 2, 0, 1, 3]
    spread = pack([3, 3], CPU, shared=shared).queries
    assert spread is not None
    pushes = torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]])
    for collected, want in ((False, [11.0, 22.0, 3.0, 30.0]), (True, [1.0, 2.0, 3.0, 30.0])):
        tokens = torch.zeros(4, 1, requires_grad=True)
        (places,) = spread.spread(tokens, collected=collected)
        (places[..., 0] * pushes).sum().backward()
        assert tokens.grad is not None and tokens.grad[:, 0].tolist() == want


def config_of(folder: Path, share_prompts: bool, **sections: dict[str, Any]) -> Config:
    tree: dict[str, Any] = {
        "run": {"steps": 2},
        "model": {"path": str(folder)},
        "algorithm": {"name": "stare", "variant": "C2", "entropy_target": 3.0},
        "batch": {"prompts": 3, "samples_per_prompt": 4, "micro_batch_tokens": 120},
        "rollout": {"max_prompt_tokens": 8, "max_new_tokens": 12},
        "performance": {"share_prompts": share_prompts},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return Config.model_validate(tree)


def step_of(
    rank: int, init: str, config: Config
) -> tuple[Any, list[torch.Tensor], tuple[int, int]]:
    """The metrics of a step, its gradients, and how many of the rank's tokens went through a layer
    in one pass."""
    trainer = Trainer(resolve_run(config), rank, init)
    batch = random_batch(3, 12, group=4)
    log_prob_pass(trainer, batch)
    assert trainer.step is not None
    tokens = sum(micro.tokens.numel() for micro in trainer.step.batch.micro_batches)
    metrics, _ = take_step(trainer, batch)
    gradients = [p.main_grad.clone() for chunk in trainer.policy.model for p in chunk.parameters()]
    own = sum(
        int(batch.lengths[i]) for i in trainer.step.batch.plan.branches_of(trainer.data_rank())
    )
    trainer.close()
    return metrics, gradients, (tokens, own)


LAYOUTS: list[Any] = [
    pytest.param("qwen2", {}, id="one-rank"),
    pytest.param("qwen3", {"parallel": {"tensor": 2, "sequence": True}}, id="tp2-sp"),
    pytest.param("qwen2_tied", {"parallel": {"pipeline": 2, "data": 2}}, id="pp2-dp2"),
    pytest.param(
        "qwen2",
        {"model": {"recompute": "full"}, "batch": {"micro_batch_tokens": 60}},
        id="recompute",
    ),
    pytest.param(
        "qwen3_moe", {"parallel": {"data": 2, "expert": 2}}, id="ep2", marks=pytest.mark.slow
    ),
]


@pytest.mark.wide
@pytest.mark.distributed
@pytest.mark.parametrize(("family", "sections"), LAYOUTS)
def test_the_same_step_with_fewer_tokens(
    ranks, tmp_path: Path, family: str, sections: dict[str, Any]
) -> None:
    save_model(tmp_path, family)
    apart, together = (config_of(tmp_path, share, **sections) for share in (False, True))
    ways = [ranks.run(step_of, config.parallel.world_size, config) for config in (apart, together)]
    for (metrics, gradients, (all_tokens, _)), (
        shared_metrics,
        shared_gradients,
        (tokens, own),
    ) in zip(*ways, strict=True):
        assert tokens < own <= all_tokens
        torch.testing.assert_close(shared_gradients, gradients, atol=1e-6, rtol=1e-5)
        for one, other in zip(metrics, shared_metrics, strict=True):
            assert other == pytest.approx(one, rel=1e-5, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize(
    "sections",
    [
        {"parallel": {"context": 2}},
        {"parallel": {"pipeline": 2, "virtual_pipeline": 2}},
        {"batch": {"packed": False}},
        {"moe": {"routing_replay": True}},
        {"performance": {"share_prompts": False}},
    ],
    ids=["context", "virtual-pipeline", "padded", "replay", "off"],
)
def test_not_where_a_pass_needs_them_apart(tmp_path: Path, sections: dict[str, Any]) -> None:
    assert shares_prompts(config_of(tmp_path, True))
    assert not shares_prompts(config_of(tmp_path, True, **sections))


@pytest.mark.parametrize("theirs", [False, True])
def test_not_with_an_attention_that_takes_whole_sequences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, theirs: bool
) -> None:
    """Whoever asks for the layout: the trainer, and the checks that run on a GPU."""
    one_rank: Any = SimpleNamespace(tp=1, dp=1, cp=1, cp_rank=0)
    monkeypatch.setattr(sequences, "has_transformer_engine", lambda: theirs)
    assert (
        sequences.sequence_layout(config_of(tmp_path, True), one_rank).share_prompts is not theirs
    )
