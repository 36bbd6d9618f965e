"""Two nodes of a cluster on this machine: namespaces with an address, a host name, a /dev/shm and a
/tmp of their own.

Ray's head is in the first, a node of the same cluster in the second. One folder is common to both.
Needs root.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

ADDRESSES = ("10.77.0.1", "10.77.0.2")
RAY_PORT, FAKE, UP_S = 6379, "fake_gpu", 120
RAY = str(Path(sys.executable).with_name("ray"))
OWN = ["--net", "--uts", "--mount", "--ipc"]


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


class Node:
    """One of the two. Its namespaces end with `holder`."""

    def __init__(self, number: int, environment: Mapping[str, str]) -> None:
        self.name, self.address, self._environment = f"node{number}", ADDRESSES[number], environment
        set_up = (
            f"hostname {self.name} && mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs /tmp &&"
            " chmod 1777 /tmp && ip link set lo up && echo up && exec sleep infinity"
        )
        words = ["unshare", *OWN, "bash", "-c", set_up]
        self.holder = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self.holder.stdout is not None and self.holder.stdout.readline().strip() == "up"

    def command(self, words: Sequence[str]) -> list[str]:
        """Runs the words in this node."""
        return ["nsenter", f"--target={self.holder.pid}", *OWN, "--", *words]

    def popen(self, words: Sequence[str], **given: object) -> subprocess.Popen[str]:
        return subprocess.Popen(self.command(words), env=self._environment, text=True, **given)  # type: ignore[call-overload, no-any-return]

    def run(self, *words: str) -> str:
        done = subprocess.run(
            self.command(words), env=self._environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{' '.join(words)} on {self.name}: {done.stdout}{done.stderr}"
        return done.stdout


@contextmanager
def two_nodes(
    gpus: Sequence[int], environment: Mapping[str, str]
) -> Iterator[tuple[list[Node], Path]]:
    """Both nodes, joined in a Ray cluster, and the folder that both see.

    Args:
        gpus: simulated ones of each.
        environment: of every process there.
    """
    assert (lacking := missing()) is None, lacking
    with ExitStack() as stack:
        shared = Path(tempfile.mkdtemp(prefix="ms-nodes-", dir="/var/tmp"))
        stack.callback(shutil.rmtree, shared, ignore_errors=True)
        (shared / "token").write_text(secrets.token_hex(32))
        # a head may come up with a token of its own, which no node that joins would have
        tokens = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(shared / "token")}
        nodes = []
        for number in range(2):
            nodes.append(Node(number, {**environment, **tokens}))
            stack.callback(_ended, nodes[-1])
        link = f"ms{secrets.token_hex(3)}"
        subprocess.run(
            ["ip", "link", "add", f"{link}0", "type", "veth", "peer", "name", f"{link}1"],
            check=True,
        )
        for number, node in enumerate(nodes):
            subprocess.run(
                ["ip", "link", "set", f"{link}{number}", "netns", str(node.holder.pid)], check=True
            )
            node.run("ip", "link", "set", f"{link}{number}", "name", "veth0")
            node.run("ip", "addr", "add", f"{node.address}/24", "dev", "veth0")
            node.run("ip", "link", "set", "veth0", "up")
        for number, node in enumerate(nodes):
            joins = ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"]
            if number:
                joins = [f"--address={ADDRESSES[0]}:{RAY_PORT}"]
            counted = [
                f'--resources={{"{FAKE}": {gpus[number]}}}',
                "--num-cpus=2",
                "--object-store-memory=200000000",
            ]
            stack.callback(_stopped, node)
            node.run(
                RAY,
                "start",
                *joins,
                f"--node-ip-address={node.address}",
                "--disable-usage-stats",
                *counted,
            )
        yield nodes, shared


def _stopped(node: Node) -> None:
    subprocess.run(node.command([RAY, "stop", "--force"]), capture_output=True)


def _ended(node: Node) -> None:
    """Ends whatever is left in the node's network, and with it its namespaces."""
    mine = os.readlink(f"/proc/{node.holder.pid}/ns/net")
    until = time.monotonic() + 10
    while time.monotonic() < until:
        left = [
            int(each.name)
            for each in Path("/proc").iterdir()
            if each.name.isdigit() and _network(each) == mine
        ]
        if left in ([], [node.holder.pid]):
            break
        for process in left:
            if process != node.holder.pid:
                subprocess.run(["kill", "-9", str(process)], capture_output=True)
        time.sleep(0.2)
    node.holder.kill()
    node.holder.wait()


def _network(process: Path) -> str | None:
    try:
        return os.readlink(process / "ns/net")
    except OSError:
        return None
