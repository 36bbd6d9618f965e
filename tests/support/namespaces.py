"""Two nodes of a Ray cluster on this machine, each in namespaces of its own (tools/rehearse)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from support.runs import ROOT

sys.path.append(str(ROOT / "tools/rehearse"))

import namespaces
from namespaces import ADDRESSES, Node, missing

RAY_PORT, FAKE = 6379, "fake_gpu"
RAY = str(Path(sys.executable).with_name("ray"))

__all__ = ["ADDRESSES", "FAKE", "RAY_PORT", "Node", "two_nodes"]


@contextmanager
def two_nodes(
    gpus: Sequence[int], environment: Mapping[str, str]
) -> Iterator[tuple[list[Node], Path]]:
    """Both nodes, joined in a Ray cluster whose head is in the first, and the folder that both see.

    Args:
        gpus: simulated ones of each.
        environment: of every process there.
    """
    assert (lacking := missing()) is None, lacking
    with namespaces.two_nodes(environment) as (nodes, shared):
        for number, node in enumerate(nodes):
            joins = ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"]
            if number:
                joins = [f"--address={ADDRESSES[0]}:{RAY_PORT}"]
            counted = [
                f'--resources={{"{FAKE}": {gpus[number]}}}',
                "--num-cpus=2",
                "--object-store-memory=200000000",
                f"--node-ip-address={node.address}",
                "--disable-usage-stats",
            ]
            node.run(RAY, "start", *joins, *counted)
        yield nodes, shared
