"""Steps that are recorded leave traces of the ranks, and change nothing."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from megatron_stare.config.load import load_config
from megatron_stare.errors import ConfigError
from megatron_stare.planning.preflight import check_run
from megatron_stare.train import train

INLINE = ["runtime.runner=inline", "parallel.tensor=1", "eval.prompts=0", "batch.prompts=4"]


@pytest.mark.wide
def test_a_recorded_step_leaves_a_trace_and_the_same_weights(tmp_path: Path) -> None:
    def weights(name: str, *settings: str) -> bytes:
        of = [*INLINE, f"run.dir={tmp_path / name}", "run.steps=3", *settings]
        run_dir = train(load_config("configs/quickstart.yaml", of))
        return (run_dir / "hf/model.safetensors").read_bytes()

    recorded = weights("recorded", "observability.profile_steps=[2]")
    (trace,) = (tmp_path / "recorded/profile").iterdir()
    assert trace.name == "step_000002_rank_0.json.gz"
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = [event.get("name") for event in events]
    assert names.count("log_probs") == 1 and names.count("update") >= 1
    assert any("mm" in str(name) for name in names)  # operators too
    assert recorded == weights("plain")
    assert load_file(tmp_path / "plain/hf/model.safetensors")
    assert not (tmp_path / "plain/profile").exists()


@pytest.mark.parametrize(
    ("setting", "what"),
    [
        ("observability.profile_ranks=[1]", "there is no rank 1: the layout has 1"),
        ("observability.profile_ranks=[-1]", "there is no rank -1"),
        ("observability.profile_steps=[4]", "there is no step 4: the run has 3"),
        ("observability.profile_steps=[0]", "there is no step 0"),
    ],
)
def test_ranks_and_steps_that_there_are_not_are_refused(setting: str, what: str) -> None:
    config = load_config("configs/quickstart.yaml", [*INLINE, "run.steps=3", setting])
    with pytest.raises(ConfigError, match=what):
        check_run(config)
