"""The doctor on a real Ray cluster of two nodes of this machine: every node is looked at, and all
of them together."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cluster import FAKE, simulated
from support.runs import ROOT

from megatron_stare.commands.doctor.examine import examine
from megatron_stare.config.load import load_config


@pytest.mark.slow
@pytest.mark.distributed
def test_every_node_is_looked_at(tmp_path: Path) -> None:
    """The head and two nodes, which are one machine: versions are alike, clocks agree, the folder
    is seen by all."""
    with simulated(2, 1) as nodes:
        runtime = [
            f"runtime.ray_address={nodes.address}",
            f"runtime.gpu_resource={FAKE}",
            "runtime.interface=eth99",
        ]
        config = load_config(
            str(ROOT / "configs/quickstart.yaml"), [*runtime, f"run.dir={tmp_path}/run"]
        )
        found = {each.subject: each for each in examine(config, bandwidth=True)}
    of_nodes = {name.partition(": ")[0] for name in found if ": " in name}
    assert len(of_nodes) == 3
    for node in of_nodes:
        assert found[f"{node}: clock"].level == found[f"{node}: megatron-core"].level == "ok"
        assert found[f"{node}: runtime.interface"].level == "fault"
    assert found["versions on all nodes"].seen == "the same on 3 nodes"
    assert found[f"folder {tmp_path}/run"].seen == "seen by all 3 nodes"
    assert found[f"locks of {tmp_path}/run"].seen == "shared by 3 nodes"
    assert "3 nodes, gloo" in found["bandwidth"].seen
    assert list(tmp_path.iterdir()) == []
