"""Upgrades older formats of a run's config.yaml, and of the run_state.json in each checkpoint.

config.yaml and run_state.json store their format number under the key "format". `FORMAT` is the
current format number. A file without a format number has format 1. When a file of an older release
is read, its content is upgraded one format at a time. Reading does not change the file on disk.
Only a resumed run writes the upgraded content to disk. An incompatible change of config.yaml or
run_state.json needs one more entry in `UPGRADES` and no other code.
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
FORMER_HOST = "127.0.0.1"
# section names up to format 5, and the current names
RENAMED = {
    "limits": "faults.requests",
    "restarts": "faults.engines",
    "recovery": "faults.run",
    "guards": "faults.guards",
    "black_box": "faults.hangs",
}
# settings of the former section `services`: the sink that has each now, its name there, its default
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
    """Removes server settings if the engine has no servers. In format 1, a configuration could
    contain server settings although its engine had no servers. A run whose engine had no servers
    ignored the server settings."""
    if not _has_servers(config):
        config.pop("sglang", None)
    return config


def _cache_of_the_device(config: Tree) -> Tree:
    """Removes cache_tokens if its value is 20,000 tokens. In format 2, the default of cache_tokens
    was 20,000 tokens, which was meant for CPU servers. The default of cache_tokens is now null. On
    a CPU, the value null has the same effect as 20,000 tokens."""
    return _without_server_setting(config, "cache_tokens", FORMER_CACHE_TOKENS)


def _address_that_is_used(config: Tree) -> Tree:
    """Removes sglang.host if the engine has no servers and the value is `FORMER_HOST`, which was
    the default up to format 6. The default of sglang.host is now null. If the engine has no
    servers, validation refuses every server setting that differs from the current default, and
    would therefore refuse `FORMER_HOST`. If the engine has servers, the recorded value of
    sglang.host stays unchanged."""
    if _has_servers(config):
        return config
    return _without_server_setting(config, "host", FORMER_HOST)


def _without_server_setting(config: Tree, name: str, value: object) -> Tree:
    sglang = config.get("sglang")
    if not isinstance(sglang, Mapping) or sglang.get(name) != value:
        return config
    return {**config, "sglang": {key: each for key, each in sglang.items() if key != name}}


def _without_rollbacks(run_state: Tree) -> Tree:
    """Adds an empty list of rollbacks, because runs of format 4 could not roll back."""
    return {**run_state, "rollbacks": []}


def with_new_names(config: Tree) -> Tree:
    """Renames the sections in `RENAMED`, and moves the settings of the former section `services` to
    the sinks that have these settings now. A configuration that uses only current section names
    stays unchanged."""
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
    """Returns a sink's entry for the list observability.sinks. The entry contains the settings in
    `services` that belong to this sink and differ from their defaults."""
    settings = {
        setting: services[former]
        for former, (sink, setting, default) in SERVICES.items()
        if sink == name and services.get(former, default) != default
    }
    return {"name": name, **settings} if settings else name


def names_now(former: str) -> str:
    """Returns the current name of the setting or section that was called `former` in an earlier
    format. Returns "" if `former` does not begin with the former name of a section."""
    section, _, setting = former.partition(".")
    if section in RENAMED:
        return f"{RENAMED[section]}.{setting}" if setting else RENAMED[section]
    if section != "services":
        return ""
    sink, name, _ = SERVICES.get(setting, ("wandb", "setting", None))
    return f"observability.sinks: [{{name: {sink}, {name}: ...}}]"


def names_met(config: Mapping[str, Any]) -> list[str]:
    """Returns one message for each section to which the configuration refers by a former name, such
    as `limits` for `faults.requests`. The message contains the former name and the current name of
    the section."""
    met = [f"{former} is {now} now" for former, now in RENAMED.items() if former in config]
    return met + (
        ["services is settings of observability.sinks now"] if "services" in config else []
    )


def without_former_defaults(config: Tree) -> Tree:
    """Removes sglang.host and sglang.cache_tokens if the engine has no servers. Each of the two
    settings is removed only if its value is the default of an earlier release. If the engine has no
    servers, validation refuses every server setting that differs from the current default.

    A user can copy an old run's config.yaml, delete the format number, and start a new run from the
    copy. A file without a format number is not upgraded, and may therefore contain defaults of an
    earlier release.
    """
    return config if _has_servers(config) else _address_that_is_used(_cache_of_the_device(config))


@dataclass(frozen=True)
class Upgrade:
    """Functions that convert files of one format to the next format. Each function takes the
    content of a whole file and can modify the content in place."""

    config: Callable[[Tree], Tree] = _same
    run_state: Callable[[Tree], Tree] = _same


def _of_unknown_inputs(run_state: Tree) -> Tree:
    """Adds an empty dict for the digests of the tokenizer and the chat template, because format 3
    did not record these digests. Format 3 had no checksums of checkpoints."""
    return {**run_state, "inputs": {}}


def _without_stops(run_state: Tree) -> Tree:
    """Adds an empty list of stop tokens, because format 7 did not record stop tokens."""
    return {**run_state, "stops": []}


UPGRADES = (
    Upgrade(config=_servers_that_are_used),  # from 1, which had no number
    Upgrade(config=_cache_of_the_device),  # from 2
    Upgrade(run_state=_of_unknown_inputs),  # from 3
    Upgrade(run_state=_without_rollbacks),  # from 4
    Upgrade(config=with_new_names),  # from 5
    Upgrade(config=_address_that_is_used),  # from 6
    Upgrade(run_state=_without_stops),  # from 7
)
FORMAT = 1 + len(UPGRADES)
FIRST_WITH_CHECKSUMS = 4  # first format whose checkpoints contain checksums


def config_up_to_date(tree: Mapping[str, Any], where: str | Path) -> Tree:
    """Upgrades a run's config.yaml to the current format and removes the format number. See
    `_up_to_date`."""
    return _up_to_date(tree, where, [upgrade.config for upgrade in UPGRADES])


def run_state_up_to_date(tree: Mapping[str, Any], where: str | Path) -> Tree:
    """Upgrades a run_state.json to the current format and removes the format number. See
    `_up_to_date`."""
    return _up_to_date(tree, where, [upgrade.run_state for upgrade in UPGRADES])


def _up_to_date(
    tree: Mapping[str, Any], where: str | Path, steps: list[Callable[[Tree], Tree]]
) -> Tree:
    """Applies the upgrade steps that lead from the file's format to the current format. Raises
    DataError if a newer release wrote the file, or if the file's format number is invalid."""
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
