"""Checkpoints that are not what was written, and disks that take none: an error that says so, what
there is to go on from, and nothing overwritten. The runs are in this process, where they take a
second each."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from support.models import save_model
from support.runs import ROOT, command, metrics, model
from support.small_disk import small_disk

from megatron_stare.cli import main
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.run_dir.run_state import RUN_STATE
from megatron_stare.weights.files.manifest import MANIFEST, put, sums_of, write_manifest

pytestmark = pytest.mark.distributed
INLINE = {
    "runtime.runner": "inline",
    "parallel.tensor": 1,
    "eval.prompts": 0,
    "run.steps": 4,
    "run.checkpoint_every": 2,
    "observability.sinks": "[jsonl]",
}


def typed(run_dir: Path, *more: str, **settings: Any) -> list[str]:
    return command(model(), f"run.dir={run_dir}", *more, **{**INLINE, **settings})[3:]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps, with checkpoints of the second and the fourth."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert main(typed(run)) == 0
    return run


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """A copy, which is to make a fifth step."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 1
    file.write_bytes(content)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("change", "name", "said"),
    [
        (flip, "__0_0.distcp", "damaged: its SHA-256 is"),
        (flip, ".metadata", "damaged: its SHA-256 is"),
        (flip, "metadata.json", "damaged: its SHA-256 is"),
        (flip, RUN_STATE, "damaged: its SHA-256 is"),
        (flip, MANIFEST, "the list of checksums is damaged"),
        (Path.unlink, MANIFEST, "the list of checksums is missing"),
        (Path.unlink, "__0_1.distcp", "a file of the checkpoint is missing"),
        (cut, "__0_1.distcp", "cut short"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_offered(
    run: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[Path], None],
    name: str,
    said: str,
) -> None:
    change(run / "checkpoints/step_000004" / name)
    before = contents(run / "checkpoints"), (run / "config.yaml").read_bytes()
    assert main(typed(run, "--resume", **{"run.steps": 5})) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {run}/checkpoints/step_000004/{name}: {said}"), error
    assert "continue from the checkpoint of step 2: --from-step 2" in error
    assert shlex.split(error.splitlines()[-1])[-2:] == ["--from-step", "2"]
    assert (contents(run / "checkpoints"), (run / "config.yaml").read_bytes()) == before


def test_the_command_that_is_offered_continues_and_keeps_what_it_passes_by(
    run: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(run / "checkpoints/step_000004/__0_0.distcp")
    damaged = contents(run / "checkpoints/step_000004")
    assert main(typed(run, "--resume", **{"run.steps": 5})) == 2
    offered = shlex.split(capsys.readouterr().err.splitlines()[-1])
    assert offered[:2] == ["megatron-stare", "train"] and offered.count(f"run.dir={run}") == 1
    offered = ["run.steps=4" if word == "run.steps=5" else word for word in offered]
    assert main(offered[1:]) == 0
    assert contents(run / "checkpoints/step_000004.aside-1") == damaged
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "step_000002",
        "step_000004",
        "step_000004.aside-1",
    ]
    assert metrics(run) == metrics(whole)  # steps 3 and 4 were made again, and stand there once
    got, want = (load_file(folder / "hf/model.safetensors") for folder in (run, whole))
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_a_start_from_an_earlier_step_that_fails_leaves_all_later_steps(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Record and checkpoints, so that the run can still be continued from its newest one."""
    flip(run / "checkpoints/step_000002/__0_0.distcp")
    files = ("metrics.jsonl", "eval.jsonl", "starts.jsonl")

    def kept() -> dict[str, bytes]:
        return contents(run / "checkpoints") | {name: (run / name).read_bytes() for name in files}

    before = kept()
    assert main(typed(run, "--from-step", "2")) == 2
    assert "step_000002/__0_0.distcp: damaged" in capsys.readouterr().err
    assert kept() == before
    assert main(typed(run, "--resume", **{"run.steps": 5})) == 0
    assert [row["step"] for row in metrics(run)] == [1, 2, 3, 4, 5]


def test_without_verification_lengths_and_small_files_are_still_looked_at(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The flipped byte is one of the padding before a tensor, of which the load itself has nothing
    to say."""
    file = run / "checkpoints/step_000004/__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[content.index(b"ZZZZZZZZ") + 4] ^= 1
    file.write_bytes(content)
    settings = {"run.steps": 5, "checkpoint.verify": "false"}
    shutil.copytree(run, run.with_name("cut"))
    assert main(typed(run, "--resume", **settings)) == 0
    assert [row["step"] for row in metrics(run)] == [1, 2, 3, 4, 5]
    cut(run.with_name("cut") / "checkpoints/step_000004/__0_0.distcp")
    assert main(typed(run.with_name("cut"), "--resume", **settings)) == 2
    assert "cut short" in capsys.readouterr().err
    assert main(typed(run.with_name("cut"), "--from-step", "2", "--dry-run", **settings)) == 0


def test_nothing_is_offered_where_nothing_older_is_whole(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(run / "checkpoints/step_000002" / RUN_STATE)
    flip(run / "checkpoints/step_000004/metadata.json")
    assert main(typed(run, "--resume", **{"run.steps": 5})) == 2
    error = capsys.readouterr().err
    assert "step_000004/metadata.json: damaged" in error and "--from-step" not in error
    assert main(typed(run, "--from-step", "3", **{"run.steps": 5})) == 2
    error = capsys.readouterr().err
    assert (
        "the run has no complete checkpoint of step 3\n  fix: choose a step that has one: 2, 4"
        in error
    )


def test_another_models_checkpoint(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tmp_path / "other", "qwen3")
    place = run / "checkpoints/step_000004"
    state = (place / RUN_STATE).read_bytes()
    shutil.rmtree(place)
    assert main(["convert", str(tmp_path / "other"), str(place)]) == 0
    sums = sums_of(place, [file.name for file in place.iterdir()])
    write_manifest(place, {**sums, RUN_STATE: put(place / RUN_STATE, state)})
    before = contents(run / "checkpoints")
    capsys.readouterr()
    assert main(typed(run, "--resume", **{"run.steps": 5})) == 2
    error = capsys.readouterr().err
    assert (
        "the checkpoint does not fit this model and optimizer" in error and "--from-step 2" in error
    )
    assert contents(run / "checkpoints") == before


def test_what_was_loaded_and_is_not_what_was_saved(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All files are whole, and the load forgets the optimizer's moments, as a fresh Adam has
    them."""
    load = Trainer.load

    def forgetful(self: Trainer, folder: str) -> None:
        load(self, folder)
        for part in self.policy.optimizer.chained_optimizers:
            for state in part.optimizer.state.values():
                state["exp_avg"].zero_()

    before = contents(run / "checkpoints")
    monkeypatch.setattr(Trainer, "load", forgetful)
    assert main(typed(run, "--resume", **{"run.steps": 5})) == 2
    error = capsys.readouterr().err
    assert (
        "step_000004: the loaded state differs from the saved state:"
        " optimizer: optimizer.state.exp_avg." in error
    )
    assert "has the squared norm 0, " in error and "--from-step 2" in error
    assert contents(run / "checkpoints") == before
    assert main(typed(run, "--resume", **{"run.steps": 5, "checkpoint.self_test": "false"})) == 0


def test_another_tokenizer_is_refused_by_name(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder is the same; what lies in it is not."""
    base = tmp_path / "model"
    shutil.copytree(ROOT / "assets/tiny-adder", base)
    tree = yaml.safe_load((run / "config.yaml").read_text())
    tree["model"]["path"] = str(base)
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    resume = [*typed(run, "--resume", **{"run.steps": 5}), f"model.path={base}"]
    assert main([*resume, "--dry-run"]) == 0
    whole = (base / "tokenizer_config.json").read_text()
    (base / "tokenizer_config.json").write_text(whole + "\n")
    for more in ([], ["--dry-run"]):
        assert main([*resume, *more]) == 2
        error = capsys.readouterr().err
        assert f"{base}: tokenizer_config.json has changed since the run was started" in error
    (base / "tokenizer_config.json").write_text(whole)
    (base / "chat_template.jinja").write_text("{{ messages }}")
    assert main([*resume, "--dry-run"]) == 2
    assert "chat_template.jinja is new since the run was started" in capsys.readouterr().err


def test_a_full_disk_leaves_what_there_was_and_room_is_all_it_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two checkpoints of 4.2 MB fit; the third is written before the first is removed."""
    settings = {"run.checkpoint_every": 1, "checkpoint.background": "false"}
    with small_disk(tmp_path / "disk", "11m") as disk:
        run = disk.folder / "run"
        assert main(typed(run, **settings)) == 2
        error = capsys.readouterr().err
        assert "the checkpoint could not be written (No space left on device)" in error, error
        assert "ended after step 3 of 4; the last checkpoint is of step 2" in error
        assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
            "step_000001",
            "step_000002",
        ]
        disk.change("ro")
        assert main(typed(run, "--resume", **settings)) == 2
        assert (
            "the run directory cannot be written (Read-only file system)" in capsys.readouterr().err
        )
        disk.change("rw,size=32m")
        assert main(shlex.split(error.splitlines()[-1])[1:]) == 0
        assert [row["step"] for row in metrics(run)] == [1, 2, 3, 4]
