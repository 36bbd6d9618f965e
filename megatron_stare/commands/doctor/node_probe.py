"""Worker of the doctor on each node of a cluster: looks at the node, and is one end of a bandwidth
measurement."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_stare.commands.doctor.checks_machine import check_ports
from megatron_stare.commands.doctor.facts import Facts, local_facts
from megatron_stare.commands.doctor.finding import Finding
from megatron_stare.process.network import free_port

MEASURED, ROUNDS = 16 * 2**20, 5  # bytes of a message, and how many
LIMIT_S = 120


class NodeProbe:
    """A worker; one a node."""

    def facts(self, served_by: str | None = None) -> Facts:
        return local_facts(served_by)

    def sees(self, path: str) -> bool:
        """Returns True if a path that another node wrote exists on this node."""
        return Path(path).exists()

    def ports(self, ports: list[int]) -> Finding:
        return check_ports(ports)

    def meeting_place(self, host: str) -> str:
        return f"tcp://{host}:{free_port(host, (0,))}"

    def bandwidth(self, rank: int, world: int, meeting_place: str) -> float:
        """See measure_bandwidth."""
        return measure_bandwidth(rank, world, meeting_place)

    def close(self) -> None:
        """Nothing is held."""


def measure_bandwidth(rank: int, world: int, meeting_place: str) -> float:
    """Bus bandwidth of an all-reduce over `world` ranks and gloo, 10^9 bytes a second: 2 (n - 1) /
    n of the message's bytes by the time of the quickest round, as NCCL's tests count it."""
    limit = timedelta(seconds=LIMIT_S)
    dist.init_process_group(
        "gloo", init_method=meeting_place, rank=rank, world_size=world, timeout=limit
    )
    try:
        message, times = torch.zeros(MEASURED // 4, dtype=torch.float32), []
        for _ in range(ROUNDS):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(message)
            times.append(time.perf_counter() - began)
        return 2 * (world - 1) / world * MEASURED / min(times) / 1e9
    finally:
        dist.destroy_process_group()
