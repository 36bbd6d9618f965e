"""A folder's weights as engines take them: whole, in buckets of bounded size, cast, and proven to
have arrived."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.models import save_model
from support.runs import ROOT
from transformers import AutoModelForCausalLM

from megatron_stare.cluster.engines_alone import FolderWeights
from megatron_stare.cluster.inline import InlineWorkers
from megatron_stare.errors import DataError
from megatron_stare.models import read_shape
from megatron_stare.rollout.engines.local import LocalEngine
from megatron_stare.rollout.fleet.engine_pool import EnginePool, SyncError
from megatron_stare.weights.sync.stream import tensor_checksum


class Held(LocalEngine):
    """Engine that is told of buckets by number, as an engine's worker is."""

    def bring_up(self):
        return self.model_info()

    def expect_buckets(self, layouts):
        self.expected = layouts

    def update_weights(self, number, flat):  # type: ignore[override]
        super().update_weights(self.expected[number].tensors(flat))


def weights_of(
    folder: Path, dtype: torch.dtype = torch.float32, bucket_bytes: int = 20_000
) -> FolderWeights:
    return FolderWeights(folder, read_shape(folder), dtype, bucket_bytes, lambda value: value)


@pytest.mark.parametrize("family", ["qwen2", "qwen2_tied", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engines_hold_what_the_folder_holds(tmp_path: Path, family: str, dtype: str) -> None:
    save_model(tmp_path / "model", family)
    engine = Held(str(tmp_path / "model"), dtype=dtype)
    sent = weights_of(tmp_path / "model", getattr(torch, dtype))
    assert len(sent.layouts) > 3
    assert max(layout.nbytes for layout in sent.layouts if len(layout.slots) > 1) <= 20_000
    EnginePool(InlineWorkers([engine])).update_weights(7, sent)
    assert engine.model_info().weight_version == 7
    wanted = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=getattr(torch, dtype)
    ).state_dict()
    held = engine._model.state_dict()  # type: ignore[union-attr]
    assert held.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert tensor_checksum(held[name]) == tensor_checksum(tensor), name


def test_what_did_not_arrive_is_found() -> None:
    class Deaf(Held):
        """Takes the first bucket for all of its values, and says so of none."""

        def update_weights(self, number, flat):
            super().update_weights(number, flat if number else torch.zeros_like(flat))

    folder = ROOT / "assets/tiny-adder"
    with pytest.raises(SyncError, match="holds other values than the trainer sent"):
        EnginePool(InlineWorkers([Deaf(str(folder))])).update_weights(1, weights_of(folder))


def test_a_folder_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen2")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))
    with pytest.raises(DataError, match="missing: the tensor"):
        weights_of(tmp_path)
