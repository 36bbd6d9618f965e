"""Micro-batches move from host to device when a pass comes to them, and nothing moves back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import random_batch, save_model
from torch import Tensor

from megatron_stare.config.schema import BatchConfig, Config, ModelConfig, ParallelConfig
from megatron_stare.megatron.backend import layout as parallel_layout
from megatron_stare.megatron.backend.cpu_backend import backend, device, substituted
from megatron_stare.megatron.batching.microbatch import MicroBatch, RankBatch
from megatron_stare.megatron.batching.sequence_layout import sequence_layout
from megatron_stare.megatron.model.head import Head
from megatron_stare.megatron.model.model import build_model, build_policy, hidden_states, unwrap
from megatron_stare.megatron.step import passes
from megatron_stare.models import cost_of, read_shape
from megatron_stare.ops.plan import PlanRules, plan_micro_batches

# whose tensors nobody can read: a device that must not be waited for
ELSEWHERE = torch.device("meta")


def traffic(rank: int, init: str, path: str, family_packed: bool) -> dict[str, object]:
    """Runs a pass over one micro-batch on a device whose values cannot be read, and notes what it
    does."""
    shape, parallel = read_shape(path), ParallelConfig()
    config = Config(model=ModelConfig(path=path), batch=BatchConfig(packed=family_packed))
    layout = parallel_layout.join(parallel, rank, init, seed=1, timeout_s=60)
    batch = random_batch(3, 10)
    plan = plan_micro_batches(
        batch.lengths.tolist(), PlanRules(1, 60, family_packed, cost=cost_of(shape))
    )
    share = batch.share(plan.branches_of(0))
    ranked = RankBatch(share, plan, 0, ELSEWHERE, sequence_layout(config, layout))
    model = build_model(shape, config.model, parallel, layout)
    model[0].to(ELSEWHERE)
    unwrap(model[0]).rotary_pos_emb.inv_freq = unwrap(model[0]).rotary_pos_emb.inv_freq.to(
        ELSEWHERE
    )
    here = [micro.tokens.device.type for micro in ranked.micro_batches]
    found: dict[str, object] = {"before": here}
    for bounds in (False, True):
        micro = ranked.micro_batches[0].to(ELSEWHERE, bounds=bounds)
        found["moved"] = {
            tensor.device.type
            for tensor in (micro.tokens, micro.positions, micro.rows, micro.targets)
        }
        try:
            with backend():
                hidden = hidden_states(model[0], micro.tokens, micro.positions, micro.packing)
                micro.layout.rows(hidden, micro.rows).sum().backward()
            found[f"bounds {bounds}"] = "nothing was read"
        except (RuntimeError, NotImplementedError) as error:
            found[f"bounds {bounds}"] = str(error)
    parallel_layout.leave()
    return found


def order(rank: int, init: str, path: str) -> list[list[str]]:
    """Records what a log-prob pass and a gradient pass do, in order: a micro-batch is moved, and
    met by the model."""
    shape, parallel = read_shape(path), ParallelConfig()
    config = Config(model=ModelConfig(path=path))
    layout = parallel_layout.join(parallel, rank, init, seed=1, timeout_s=60)
    batch = random_batch(3, 10)
    plan = plan_micro_batches(batch.lengths.tolist(), PlanRules(1, 40, True, cost=cost_of(shape)))
    ranked = RankBatch(
        batch.share(plan.branches_of(0)), plan, 0, device(), sequence_layout(config, layout)
    )
    model = build_policy(shape, config.model, parallel, layout, distributed_optimizer=False)
    head = Head(shape.vocab_size, 1.0, layout)
    move, seen = MicroBatch.to, []

    def moved(self: MicroBatch, *args: Any, **kwargs: Any) -> MicroBatch:
        seen.append("moved")
        return move(self, *args, **kwargs)

    def met(*args: Any) -> Tensor:
        seen.append("met")
        return hidden_states(*args)

    found = []
    with substituted(MicroBatch, "to", moved), substituted(passes, "hidden_states", met):
        passes.compute_log_probs(model, ranked, head)
        found.append(seen.copy())
        seen.clear()
        passes.accumulate_gradients(model, ranked, head, lambda log_prob, *_: (log_prob.sum(), {}))
        found.append(seen.copy())
    parallel_layout.leave()
    return [[str(len(ranked.micro_batches))], *found]


@pytest.mark.distributed
def test_micro_batches_move_when_their_turn_comes(ranks, tmp_path: Path) -> None:
    save_model(tmp_path, "qwen2")
    (((number,), *both),) = ranks.run(order, 1, str(tmp_path))
    assert int(number) > 2
    assert both == [["moved", "met"] * int(number)] * 2


@pytest.mark.distributed
@pytest.mark.parametrize("packed", [True, False])
def test_a_pass_reads_nothing_from_the_device(ranks, tmp_path: Path, packed: bool) -> None:
    save_model(tmp_path, "qwen3")
    (found,) = ranks.run(traffic, 1, str(tmp_path), packed)
    assert found["before"] == ["cpu"] * len(found["before"])
    assert found["moved"] == {"meta"}
    assert found["bounds False"] == "nothing was read"
    # Megatron's rotary embedding reads where packed sequences end: where they lie on the device, it
    # waits for it
    assert ("meta" in found["bounds True"]) == packed
