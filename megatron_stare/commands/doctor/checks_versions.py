"""Checks package versions on one machine, and compares the versions of several machines."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence

from megatron_stare.commands.doctor.facts import Facts
from megatron_stare.commands.doctor.finding import Finding, fault, ok, warning
from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.errors import UserError

PYTHONS = ((3, 11), (3, 13))
# packages pinned in constraints.txt whose private API is used
PINNED = {"torch": "2.13.0", "ray": "2.60.0"}
MEGATRON = {'python_version < "3.12"': "0.16.1", 'python_version >= "3.12"': "0.19.2"}
SETUP = "bash scripts/setup_env.sh"
# oldest driver for a CUDA release on Linux; from NVIDIA's CUDA Toolkit release notes, minor-version
# compatibility
LEAST_DRIVER = {12: (525, 60), 13: (580, 0)}
ALIKE = (
    "python",
    "torch",
    "cuda",
    "nccl",
    "megatron-core",
    "transformer-engine",
    "apex",
    "flash-attn",
    "ray",
)


def check_versions(facts: Facts, config: Config | None) -> list[Finding]:
    """Checks the package versions on one machine. If `config` is given, the function also checks
    that the versions suit the configured run."""
    versions = facts.versions
    found = [_python(versions), _megatron(versions)]
    found += [_pinned(name, versions, wanted) for name, wanted in PINNED.items()]
    if facts.gpus:
        found += [
            _cuda(versions),
            _transformer_engine(versions, config),
            _flash_attention(versions),
        ]
    return found + _apex(facts) + _servers(facts, config)


def _servers(facts: Facts, config: Config | None) -> list[Finding]:
    """Compares the trainer's version with the servers' version for each library that the weight
    sync on GPUs needs."""
    if config is None or not facts.gpus or not facts.served:
        return []
    own, served = facts.versions, facts.served
    if config.sglang.sync == "distributed":
        theirs = f"{served.get('nccl', 'none')} in the servers' environment"
        said = f"NCCL {own.get('nccl', 'none')} here, {theirs}"
        if own.get("nccl") == served.get("nccl"):
            return [ok("servers' libraries", said)]
        mend = (
            "NCCL refuses a group with both releases: install the servers' nvidia-nccl-cu* here,"
            " with pip install --no-deps (docs/install.md)"
        )
        return [fault("servers' libraries", said, mend)]
    if config.sglang.sync == "tensor":
        theirs = f"{served.get('torch', 'none')} in the servers' environment"
        said = f"torch {own.get('torch')} here, {theirs}"
        if own.get("torch") == served.get("torch"):
            return [ok("servers' libraries", said)]
        mend = (
            "the weight sync shares CUDA memory between the two, which is untested with these"
            " releases: run server_cycle of scripts/gpu_check.sh first, or set sglang.sync=disk"
        )
        return [warning("servers' libraries", said, mend)]
    return []


def _python(versions: Mapping[str, str]) -> Finding:
    found, (least, most) = versions["python"], PYTHONS
    if least <= _numbers(found)[:2] <= most:
        return ok("python", found)
    return fault("python", found, f"use one of {_text(least)} to {_text(most)}: {SETUP}")


def _megatron(versions: Mapping[str, str]) -> Finding:
    """Checks that megatron-core is the newest supported release for the installed Python. Parts of
    this package were never tested with the newest release in the dict `MEGATRON`. If this newest
    release is installed, the returned finding lists what was not tested."""
    older, newest = MEGATRON.values()
    python = _numbers(versions["python"])[:2]
    if python > PYTHONS[1]:  # reported by `_python`
        return ok("megatron-core", versions.get("megatron-core", "none"))
    wanted = newest if python >= (3, 12) else older
    finding = _pinned("megatron-core", versions, wanted)
    if finding.level == "ok" and wanted == newest:
        return ok(
            "megatron-core",
            f"{newest}; untested with this release: most slow tests, GPUs, Transformer Engine",
        )
    return finding


def _pinned(name: str, versions: Mapping[str, str], wanted: str) -> Finding:
    found = versions.get(name)
    if found is None:
        return fault(name, "not installed", SETUP)
    if found.partition("+")[0] != wanted:
        return fault(
            name, f"{found}, not {wanted}, the one release that is tested", f"{SETUP} installs it"
        )
    return ok(name, found)


def _cuda(versions: Mapping[str, str]) -> Finding:
    cuda, driver = versions.get("cuda"), versions.get("driver", "")
    if cuda is None:
        return fault(
            "cuda",
            "there are GPUs, but PyTorch was built without CUDA",
            "install PyTorch's build with CUDA",
        )
    least = LEAST_DRIVER.get(_numbers(cuda)[0], (0, 0))
    said = f"CUDA {cuda}, NCCL {versions.get('nccl', 'none')}, driver {driver or 'unknown'}"
    if driver and _numbers(driver)[:2] < least:
        return fault(
            "cuda", said, f"CUDA {_numbers(cuda)[0]} needs a driver of {_text(least)} or newer"
        )
    if "nccl" not in versions:
        return fault("cuda", said, "ranks on GPUs need NCCL: install a PyTorch build with NCCL")
    return ok("cuda", said)


def _transformer_engine(versions: Mapping[str, str], config: Config | None) -> Finding:
    found = versions.get("transformer-engine")
    if found is not None:
        return ok("transformer engine", found)
    mend = "pip install --no-build-isolation transformer-engine[pytorch]"
    if config is not None and config.parallel.context > 1:
        return fault(
            "transformer engine", "not installed, and context parallelism needs its attention", mend
        )
    if config is not None and _has_experts(config):
        return fault(
            "transformer engine", "not installed, and the router of the experts needs it", mend
        )
    return warning(
        "transformer engine",
        "not installed; mixtures of experts and context parallelism need it",
        mend,
    )


def _has_experts(config: Config) -> bool:
    """Returns True if the configured model is a mixture of experts. Returns False if the model is
    dense or cannot be read. If the model cannot be read, the checks at the start of a run report
    the error."""
    with contextlib.suppress(UserError):
        return resolve_run(config, published=True).shape.experts > 0
    return False


def _flash_attention(versions: Mapping[str, str]) -> Finding:
    found = versions.get("flash-attn")
    if found is not None:
        return ok("flash attention", found)
    return warning(
        "flash attention",
        "not installed",
        "Transformer Engine brings cuDNN's; pip install flash-attn",
    )


def _apex(facts: Facts) -> list[Finding]:
    """Checks that an installed `apex` is NVIDIA's. `pip install apex` installs an unrelated web
    framework package."""
    found = facts.versions.get("apex")
    if found is None or facts.apex_is_nvidias:
        return [ok("apex", found or "not installed: performance.wgrad_fusion stays off")]
    mend = "pip uninstall apex; if you need Apex, build NVIDIA's from source"
    return [
        fault(
            "apex",
            f"{found} has no amp_C: it is another package of that name, or built without CUDA",
            mend,
        )
    ]


def check_server_version(version: str | None, supported: Sequence[str]) -> Finding:
    """Checks the release of SGLang in the environment of the rollout servers. `version` is None if
    SGLang is not installed."""
    if version is None:
        return fault(
            "server environment",
            "SGLang is not installed in it",
            "set it up, or name the Python of another: docs/doctor.md",
        )
    if version not in supported:
        return fault(
            "server environment",
            f"{version}, not one of {', '.join(supported)}",
            "install one of these",
        )
    return ok("server environment", version)


def check_alike(nodes: Mapping[str, Facts]) -> list[Finding]:
    """Checks that all nodes have the same versions."""
    found = []
    for name in ALIKE:
        versions = {node: facts.versions.get(name, "none") for node, facts in nodes.items()}
        if len(set(versions.values())) > 1:
            seen = ", ".join(f"{version} on {node}" for node, version in versions.items())
            found.append(
                fault(f"{name} on all nodes", seen, "install the same environment on every node")
            )
    return found or [ok("versions on all nodes", f"the same on {len(nodes)} nodes")]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3])) or (0,)


def _text(numbers: Sequence[int]) -> str:
    return ".".join(map(str, numbers))
