"""A Ray cluster of several nodes on this machine, some of them with GPUs that there are not.

Every node has Ray's own resource, which Ray counts and shows to actors as if they were GPUs, and
one of another name, which it only counts. All nodes have one address, so they are told apart by
their ids.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from support.runs import ROOT

from megatron_stare.cluster.ray import cluster_nodes

FAKE = "fake_gpu"
WAIT_S = 60.0
# a node that is killed is known to be lost in a second, not in ten
QUICK = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 300,
    "health_check_timeout_ms": 3000,
    "health_check_failure_threshold": 3,
}


class Nodes:
    """The nodes with GPUs, by the order they were added in."""

    def __init__(self, cluster: Any, nodes: list[Any], gpus: int) -> None:
        self._cluster, self._nodes, self._gpus = cluster, nodes, gpus
        self.address: str = cluster.address
        self.total = len(nodes) * gpus

    def add(self) -> str:
        """The id of one more."""
        self._nodes.append(added(self._cluster, self._gpus))
        return str(self._nodes[-1].node_id)

    def kill(self, node: str) -> None:
        """Ends the processes of a node, of this id, at once."""
        (found,) = (each for each in self._nodes if each.node_id == node)
        self._cluster.remove_node(found, allow_graceful=False)


def added(cluster: Any, gpus: int) -> Any:
    return cluster.add_node(num_cpus=1, num_gpus=gpus, resources={FAKE: gpus}, wait=False)


@contextmanager
def simulated(nodes: int, gpus: int) -> Iterator[Nodes]:
    """A cluster of so many nodes with so many simulated GPUs each, beside a head without any."""
    with ExitStack() as stack:
        folder = tempfile.mkdtemp(prefix="ms-ray-", dir="/tmp")  # short: Ray keeps sockets in it
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        # where other runs on this machine look for a cluster to join
        patch.setenv("RAY_TMPDIR", folder)
        # Ray would start no node with more GPUs than it shows
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
        head = {"num_cpus": 1, "include_dashboard": False, "_system_config": QUICK}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        stack.callback(cluster.shutdown)
        made = [added(cluster, gpus) for _ in range(nodes)]
        cluster.wait_for_nodes()
        yield Nodes(cluster, made, gpus)


@contextmanager
def joined(nodes: Nodes) -> Iterator[None]:
    """This process as a driver of the cluster. A node may be alive before its GPUs are counted as
    free, so they are waited for."""
    with suppress(Exception):
        ray.shutdown()
    ray.init(
        address=nodes.address, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
    )
    try:
        deadline = time.monotonic() + WAIT_S
        while sum(node.free for node in cluster_nodes(FAKE)) < nodes.total:
            assert time.monotonic() < deadline
        yield
    finally:
        ray.shutdown()


def left_behind(run_dir: Path) -> list[str]:
    """Paths that a run that did not start has left."""
    return sorted(str(each) for each in run_dir.rglob("*")) if run_dir.exists() else []
