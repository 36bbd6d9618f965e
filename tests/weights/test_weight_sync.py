"""Trainer to engines through the driver's groups: everything arrives, and what does not is
named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.models import save_model

from megatron_stare.cluster.inline import InlineRunner
from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.rollout.engines.state import EngineState
from megatron_stare.rollout.fleet.engine_pool import SyncError, check_arrived
from megatron_stare.weights.files.hf_folder import HfFolder
from megatron_stare.weights.sync.stream import tensor_checksum


def sync_twice(rank: int, init: str, config: Config) -> dict[str, Any]:
    """An inline run's first two weight syncs; what the engines say then, or the error of the
    second."""
    runner = InlineRunner(resolve_run(config))
    try:
        runner.engines.update_weights(0, runner.trainers.export())
        try:
            runner.engines.update_weights(1, runner.trainers.export())
        except SyncError as error:
            return {"error": str(error)}
        return {"infos": runner.engines.infos(), "held": runner.trainers.weights()}
    finally:
        runner.close()


def config_of(path: Path, **rollout: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(path)},
            "runtime": {"runner": "inline"},
            "rollout": {"engines": 2, **rollout},
        }
    )


@pytest.mark.distributed
def test_every_engine_publishes_the_version_it_was_sent(ranks, tmp_path: Path) -> None:
    save_model(tmp_path, "qwen2_tied")
    (result,) = ranks.run(sync_twice, 1, config_of(tmp_path))
    assert [(info.state, info.weight_version) for info in result["infos"]] == [
        (EngineState.HEALTHY, 1)
    ] * 2
    folder = HfFolder(tmp_path)
    assert {name: tensor_checksum(tensor) for name, tensor in result["held"].items()} == {
        name: tensor_checksum(folder.slice(name)[:]) for name in folder.names()
    }


@pytest.mark.distributed
def test_one_changed_bit_in_an_engine_stops_the_run(ranks, tmp_path: Path) -> None:
    save_model(tmp_path, "qwen2_tied")
    (result,) = ranks.run(
        sync_twice, 1, config_of(tmp_path, engine="support.engines.CorruptedEngine")
    )
    assert (
        "engine 0 holds other values than the trainer sent in 1 of 50 tensors: model.norm.weight"
        in result["error"]
    )


def sync_often(rank: int, init: str, config: Config) -> dict[str, Any]:
    """The states an inline run's engines are in after each weight sync, until one fails."""
    runner, states = InlineRunner(resolve_run(config)), []
    try:
        for version in range(8):
            runner.engines.update_weights(version, runner.trainers.export())
            infos = runner.engines.infos()
            assert [info.weight_version for info in infos] == [version] * len(infos)
            states.append({info.state.name for info in infos})
    except SyncError as error:
        return {"states": states, "error": str(error)}
    finally:
        runner.close()
    return {"states": states}


@pytest.mark.distributed
def test_weights_are_unproved_between_proofs(ranks, tmp_path: Path) -> None:
    save_model(tmp_path, "qwen2_tied")
    (result,) = ranks.run(sync_often, 1, config_of(tmp_path, prove_every=3))
    assert result["states"] == [{"HEALTHY"}, {"UNPROVED"}, {"UNPROVED"}] * 2 + [
        {"HEALTHY"},
        {"UNPROVED"},
    ]


@pytest.mark.distributed
def test_corruption_is_caught_at_the_next_proof(ranks, tmp_path: Path) -> None:
    save_model(tmp_path, "qwen2_tied")
    config = config_of(tmp_path, prove_every=5, engine="support.engines.CorruptedEngine")
    (result,) = ranks.run(sync_often, 1, config)
    assert result["states"] == [{"HEALTHY"}] + [{"UNPROVED"}] * 4
    assert (
        "engine 0 holds other values than the trainer sent in 1 of 50 tensors: model.norm.weight"
        in result["error"]
    )


def test_tensors_that_differ_are_named() -> None:
    check_arrived(0, {"a": "1"}, {"a": "1"})
    with pytest.raises(
        SyncError, match="engine 1 holds other values than the trainer sent in 2 of 3 tensors: b, c"
    ):
        check_arrived(1, {"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "0"})
