"""Every shipped recipe, at every size, syncs weights in each way or refuses the way by name."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from support.runs import ROOT

from megatron_stare.config.recipes import recipes
from megatron_stare.planning.placement import Demand, Node, plan


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "make_route_docs", ROOT / "tools" / "make_route_docs.py"
    )
    assert spec is not None and spec.loader is not None
    made = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


TOOL = tool()
EXPECTED = {  # refused: the setting and words of the reason
    (True, "distributed"): ("sglang.sync", "two ranks have the same GPU"),
    (False, "tensor"): ("sglang.sync", "does not see the trainer's GPUs"),
}


@pytest.mark.parametrize("nodes", TOOL.SIZES)
@pytest.mark.parametrize("colocated", [True, False])
@pytest.mark.parametrize("sync", TOOL.SYNCS)
def test_every_recipe_runs_or_is_refused_by_name(nodes: int, colocated: bool, sync: str) -> None:
    for name in recipes():
        case = TOOL.case_of(name, nodes, colocated, sync)
        found = TOOL.answer(case, name)
        refused = EXPECTED.get((colocated, sync))
        if refused is not None:
            assert found.where == refused[0] and refused[1] in found.why, name
            continue
        assert not found.where, f"{name}: {found.why}"
        servers = nodes * TOOL.GPUS // (1 if colocated else 2) // case.served
        assert found.pairs == servers * (case.served if sync == "tensor" else case.pipeline), name


def test_each_of_a_colocated_server_s_ranks_has_a_rank_of_the_trainer_on_its_own_node_and_gpu() -> (
    None
):
    """At 16 nodes of 8, where one sender a stage would be seen by one server of them all."""
    config = TOOL.scaled("short_cot_qwen2.5_32b", 16, True, "tensor")
    nodes = [Node(f"node{n:02d}", f"10.0.0.{n}", 8, 8) for n in range(16)]
    placed = plan(Demand.of(config), nodes)
    found = TOOL.pairs(config, placed)
    assert len({server for server, _ in found}) == 32 and sorted(rank for _, rank in found) == list(
        range(128)
    )
    assert all(placed.parts[server] == placed.ranks[rank] for server, rank in found)


def test_the_page_has_the_table_that_the_tool_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["make_route_docs.py", "--check"])
    assert TOOL.main() == 0, "run tools/make_route_docs.py"


def test_a_page_that_is_out_of_date_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = tmp_path / "cluster.md"
    page.write_text(TOOL.PAGE.read_text().replace("| runs, ", "| runs, 1", 1))
    monkeypatch.setattr(TOOL, "PAGE", page)
    monkeypatch.setattr(sys, "argv", ["make_route_docs.py", "--check"])
    assert TOOL.main() == 1
