"""Runs all checks of the doctor on this machine or on every node of a cluster, and formats the
findings."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_stare.commands.doctor.checks_environment import (
    check_environment,
    check_interface_setting,
    check_timeouts,
)
from megatron_stare.commands.doctor.checks_machine import (
    check_clock,
    check_folder,
    check_limits,
    check_locked_for_all,
    check_ports,
    check_sandbox,
    check_seen_by_all,
    check_shared_memory,
    check_topology,
)
from megatron_stare.commands.doctor.checks_versions import (
    check_alike,
    check_server_version,
    check_versions,
)
from megatron_stare.commands.doctor.facts import Facts, local_facts, look_at_folder, marker
from megatron_stare.commands.doctor.finding import Finding, ok, warning
from megatron_stare.config.schema import Config
from megatron_stare.errors import UserError
from megatron_stare.process.network import free_port
from megatron_stare.rollout.engines.replicas import server_python, server_release

HERE = "127.0.0.1"
NODE_S = 120.0  # timeout of a call on a node
SLOW_GB_S = 0.5  # least bandwidth between nodes; 10 Gbit Ethernet has 1.25, InfiniBand 25 and more


def examine(config: Config | None, *, bandwidth: bool) -> list[Finding]:
    """Examines this machine, or every node of the Ray cluster if `config` names a cluster.

    Raises:
        UserError: the cluster cannot be joined.
    """
    folder = Path(config.run.dir or "runs") if config else Path("runs")
    found = check_folder(look_at_folder(folder))
    if config is not None:
        found += [check_timeouts(config), *check_sandbox(config)]
        if release := server_release(config):
            found.append(check_server_version(*release))
    if config is not None and config.runtime.ray_address:
        return found + _cluster(config, folder, bandwidth)
    facts = local_facts(served_by(config))
    found += of_machine(facts, config)
    found.append(check_ports(config.runtime.ports if config else ()))
    return found + ([_local_bandwidth()] if bandwidth else [])


def served_by(config: Config | None) -> str | None:
    """Returns the Python interpreter of the servers that a run starts on its nodes.

    Returns None if `config` is None, if the run starts no servers, or if the interpreter of the
    servers is not known.
    """
    with contextlib.suppress(UserError):
        return None if config is None else server_python(config)
    return None


def of_machine(facts: Facts, config: Config | None, addresses: Sequence[str] = ()) -> list[Finding]:
    """Runs the checks that need only the facts of one machine."""
    tensor = config.parallel.tensor if config else 1
    found = [*check_versions(facts, config), *check_limits(facts), check_shared_memory(facts)]
    if facts.gpus:
        found.append(check_topology(facts, tensor))
    if config is not None:
        found += [
            *check_environment(facts, config, addresses),
            check_interface_setting(facts, config),
        ]
    return found


def _cluster(config: Config, folder: Path, bandwidth: bool) -> list[Finding]:
    from megatron_stare.cluster.ray import leave_ray, node_workers, start_ray
    from megatron_stare.commands.doctor.node_probe import NodeProbe

    start_ray(config)
    try:
        addresses, workers = node_workers(NODE_S)
        names = [f"{address} ({number})" for number, address in enumerate(addresses)]
        workers.build(NodeProbe, [()] * len(names))
        found, nodes = [], {}
        for number, name in enumerate(names):
            asked = time.time()
            (facts,) = workers.wait([workers.start_on(number, "facts", served_by(config))])
            judged = [
                check_clock(asked, facts.clock, time.time()),
                *of_machine(facts, config, addresses),
            ]
            (ports,) = workers.wait([workers.start_on(number, "ports", list(config.runtime.ports))])
            nodes[name] = facts
            found += [each.of(name) for each in (*judged, ports)]
        found += check_alike(nodes)
        with marker(folder) as path:
            if path is not None:
                saw = workers.wait(
                    [workers.start_on(number, "sees", str(path)) for number in range(len(names))]
                )
                found.append(check_seen_by_all(str(folder), dict(zip(names, saw, strict=True))))
                seeing = [number for number, there in enumerate(saw) if there]
                held = workers.wait(
                    [workers.start_on(number, "sees_locked", str(path)) for number in seeing]
                )
                found.append(
                    check_locked_for_all(
                        str(folder),
                        {names[number]: each for number, each in zip(seeing, held, strict=True)},
                    )
                )
        if bandwidth and len(names) > 1:
            found.append(_cluster_bandwidth(workers, addresses, nodes))
        workers.close()
        return found
    finally:
        leave_ray()


def _cluster_bandwidth(workers: Any, addresses: Sequence[str], nodes: dict[str, Facts]) -> Finding:
    (place,) = workers.wait([workers.start_on(0, "meeting_place", addresses[0])])
    world = len(addresses)
    measured = workers.wait(
        [workers.start_on(rank, "bandwidth", rank, world, place) for rank in range(world)]
    )
    return judge_bandwidth(min(measured), f"{world} nodes, gloo")


def _local_bandwidth() -> Finding:
    """Measures the bandwidth of gloo between two processes of this machine. To test NCCL, run
    `nccl_ranks` of scripts/gpu_check.sh."""
    from megatron_stare.commands.doctor.node_probe import measure_bandwidth

    place = f"tcp://{HERE}:{free_port(HERE, (0,))}"
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        measured = pool.starmap(
            measure_bandwidth, [(rank, 2, place) for rank in range(2)], chunksize=1
        )
    return judge_bandwidth(min(measured), "two processes of this machine, gloo")


def judge_bandwidth(gb_s: float, between: str) -> Finding:
    seen = f"{gb_s:.2f} GB/s between {between}"
    if gb_s < SLOW_GB_S:
        return warning(
            "bandwidth",
            seen,
            "set runtime.interface to the fast network: `ip -s link` shows the traffic of each"
            " interface",
        )
    return ok("bandwidth", seen)


def as_json(found: Sequence[Finding]) -> str:
    return json.dumps(
        {"ok": not faults(found), "findings": [asdict(each) for each in found]}, indent=2
    )


def as_text(found: Sequence[Finding]) -> str:
    """Returns one line per finding, with the faults last. If a finding has a remedy, the next line
    gives the remedy."""
    order = sorted(found, key=lambda each: ("ok", "warning", "fault").index(each.level))
    width = max(len(each.subject) for each in found)
    lines = []
    for each in order:
        lines.append(f"{each.level:<8} {each.subject:<{width}}  {each.seen}")
        if each.mend:
            lines.append(f"{'':<8} {'':<{width}}  mend: {each.mend}")
    count = {
        level: sum(each.level == level for each in found) for level in ("fault", "warning", "ok")
    }
    told = [f"{n} {level}{'' if n == 1 else 's'}" for level, n in count.items() if level != "ok"]
    lines.append(f"{', '.join(told)}, {count['ok']} ok")
    return "\n".join(lines)


def faults(found: Sequence[Finding]) -> list[Finding]:
    return [each for each in found if each.level == "fault"]
