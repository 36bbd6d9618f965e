"""Workers close an engine that they brought up, return results with their text, and ask no servers
where none are."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.models import save_model
from transformers import AutoTokenizer

from megatron_stare.config.schema import Config
from megatron_stare.errors import UserError
from megatron_stare.records.batch import SamplingParams
from megatron_stare.rollout.engines.engine import GenerateRequest
from megatron_stare.rollout.engines.engine_worker import EngineWorker
from megatron_stare.rollout.engines.state import EngineState
from megatron_stare.weights.sync.stream_plan import BucketLayout, Slot

ADDER = Path(__file__).parents[2] / "assets" / "tiny-adder"


def test_an_engine_in_process_says_that_it_has_no_servers(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen2_tied")
    worker = EngineWorker(Config.model_validate({"model": {"path": str(tmp_path)}}), 0)
    assert not worker.bring_up().served
    for call in (
        lambda: worker.prompt_log_probs([[1, 2]]),
        worker.release_memory,
        worker.resume_memory,
        worker.memory_mb,
    ):
        with pytest.raises(UserError, match="LocalEngine has no server"):
            call()
    worker.close()


def test_a_worker_closes_the_engine_that_it_brought_up_and_none_before() -> None:
    for brought_up in (True, False):
        worker = EngineWorker(Config.model_validate({"model": {"path": str(ADDER)}}), 0)
        if brought_up:
            assert worker.bring_up().state is not EngineState.DEAD
        worker.close()
        if brought_up:
            assert worker.model_info().state is EngineState.DEAD


@pytest.mark.parametrize("kept", [True, False], ids=["stop token said", "stop token left out"])
def test_results_leave_the_worker_with_their_text(kept: bool) -> None:
    """Without the token that stopped a response, though `;` is not special to its tokenizer, and
    with all of it where the length cut it."""
    worker = EngineWorker(Config.model_validate({"model": {"path": str(ADDER)}}), 0)
    worker.bring_up()
    worker.begin_weight_update(1)
    names, tensors = zip(*load_file(ADDER / "model.safetensors").items(), strict=True)
    ends = list(accumulate(tensor.numel() for tensor in tensors))
    slots = [
        Slot(name, tuple(tensor.shape), end - tensor.numel())
        for name, tensor, end in zip(names, tensors, ends, strict=True)
    ]
    worker.expect_buckets([BucketLayout(torch.float32, tuple(slots))])
    worker.update_weights(0, torch.cat([tensor.flatten() for tensor in tensors]))
    worker.end_weight_update()
    tokenizer = AutoTokenizer.from_pretrained(ADDER)
    semicolon = tokenizer.convert_tokens_to_ids(";")
    params = SamplingParams(1.0, 24, seed=3, step=2, stop_token_ids=() if kept else (semicolon,))
    prompt = tuple(tokenizer("12+7=").input_ids)
    found = worker.advance(
        [GenerateRequest(f"{i}:0", prompt, i, 0) for i in range(16)], params, 0.0
    )
    assert {result.finish_reason for result in found} == (
        {"length"} if kept else {"stop", "length"}
    )
    for result in found:
        ids = result.output_ids.tolist()
        said = ids[:-1] if result.finish_reason == "stop" else ids
        assert result.text == tokenizer.decode(said, skip_special_tokens=True)
        assert result.finish_reason == "length" or (ids[-1] == semicolon and ";" not in result.text)
    worker.close()
