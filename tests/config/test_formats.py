"""Files of runs are read in every format up to today's, and refused by name beyond it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from megatron_stare.config import formats
from megatron_stare.config.formats import FORMAT, Upgrade, config_up_to_date, run_state_up_to_date
from megatron_stare.config.load import dump_yaml, load_config, load_recorded
from megatron_stare.errors import ConfigError, DataError
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
    assert load_config(write(tmp_path / "config.yaml", tree)) == load_recorded(tmp_path / "config.yaml") == config
    state = RunState(**STATE)
    (checkpoint / "run_state.json").write_text(state.to_json())
    assert json.loads(state.to_json()) == {"format": FORMAT, **STATE, "rollbacks": []}
    assert RunState.read(checkpoint) == state


def test_without_a_number_it_is_the_first_format(tmp_path: Path, checkpoint: Path) -> None:
    (checkpoint / "run_state.json").write_text(json.dumps(OF_FIRST))
    assert RunState.read(checkpoint) == RunState(**OF_FIRST, inputs={})
    unread = {"model": {"path": "m"}, "sglang": {"seeds": True}, "rollout": {"engine": "local"}}
    first = write(tmp_path / "config.yaml", unread)
    assert not load_recorded(first).sglang.seeds
    with pytest.raises(ConfigError, match=r"sglang\.seeds is set, but"):
        load_config(first)  # a person wrote it, today
    assert not load_config(write(first, {"format": 1, **unread})).sglang.seeds
    read = {**unread, "rollout": {"engine": "sglang"}}
    assert load_recorded(write(first, read)).sglang.seeds
    with pytest.raises(ConfigError, match=r"sglang\.seeds is set, but"):
        load_recorded(write(first, {"format": 2, **unread}))


def test_a_cache_that_nobody_chose_is_the_devices(tmp_path: Path) -> None:
    """The second format wrote a CPU's default down whatever the device."""

    def read(tokens: int, engine: str = "sglang") -> object:
        tree = {"format": 2, "model": {"path": "m"}, "rollout": {"engine": engine}, "sglang": {"cache_tokens": tokens}}
        return load_recorded(write(tmp_path / "config.yaml", tree)).sglang.cache_tokens

    assert (read(20_000), read(9_000), read(20_000, "local")) == (None, 9_000, None)


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
        f"{{}}: written in format {FORMAT + 1} by a newer release; this one reads formats 1 to {FORMAT}\n  fix: resume"
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
    with pytest.raises(DataError, match="is no format"):
        load_recorded(write(tmp_path / "config.yaml", {"format": number, "model": {"path": "m"}}))


@pytest.mark.parametrize("text", ["{", "[]", "{}", "7", '{"step": 1, "of_another": 2}'])
def test_a_state_that_is_damaged_is_named(checkpoint: Path, text: str) -> None:
    (checkpoint / "run_state.json").write_text(text)
    with pytest.raises(DataError, match=r"run_state\.json: not the state of a run"):
        RunState.read(checkpoint)
