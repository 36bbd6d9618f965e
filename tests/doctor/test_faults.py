"""The doctor finds what is planted: faults of the environment, of folders, ports and files for
real; versions, clocks and devices as facts of a machine that this one is not."""

from __future__ import annotations

import dataclasses
import fcntl
import importlib.metadata
import json
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import ROOT

from megatron_stare.cli import main
from megatron_stare.commands.doctor import examine as examine_module
from megatron_stare.commands.doctor import facts
from megatron_stare.commands.doctor.checks_environment import check_timeouts
from megatron_stare.commands.doctor.checks_machine import (
    check_clock,
    check_folder,
    check_locked_for_all,
    check_ports,
    check_sandbox,
    check_seen_by_all,
    check_topology,
    parse_topology,
)
from megatron_stare.commands.doctor.checks_versions import (
    LEAST_DRIVER,
    MEGATRON,
    PINNED,
    check_alike,
    check_server_version,
    check_versions,
)
from megatron_stare.commands.doctor.examine import as_text, examine, of_machine
from megatron_stare.commands.doctor.facts import VARIABLES, Facts, local_facts
from megatron_stare.commands.doctor.finding import Finding
from megatron_stare.commands.doctor.node_probe import NodeProbe
from megatron_stare.config.load import load_config
from megatron_stare.config.schema import Config
from megatron_stare.environments import sandboxes
from megatron_stare.process import versions as package_versions
from megatron_stare.process.versions import loaded_nccl
from megatron_stare.rollout.engines.replicas import server_release
from megatron_stare.rollout.engines.sglang import replica

# `nvidia-smi topo -m` of a machine whose second pair of GPUs is on the other socket; its header is
# underlined
TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\nGPU0\t"
    " X \tNV18\tSYS\tSYS\tPIX\t0-55\t0\t\tN/A\nGPU1\tNV18\t X"
    " \tSYS\tSYS\tPXB\t0-55\t0\t\tN/A\nGPU2\tSYS\tSYS\t X"
    " \tNV18\tSYS\t56-111\t1\t\tN/A\nGPU3\tSYS\tSYS\tNV18\t X"
    " \tSYS\t56-111\t1\t\tN/A\nNIC0\tPIX\tPXB\tSYS\tSYS\t X \t\t\t\t\n\nLegend:\n\n  X    = Self\n "
    " SYS  = Connection traversing PCIe as well as the SMP interconnect\n"
)
WELL = Facts(
    versions={
        "python": "3.11.7",
        "megatron-core": "0.16.1",
        **PINNED,
        "cuda": "13.0",
        "nccl": "2.28.9",
        "driver": "580.95.05",
    }
    | {"transformer-engine": "2.20.2", "flash-attn": "2.8.3"},
    apex_is_nvidias=False,
    gpus=(80 * 10**9,) * 4,
    topology=TOPOLOGY,
    limits={"open files": 1048576, "processes": -1, "locked memory": -1},
    shared_memory=(60 * 10**9, 64 * 10**9),
    interfaces={"lo": ("127.0.0.1",), "eth0": ("10.0.0.1",), "ib0": ()},
    infiniband=("mlx5_0", "mlx5_1"),
    environment={},
    clock=0.0,
)
COLOCATED = ("rollout.engine=sglang", "sglang.colocated=true", "sglang.device=cuda")


def run(*overrides: str) -> Config:
    return load_config(
        str(ROOT / "configs/quickstart.yaml"), ["parallel.sequence=true", *overrides]
    )


def wrong(found: list[Finding]) -> dict[str, Finding]:
    """By subject; each has a mend, and what is ok has none."""
    assert all(bool(each.mend) == (each.level != "ok") for each in found)
    return {each.subject: each for each in found if each.level != "ok"}


SERVERS = ("rollout.engine=sglang", "sglang.device=cuda", "sglang.colocated=true")
APART = ("rollout.engine=sglang", "sglang.device=cuda", "sglang.sync=distributed")


