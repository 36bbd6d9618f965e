"""Checks that a machine's environment variables suit a run. Also checks settings that would
otherwise cause errors only late in the run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from megatron_stare.commands.doctor.facts import Facts
from megatron_stare.commands.doctor.finding import Finding, fault, ok, warning
from megatron_stare.config.fault_sections import COLLECTIVE_S
from megatron_stare.config.performance import FEATURES, connections, reasons
from megatron_stare.config.process_settings import (
    AGREED,
    ALLOCATORS,
    INTERFACES,
    shared_environment,
)
from megatron_stare.config.schema import Config

VISIBILITY = ("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO")
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def check_environment(facts: Facts, config: Config, addresses: Sequence[str] = ()) -> list[Finding]:
    """Checks the environment variables that a rank or server on this machine would get.

    If the run sets a variable, the check uses the run's value and not the shell's value.

    Args:
        addresses: addresses of all nodes of a cluster.
    """
    shell = facts.environment
    seen = {**shell, **shared_environment(config)}
    return [
        _allocator(seen, config),
        _connections(shell, config, bool(facts.gpus)),
        *(_agreed(name, shell, config) for name in AGREED),
        _infiniband(seen, facts),
        *(_interface(name, seen, facts, len(addresses) > 1) for name in INTERFACES),
        _visibility(shell, config),
        _proxy(shell, addresses),
        _cache(shell),
        *_performance(facts, config),
    ]


def _performance(facts: Facts, config: Config) -> list[Finding]:
    """Lists the features of the section `performance` that are enabled. Also lists the disabled
    features, each with the reason why the feature is disabled. Returns [] for a machine without
    GPUs."""
    if not facts.gpus:
        return []
    has = {"cuda"}
    if "transformer-engine" in facts.versions:
        has.add("te")
    if facts.apex_is_nvidias:
        has.add("wgrad")
    off = reasons(config, has=has)
    on = [feature.name for feature in FEATURES if feature.name not in off]
    lines = [f"on: {', '.join(on) or 'nothing'}"]
    lines += [f"off: {name} ({reason})" for name, reason in off.items()]
    return [ok("performance", "; ".join(lines))]


def _allocator(seen: Mapping[str, str], config: Config) -> Finding:
    for name in ALLOCATORS:
        value = seen.get(name, "")
        if config.sglang.colocated and "expandable_segments:true" in value.lower():
            mend = (
                "unset it where Ray is started: neither the servers' memory saver nor CUDA IPC can"
                " share such memory"
            )
            return fault(
                "allocator", f"{name}={value}, and servers are on the trainer's GPUs", mend
            )
    return ok("allocator", "no setting prevents servers from sharing the trainer's GPUs")


def _connections(shell: Mapping[str, str], config: Config, gpus: bool) -> Finding:
    used = connections(config)
    value = shell.get(CONNECTIONS, "not set, and not needed") if used is None else str(used)
    parallel = config.parallel
    if gpus and (parallel.tensor > 1 or parallel.context > 1) and used != 1:
        mend = (
            "performance.cuda_connections=null: one queue lets tensor and context parallelism"
            " overlap with matrix products"
        )
        return warning(CONNECTIONS, value, mend)
    return ok(CONNECTIONS, value)


def _agreed(name: str, shell: Mapping[str, str], config: Config) -> Finding:
    """Checks one environment variable that `AGREED` lists. Every process that the run starts gets
    the run's own value of the variable.

    The run does not start the servers in `sglang.urls`. For the servers in `sglang.urls`, the check
    assumes the value that the variable has in the shell. If a run with `sglang.urls` sets the
    variable to another value than the shell does, the check returns a fault.
    """
    own, value = shared_environment(config).get(name), shell.get(name)
    if own is not None and config.sglang.urls and value is not None and value != own:
        mend = (
            f"start the servers of sglang.urls with {name}={own}, or set their value in runtime.env"
        )
        return fault(
            name,
            f"{value} on this node, but the run sets {own} for its ranks: an NCCL group with both"
            " values would hang",
            mend,
        )
    return ok(name, own or value or "not set")


def _infiniband(seen: Mapping[str, str], facts: Facts) -> Finding:
    """Checks NCCL_IB_HCA, a list of network adapters. Each entry is a prefix of adapter names, or a
    whole name if the list starts with `=`. If the list starts with `^`, NCCL uses all adapters
    except the listed ones."""
    value = seen.get("NCCL_IB_HCA", "")
    names = [name.partition(":")[0] for name in value.lstrip("^=").split(",") if name]
    exact = "=" in value[:2]
    lost = [
        n for n in names if not any(a == n if exact else a.startswith(n) for a in facts.infiniband)
    ]
    if lost and not value.startswith("^"):
        mend = (
            f"adapters there: {', '.join(facts.infiniband) or 'none'}; NCCL would use sockets, ten"
            " times slower"
        )
        return fault("NCCL_IB_HCA", f"{value}: there is no adapter {', '.join(lost)}", mend)
    if facts.infiniband and seen.get("NCCL_IB_DISABLE") == "1":
        return warning(
            "NCCL_IB_HCA", "NCCL_IB_DISABLE=1 though there are adapters", "unset NCCL_IB_DISABLE"
        )
    return ok("NCCL_IB_HCA", value or f"not set; adapters: {', '.join(facts.infiniband) or 'none'}")


def _interface(variable: str, seen: Mapping[str, str], facts: Facts, several: bool) -> Finding:
    """Checks the network interfaces that are listed in an environment variable. NCCL accepts
    prefixes, `^` and `=`; gloo accepts only whole names."""
    value, there = seen.get(variable, ""), facts.interfaces
    exact = variable.startswith("GLOO") or value.startswith("=")
    names = [name for name in value.lstrip("=").split(",") if name]
    if value and not value.startswith("^"):
        found = [
            each
            for each in there
            for name in names
            if (each == name if exact else each.startswith(name))
        ]
        if not found:
            return fault(
                variable,
                f"{value}: there is no such interface",
                f"use one of {', '.join(sorted(there))}",
            )
        if several and set(found) == {"lo"}:
            return fault(
                variable,
                "lo, which no other node reaches",
                "name the network's interface in runtime.interface",
            )
        if not any(there[each] for each in found):
            return fault(
                variable,
                f"{value} has no IPv4 address",
                "name one that has: `ip -4 addr` lists them",
            )
    return ok(variable, value or "not set")


def _visibility(shell: Mapping[str, str], config: Config) -> Finding:
    """Checks the two variables of Ray that change how Ray sets CUDA_VISIBLE_DEVICES for a process.
    With a wrong value, a process would see all GPUs of its node, or none."""
    noset, zero = (shell.get(name, "") for name in VISIBILITY)
    if noset not in ("", "0"):
        return fault(
            "Ray's device visibility",
            f"{VISIBILITY[0]}={noset}",
            "unset it: every rank would see all GPUs",
        )
    if config.sglang.colocated and zero not in ("", "0"):
        mend = "unset it: servers on the trainer's GPUs ask Ray for no GPU, and would then see none"
        return fault("Ray's device visibility", f"{VISIBILITY[1]}={zero}", mend)
    return ok("Ray's device visibility", "each process sees only its own GPUs")


def _proxy(shell: Mapping[str, str], addresses: Sequence[str]) -> Finding:
    """Checks that no proxy is used for Ray's own traffic or for requests to servers."""
    named = [
        name
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
        if shell.get(name)
    ]
    spared = _words([shell.get("no_proxy", ""), shell.get("NO_PROXY", "")])
    wanted = ["127.0.0.1", "localhost", *addresses]
    missing = [
        each
        for each in wanted
        if "*" not in spared and not any(_covers(word, each) for word in spared)
    ]
    if named and missing:
        mend = f"no_proxy={','.join([*sorted(spared), *missing])}, where Ray is started"
        return fault(
            "no_proxy", f"{named[0]} is set and no_proxy leaves out {', '.join(missing)}", mend
        )
    return ok("no_proxy", "includes all nodes" if named else "no proxy is set")


