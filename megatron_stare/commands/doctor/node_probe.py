"""Worker of the command `megatron-stare doctor`. Each node of a cluster runs one worker. Collects
the node's Facts, such as versions, GPUs and limits, and takes part in the measurement of the
bandwidth between nodes."""

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
from megatron_stare.run_dir.liveness import is_locked

MEASURED, ROUNDS = 16 * 2**20, 5  # bytes per message, and number of messages
LIMIT_S = 120


class NodeProbe:
    """Worker of the doctor. Each node runs one worker."""

    def facts(self, served_by: str | None = None) -> Facts:
        return local_facts(served_by)

    def sees(self, path: str) -> bool:
        """Tells whether a file that another node wrote exists on this node."""
        return Path(path).exists()

    def sees_locked(self, path: str) -> bool:
        """Tells whether this node sees the file `path` as locked. When the doctor calls
        `sees_locked`, the machine that runs the doctor holds the lock of the file."""
        return is_locked(Path(path))

    def ports(self, ports: list[int]) -> Finding:
        return check_ports(ports)

    def meeting_place(self, host: str) -> str:
        return f"tcp://{host}:{free_port(host, (0,))}"

    def bandwidth(self, rank: int, world: int, meeting_place: str) -> float:
        """See measure_bandwidth."""
        return measure_bandwidth(rank, world, meeting_place)

    def close(self) -> None:
        """Does nothing."""


def measure_bandwidth(rank: int, world: int, meeting_place: str) -> float:
    """Returns the bus bandwidth of a gloo all-reduce over `world` ranks, in 10^9 bytes/s.

    As in NCCL's tests, the bus bandwidth of n ranks is 2 (n - 1) / n times the message's bytes,
    divided by the time of the fastest round.
    """
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
