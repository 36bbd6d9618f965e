"""Slurm for one node, this machine: Debian's slurm-wlm, with its own key, ports and folders, as
root."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd")
START_S = 60.0


def reason_against() -> str | None:
    """Why it cannot be started here."""
    if missing := [name for name in DAEMONS if shutil.which(name) is None]:
        return f"no {', '.join(missing)}: apt-get install slurm-wlm"
    return None if os.geteuid() == 0 else "slurmd needs root"


@contextmanager
def one_node(folder: Path, ports: tuple[int, int]) -> Iterator[dict[str, str]]:
    """While open, Slurm runs; gives the variables that its commands need."""
    folder.mkdir(mode=0o755)
    secret = folder / "munge"
    secret.mkdir(mode=0o700)
    (secret / "key").write_bytes(secrets.token_bytes(1024))
    (secret / "key").chmod(0o400)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    host, file = socket.gethostname().partition(".")[0], folder / "slurm.conf"
    file.write_text(configuration(folder, host, ports))
    environment = {**os.environ, "SLURM_CONF": str(file)}
    munged = [
        "munged",
        "--foreground",
        "--force",
        f"--key-file={secret}/key",
        f"--socket={folder}/munge.sock",
    ]
    munged += [f"--{what}-file={secret}/{what}" for what in ("pid", "log", "seed")]
    with ExitStack() as stack:
        for command in (
            munged,
            ["slurmctld", "-D", "-f", str(file)],
            ["slurmd", "-D", "-f", str(file)],
        ):
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            daemon = subprocess.Popen(command, env=environment, **quiet)  # type: ignore[call-overload]
            stack.callback(daemon.wait)
            stack.callback(daemon.terminate)
            if command is munged:
                until(lambda: (folder / "munge.sock").exists(), "munged")
        until(lambda: "idle" in asked(environment, "sinfo", "-h", "-o", "%t"), "slurmd")
        yield {"SLURM_CONF": str(file)}


def configuration(folder: Path, host: str, ports: tuple[int, int]) -> str:
    settings = {
        "ClusterName": "one",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={folder}/munge.sock",
        "CredType": "cred/munge",
        "StateSaveLocation": f"{folder}/state",
        "SlurmdSpoolDir": f"{folder}/spool",
        "SlurmctldPidFile": f"{folder}/slurmctld.pid",
        "SlurmdPidFile": f"{folder}/slurmd.pid",
        "SlurmctldLogFile": f"{folder}/slurmctld.log",
        "SlurmdLogFile": f"{folder}/slurmd.log",
        "SlurmctldPort": ports[0],
        "SlurmdPort": ports[1],
        "ProctrackType": "proctrack/pgid",  # a container has no cgroups to give
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "AccountingStorageType": "accounting_storage/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_CPU",
        "KillWait": 5,
        "SlurmdParameters": "config_overrides",
        "NodeName": f"{host} NodeAddr=127.0.0.1 CPUs=8",
        "PartitionName": f"all Nodes={host} Default=YES MaxTime=INFINITE State=UP",
    }
    return "".join(f"{name}={value}\n" for name, value in settings.items())


def asked(environment: dict[str, str], *command: str) -> str:
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60
    ).stdout


def until(holds, what: str, limit_s: float = START_S) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.2)