def _words(texts: Iterable[str]) -> set[str]:
    return {word for text in texts for word in re.split(r"[,\s]+", text) if word}


def _covers(word: str, address: str) -> bool:
    return address == word or address.endswith("." + word.lstrip("."))


def _cache(shell: Mapping[str, str]) -> Finding:
    """Checks that the download cache of transformers and datasets is writable."""
    home = shell.get("HF_HUB_CACHE") or shell.get("HF_HOME") or "~/.cache/huggingface"
    folder = Path(home).expanduser()
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        mend = "name a folder that can be written in HF_HOME; datasets by name are kept there"
        return warning("Hugging Face cache", f"{folder} cannot be written", mend)
    return ok("Hugging Face cache", str(folder))


def check_timeouts(config: Config) -> Finding:
    """Checks the timeout of collectives. If a rank hangs, the other ranks' collective fails after
    this timeout. The timeout may be shorter than a rollout, since ranks run no collective during a
    rollout; see docs/cluster.md."""
    seconds = config.faults.requests.collective_limit(config.runtime.timeout_s)
    if seconds > COLLECTIVE_S:
        return warning(
            "NCCL timeout",
            f"{seconds:.0f} s until a collective with a missing rank fails",
            f"leave faults.requests.collective_s out ({COLLECTIVE_S:.0f} s), unless the ranks'"
            " times to read weights or checkpoints differ by that much",
        )
    return ok("NCCL timeout", f"{seconds:.0f} s")


def check_interface_setting(facts: Facts, config: Config) -> Finding:
    """Checks runtime.interface on one node."""
    name = config.runtime.interface
    if name and not facts.interfaces.get(name):
        mend = f"interfaces there: {', '.join(sorted(facts.interfaces))}"
        return fault("runtime.interface", f"{name} is not there, or has no IPv4 address", mend)
    return ok("runtime.interface", name or "not set")
