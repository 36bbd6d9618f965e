"""Checks a machine's limits, memory, clock, GPU links, ports and folders."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_stare.commands.doctor.facts import Facts, FolderSeen
from megatron_stare.commands.doctor.finding import Finding, fault, ok, warning
from megatron_stare.config.schema import Config
from megatron_stare.environments.sandboxes import why_not_isolated
from megatron_stare.errors import UserError

# least limits of a node with GPUs; Ray recommends 65536 files for clusters
OPEN_FILES, PROCESSES = 65536, 4096
OPEN_FILES_ON_CPUS = 4096
# least /dev/shm for Ray's objects and NCCL's buffers on a node with GPUs; runs on CPUs need less
SHARED_MEMORY = 8 * 10**9
SHARED_MEMORY_ON_CPUS = 128 * 2**20
SKEW_S = 1.0  # greater skew breaks leases of shared file systems and the order of logs
SLOW_MB_S = 100.0  # at this speed a checkpoint of 460 GB over 32 ranks takes minutes
# names in `nvidia-smi topo -m` of connections between GPUs that cross a PCIe host bridge
FAR = ("SYS", "NODE", "PHB")
_WHERE_PROGRAMS_RUN = "on the machine that starts the run; other nodes run no programs"


def check_sandbox(config: Config) -> list[Finding]:
    """Checks that this machine can isolate the programs that the policy writes in training or in an
    evaluation. Returns [] if the configuration lets the policy write no programs. Other nodes of a
    cluster are not checked, because all environments run in the driver process."""
    from megatron_stare.environments.tools import sandboxed  # needs torch and transformers
    from megatron_stare.tasks.task import evaluation_tasks, training_task

    found: list[Finding] = []
    for task in (training_task(config), *evaluation_tasks(config, offline=True)):
        with contextlib.suppress(UserError):  # a run refuses it before anything starts
            if (settings := sandboxed(task.config)) is not None:
                found.append(_sandbox(settings))
    return list(dict.fromkeys(found))


def _sandbox(settings: Mapping[str, Any]) -> Finding:
    if url := settings.get("sandbox_url"):
        return ok("sandbox", f"programs run at {url}")
    if settings.get("sandbox") == "monty":
        if importlib.util.find_spec("pydantic_monty") is None:
            fix = f'pip install "megatron-stare[tools]", {_WHERE_PROGRAMS_RUN}'
            return fault("sandbox", "the package pydantic-monty is not installed", fix)
        seen = "programs run in pydantic-monty, which supports only a part of Python"
        return ok("sandbox", f"{seen}, {_WHERE_PROGRAMS_RUN}")
    if why := why_not_isolated():
        fix = f"apt-get install bubblewrap, and allow user namespaces, {_WHERE_PROGRAMS_RUN}"
        return fault("sandbox", why, fix)
    return ok("sandbox", f"bubblewrap isolates programs {_WHERE_PROGRAMS_RUN}")


def check_limits(facts: Facts) -> list[Finding]:
    found = []
    for name, least, why in (
        ("open files", OPEN_FILES if facts.gpus else OPEN_FILES_ON_CPUS, "ulimit -n"),
        ("processes", PROCESSES, "ulimit -u"),
    ):
        value = facts.limits[name]
        if 0 <= value < least:
            found.append(
                fault(
                    name,
                    f"{value}",
                    f"{why} {least}, in the shell that starts Ray or in limits.conf",
                )
            )
        else:
            found.append(ok(name, "no limit" if value < 0 else f"{value}"))
    locked = facts.limits["locked memory"]
    if facts.infiniband and locked >= 0:
        mend = (
            "ulimit -l unlimited, in the shell that starts Ray; InfiniBand registers memory that is"
            " locked"
        )
        found.append(fault("locked memory", f"{locked // 1024} kB", mend))
    return found


def check_shared_memory(facts: Facts) -> Finding:
    free, whole = facts.shared_memory
    least = SHARED_MEMORY if facts.gpus else SHARED_MEMORY_ON_CPUS
    seen = f"{free / 1e9:.2f} of {whole / 1e9:.2f} GB free"
    if free < least:
        mend = (
            f"at least {least / 1e9:.2f} GB are needed: raise --shm-size of the container, or"
            " remove files from /dev/shm"
        )
        return fault("/dev/shm", seen, mend)
    return ok("/dev/shm", seen)


def check_clock(asked: float, told: float, answered: float) -> Finding:
    """Compares a node's clock with this machine's clock. All times are seconds since 1970.

    Args:
        asked: time of the request, by this machine's clock.
        told: the node's time.
        answered: time of the answer, by this machine's clock.
    """
    skew = told - asked if told < asked else max(told - answered, 0.0)
    if abs(skew) > SKEW_S:
        return fault(
            "clock", f"{skew:+.1f} s from this machine's", "run chrony or ntpd on every node"
        )
    return ok("clock", f"within {SKEW_S:.0f} s of this machine's")


def check_topology(facts: Facts, tensor: int) -> Finding:
    """Checks that no connection between GPUs of the same tensor-parallel group crosses a PCIe host
    bridge. `tensor` is the number of GPUs in a tensor-parallel group. The GPUs of a group have
    consecutive indices. Uses the output of `nvidia-smi topo -m`."""
    links = parse_topology(facts.topology)
    count = len(links)
    far = [
        f"GPU{a} and GPU{b} ({links[a][b]})"
        for first in range(0, count - count % tensor, tensor)
        for a in range(first, first + tensor)
        for b in range(a + 1, first + tensor)
        if links[a][b] in FAR
    ]
    if far:
        mend = (
            f"a tensor group of {tensor} should be linked by NVLink (NV#): use a smaller"
            " parallel.tensor, or other nodes"
        )
        return warning("GPU topology", f"no link within a tensor group: {', '.join(far[:3])}", mend)
    return ok(
        "GPU topology",
        f"{count} GPUs; groups of {tensor} are linked" if count > 1 else f"{count} GPUs",
    )


def parse_topology(table: str) -> list[list[str]]:
    """Returns the matrix of connections between GPUs. An entry is 'X', 'NV18', 'PIX', 'PXB', 'PHB',
    'NODE' or 'SYS'."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", table)  # removes the underlining of the header
    rows = [
        line.split() for line in plain.splitlines() if re.match(r"GPU\d+\s", line) and "\t" in line
    ]
    rows = [row for row in rows if row[1:] and not row[1].startswith("GPU")]
    return [row[1 : 1 + len(rows)] for row in rows]


