"""A server on several nodes: how its processes are started, that it ends as a whole, and who is
named. What stands in for SGLang here only says what it was told; test_train_sglang.py has real
servers."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from support import sglang_servers as servers
from support.sglang_fake import FakeServer
from support.sglang_groups import JoiningServer

from megatron_stare.cluster.inline import InlineWorkers
from megatron_stare.config.schema import Config, RuntimeConfig
from megatron_stare.errors import ConfigError, UserError
from megatron_stare.models import read_shape
from megatron_stare.rollout.engines.replicas import Site, make_part, make_replica, replica_nodes
from megatron_stare.rollout.engines.sglang import broadcast
from megatron_stare.rollout.engines.sglang.broadcast import BroadcastSync
from megatron_stare.rollout.engines.sglang.place import Place
from megatron_stare.rollout.engines.sglang.protocol import SGLangError
from megatron_stare.rollout.engines.sglang.replica import check_servers, server_options
from megatron_stare.rollout.engines.sglang.server_layout import ServerLayout
from megatron_stare.rollout.engines.sglang.spread_server import ServerPart, SpreadServer

SHAPE = read_shape(servers.MODEL)
LIMIT_S = 60
# says what it was told, has a process of a rank, and ends with its starter, as serve.py does
STAND_IN = """#!/bin/sh
echo "told $*" >&2
"$(dirname "$0")/sglang_rank" 1000 >/dev/null 2>&1 &
exec cat
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    script = tmp_path / "python"
    script.write_text(STAND_IN)
    script.chmod(0o755)
    (tmp_path / "sglang_rank").symlink_to("/bin/sleep")
    return script


def config(given_python: Path, ports: tuple[int, ...] = (), **sglang: object) -> Config:
    given = {
        "python": str(given_python),
        "device": "cpu",
        "tensor_parallel": 2,
        "nodes": 2,
        **sglang,
    }
    found = servers.config(engines=2, **given)
    return found.model_copy(update={"runtime": RuntimeConfig(ports=list(ports))})


@pytest.fixture(autouse=True)
def watched_closely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_stare.rollout.engines.sglang.spread_server.WATCH_EVERY_S", 0.05)


@pytest.fixture
def spread(python: Path) -> Iterator[tuple[SpreadServer, ServerPart]]:
    asked = config(python)
    part = ServerPart(server_options(asked, 0, 1))
    with ExitStack() as stack:
        stack.callback(part.close)
        server = SpreadServer(
            server_options(asked, 0), Site(InlineWorkers([part]), "127.0.0.1", ("10.0.0.2",))
        )
        stack.callback(server.close)
        until(lambda: "told" in part_of(part).last_words() and ranks(part_of(part).process_group))
        yield server, part


def part_of(part: ServerPart):
    assert part._process is not None
    return part._process


def until(holds) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline


def ranks(group: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(group).children() if child.name() == "sglang_rank"]


def test_every_node_is_told_its_number_and_where_to_meet(
    spread: tuple[SpreadServer, ServerPart],
) -> None:
    server, part = spread
    until(lambda: "told" in server.last_words())
    first, other = server.last_words().split(), part_of(part).last_words().split()
    for words, node in ((first, "0"), (other, "1")):
        assert (
            words[words.index("--nnodes") + 1] == "2"
            and words[words.index("--node-rank") + 1] == node
        )
        assert words[words.index("--tp-size") + 1] == "2"
    met = {words[words.index("--dist-init-addr") + 1] for words in (first, other)}
    assert len(met) == 1 and met.pop().startswith("127.0.0.1:")
    assert "--nccl-port" not in first + other
    assert server.ended() is None


def test_a_part_that_ends_ends_the_server_and_is_named(
    spread: tuple[SpreadServer, ServerPart],
) -> None:
    server, part = spread
    os.killpg(part_of(part).process_group, signal.SIGKILL)
    server._process.wait(LIMIT_S)  # by the watch: nobody asks
    with pytest.raises(SGLangError) as error:
        server.require_alive()
    text = str(error.value)
    assert "the server on 10.0.0.2 (node rank 1) ended with -9; its last words:" in text
    assert "--node-rank 1" in text and "--node-rank 0" not in text


def test_a_rank_that_is_killed_alone_is_noticed(spread: tuple[SpreadServer, ServerPart]) -> None:
    """SGLang's launcher, on any node but the first, waits for its ranks one after the other."""
    server, part = spread
    (rank,) = ranks(part_of(part).process_group)
    rank.kill()
    server._process.wait(LIMIT_S)
    ended = server.ended()
    assert ended is not None and ended.startswith(
        f"on 10.0.0.2 (node rank 1) lost the process of a rank, {rank.pid}"
    )


def test_the_first_nodes_end_is_its_own(spread: tuple[SpreadServer, ServerPart]) -> None:
    server, part = spread
    os.killpg(server.process_group, signal.SIGKILL)
    server._process.wait(LIMIT_S)
    ended = server.ended()
    assert ended is not None and ended.startswith("on 127.0.0.1 (node rank 0) ended with -9")
    assert part.ended() is None  # until the server is closed
    group = part_of(part).process_group
    server.close()
    assert not psutil.pid_exists(group)


def test_a_part_that_cannot_start_leaves_nothing(python: Path, tmp_path: Path) -> None:
    asked = config(python)
    part = ServerPart(
        server_options(asked.model_copy(update={"sglang": without_python(asked, tmp_path)}), 0, 1)
    )
    before = set(psutil.Process().children())
    with pytest.raises(FileNotFoundError, match="nothing"):
        SpreadServer(
            server_options(asked, 0), Site(InlineWorkers([part]), "127.0.0.1", ("127.0.0.1",))
        )
    assert set(psutil.Process().children()) <= before


