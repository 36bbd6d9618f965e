"""Ranks meet at the port that the first of them reserved, wait for others as long as the run says,
in the world and in Megatron's groups, and begin with its seed."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.ranks import RankPool

from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config, ParallelConfig
from megatron_stare.errors import ConfigError
from megatron_stare.megatron.backend.layout import join, leave
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.process.network import LOOPBACK, reserve_port

MODEL = Path(__file__).parents[2] / "assets" / "tiny-adder"
# megatron-core 0.16.1 gives this one no limit; its own way of saving the distributed optimizer
# alone uses it
UNUSED = "EXPERT_DATA_PARALLEL_GROUP_GLOO"


def _limits(rank: int, init: str, config: Config) -> set[float]:
    trainer = Trainer(resolve_run(config), rank, init)
    groups = [group for group in dist.distributed_c10d._world.pg_map if group.group_desc != UNUSED]
    found = {
        group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups
    }
    assert len(groups) > 5
    trainer.close()
    return found


@pytest.mark.distributed
@pytest.mark.parametrize(("limits", "seconds"), [({"collective_s": 77.0}, 77.0), ({}, 100.0)])
def test_every_group_waits_as_long_as_the_run_says(
    ranks: RankPool, limits: dict[str, float], seconds: float
) -> None:
    """Megatron's own groups would wait for half an hour, whatever the world's limit is."""
    config = Config.model_validate(
        {
            "model": {"path": str(MODEL)},
            "parallel": {"tensor": 2},
            "algorithm": {"name": "grpo"},
            "runtime": {"timeout_s": 100.0},
            "faults": {"requests": limits},
        }
    )
    assert ranks.run(_limits, 2, config) == [{seconds}] * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="its device lacks nothing")
def test_a_rank_refuses_what_its_device_lacks_before_it_joins(tmp_path: Path) -> None:
    """The driver asked its own device, which may be another."""
    config = Config.model_validate(
        {
            "model": {"path": str(MODEL)},
            "performance": {"cuda_connections": 1},
            "algorithm": {"name": "grpo"},
        }
    )
    with pytest.raises(
        ConfigError, match=r"performance\.cuda_connections: this setting needs CUDA"
    ):
        Trainer(resolve_run(config), 0, f"file://{tmp_path / 'ranks'}")
    assert not dist.is_initialized()


def _seed(rank: int, init: str, seed: int) -> tuple[int, float]:
    join(ParallelConfig(), rank, init, seed, 60.0)
    leave()
    return torch.initial_seed(), float(torch.rand(()))


@pytest.mark.distributed
def test_a_rank_begins_with_the_runs_seed(ranks: RankPool) -> None:
    for seed in (7, 8):
        drawn = float(torch.rand((), generator=torch.Generator().manual_seed(seed)))
        assert ranks.run(_seed, 1, seed) == [(seed, drawn)]


def _met(rank: int, init: str) -> tuple[float, bool]:
    known = dist.FileStore(init.removeprefix("file://"), 2)
    if rank == 0:
        known.set("place", f"{LOOPBACK}:{reserve_port(LOOPBACK, (0,))}")
    place = known.get("place").decode()
    layout = join(ParallelConfig(tensor=2), rank, f"tcp://{place}", seed=1, timeout_s=60.0)
    total = torch.ones(1)
    dist.all_reduce(total, group=layout.tp_group)
    host, _, port = place.rpartition(":")
    with socket.create_connection((host, int(port)), 10):
        listens = True
    dist.barrier()
    leave()
    return float(total), listens


@pytest.mark.distributed
def test_ranks_meet_at_the_port_that_the_first_keeps_bound(ranks: RankPool) -> None:
    """A port that was only seen to be free may be another program's when the ranks meet; then the
    run would end with EADDRINUSE."""
    assert ranks.run(_met, 2) == [(2.0, True)] * 2
