"""Files of runs are read in every format up to today's, and refused by name beyond it."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
import yaml
from support.runs import ROOT

from megatron_stare.cli import main
from megatron_stare.config import formats
from megatron_stare.config.formats import (
    FORMAT,
    RENAMED,
    SERVICES,
    Upgrade,
    config_up_to_date,
    run_state_up_to_date,
)
from megatron_stare.config.load import dump_yaml, former_names, load_config, load_recorded
from megatron_stare.config.recipes import recipes
from megatron_stare.errors import ConfigError, DataError
from megatron_stare.observability.sink import SINKS
from megatron_stare.registry import resolve
from megatron_stare.run_dir.run_files import read_run
from megatron_stare.run_dir.run_state import RunState

OF_FIRST = {"step": 2, "data": {"cursor": 8}, "method": {"gate": 1.0}, "skipped": 1}
STATE = {**OF_FIRST, "inputs": {"tokenizer.json": "0f"}}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "step_000002"
    folder.mkdir()
    return folder


def write(file: Path, tree: dict) -> Path:
    file.write_text(yaml.safe_dump(tree))
    return file


def test_what_is_written_today_says_so(tmp_path: Path, checkpoint: Path) -> None:
    config = load_config(write(tmp_path / "mine.yaml", {"model": {"path": "m"}}))
    tree = yaml.safe_load(dump_yaml(config))
    assert tree["format"] == FORMAT == len(formats.UPGRADES) + 1
    assert (
        load_config(write(tmp_path / "config.yaml", tree))
        == load_recorded(tmp_path / "config.yaml")
        == config
    )
    state = RunState(**STATE, stops=[7])
    (checkpoint / "run_state.json").write_text(state.to_json())
    assert json.loads(state.to_json()) == {"format": FORMAT, **STATE, "rollbacks": [], "stops": [7]}
    assert RunState.read(checkpoint) == state


def test_without_a_number_it_is_the_first_format(tmp_path: Path, checkpoint: Path) -> None:
    (checkpoint / "run_state.json").write_text(json.dumps(OF_FIRST))
    assert RunState.read(checkpoint) == RunState(**OF_FIRST, inputs={}, stops=[])
    unread = {"model": {"path": "m"}, "sglang": {"seeds": True}, "rollout": {"engine": "local"}}
    first = write(tmp_path / "config.yaml", unread)
    assert not load_recorded(first).sglang.seeds
    with pytest.raises(
        ConfigError, match=r"sglang\.seeds is set, but.* or sglang\.seeds=false, the default"
    ):
        load_config(first)  # a person wrote it, today
    assert not load_config(write(first, {"format": 1, **unread})).sglang.seeds
    read = {**unread, "rollout": {"engine": "sglang"}}
    assert load_recorded(write(first, read)).sglang.seeds
    with pytest.raises(ConfigError, match=r"sglang\.seeds is set, but"):
        load_recorded(write(first, {"format": 2, **unread}))


def test_a_cache_that_nobody_chose_is_the_devices(tmp_path: Path) -> None:
    """The second format wrote a CPU's default down whatever the device."""

    def read(tokens: int, engine: str = "sglang") -> object:
        tree = {
            "format": 2,
            "model": {"path": "m"},
            "rollout": {"engine": engine},
            "sglang": {"cache_tokens": tokens},
        }
        return load_recorded(write(tmp_path / "config.yaml", tree)).sglang.cache_tokens

    assert (read(20_000), read(9_000), read(20_000, "local")) == (None, 9_000, None)


@pytest.mark.parametrize("number", range(2, 7))
def test_an_address_that_nobody_chose_is_dropped_where_no_server_is(
    tmp_path: Path, number: int
) -> None:
    """Up to the sixth format, every run wrote the default of the address down."""

    def read(host: str, engine: str) -> str | None:
        tree = {
            "format": number,
            "model": {"path": "m"},
            "rollout": {"engine": engine},
            "sglang": {"host": host},
        }
        assert load_config(write(tmp_path / "config.yaml", tree)) == load_recorded(
            tmp_path / "config.yaml"
        )
        return load_recorded(tmp_path / "config.yaml").sglang.host

    assert read("127.0.0.1", "local") is None
    assert read("127.0.0.1", "sglang") == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"sglang\.host is set, but"):
        read("0.0.0.0", "local")


def test_a_copy_of_an_old_runs_file_without_its_number_is_read(tmp_path: Path) -> None:
    tree = {"model": {"path": "m"}, "sglang": {"host": "127.0.0.1", "cache_tokens": 20_000}}
    config = load_config(write(tmp_path / "mine.yaml", tree))
    assert config.sglang.host is None and config.sglang.cache_tokens is None


