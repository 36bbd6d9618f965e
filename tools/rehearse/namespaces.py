"""Nodes of a cluster on this machine: namespaces with an address, a host name, a /dev/shm and a
/tmp of their own, and commands in the place of Slurm's that start words on them.

The rest of the file system is common to all nodes. Needs root.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ADDRESSES = ("10.77.0.1", "10.77.0.2")
OWN = ["--net", "--uts", "--mount", "--ipc"]

# srun: its words on each of the nodes that --nodelist and --exclude leave; it ends them when it is
# told to end
SRUN = """#!/usr/bin/env bash
here="$(dirname "$0")" nodes=(node0 node1)
while [ "${1#--}" != "$1" ]; do
    case "$1" in
    --nodelist=*) nodes=("${1#*=}") ;;
    --exclude=*) nodes=("${nodes[@]/${1#*=}/}") ;;
    esac
    shift
done
trap 'kill $(jobs -p) 2>/dev/null' TERM INT
for node in ${nodes[@]}; do
    nsenter "--target=$(cat "$here/$node.pid")" --net --uts --mount --ipc -- "$@" &
done
wait
wait
"""
SCONTROL = """#!/usr/bin/env bash
case "$1 $2" in
"show hostnames") printf 'node0\\nnode1\\n' ;;
"requeue "*) touch "$(dirname "$0")/requeued" ;;
esac
"""


def missing() -> str | None:
    """Says what this machine lacks for nodes of its own; None: nothing."""
    if os.geteuid():
        return "namespaces need root"
    absent = [tool for tool in ("unshare", "nsenter", "ip") if shutil.which(tool) is None]
    if absent:
        return f"namespaces need {', '.join(absent)} (apt-get install iproute2 util-linux)"
    tried = subprocess.run(["unshare", *OWN, "true"], capture_output=True, text=True)
    return (
        None if tried.returncode == 0 else f"namespaces cannot be made here: {tried.stderr.strip()}"
    )


@dataclass
class Node:
    """One of the nodes. Its namespaces end with `holder`.

    environment: of every process that is started on it.
    """

    name: str
    address: str
    environment: Mapping[str, str]
    hosts: Path
    holder: subprocess.Popen[str] = field(init=False)

    def __post_init__(self) -> None:
        set_up = (
            f"hostname {self.name} && mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs /tmp &&"
            f" chmod 1777 /tmp && mount --bind {self.hosts} /etc/hosts && ip link set lo up &&"
            " echo up && exec sleep infinity"
        )
        words = ["unshare", *OWN, "bash", "-c", set_up]
        self.holder = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self.holder.stdout is not None and self.holder.stdout.readline().strip() == "up"

    def command(self, words: Sequence[str]) -> list[str]:
        """Returns the words as a command that runs in this node."""
        return ["nsenter", f"--target={self.holder.pid}", *OWN, "--", *words]

    def popen(self, words: Sequence[str], **given: object) -> subprocess.Popen[str]:
        return subprocess.Popen(self.command(words), env=self.environment, text=True, **given)  # type: ignore[call-overload, no-any-return]

    def run(self, *words: str) -> str:
        """Returns the output of a command on this node. Raises RuntimeError if it failed."""
        done = subprocess.run(
            self.command(words), env=self.environment, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)} on {self.name}: {done.stdout}{done.stderr}")
        return done.stdout

    def processes(self) -> list[int]:
        """Returns the processes in the node's network, without its holder."""
        mine = os.readlink(f"/proc/{self.holder.pid}/ns/net")
        return [
            int(each.name)
            for each in Path("/proc").iterdir()
            if each.name.isdigit() and int(each.name) != self.holder.pid and _network(each) == mine
        ]

    def kill(self) -> None:
        """Kills everything on the node at once, and again what that started; the node stays."""
        until = time.monotonic() + 20
        while (left := self.processes()) and time.monotonic() < until:
            for process in left:
                subprocess.run(["kill", "-9", str(process)], capture_output=True)
            time.sleep(0.2)

    def close(self) -> None:
        self.kill()
        self.holder.kill()
        self.holder.wait()


@contextmanager
def two_nodes(environment: Mapping[str, str]) -> Iterator[tuple[list[Node], Path]]:
    """Yields two nodes that are joined by a cable and know each other's names, and the folder that
    both see. The folder's `bin` has commands in the place of Slurm's; its `token` is of Ray, whose
    cluster takes nobody without it.

    Args:
        environment: of every process there.
    """
    with ExitStack() as stack:
        shared = Path(tempfile.mkdtemp(prefix="ms-nodes-", dir="/var/tmp"))
        stack.callback(shutil.rmtree, shared, ignore_errors=True)
        (shared / "token").write_text(secrets.token_hex(32))
        names = [f"node{number}" for number in range(len(ADDRESSES))]
        lines = [f"{address} {name}" for address, name in zip(ADDRESSES, names, strict=True)]
        hosts = shared / "hosts"
        hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        # a head may come up with a token of its own, which no node that joins would have
        tokens = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(shared / "token")}
        folder = shared / "bin"
        folder.mkdir()
        path = f"{folder}{os.pathsep}{environment.get('PATH', os.defpath)}"
        own = {**environment, **tokens, "PATH": path}
        for name, words in (("srun", SRUN), ("scontrol", SCONTROL)):
            (folder / name).write_text(words)
            (folder / name).chmod(0o755)
        nodes = []
        for name, address in zip(names, ADDRESSES, strict=True):
            nodes.append(Node(name, address, own, hosts))
            stack.callback(nodes[-1].close)
            (folder / f"{name}.pid").write_text(str(nodes[-1].holder.pid))
        link = f"ms{secrets.token_hex(3)}"
        cable = ["ip", "link", "add", f"{link}0", "type", "veth", "peer", "name", f"{link}1"]
        subprocess.run(cable, check=True)
        for number, node in enumerate(nodes):
            to = ["ip", "link", "set", f"{link}{number}", "netns", str(node.holder.pid)]
            subprocess.run(to, check=True)
            node.run("ip", "link", "set", f"{link}{number}", "name", "veth0")
            node.run("ip", "addr", "add", f"{node.address}/24", "dev", "veth0")
            node.run("ip", "link", "set", "veth0", "up")
            # without a way out, Ray takes a node's loopback for its address
            node.run("ip", "route", "add", "default", "dev", "veth0")
        yield nodes, shared


def _network(process: Path) -> str | None:
    try:
        return os.readlink(process / "ns/net")
    except OSError:
        return None
