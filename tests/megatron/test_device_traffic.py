"""What moves between host and device: micro-batches when a pass comes to them, and nothing back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.models import random_batch, save_model

from megatron_stare.config.schema import BatchConfig, Config, ModelConfig, ParallelConfig
from megatron_stare.megatron import layout as parallel_layout
from megatron_stare.megatron.batching.microbatch import RankBatch
from megatron_stare.megatron.batching.sequence_layout import sequence_layout
from megatron_stare.megatron.cpu_backend import backend
from megatron_stare.megatron.model import build_model, hidden_states, unwrap
from megatron_stare.models import cost_of, read_shape
from megatron_stare.ops.plan import PlanRules, plan_micro_batches

ELSEWHERE = torch.device("meta")  # whose tensors nobody can read: a device that must not be waited for


def traffic(rank: int, init: str, path: str, family_packed: bool) -> dict[str, object]:
    """What a pass over one micro-batch does on a device whose values cannot be read."""
    shape, parallel = read_shape(path), ParallelConfig()
    config = Config(model=ModelConfig(path=path), batch=BatchConfig(packed=family_packed))
    layout = parallel_layout.join(parallel, rank, init, seed=1, timeout_s=60)
    batch = random_batch(3, 10)
    plan = plan_micro_batches(batch.lengths.tolist(), PlanRules(1, 60, family_packed, cost=cost_of(shape)))
    share = batch.share(plan.samples_of(0))
    ranked = RankBatch(share, plan, 0, ELSEWHERE, sequence_layout(config, layout))
    model = build_model(shape, config.model, parallel, layout)
    model[0].to(ELSEWHERE)
    unwrap(model[0]).rotary_pos_emb.inv_freq = unwrap(model[0]).rotary_pos_emb.inv_freq.to(ELSEWHERE)
    here = [micro.tokens.device.type for micro in ranked.micro_batches]
    found: dict[str, object] = {"before": here}
    for bounds in (False, True):
        micro = ranked.micro_batches[0].to(ELSEWHERE, bounds=bounds)
        found["moved"] = {tensor.device.type for tensor in (micro.tokens, micro.positions, micro.rows, micro.targets)}
        try:
            with backend():
                hidden = hidden_states(model[0], micro.tokens, micro.positions, micro.packing)
                micro.layout.rows(hidden, micro.rows).sum().backward()
            found[f"bounds {bounds}"] = "nothing was read"
        except (RuntimeError, NotImplementedError) as error:
            found[f"bounds {bounds}"] = str(error)
    parallel_layout.leave()
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("packed", [True, False])
def test_a_pass_reads_nothing_from_the_device(ranks, tmp_path: Path, packed: bool) -> None:
    save_model(tmp_path, "qwen3")
    (found,) = ranks.run(traffic, 1, str(tmp_path), packed)
    assert found["before"] == ["cpu"] * len(found["before"])
    assert found["moved"] == {"meta"}
    assert found["bounds False"] == "nothing was read"
    # Megatron's rotary embedding reads where packed sequences end: where they lie on the device, it waits for it
    assert ("meta" in found["bounds True"]) == packed