@pytest.mark.parametrize(
    ("settings", "served", "level", "said"),
    [
        (APART, {"torch": "2.14.1", "nccl": "2.28.9"}, "ok", "NCCL 2.28.9 here, 2.28.9 in"),
        (APART, {"torch": "2.14.1", "nccl": "2.29.3"}, "fault", "NCCL 2.28.9 here, 2.29.3 in"),
        ((*SERVERS, "sglang.sync=tensor"), {"torch": "2.13.0"}, "ok", "torch 2.13.0 here, 2.13.0"),
        (
            (*SERVERS, "sglang.sync=tensor"),
            {"torch": "2.14.1"},
            "warning",
            "2.14.1 in the servers' environment",
        ),
        ((*SERVERS, "sglang.sync=disk"), {"torch": "2.14.1"}, None, ""),
        (APART, {}, None, ""),  # no such environment: another check says so
    ],
)
def test_libraries_of_trainer_and_servers_that_meet(
    settings: tuple[str, ...], served: dict[str, str], level: str | None, said: str
) -> None:
    facts = dataclasses.replace(WELL, served=served)
    found = [each for each in check_versions(facts, run(*settings)) if "servers'" in each.subject]
    assert [each.level for each in found] == ([level] if level else [])
    assert not found or said in found[0].seen
    without = dataclasses.replace(facts, gpus=())
    assert not [e for e in check_versions(without, run(*settings)) if "servers'" in e.subject]


def test_versions_of_the_servers_are_read_from_their_environment() -> None:
    facts = local_facts(sys.executable)
    assert facts.served["torch"] == importlib.metadata.version("torch")
    assert local_facts().served == {} and local_facts("/no/such/python").served == {}


def test_a_machine_that_is_well_has_nothing() -> None:
    """So that what follows is found because it was planted."""
    for config in (
        None,
        run(),
        run(*COLOCATED),
        run("rollout.engine=sglang", "sglang.sync=distributed"),
    ):
        assert wrong(of_machine(WELL, config, ["10.0.0.1", "10.0.0.2"] if config else ())) == {}


# facts of a machine: the fault's subject, its level, what is other than on a machine that is well,
# and the run
FACTS: dict[str, tuple[str, str, dict[str, Any], tuple[str, ...]]] = {
    "a Python too new": ("python", "fault", {"versions": {"python": "3.14.0"}}, ()),
    "another PyTorch": ("torch", "fault", {"versions": {"torch": "2.14.1"}}, ()),
    "another megatron-core": (
        "megatron-core",
        "fault",
        {"versions": {"megatron-core": "0.17.0"}},
        (),
    ),
    "no Ray": ("ray", "fault", {"versions": {"ray": None}}, ()),
    "PyTorch without CUDA": ("cuda", "fault", {"versions": {"cuda": None}}, ()),
    "PyTorch without NCCL": ("cuda", "fault", {"versions": {"nccl": None}}, ()),
    "an old driver": ("cuda", "fault", {"versions": {"driver": "570.12"}}, ()),
    "no Transformer Engine": (
        "transformer engine",
        "warning",
        {"versions": {"transformer-engine": None}},
        (),
    ),
    "no attention for context parallelism": (
        "transformer engine",
        "fault",
        {"versions": {"transformer-engine": None}},
        ("parallel.context=2",),
    ),
    "no router for experts": (
        "transformer engine",
        "fault",
        {"versions": {"transformer-engine": None}},
        ("model.path=models/Qwen3-30B-A3B",),
    ),
    "no flash attention": ("flash attention", "warning", {"versions": {"flash-attn": None}}, ()),
    "the index's apex": ("apex", "fault", {"versions": {"apex": "0.9.10.dev0"}}, ()),
    "few open files": ("open files", "fault", {"limits": {"open files": 1024}}, ()),
    "few processes": ("processes", "fault", {"limits": {"processes": 1024}}, ()),
    "memory that cannot be locked": (
        "locked memory",
        "fault",
        {"limits": {"locked memory": 65536}},
        (),
    ),
    "Docker's /dev/shm": ("/dev/shm", "fault", {"shared_memory": (64 * 10**6, 64 * 2**20)}, ()),
    "tensor groups over sockets": ("GPU topology", "warning", {}, ("parallel.tensor=4",)),
    "no such interface": ("runtime.interface", "fault", {}, ("runtime.interface=eth9",)),
}


def planted(changes: dict[str, Any]) -> Facts:
    merged = {
        name: (
            {k: v for k, v in {**getattr(WELL, name), **value}.items() if v is not None}
            if isinstance(value, dict)
            else value
        )
        for name, value in changes.items()
    }
    return dataclasses.replace(WELL, **merged)


