"""A response of 32,768 tokens on a CPU: padded as packed, and over two context-parallel times two
tensor-parallel ranks as on one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import forking_context
from support.runs import ROOT
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen2Config, Qwen2ForCausalLM

from megatron_stare.cluster.trainer_group import plan_rules
from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.megatron.export.export import export_gradients
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.ops.plan import plan_mini_batches
from megatron_stare.records.batch import Prompt
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.records.trajectory import sampled_trajectory

RESPONSE, VOCAB, CHUNK, TIMEOUT_S = 32_768, 4096, 512, 1500


class RowsOfLogits(TorchDispatchMode):
    """Counts the rows of the largest tensor with as many columns as this rank has of the
    vocabulary."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.columns, self.most = columns, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, Tensor) and x.dim() and x.shape[-1] == self.columns:
                self.most = max(self.most, x.numel() // self.columns)
        return made


def long_and_short(vocabulary: int) -> RolloutBatch:
    generator = torch.Generator().manual_seed(0)
    prompt, samples = Prompt(0, "0", "", "", (5, 6, 7)), []
    for number, length in enumerate((RESPONSE, 9)):
        ids = torch.randint(2, vocabulary, (length,), generator=generator).tolist()
        sample = sampled_trajectory(prompt, number, ids, [-8.0] * length)
        sample.reward, sample.reward_status = float(number == 0), "ok"
        samples.append(sample)
    return RolloutBatch.from_trajectories(samples, step=1)


def step_of(config: Config, rank: int, init: str, vocabulary: int) -> dict[str, Any]:
    """This rank's log-probs, what it reported of the step, and the most rows of logits it held at
    once."""
    torch.set_num_threads(1)
    trainer = Trainer(resolve_run(config), rank, init)
    batch = trainer.method.judge(long_and_short(vocabulary))
    plan = plan_mini_batches(
        batch.lengths.tolist(), batch.groups.tolist(), plan_rules(resolve_run(config))
    )
    with RowsOfLogits(vocabulary // config.parallel.tensor) as rows:
        trainer.compute_log_probs(batch.share(plan.branches_of(trainer.data_rank())), plan)
        trainer.measure(trainer.method.initial_state())
        assert trainer.step.measured is not None
        tokens = trainer.step.measured.tokens
        result = trainer.update()
    policy = trainer.policy
    found = {
        "index": tokens.index,
        "log_prob": tokens.old_log_prob,
        "metrics": result[0] if result else None,
        "rows": rows.most,
        "micro_batches": plan.micro_batches,
        "gradients": export_gradients(policy.model, policy.shape, policy.layout),
    }
    trainer.close()
    return found


NUMBERS = ("loss/policy", "optimizer/grad_norm", "entropy/mean", "surprisal/mean", "loss/tokens")


def steps(
    model: Path,
    meeting: Path,
    parallel: dict[str, int],
    *,
    packed: bool = True,
    vocabulary: int = VOCAB,
) -> list[dict[str, Any]]:
    """Takes a step on every rank of the layout, and gives what each rank found."""
    config = Config.model_validate(
        {
            "model": {
                "path": str(model),
                "head": "gradient_in_forward",
                "head_chunk_tokens": CHUNK,
            },
            "parallel": parallel,
            "batch": {
                "prompts": 1,
                "samples_per_prompt": 2,
                "micro_batch_tokens": RESPONSE + 64,
                "packed": packed,
            },
            "algorithm": {"name": "stare", "variant": "C2"},
            "observability": {"entropy_forecast": False},
            "runtime": {"timeout_s": float(TIMEOUT_S)},
        }
    )
    world = config.parallel.world_size
    jobs = [
        (config, rank, f"file://{meeting}/{world}-{packed}", vocabulary) for rank in range(world)
    ]
    with forking_context().Pool(world) as pool:
        found = pool.starmap_async(step_of, jobs, chunksize=1).get(timeout=TIMEOUT_S)
    for step in found:
        assert 0 < step["rows"] <= CHUNK
    return found


@pytest.mark.slow
@pytest.mark.distributed
def test_a_long_response_trains_padded_as_packed(tmp_path: Path) -> None:
    """The quickstart's model, with more positions. Packed, both responses stand in one micro-batch;
    padded, each in its own."""
    folder = shutil.copytree(ROOT / "assets/tiny-adder", tmp_path / "model")
    shape = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**shape, "max_position_embeddings": 2 * RESPONSE})
    )
    (alone,), (padded,) = (
        steps(folder, tmp_path, {}, packed=packed, vocabulary=shape["vocab_size"])
        for packed in (True, False)
    )
    assert (alone["micro_batches"], padded["micro_batches"]) == (1, 2)
    order, other = alone["index"].argsort(), padded["index"].argsort()
    assert torch.equal(padded["index"][other], torch.arange(RESPONSE + 9))
    torch.testing.assert_close(padded["log_prob"][other], alone["log_prob"][order])
    assert {name: padded["metrics"][name] for name in NUMBERS} == pytest.approx(
        {name: alone["metrics"][name] for name in NUMBERS}, rel=1e-5, abs=1e-7
    )
    assert padded["gradients"].keys() == alone["gradients"].keys()
    for name, gradient in alone["gradients"].items():
        off = float((padded["gradients"][name] - gradient).abs().max())
        assert off <= 1e-5 * float(gradient.abs().max()), name


@pytest.mark.slow
@pytest.mark.distributed
def test_a_long_response_trains_as_on_one_rank(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    Qwen2ForCausalLM(
        Qwen2Config(vocab_size=VOCAB, max_position_embeddings=2 * RESPONSE, **sizes, **heads)
    ).save_pretrained(tmp_path)
    (alone,), four = (
        steps(tmp_path, tmp_path, parallel) for parallel in ({}, {"context": 2, "tensor": 2})
    )
    everyone = torch.cat([step["index"] for step in four]).sort().values
    # two tensor-parallel ranks
    assert torch.equal(everyone, torch.arange(RESPONSE + 9).repeat_interleave(2))
    for step in four:
        assert RESPONSE // 2 - 8 <= len(step["index"]) <= RESPONSE // 2 + 16
        torch.testing.assert_close(
            step["log_prob"], alone["log_prob"][alone["index"].argsort()][step["index"]]
        )
    (metrics,) = [step["metrics"] for step in four if step["metrics"] is not None]
    assert {name: metrics[name] for name in NUMBERS} == pytest.approx(
        {name: alone["metrics"][name] for name in NUMBERS}, rel=1e-5, abs=1e-7
    )
