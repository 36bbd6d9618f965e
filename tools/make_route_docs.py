"""Writes the table of ways of weights in docs/cluster.md: of every shipped recipe, at which size
and with which `sglang.sync` it runs, or how it is refused; --check says whether the page is as it
is.

    python tools/make_route_docs.py

Every answer is that of the product's own checks and plan, on nodes of eight GPUs that there are
not.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # placed without any device

from megatron_stare.config.load import load_config
from megatron_stare.config.recipes import recipes
from megatron_stare.config.schema import Config
from megatron_stare.errors import ConfigError
from megatron_stare.planning.placement import Demand, Node, Plan, check_possible, plan
from megatron_stare.rollout.engines.replicas import check_sync, replica_route
from megatron_stare.rollout.engines.sglang.place import Place, carriers
from megatron_stare.rollout.engines.sglang.server_layout import ServerLayout

PAGE = Path(__file__).parent.parent / "docs" / "cluster.md"
START, END = "<!-- made by tools/make_route_docs.py -->\n", "<!-- to here: routes -->\n"
SIZES, GPUS, SYNCS = (4, 8, 16), 8, ("tensor", "distributed", "disk")
ADDRESS, RUN_DIR = "10.0.0.{}", "/shared/run"


@dataclass(frozen=True)
class Case:
    """A layout of recipes on so many nodes.

    tensor, pipeline, context: ranks of the trainer that hold a copy of the model.
    served: ranks of a server.
    """

    tensor: int
    pipeline: int
    context: int
    served: int
    nodes: int
    colocated: bool
    sync: str


@dataclass(frozen=True)
class Answer:
    """Runs, with the pairs of a server and a rank that sends to it; or is refused, with the setting
    and the reason."""

    pairs: int = 0
    where: str = ""
    why: str = ""

    def __str__(self) -> str:
        return f"refused: `{self.where}`" if self.where else f"runs, {self.pairs:,} pairs"


def main() -> int:
    page = PAGE.read_text()
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    made = f"{before}{START}{table()}\n{END}{after}"
    if "--check" in sys.argv[1:]:
        return int(made != page)
    PAGE.write_text(made)
    return 0


@cache
def recipe(name: str, overrides: tuple[str, ...] = ()) -> Config:
    return load_config(f"recipes/{name}", overrides)


def case_of(name: str, nodes: int, colocated: bool, sync: str) -> Case:
    parallel = recipe(name).parallel
    served = recipe(name).sglang.tensor_parallel
    return Case(
        parallel.tensor, parallel.pipeline, parallel.context, served, nodes, colocated, sync
    )


def scaled(
    name: str, nodes: int, colocated: bool, sync: str, overrides: tuple[str, ...] = ()
) -> Config:
    """The recipe on so many nodes: all GPUs for both, or one half for the trainer and one for the
    servers."""
    config = recipe(name, overrides)
    gpus = nodes * GPUS if colocated else nodes * GPUS // 2
    copy = config.parallel.tensor * config.parallel.pipeline * config.parallel.context
    changed = {
        "colocated": colocated,
        "sync": sync,
        "sync_folder": RUN_DIR if sync == "disk" else None,
    }
    return config.model_copy(
        update={
            "parallel": config.parallel.model_copy(update={"data": gpus // copy}),
            "rollout": config.rollout.model_copy(
                update={"engines": gpus // config.sglang.tensor_parallel}
            ),
            "sglang": config.sglang.model_copy(update=changed),
            "runtime": config.runtime.model_copy(
                update={"ray_address": f"{ADDRESS.format(0)}:6379"}
            ),
        }
    )


@cache
def answer(case: Case, name: str) -> Answer:
    """Answer that a run of this recipe gets, as far as placement decides it."""
    config = scaled(name, case.nodes, case.colocated, case.sync)
    nodes = [Node(f"node{n:02d}", ADDRESS.format(n), GPUS, GPUS) for n in range(case.nodes)]
    try:
        check_sync(config)
        demand = Demand.of(config)
        check_possible(demand, nodes)
        return Answer(len(pairs(config, plan(demand, nodes))))
    except ConfigError as error:
        return Answer(where=error.where or "", why=error.what)


def pairs(config: Config, placed: Plan) -> list[tuple[int, int]]:
    """Each server with each rank that sends to it.

    Raises:
        ConfigError: one of them does not lead there.
    """
    route = replica_route(config)
    # each server at its own node's address
    assert route is not None and route.listens and route.host is None
    ranks = [
        Place(node.address, (f"{node.address}/{number}",))
        for number, node in enumerate(placed.ranks)
    ]
    servers = range(len(placed.parts))
    if config.sglang.sync == "tensor":
        layout, found = ServerLayout("cuda", config.sglang.tensor_parallel), []
        for server in servers:
            shown = tuple(gpu for rank in placed.sharing(server) for gpu in ranks[rank].gpus)
            found.append((f"server {server}", Place(placed.parts[server].address, shown), layout))
        return [(number, rank) for number, of in enumerate(carriers(found, ranks)) for rank in of]
    assert config.sglang.sync == "distributed" or route.folder == RUN_DIR
    senders = [
        stage * (len(ranks) // config.parallel.pipeline)
        for stage in range(config.parallel.pipeline)
    ]
    return [(server, rank) for server in servers for rank in senders]


def table() -> str:
    """Markdown: a row a layout, size and way of placing; then each reason once."""
    lines = [
        (
            "| recipes | trainer TP | server TP | nodes | servers | `tensor` | `distributed` |"
            " `disk` |"
        ),
        "|---|---|---|---|---|---|---|---|",
    ]
    reasons: dict[str, None] = {}
    of: dict[tuple[int, ...], list[str]] = {}
    for name in recipes():
        one = case_of(name, 4, True, "disk")
        of.setdefault((one.tensor, one.pipeline, one.context, one.served), []).append(name)
    for (tensor, _, _, served), names in sorted(of.items()):
        for nodes in SIZES:
            for colocated in (True, False):
                answers = [
                    answer(case_of(names[0], nodes, colocated, sync), names[0]) for sync in SYNCS
                ]
                reasons |= {f"`{each.where}`: {each.why}": None for each in answers if each.where}
                where = "on the trainer's GPUs" if colocated else "on half of the nodes"
                cells = " | ".join(map(str, answers))
                lines.append(
                    f"| {len(names)} | {tensor} | {served} | {nodes} | {where} | {cells} |"
                )
    shown = [f"- {reason}." for reason in reasons]
    return "\n".join([*lines, "", "What is refused says:", "", *shown])


if __name__ == "__main__":
    sys.exit(main())
