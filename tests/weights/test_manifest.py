"""The sums of a checkpoint's files: of the bytes that are written, and held against those that are
there."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.runs import ROOT

from megatron_stare.config.engines_alone import synced_in
from megatron_stare.config.load import load_config
from megatron_stare.errors import DataError
from megatron_stare.run_dir.run_state import RunDir, RunState
from megatron_stare.weights.files.manifest import (
    MANIFEST,
    Sum,
    SummedFile,
    check_bytes,
    check_lengths,
    put,
    read_manifest,
    shares,
    write_manifest,
)

CONTENT = bytes(range(256)) * 18_000  # 4.6 MB: it is read in several pieces


def test_a_file_is_summed_as_it_is_written(tmp_path: Path) -> None:
    with SummedFile(tmp_path / "file") as file:
        for piece in (
            b"abc",
            memoryview(CONTENT),
            bytearray(b"x"),
            torch.arange(3, dtype=torch.float64).numpy(),
        ):
            file.write(piece)
        torch.save(torch.arange(1000), file)
        with pytest.raises(OSError, match="written twice"):
            file.seek(0)
    content = (tmp_path / "file").read_bytes()
    assert content[:3] == b"abc" and len(content) > len(CONTENT) + 8000
    want = Sum(len(content), hashlib.sha256(content).hexdigest())
    assert file.sum() == want == Sum.of_file(tmp_path / "file") == Sum.of(content)


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Path, dict[str, Sum]]:
    sums = {
        name: put(tmp_path / name, content)
        for name, content in [("a", CONTENT), ("b", b"b"), ("c", b"")]
    }
    write_manifest(tmp_path, sums)
    return tmp_path, sums


def test_what_is_as_it_was_written_passes(checkpoint: tuple[Path, dict[str, Sum]]) -> None:
    folder, sums = checkpoint
    assert read_manifest(folder) == sums
    check_lengths(folder, sums)
    check_bytes(folder, sums, threads=2)
    (folder / MANIFEST).unlink()
    assert read_manifest(folder) is None


@pytest.mark.parametrize("at", [0, 1, 2**22, len(CONTENT) - 1])
def test_one_flipped_bit_is_seen(checkpoint: tuple[Path, dict[str, Sum]], at: int) -> None:
    folder, sums = checkpoint
    damaged = bytearray(CONTENT)
    damaged[at] ^= 1
    (folder / "a").write_bytes(damaged)
    check_lengths(folder, sums)
    check_bytes(folder, {name: sums[name] for name in "bc"})
    with pytest.raises(DataError, match="damaged: its SHA-256 is") as raised:
        check_bytes(folder, sums, threads=2)
    assert raised.value.where == str(folder / "a")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda file: file.write_bytes(CONTENT[:-1]),
            "cut short: 4,607,999 of 4,608,000 bytes are there",
        ),
        (lambda file: file.write_bytes(CONTENT + b"x"), "longer than it was written"),
        (Path.unlink, "a file of the checkpoint is missing"),
    ],
)
def test_a_file_of_another_length_is_named(
    checkpoint: tuple[Path, dict[str, Sum]], change: Callable[[Path], object], said: str
) -> None:
    folder, sums = checkpoint
    change(folder / "a")
    with pytest.raises(DataError, match=said) as raised:
        check_lengths(folder, sums)
    assert raised.value.where == str(folder / "a")


def test_damaged_sums_are_not_taken_for_sums(checkpoint: tuple[Path, dict[str, Sum]]) -> None:
    """Every flip of one bit of the list either leaves what it says as it is, or is seen."""
    folder, sums = checkpoint
    whole = (folder / MANIFEST).read_bytes()
    found = []
    for at in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[at] ^= 2
        (folder / MANIFEST).write_bytes(damaged)
        with contextlib.suppress(DataError):
            found.append(read_manifest(folder))
    assert all(each == sums for each in found)
    assert len(found) < len(whole) / 7 / 2  # those of spaces between entries
    tree = json.loads(whole)
    del tree["files"]["a"]
    (folder / MANIFEST).write_text(json.dumps(tree))
    with pytest.raises(DataError, match="its own checksum does not match"):
        read_manifest(folder)


def test_each_file_is_dealt_to_one_rank_in_shares_of_like_size() -> None:
    sizes = [900, 10, 500, 400, 480, 20, 430, 60]
    sums = {f"__{n}": Sum(size, "") for n, size in enumerate(sizes)}
    dealt = shares(sums, 3)
    assert sorted(name for share in dealt for name in share) == sorted(sums)
    assert [sum(each.size for each in share.values()) for share in dealt] == [960, 920, 920]
    assert shares(sums, 3) == shares(dict(reversed(sums.items())), 3)  # all ranks deal alike
    assert shares({}, 2) == [{}, {}]


@pytest.mark.parametrize("size", [0, 6, 8, None])
def test_a_checkpoint_is_completed_of_files_as_long_as_they_were_written(
    tmp_path: Path, size: int | None
) -> None:
    """A rank's file that is cut short, longer or gone by then makes no checkpoint, and leaves the
    one before."""
    config = load_config(ROOT / "configs/quickstart.yaml", [f"run.dir={tmp_path / 'run'}"])
    run = RunDir.create(config)
    first = run.stage(RunState(step=5))
    run.complete(first, {"part.bin": put(first.folder / "part.bin", b"weights")})
    staged = run.stage(RunState(step=10))
    written = {"part.bin": put(staged.folder / "part.bin", b"weights")}
    if size is None:
        (staged.folder / "part.bin").unlink()
    else:
        (staged.folder / "part.bin").write_bytes(b"weights+"[:size])
    with pytest.raises(
        DataError, match="missing" if size is None else "cut short|longer than it was written"
    ):
        run.complete(staged, written)
    assert [each.name for each in run.checkpoints()] == ["step_000005"]
    run.close()


def test_a_run_that_is_opened_again_removes_what_a_kill_left(tmp_path: Path) -> None:
    """A checkpoint that was being written, and the files of a weight sync; nothing else."""
    config = load_config(ROOT / "configs/quickstart.yaml", [f"run.dir={tmp_path / 'run'}"])
    run = RunDir.create(config)
    first = run.stage(RunState(step=5))
    run.complete(first, {"part.bin": put(first.folder / "part.bin", b"weights")})
    (run.stage(RunState(step=10)).folder / "part.bin").write_bytes(b"we")
    weights = Path(synced_in(config, run.path).sglang.sync_folder or "")
    (weights / "megatron-stare-weights-1").mkdir(parents=True)
    (weights / "megatron-stare-weights-1" / "part.safetensors").write_bytes(b"weights")
    run.close()
    RunDir.reopen(run.path).close()
    left = {str(file.relative_to(run.path)) for file in run.path.rglob("*") if file.is_file()}
    assert {Path(name).parts[0] for name in left} == {".lock", "config.yaml", "checkpoints"}
    assert {name for name in left if "step_" in name} == {
        f"checkpoints/step_000005/{name}"
        for name in ("part.bin", "run_state.json", "checksums.json")
    }
    assert not weights.exists()