def without_python(asked: Config, tmp_path: Path):
    return asked.sglang.model_copy(update={"python": str(tmp_path / "nothing")})


class Silent(InlineWorkers):
    """Workers on a node that is gone."""

    def start(self, method: str, *args: object) -> list[object]:
        if method == "ended":
            raise UserError("a rollout engine process died")
        return super().start(method, *args)


def test_a_worker_that_is_gone_with_its_node_ends_the_server(python: Path) -> None:
    asked = config(python)
    part = ServerPart(server_options(asked, 0, 1))
    server = SpreadServer(
        server_options(asked, 0), Site(Silent([part]), "127.0.0.1", ("10.0.0.2",))
    )
    try:
        server._process.wait(LIMIT_S)
        ended = server.ended()
        assert (
            ended is not None
            and "lost the worker of its part on 10.0.0.2: a rollout engine process died" in ended
        )
    finally:
        server.close()


def test_replicas_and_their_parts_are_those_of_the_run(python: Path) -> None:
    """Their ports, too: a share for each process of each replica."""
    asked = config(python, (30_000, 30_019))
    assert replica_nodes(asked) == 2
    attached = asked.sglang.model_copy(update={"urls": ["http://a"]})
    assert replica_nodes(asked.model_copy(update={"sglang": attached})) == 1
    parts = [make_part(asked, number, 1) for number in range(2)]
    shares = [server_options(asked, number, node).ports for number in range(2) for node in range(2)]
    assert [part._options.ports for part in parts] == shares[1::2]  # type: ignore[attr-defined]
    assert [list(share or ()) for share in shares] == [
        list(range(30_004 + 4 * n, 30_008 + 4 * n)) for n in range(4)
    ]
    with ExitStack() as stack:
        stack.callback(parts[0].close)
        replica = make_replica(
            asked, 0, Site(InlineWorkers(parts[:1]), "127.0.0.1", ("127.0.0.1",))
        )
        stack.callback(replica.close)
        process = replica._process  # type: ignore[attr-defined]
        until(lambda: "told" in process.last_words())
        words = process.last_words().split()
        assert int(words[words.index("--dist-init-addr") + 1].rpartition(":")[2]) in (
            shares[0] or ()
        )


@pytest.mark.parametrize(
    ("asked", "where", "message"),
    [
        (
            {"nodes": 3},
            "sglang.nodes",
            "2 ranks of a server cannot be dealt to 3 nodes in equal parts",
        ),
        ({"device": "cuda"}, "sglang.sync", "which ranks on another node cannot open"),
        (
            {"urls": ["http://localhost:1"]},
            "sglang.nodes",
            "this setting applies to servers that the run starts",
        ),
    ],
)
def test_what_several_nodes_cannot_do_is_refused(
    python: Path, asked: dict[str, object], where: str, message: str
) -> None:
    given = {"tensor_parallel": 1, "python": None, "device": "auto"} if "urls" in asked else {}
    with pytest.raises(ConfigError, match=message) as error:
        check_servers(
            config(python, **given, **asked).model_copy(update={"rollout": one(python)}), SHAPE
        )
    assert error.value.where == where
    for works in (
        {},
        {"sync": "disk", "sync_folder": "/shared"},
        {"sync": "distributed", "device": "cuda"},
    ):
        check_servers(config(python, **works), SHAPE)


def one(python: Path):
    return config(python).rollout.model_copy(update={"engines": 1})


def test_ranks_of_a_node_on_a_cpu_are_bound_to_cores_of_its_own(
    python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang counts the ranks of each node from 0; on one machine those of two are not to have one
    core."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5, 6, 7})
    asked = config(python, tensor_parallel=4)
    bound = [
        server_options(asked, 0, node).process_environment()["SGLANG_CPU_OMP_THREADS_BIND"]
        for node in range(2)
    ]
    assert bound == ["4|5", "6|7"]


def test_all_nodes_of_all_servers_are_told_an_address_that_they_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server that answers is on this machine, half of its ranks are not; and their numbers go
    on over both."""
    asked: list[list[str]] = []

    def facing(urls: list[str]) -> str:
        asked.append(urls)
        return "127.0.0.1"

    monkeypatch.setattr(broadcast, "address_facing", facing)
    fakes = [JoiningServer("one", 2), JoiningServer("two", 1)]

    async def join() -> None:
        places = [replace(Place("here"), others=("10.0.0.2", "10.0.0.3")), Place("there")]
        sync = BroadcastSync([fake.client() for fake in fakes], 60, places)
        await sync.meet([ServerLayout("cpu", 2), ServerLayout("cpu", 1)])
        await sync.close()

    asyncio.run(join())
    assert asked == [["http://one", "http://two", "http://10.0.0.2", "http://10.0.0.3"]]
    assert [fake.worlds for fake in fakes] == [[(1, 4)], [(3, 4)]]


def test_checksums_of_every_group_of_ranks_are_held_against_each_other() -> None:
    """Each group with requests of its own answers for all ranks of all nodes."""
    fake = FakeServer("one")
    fake.ranks = 2

    def told(*sums: str) -> list[str]:
        answers = [
            {"checksums": {"w": each}, "parallelism_info": [{"tp_rank": number % 2}]}
            for number, each in enumerate(sums)
        ]
        fake._checker = lambda _: {"success": True, "ranks": answers}  # type: ignore[method-assign]
        return [rank["w"] for rank in asyncio.run(fake.client().checksums())]

    assert told("a", "b") == told("a", "b", "a", "b") == ["a", "b"]
    with pytest.raises(SGLangError, match="rank 1 is said to hold two different sets of weights"):
        told("a", "b", "a", "c")