def check_ports(ports: Sequence[int], host: str = "") -> Finding:
    """Checks that every port of a range is free on this machine."""
    if not ports:
        return ok("ports", "runtime.ports is not set: the kernel chooses the ports")
    taken = [port for port in range(ports[0], ports[-1] + 1) if not _free(host, port)]
    if taken:
        seen = f"{len(taken)} of {ports[-1] - ports[0] + 1} are in use, {taken[0]} among them"
        return fault(
            "ports", seen, "end what listens there, or name another range in runtime.ports"
        )
    return ok("ports", f"{ports[0]} to {ports[-1]} are free")


def _free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def check_folder(seen: FolderSeen) -> list[Finding]:
    """Checks that the folder for run directories supports writing, renaming and locking."""
    where = f"folder {seen.path}"
    if seen.error:
        return [
            fault(
                where,
                seen.error,
                "name a folder that can be written, on a file system of all nodes",
            )
        ]
    found = []
    if not seen.renames:
        mend = "checkpoints are renamed into place: use a file system with renames of folders"
        found.append(fault(where, "a folder could not be renamed", mend))
    if not seen.locks:
        mend = (
            "mount it with locks (NFS: without nolock; Lustre: -o flock): two processes could write"
            " one run"
        )
        found.append(
            fault(where, "a lock was given to a second process while the first held it", mend)
        )
    if seen.mb_s < SLOW_MB_S:
        mend = (
            "use a parallel file system for runs; checkpoints are written in the background, but"
            " must finish in time"
        )
        found.append(warning(where, f"written at {seen.mb_s:.0f} MB/s", mend))
    return found or [ok(where, f"renames and locks work, {seen.mb_s:.0f} MB/s")]


def check_seen_by_all(path: str, saw: Mapping[str, bool]) -> Finding:
    blind = [node for node, there in saw.items() if not there]
    if blind:
        seen = f"a file written here is not visible on {', '.join(blind)}"
        return fault(
            f"folder {path}",
            seen,
            "use a file system that all nodes mount at the same path",
        )
    return ok(f"folder {path}", f"seen by all {len(saw)} nodes")


def check_locked_for_all(path: str, held: Mapping[str, bool]) -> Finding:
    """Checks that every node sees a file as locked while this machine holds the lock of the file.
    The file lies in the folder `path`.

    Args:
        held: by the name of a node, True if the node sees the file as locked. Contains only the
            nodes on which the file exists.
    """
    free = [node for node, there in held.items() if not there]
    if free:
        return fault(
            f"locks of {path}",
            f"a lock held here is free on {', '.join(free)}",
            "mount it with shared locks (NFS: without nolock; Lustre: -o flock, not localflock):"
            " two nodes could write one run",
        )
    return ok(f"locks of {path}", f"shared by {len(held)} nodes")