@pytest.mark.parametrize(("subject", "level", "changes", "overrides"), FACTS.values(), ids=FACTS)
def test_a_fault_of_a_machine(
    subject: str, level: str, changes: dict, overrides: tuple[str, ...]
) -> None:
    found = wrong(of_machine(planted(changes), run(*overrides)))
    assert found[subject].level == level
    assert set(found) - {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} == {subject}


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


# variables of a shell: the finding's subject, its level, variables, the run's overrides
SHELL: dict[str, tuple[str, str, dict[str, str], tuple[str, ...]]] = {
    "segments that cannot be shared": (
        "allocator",
        "fault",
        {"PYTORCH_CUDA_ALLOC_CONF": "backend:native,expandable_segments:True"},
        COLOCATED,
    ),
    "streams that do not overlap": (
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "warning",
        {"CUDA_DEVICE_MAX_CONNECTIONS": "8"},
        ("performance.cuda_connections=8",),
    ),
    "NCCL's memory set apart": (
        "NCCL_CUMEM_ENABLE",
        "fault",
        {"NCCL_CUMEM_ENABLE": "1"},
        ("rollout.engine=sglang", "sglang.sync=distributed", "sglang.urls=[http://10.0.0.2:30000]"),
    ),
    "NVLink SHARP set apart": (
        "NCCL_NVLS_ENABLE",
        "fault",
        {"NCCL_NVLS_ENABLE": "1"},
        ("rollout.engine=sglang", "sglang.sync=distributed", "sglang.urls=[http://10.0.0.2:30000]"),
    ),
    "no such adapter": ("NCCL_IB_HCA", "fault", {"NCCL_IB_HCA": "=mlx5_9:1"}, ()),
    "no such interface, NCCL": ("NCCL_SOCKET_IFNAME", "fault", {"NCCL_SOCKET_IFNAME": "bond"}, ()),
    "a beginning of a name, gloo": (
        "GLOO_SOCKET_IFNAME",
        "fault",
        {"GLOO_SOCKET_IFNAME": "eth"},
        (),
    ),
    "an interface without address": (
        "GLOO_SOCKET_IFNAME",
        "fault",
        {"GLOO_SOCKET_IFNAME": "ib0"},
        (),
    ),
    "loopback between nodes": ("NCCL_SOCKET_IFNAME", "fault", {"NCCL_SOCKET_IFNAME": "lo"}, ()),
    "all GPUs shown to each": (
        "Ray's device visibility",
        "fault",
        {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"},
        (),
    ),
    "no GPU shown to servers": (
        "Ray's device visibility",
        "fault",
        {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1"},
        COLOCATED,
    ),
    "a proxy between nodes": (
        "no_proxy",
        "fault",
        {"http_proxy": "http://p:3128", "no_proxy": "localhost"},
        (),
    ),
    "a cache that cannot be written": (
        "Hugging Face cache",
        "warning",
        {"HF_HOME": "/proc/1/cache"},
        (),
    ),
}


@pytest.mark.parametrize(("subject", "level", "variables", "overrides"), SHELL.values(), ids=SHELL)
def test_a_fault_of_the_shell(
    subject: str,
    level: str,
    variables: dict[str, str],
    overrides: tuple[str, ...],
    clean: pytest.MonkeyPatch,
) -> None:
    """Set for real and read by the probe; the devices are another machine's."""
    for name, value in variables.items():
        clean.setenv(name, value)
    seen = dataclasses.replace(WELL, environment=local_facts().environment)
    found = wrong(of_machine(seen, run(*overrides), ["10.0.0.1", "10.0.0.2"]))
    assert {name: each.level for name, each in found.items()} == {subject: level}
    assert next(iter(variables.values())) in found[subject].seen or subject in (
        "no_proxy",
        "Hugging Face cache",
    )


@pytest.mark.parametrize(
    "variables",
    [
        {"NCCL_IB_HCA": "mlx5"},
        {"NCCL_IB_HCA": "^mlx5_9"},
        {"NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1"},
        {"NCCL_SOCKET_IFNAME": "^docker,lo"},
        {"NCCL_SOCKET_IFNAME": "eth"},
        {
            "https_proxy": "http://p:3128",
            "no_proxy": "localhost,127.0.0.1",
            "NO_PROXY": "10.0.0.1,10.0.0.2",
        },
        {"https_proxy": "http://p:3128", "no_proxy": "*"},
        {"NCCL_CUMEM_ENABLE": "1"},
    ],
    ids=str,
)
def test_what_is_no_fault_of_the_shell(variables: dict[str, str]) -> None:
    seen = dataclasses.replace(WELL, environment={**WELL.environment, **variables})
    # whose servers get what the ranks get
    config = run("rollout.engine=sglang", "sglang.sync=distributed")
    assert wrong(of_machine(seen, config, ["10.0.0.1", "10.0.0.2"])) == {}


def test_a_collective_whose_limit_hides_a_hang() -> None:
    """Rollouts may be as long as they like: no rank is in a collective meanwhile."""
    for well in (
        (),
        ("runtime.timeout_s=7200", "faults.requests.request_s=2400"),
        ("faults.requests.collective_s=1200",),
    ):
        assert wrong([check_timeouts(run(*well))]) == {}
    found = wrong([check_timeouts(run("faults.requests.collective_s=1201"))])["NCCL timeout"]
    assert (found.level, found.seen) == (
        "warning",
        "1201 s until a collective with a missing rank fails",
    )
    assert "faults.requests.collective_s" in found.mend


def test_a_server_of_another_release_and_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked of a Python for real; this environment's has no server. A wheel that is told of no
    server's Python has a finding, too."""
    version, supported = server_release(
        run("rollout.engine=sglang", f"sglang.python={sys.executable}")
    ) or ("", ())
    assert version is None
    assert (
        wrong([check_server_version(version, supported)])["server environment"].seen
        == "SGLang is not installed in it"
    )
    assert server_release(run("rollout.engine=sglang", f"sglang.python={tmp_path}/none")) == (
        None,
        supported,
    )
    with monkeypatch.context() as wheel:
        wheel.delenv(replica.PYTHON_VARIABLE, raising=False)
        wheel.setattr(replica, "ENVIRONMENT", None)
        assert server_release(run("rollout.engine=sglang")) == (None, supported)
    assert server_release(run()) is None  # no servers are started
    assert wrong([check_server_version("0.4.1", supported)])["server environment"].seen.startswith(
        "0.4.1, not one of"
    )
    assert wrong([check_server_version(supported[-1], supported)]) == {}


def test_nodes_of_which_one_has_another_release() -> None:
    other = planted({"versions": {"nccl": "2.27.3"}})
    assert wrong(check_alike({"a": WELL, "b": WELL})) == {}
    found = wrong(check_alike({"a": WELL, "b": other}))
    assert found["nccl on all nodes"].seen == "2.28.9 on a, 2.27.3 on b" and len(found) == 1


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize(
    ("number", "version"), [(22809, "2.28.9"), (21805, "2.18.5"), (2708, "2.7.8")]
)
def test_the_nccl_that_is_loaded_counts(
    tmp_path: Path, monkeypatch, number: int, version: str
) -> None:
    """Not the one that PyTorch was built with: a library that stands in for it is asked, by NCCL's
    own function."""
    (tmp_path / "nccl.c").write_text(
        f"int ncclGetVersion(int *version) {{ *version = {number}; return 0; }}"
    )
    library = tmp_path / "libnccl.so.2"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", str(library), str(tmp_path / "nccl.c")], check=True
    )
    monkeypatch.setattr(package_versions, "NCCL", str(library))
    assert loaded_nccl() == version
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert local_facts().versions["nccl"] == version
    monkeypatch.setattr(package_versions, "NCCL", str(tmp_path / "none"))
    assert loaded_nccl() is None


@pytest.mark.parametrize(
    ("told", "skew"),
    [(100.0, None), (100.9, None), (102.6, None), (103.7, "+1.2"), (95.0, "-5.0"), (99.2, None)],
)
def test_a_clock(told: float, skew: str | None) -> None:
    """Asked at 100, answered at 102.5: what lies between, and a second beside it, is no fault."""
    found = check_clock(100.0, told, 102.5)
    assert (found.level, found.seen.split()[0]) == (("fault", skew) if skew else ("ok", "within"))


def test_links_between_gpus() -> None:
    assert parse_topology(TOPOLOGY)[0] == ["X", "NV18", "SYS", "SYS"]
    assert [row[number] for number, row in enumerate(parse_topology(TOPOLOGY))] == ["X"] * 4
    assert check_topology(WELL, 2).level == "ok"
    assert "GPU0 and GPU2 (SYS)" in check_topology(WELL, 4).seen
    assert parse_topology("") == []


def test_a_port_that_is_taken() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        # the first that is in use is named: from this one on, so that nobody else's comes before it
        assert (
            f"of 3 are in use, {port} among them"
            in wrong([check_ports([port, port + 2])])["ports"].seen
        )
        assert " of 2 are in use" in wrong([check_ports([port - 1, port])])["ports"].seen
    assert NodeProbe().ports([]).level == "ok"


def test_a_folder_that_is_well_and_left_as_it_was(tmp_path: Path) -> None:
    seen = facts.look_at_folder(tmp_path / "runs/not/yet")
    assert (seen.path, seen.renames, seen.locks, seen.error) == (str(tmp_path), True, True, "")
    assert seen.mb_s > 0 and list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written() -> None:
    """/proc takes no files, not even root's."""
    (found,) = wrong(check_folder(facts.look_at_folder(Path("/proc/self/runs")))).values()
    assert found.level == "fault" and "cannot be written" in found.seen


def test_a_folder_whose_locks_are_given_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount with nolock tells the first taker that it has the lock, and so it tells the
    second."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    seen = facts.look_at_folder(tmp_path)
    assert not seen.locks and seen.renames
    slow = dataclasses.replace(seen, mb_s=12.0)
    assert {
        each.level for each in wrong(check_folder(dataclasses.replace(slow, locks=True))).values()
    } == {"warning"}
    (found,) = (each for each in check_folder(seen) if each.level == "fault")
    assert "lock" in found.seen and "flock" in found.mend
    assert (
        check_folder(dataclasses.replace(seen, locks=True, renames=False, mb_s=1e4))[0].level
        == "fault"
    )


def test_a_folder_that_another_node_does_not_see(tmp_path: Path) -> None:
    with facts.marker(tmp_path) as path:
        assert path is not None and NodeProbe().sees(str(path))
    assert not NodeProbe().sees(str(path)) and list(tmp_path.iterdir()) == []
    found = wrong([check_seen_by_all("runs", {"a": True, "b": False})])
    assert "not visible on b" in found["folder runs"].seen
    assert wrong([check_seen_by_all("runs", {"a": True, "b": True})]) == {}


def test_a_lock_that_another_node_does_not_see(tmp_path: Path) -> None:
    """Two processes of one node share locks even where two nodes do not (NFS with nolock)."""
    with facts.marker(tmp_path) as path:
        assert path is not None and NodeProbe().sees_locked(str(path))
        again = path.with_name("again")
        again.write_text("")
        assert not NodeProbe().sees_locked(str(again))  # as a node without shared locks sees it
    found = wrong([check_locked_for_all("runs", {"a": True, "b": False})])
    assert "free on b" in found["locks of runs"].seen
    assert "localflock" in found["locks of runs"].mend
    assert wrong([check_locked_for_all("runs", {"a": True, "b": True})]) == {}


def test_the_command_says_it_and_ends_with_1(
    tmp_path: Path, clean: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Faults of this machine, planted for real: a limit of a process, a variable, a port; in one
    run of the command."""
    clean.setenv("NCCL_SOCKET_IFNAME", "eth99")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        first = min(holder.getsockname()[1], 65000)
        ports = f"runtime.ports=[{first}, {max(holder.getsockname()[1], first + 9)}]"
        command = [
            "doctor",
            str(ROOT / "configs/quickstart.yaml"),
            "--json",
            f"run.dir={tmp_path}/runs/a",
            ports,
        ]
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        try:
            code = main(command)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    said = json.loads(capsys.readouterr().out)
    assert code == 1 and not said["ok"]
    levels = {each["subject"]: each["level"] for each in said["findings"]}
    assert {levels[name] for name in ("open files", "NCCL_SOCKET_IFNAME", "ports")} == {"fault"}
    assert levels["python"] == levels["megatron-core"] == "ok"
    assert list(tmp_path.iterdir()) == []
    assert main(["doctor", "nowhere.yaml"]) == 2
    assert "nowhere.yaml" in capsys.readouterr().err


@pytest.mark.parametrize("sft", [True, False])
def test_the_command_examines_a_run_of_sft(monkeypatch: pytest.MonkeyPatch, sft: bool) -> None:
    examined = []

    def examine(config: Config, *, bandwidth: bool) -> list[Finding]:
        examined.append(config.supervised)
        return []

    monkeypatch.setattr(examine_module, "examine", examine)
    file = str(ROOT / "configs/retool_sft_7b.yaml")
    assert main(["doctor", file, "--json", *(["--sft"] if sft else [])]) == 0
    assert examined == [sft]


def test_the_text_ends_with_what_is_wrong() -> None:
    found = [Finding("a", "fault", "seen", "mend it"), Finding("bb", "ok", "well")]
    assert as_text(found).splitlines() == [
        "ok       bb  well",
        "fault    a   seen",
        "             mend: mend it",
        "1 fault, 0 warnings, 1 ok",
    ]


def test_pins_are_those_of_the_project() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {f"{name}=={version}" for name, version in PINNED.items()}
    assert pinned | {
        f"megatron-core=={version}; {marker}" for marker, version in MEGATRON.items()
    } <= set(lines)
    assert set(LEAST_DRIVER) == {12, 13}


@pytest.mark.parametrize(
    ("python", "megatron", "level"),
    [
        ("3.11.7", "0.16.1", "ok"),
        ("3.11.7", "0.19.2", "fault"),
        ("3.12.1", "0.16.1", "fault"),
        ("3.12.1", "0.19.2", "ok"),
        ("3.13.0", "0.19.2", "ok"),
    ],
)
def test_each_python_has_its_release_of_megatron_core(
    python: str, megatron: str, level: str
) -> None:
    facts = dataclasses.replace(
        WELL, versions={**WELL.versions, "python": python, "megatron-core": megatron}
    )
    (found,) = (each for each in check_versions(facts, None) if each.subject == "megatron-core")
    assert found.level == level
    # what is untested is said
    assert ("untested with this release" in found.seen) is (python >= "3.12" and level == "ok")


def test_at_least_20_faults_are_planted() -> None:
    assert len(FACTS) + len(SHELL) >= 20


def test_without_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    subjects = [each.subject for each in examine(None, bandwidth=False)]
    assert "python" in subjects and "NCCL timeout" not in subjects


def test_whether_programs_of_the_policy_can_be_isolated(monkeypatch: Any) -> None:
    def named(**settings: Any) -> dict[str, Any]:
        return {"name": "tools", "tools": ["code_interpreter"], **settings}

    def ran(**settings: Any) -> Config:
        environment = named(**settings)
        return Config.model_validate(
            {"model": {"path": "x"}, "rollout": {"environment": environment}}
        )

    def found(**settings: Any) -> list[tuple[str, str]]:
        return [(each.level, each.seen) for each in check_sandbox(ran(**settings))]

    def evaluated(*environments: dict[str, Any]) -> list[tuple[str, str]]:
        tasks = [
            {"name": f"t{at}", "environment": each, "offline": at > 0}
            for at, each in enumerate(environments)
        ]
        config = Config.model_validate({"model": {"path": "x"}, "eval": {"tasks": tasks}})
        return [(each.level, each.seen) for each in check_sandbox(config)]

    monkeypatch.setenv("PATH", "/nowhere")
    sandboxes.why_not_isolated.cache_clear()
    assert found() == [("fault", "bubblewrap is not installed (there is no bwrap on PATH)")]
    assert found(sandbox="remote", sandbox_url="http://box") == [
        ("ok", "programs run at http://box")
    ]
    (monty,) = check_sandbox(ran(sandbox="monty"))
    assert "on the machine that starts the run" in monty.seen + monty.mend
    assert found(tools=["my_tools.py:add"]) == []
    assert found(tools=[{"name": "code_interpreter", "once": True}]) == found()
    # environments of evaluations alone, each said once
    at_url = named(sandbox="remote", sandbox_url="http://box")
    assert evaluated(named(), at_url, named()) == [
        *found(),
        ("ok", "programs run at http://box"),
    ]
    sandboxes.why_not_isolated.cache_clear()
    assert check_sandbox(Config.model_validate({"model": {"path": "x"}})) == []
