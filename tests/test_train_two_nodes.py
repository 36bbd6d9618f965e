"""Whole runs on two nodes that share neither address, host name, /dev/shm nor /tmp, each with a
real SGLang server: ten steps of each way of syncing, and what is bound where.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import sglang_servers as servers
from support.leftovers import Traces
from support.namespaces import ADDRESSES, FAKE, RAY_PORT, Node, two_nodes
from support.runs import ROOT, command, environment, metrics, model

from megatron_stare.config.process_settings import INTERFACES
from megatron_stare.rollout.engines.sglang.server_options import PORTS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.sglang,
    pytest.mark.distributed,
    pytest.mark.skipif(servers.MISSING is not None, reason=str(servers.MISSING)),
]
LIMIT = 1e-4  # nats, float32
STEPS = 10
# GPUs of the nodes: a rank and a server, and a server; or a rank and a server on each
APART, SHARED = (2, 1), (1, 1)
SMALL = {"run.steps": STEPS, "batch.prompts": 4, "batch.samples_per_prompt": 4, "eval.prompts": 0}


class Run:
    """A run whose driver is on the first node."""

    def __init__(self, nodes: list[Node], shared: Path, *overrides: str) -> None:
        self.dir, self.traces = shared / "run", Traces()
        self.log = (shared / "stderr.log").open("w+")
        given = (
            "rollout.engine=sglang",
            "rollout.engines=2",
            "parallel.tensor=1",
            f"runtime.ray_address={ADDRESSES[0]}:{RAY_PORT}",
            f"runtime.gpu_resource={FAKE}",
            f"sglang.python={servers.PYTHON}",
            f"sglang.start_timeout_s={servers.START_S}",
            "sglang.device=cpu",
            f"sglang.environment={{PYTHONPATH: {ROOT}}}",  # the servers run this tree's code, too
            f"sglang.agreement_limit={LIMIT}",
        )
        words = command(model(), f"run.dir={self.dir}", *given, *overrides, **SMALL)
        nodes[0].environment = self.traces.environment(dict(nodes[0].environment))
        self.process = nodes[0].popen(words, cwd=shared, stdout=subprocess.PIPE, stderr=self.log)

    def lines(self) -> Iterator[str]:
        assert self.process.stdout is not None
        yield from self.process.stdout

    def errors(self) -> str:
        self.log.seek(0)
        return self.log.read()


def listening(node: Node) -> list[str]:
    """Addresses that servers of a node and their ranks listen on."""
    found = node.run("ss", "-Hltnp").splitlines()
    return [line.split()[3].rpartition(":")[0] for line in found if "sglang" in line]


ASK = """
import sys, urllib.error, urllib.request
try:
    print(urllib.request.urlopen(sys.argv[1], timeout=20).status)
except urllib.error.HTTPError as error:
    print(error.code)
"""


def answers_without_key(asking: Node, asked: Node) -> list[str]:
    """Statuses that servers of a node answer to another node that has no key."""
    found = (
        line.split()[3].rpartition(":")
        for line in asked.run("ss", "-Hltnp").splitlines()
        if '"python"' in line
    )
    ports = [
        int(port) for address, _, port in found if address == asked.address and int(port) in PORTS
    ]
    return [
        asking.run(sys.executable, "-c", ASK, f"http://{asked.address}:{p}/model_info").strip()
        for p in ports
    ]


def cluster_environment() -> dict[str, str]:
    """Environment of both nodes, without the interfaces: the product says which ones are spoken
    over."""
    return {name: value for name, value in environment().items() if name not in INTERFACES}


def ten_steps(gpus: tuple[int, int], *overrides: str) -> None:
    """Makes the run and holds what it recorded, and where its servers listened in mid-run."""
    seen: list[list[str]] = []
    told: tuple[list[str], ...] = ()
    with two_nodes(gpus, cluster_environment()) as (nodes, shared):
        run = Run(nodes, shared, *overrides)
        try:
            for line in run.lines():
                if re.match(r"\s*step\s+2/", line):
                    seen = [listening(node) for node in nodes]
                    told = (
                        answers_without_key(nodes[1], nodes[0]),
                        answers_without_key(nodes[0], nodes[1]),
                    )
            assert run.process.wait() == 0, run.errors()
        finally:
            run.process.kill()
            run.process.wait()
        rows = metrics(run.dir)
        assert len(rows) == STEPS
        for row in rows:
            assert row["agreement/max"] <= LIMIT and row["agreement/canary_max"] <= LIMIT
            assert row["agreement/max_of_age_1"] == row["agreement/max"]
        placed = (run.dir / "placement.txt").read_text()
        assert all(address in placed for address in ADDRESSES)
        # the store at which a server's own ranks meet is torch's, which listens on all addresses
        assert told == (["401"], ["401"])
        assert [set(each) - {"*"} for each in seen] == [{address} for address in ADDRESSES]
        print(json.dumps({"agreement": max(row["agreement/max"] for row in rows)}))


@pytest.mark.parametrize("sync", ["distributed", "disk"])
def test_servers_on_both_nodes_follow_a_trainer_on_one(sync: str) -> None:
    ten_steps(APART, f"sglang.sync={sync}")


def test_servers_on_the_trainers_devices_open_memory_of_their_own_node() -> None:
    """A rank and a server on each node: handles of one node's shared memory are of no use on the
    other."""
    ten_steps(SHARED, "parallel.data=2", "sglang.sync=tensor", "sglang.colocated=true")


def test_what_one_node_alone_has_is_refused_before_a_server_is_started() -> None:
    """The loopback of a node, and a folder of its own /tmp: with the nodes' names, and exit 2."""
    asked = {
        "sglang.host=127.0.0.1 sglang.sync=distributed": (
            "1 of 2 servers cannot be reached by ranks that send to them: rank 0 on node0 does not"
            " reach server 1 on node1 at 127.0.0.1:"
        ),
        "sglang.host=10.77.0.1 sglang.sync=distributed": (
            "node1 has no address 10.77.0.1 to listen on"
        ),
        "sglang.sync=disk sglang.sync_folder=/tmp/own": "the first of them is server 1 on node1",
        "sglang.sync=disk runtime.interface=eth99": "has no network interface 'eth99'",
    }
    with two_nodes(APART, cluster_environment()) as (nodes, shared):
        for number, (overrides, message) in enumerate(asked.items()):
            run = Run(nodes, shared, *overrides.split(), f"run.dir={shared / str(number)}")
            told = "".join(run.lines())
            assert run.process.wait() == 2, f"{overrides}: {told}{run.errors()}"
            assert message in run.errors(), overrides
            assert not run.traces.look(), "a server was started"
