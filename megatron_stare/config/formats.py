"""The formats of what a run leaves to be read again: config.yaml, and the run_state.json in each of
its checkpoints.

Both carry the number FORMAT under "format"; a file without one is of the first. What an older
release wrote is brought up to date as it is read, one format at a time, and never written over but
by the run that goes on. A change of either file that older readers or files do not fit is one more
entry of UPGRADES here, and nothing anywhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_stare.errors import DataError

Tree = dict[str, Any]
KEY = "format"
FORMER_CACHE_TOKENS = 20_000
# sections of a configuration by the names they had up to the fifth format, and where they are now
RENAMED = {
    "limits": "faults.requests",
    "restarts": "faults.engines",
    "recovery": "faults.run",
    "guards": "faults.guards",
    "black_box": "faults.hangs",
}
# settings of those formats that are now in the section `services`: the sink that reads a setting,
# its name there, and its default
SERVICES = {
    "wandb_project": ("wandb", "project", "megatron_stare"),
    "wandb_entity": ("wandb", "entity", None),
    "wandb_mode": ("wandb", "mode", None),
    "mlflow_uri": ("mlflow", "uri", None),
    "mlflow_experiment": ("mlflow", "experiment", "megatron_stare"),
    "prometheus_host": ("prometheus", "host", "127.0.0.1"),
    "prometheus_port": ("prometheus", "port", 9464),
    "webhook_env": ("webhook", "env", "MEGATRON_STARE_WEBHOOK"),
    "webhook_attempts": ("webhook", "attempts", 3),
    "webhook_timeout_s": ("webhook", "timeout_s", 10.0),
    "webhook_back_off_s": ("webhook", "back_off_s", 1.0),
}


def _same(tree: Tree) -> Tree:
    return tree


def _has_servers(config: Tree) -> bool:
    rollout = config.get("rollout")
    return isinstance(rollout, Mapping) and rollout.get("engine") in ("sglang", {"name": "sglang"})


def _servers_that_are_used(config: Tree) -> Tree:
    """The first format allowed settings of servers beside an engine that has none, and nobody read
    them."""
    if not _has_servers(config):
        config.pop("sglang", None)
    return config


def _cache_of_the_device(config: Tree) -> Tree:
    """The second format's default was a CPU server's cache, whatever the device; null is that on a
    CPU."""
    sglang = config.get("sglang", {})
    if sglang.get("cache_tokens") != FORMER_CACHE_TOKENS:
        return config
    return {
        **config,
        "sglang": {name: value for name, value in sglang.items() if name != "cache_tokens"},
    }


def _without_rollbacks(run_state: Tree) -> Tree:
    """No run of the fourth format went back to a checkpoint by itself."""
    return {**run_state, "rollbacks": []}


def with_new_names(config: Tree) -> Tree:
    """The configuration with every section of RENAMED under its new name, and with settings of
    `services` beside the sinks that read them; what is not there is not made."""
    config = dict(config)
    if "services" in config:
        services, watched = config.pop("services") or {}, config.get("observability") or {}
        if sinks := watched.get("sinks"):
            config["observability"] = {
                **watched,
                "sinks": [_with_services(name, services) for name in sinks],
            }
    for former, now in RENAMED.items():
        if former in config:
            section, _, group = now.partition(".")
            config[section] = {**config.get(section, {}), group: config.pop(former)}
    return config


def _with_services(name: Any, services: Mapping[str, Any]) -> Any:
    """A sink of the list with those settings of the former section that it reads and that say
    something."""
    settings = {
        setting: services[former]
        for former, (sink, setting, default) in SERVICES.items()
        if sink == name and services.get(former, default) != default
    }
    return {"name": name, **settings} if settings else name


def names_now(former: str) -> str:
    """Returns the name that a setting of an earlier format has now; "" where it never had
    another."""
    section, _, setting = former.partition(".")
    if section in RENAMED:
        return f"{RENAMED[section]}.{setting}" if setting else RENAMED[section]
    if section != "services":
        return ""
    sink, name, _ = SERVICES.get(setting, ("wandb", "setting", None))
    return f"observability.sinks: [{{name: {sink}, {name}: ...}}]"


def names_met(config: Mapping[str, Any]) -> list[str]:
    """The renamed sections that a configuration has, each as `limits is faults.requests now`."""
    met = [f"{former} is {now} now" for former, now in RENAMED.items() if former in config]
    return met + (
        ["services is settings of observability.sinks now"] if "services" in config else []
    )


def without_former_defaults(config: Tree) -> Tree:
    """Without what earlier releases wrote down of servers beside an engine that has none; files
    without a number, which a user gives, may have been taken from such a run."""
    servers = config.get("sglang")
    return (
        _cache_of_the_device(config)
        if isinstance(servers, Mapping) and not _has_servers(config)
        else config
    )


@dataclass(frozen=True)
class Upgrade:
    """Functions that make files of one format those of the next; each takes a whole file, and may
    change it."""

    config: Callable[[Tree], Tree] = _same
    run_state: Callable[[Tree], Tree] = _same


def _of_unknown_inputs(run_state: Tree) -> Tree:
    """The third format did not say what tokenizer and chat template a run was begun with, nor had
    checkpoints checksums."""
    return {**run_state, "inputs": {}}


UPGRADES = (
    Upgrade(config=_servers_that_are_used),  # from 1, which had no number
    Upgrade(config=_cache_of_the_device),  # from 2
    Upgrade(run_state=_of_unknown_inputs),  # from 3
    Upgrade(run_state=_without_rollbacks),  # from 4
    Upgrade(config=with_new_names),  # from 5
)
FORMAT = 1 + len(UPGRADES)
FIRST_WITH_CHECKSUMS = 4  # format of the checkpoints that have a list of them


def config_up_to_date(tree: Mapping[str, Any], where: str | Path) -> Tree:
    """A config.yaml of a run, of whatever format, as one of today's, without the number. See
    `_up_to_date`."""
    return _up_to_date(tree, where, [upgrade.config for upgrade in UPGRADES])


def run_state_up_to_date(tree: Mapping[str, Any], where: str | Path) -> Tree:
    """A run_state.json, of whatever format, as one of today's, without the number. See
    `_up_to_date`."""
    return _up_to_date(tree, where, [upgrade.run_state for upgrade in UPGRADES])


def _up_to_date(
    tree: Mapping[str, Any], where: str | Path, steps: list[Callable[[Tree], Tree]]
) -> Tree:
    """Raises DataError where the file was written by a release that is newer than this one, or its
    number is none."""
    tree = dict(tree)
    found = tree.pop(KEY, 1)
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise DataError(
            f"{found!r} is not a format number",
            where=f"{where}: {KEY}",
            fix="put the file back as the run wrote it",
        )
    if found > FORMAT:
        raise DataError(
            f"written in format {found} by a newer release; this one reads formats 1 to {FORMAT}",
            where=str(where),
            fix=(
                "resume with the release that wrote it, or start a new run here from its policy,"
                " which `megatron-stare convert RUN_DIR HF_DIR` writes as a Hugging Face folder"
            ),
        )
    for step in steps[found - 1 :]:
        tree = step(tree)
    return tree