OWN = {
    "limits": {"request_s": 7.0, "attempts": 2},
    "restarts": {"most": 1, "probe_s": 4.0},
    "recovery": {"attempts": 0, "nodes_s": 5.0},
    "guards": {"window": 40, "known": 11, "loss": {"action": "stop"}, "entropy": {"low": 0.25}},
    "black_box": {"enabled": False, "factor": 3.0},
}


@pytest.mark.parametrize(
    "there", [[], *([name] for name in OWN), ["recovery", "guards"], [*OWN]], ids=str
)
@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
def test_what_is_done_about_faults_was_five_sections(
    tmp_path: Path, there: list[str], number: int
) -> None:
    sections = {name: OWN[name] for name in there}
    tree = {"format": number, "model": {"path": "m"}, **sections}
    groups = {RENAMED[name].partition(".")[2]: values for name, values in sections.items()}
    written_today = write(
        tmp_path / "today.yaml", {"model": {"path": "m"}, **({"faults": groups} if groups else {})}
    )
    config = load_config(written_today)
    former = write(tmp_path / "config.yaml", tree)
    assert load_recorded(former) == load_config(former) == config
    # what is read is not changed
    assert tree == {"format": number, "model": {"path": "m"}, **sections}
    names = ", ".join(f"{name} is {RENAMED[name]} now" for name in RENAMED if name in there)
    assert former_names(former) == ([f"{former} is of an earlier format: {names}"] if there else [])
    assert former_names(written_today) == []


def test_settings_of_services_were_a_section(tmp_path: Path) -> None:
    """The section is read as a run wrote it, with every default, and as a person may have, with
    some."""
    whole = {former: default for former, (_, _, default) in SERVICES.items()}
    own = {
        "wandb_project": "mine",
        "wandb_mode": "offline",
        "webhook_attempts": 5,
        "prometheus_port": 9000,
    }
    listed = ["jsonl", "wandb", "my.Sink", "mlflow", "webhook"]
    now = [
        "jsonl",
        {"name": "wandb", "project": "mine", "mode": "offline"},
        "my.Sink",
        "mlflow",
        {"name": "webhook", "attempts": 5},
    ]

    def read(number: int, services: dict, sinks: list | None = listed) -> list:
        tree = {"format": number, "model": {"path": "m"}, "services": services}
        tree |= {} if sinks is None else {"observability": {"sinks": sinks}}
        config = load_recorded(write(tmp_path / "config.yaml", tree))
        return [sink.written() for sink in config.observability.sinks]

    for number in range(1, 6):
        assert read(number, {**whole, **own}) == read(number, own) == now
        assert read(number, whole) == listed
        # which read none of them
        assert read(number, own, None) == ["jsonl", "tensorboard", "console", "report"]
    assert former_names(tmp_path / "config.yaml")[0].endswith(
        ": services is settings of observability.sinks now"
    )
    made = {name: SINKS[name] for name, _, _ in SERVICES.values()}
    for former, (sink, setting, default) in SERVICES.items():
        parameter = inspect.signature(resolve(made[sink], {}, "")).parameters[setting]
        assert (parameter.kind, parameter.default) == (parameter.KEYWORD_ONLY, default), former
    with pytest.raises(ConfigError) as caught:
        load_config(
            write(tmp_path / "mine.yaml", {"model": {"path": "m"}}), ["services.wandb_project=mine"]
        )
    assert caught.value.fix == "use observability.sinks: [{name: wandb, project: ...}]"


SHIPPED = [*(str(path.relative_to(ROOT)) for path in sorted((ROOT / "configs").glob("*.yaml")))]
SHIPPED += [f"recipes/{name}" for name in recipes()]


@pytest.mark.parametrize("name", SHIPPED)
def test_what_ships_is_the_same_as_an_earlier_release_wrote_it(tmp_path: Path, name: str) -> None:
    config = load_config(name)
    tree = yaml.safe_load(dump_yaml(config))
    faults = tree.pop("faults")
    for former, now in RENAMED.items():
        tree[former] = faults.pop(now.removeprefix("faults."))
    assert faults == {}
    tree["services"] = {former: default for former, (_, _, default) in SERVICES.items()}
    run = tmp_path / "run"
    run.mkdir()
    former = write(run / "config.yaml", {**tree, "format": 5})
    assert load_recorded(former) == config
    # so a report compares them
    assert read_run(run).config["faults"] == config.model_dump(mode="json")["faults"]


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("limits.request_s=30", "faults.requests.request_s"),
        ("restarts.most=1", "faults.engines.most"),
        ("recovery={attempts: 0, nodes_s: 1}", "faults.run.attempts and faults.run.nodes_s"),
        ("guards.loss.action=stop", "faults.guards.loss.action"),
        ("black_box=", "faults.hangs"),
    ],
)
def test_a_person_who_writes_a_former_name_is_told_the_new_one(
    tmp_path: Path, override: str, fix: str
) -> None:
    file = write(tmp_path / "mine.yaml", {"model": {"path": "m"}})
    section = override.partition("=")[0].partition(".")[0]
    with pytest.raises(ConfigError) as caught:
        load_config(file, [override])
    assert str(caught.value) == f"{override}: {section}: unknown name {section!r}\n  fix: use {fix}"
    write(file, {"model": {"path": "m"}, section: OWN[section]})
    with pytest.raises(ConfigError, match=rf"mine\.yaml: {section}: unknown name") as caught:
        load_config(file)
    assert caught.value.fix is not None and caught.value.fix.startswith(f"use {RENAMED[section]}.")
    write(file, {"format": FORMAT, "model": {"path": "m"}, section: OWN[section]})
    with pytest.raises(ConfigError, match="unknown name"):
        load_recorded(file)  # nothing of today's format has it


def test_the_names_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["format"]) == 0
    said = capsys.readouterr().out
    assert f"format {FORMAT}" in said and all(
        f"  {former:27} now {now}\n" in said for former, now in RENAMED.items()
    )
    assert (
        f"  {'services.webhook_env':27} now observability.sinks: [{{name: webhook, env: ...}}]\n"
        in said
    )
    file = write(tmp_path / "mine.yaml", {"guards": {}, "run": {}})
    assert main(["format", str(file)]) == 0
    assert (
        capsys.readouterr().out == f"{file} is of an earlier format: guards is faults.guards now\n"
    )
    assert main(["format", str(write(file, {"run": {}}))]) == 0
    assert capsys.readouterr().out == f"{file}: no renamed settings\n"
    with pytest.raises(SystemExit):
        main(["train", str(file), "--limits.request_s=30"])
    assert "settings have no dashes: faults.requests.request_s=30" in capsys.readouterr().err


def test_upgrades_are_made_one_format_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def adds(letter: str) -> Upgrade:
        return Upgrade(
            config=lambda tree: {**tree, "seen": tree.get("seen", "") + letter},
            run_state=lambda tree: {**tree, "seen": tree.get("seen", "") + letter.upper()},
        )

    monkeypatch.setattr(formats, "UPGRADES", (adds("a"), adds("b"), Upgrade()))
    monkeypatch.setattr(formats, "FORMAT", 4)
    for number, seen in ((None, "ab"), (1, "ab"), (2, "b"), (3, None), (4, None)):
        tree = {} if number is None else {"format": number}
        assert config_up_to_date(tree, "").get("seen") == seen
        assert run_state_up_to_date(tree, "").get("seen") == (seen and seen.upper())
        assert tree == ({} if number is None else {"format": number})


def test_a_newer_format_is_refused_with_what_to_do(tmp_path: Path, checkpoint: Path) -> None:
    newer = write(tmp_path / "config.yaml", {"format": FORMAT + 1, "of_that_time": {}})
    what = (
        f"{{}}: written in format {FORMAT + 1} by a newer release; this one reads formats 1 to"
        f" {FORMAT}\n  fix: resume"
    )
    for read in (load_config, load_recorded):
        with pytest.raises(DataError) as caught:
            read(newer)
        assert str(caught.value).startswith(what.format(newer))
        assert "`megatron-stare convert RUN_DIR HF_DIR`" in str(caught.value)
    state = checkpoint / "run_state.json"
    state.write_text(json.dumps({"format": FORMAT + 1, "of_that_time": 1}))
    with pytest.raises(DataError) as caught:
        RunState.read(checkpoint)
    assert str(caught.value).startswith(what.format(state))


@pytest.mark.parametrize("number", ["2", 0, -1, True, 1.5, None])
def test_what_is_no_format(tmp_path: Path, number: object) -> None:
    with pytest.raises(DataError, match="is not a format number"):
        load_recorded(write(tmp_path / "config.yaml", {"format": number, "model": {"path": "m"}}))


@pytest.mark.parametrize("text", ["{", "[]", "{}", "7", '{"step": 1, "of_another": 2}'])
def test_a_state_that_is_damaged_is_named(checkpoint: Path, text: str) -> None:
    (checkpoint / "run_state.json").write_text(text)
    with pytest.raises(DataError, match=r"run_state\.json: not the state of a run"):
        RunState.read(checkpoint)
