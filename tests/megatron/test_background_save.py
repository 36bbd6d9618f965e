"""Checkpoints are written while training goes on, once, and killed at any moment leave the one
before."""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from support.killing import hold_children_at, kill_at
from support.models import random_batch, save_model
from support.ranks import RankPool, forking_context
from support.steps import take_step
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

from megatron_stare.cluster.inline import InlineWorkers
from megatron_stare.cluster.trainer_group import TrainerGroup, plan_rules
from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.driver.checkpoints import Checkpoints
from megatron_stare.errors import UserError
from megatron_stare.megatron.backend.cpu_backend import substituted
from megatron_stare.megatron.checkpoint import background_save, checkpoint
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.megatron.upstream import RELEASE
from megatron_stare.process.memory import SharedMappings
from megatron_stare.run_dir.run_state import RunDir, RunState
from megatron_stare.weights.files.torch_dist import TorchDist

pytestmark = pytest.mark.distributed
JOIN_S = 120


def config_of(path: Path, **sections: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(path / "model")},
            "run": {"dir": str(path / "run"), "keep_checkpoints": 1},
            "batch": {"micro_batch_tokens": 48},
            "optimizer": {"lr": 1e-2},
            "algorithm": {"name": "grpo"},
            **sections,
        }
    )


def test_a_writer_collects_no_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer is a fork: it might collect a tensor of the parent's on a GPU, which a fork must not
    touch."""

    def write(
        transforms: Any, number: int, bucket: Any, results: Any, counted: Any, *, use_fsync: bool
    ) -> None:
        results.put((number, (gc.isenabled(), signal.getsignal(signal.SIGINT), bucket)))

    monkeypatch.setattr(background_save.FileSystemWriterAsync, "write_preloaded_data", write)
    context = mp.get_context("fork")
    here, there = context.Pipe(duplex=False)
    writer = context.Process(
        target=background_save._write, args=(there, os.getpid(), [], 0, "bucket")
    )
    writer.start()
    assert here.recv() is None  # it has begun
    assert here.recv() == ((False, signal.SIG_IGN, "bucket"), {})
    writer.join()
    assert gc.isenabled()


@pytest.mark.parametrize("how", ["private", "view", "shared", "pinned"])
def test_what_a_fork_may_share_is_copied_and_nothing_else(how: str) -> None:
    """Nobody can pin memory here: what says that it is pinned is put in its place."""
    whole = torch.arange(64.0)
    if how == "shared":
        whole.untyped_storage().share_memory_()
    part = whole if how == "private" else whole[8:40]
    # its base class has it
    with substituted(Tensor, "is_pinned", lambda self: how == "pinned", absent=True):
        saved = checkpoint._as_its_own(
            SharedMappings(), ShardedTensor.from_rank_offsets("a", part)
        ).data
    assert torch.equal(saved, part) and saved.untyped_storage().nbytes() == part.numel() * 4
    assert (saved.data_ptr() == part.data_ptr()) == (how in ("private", "view"))


class Run:
    """A run of one rank, as the session drives it: its directory, trainer and checkpoints."""

    def __init__(self, config: Config, rendezvous: str, run_dir: RunDir) -> None:
        self.trainer = Trainer(resolve_run(config), 0, rendezvous)
        self.dir = run_dir
        self.group = TrainerGroup(InlineWorkers([self.trainer]), plan_rules(resolve_run(config)))
        self.checkpoints = Checkpoints(config, self.group, run_dir)

    def step(self, number: int) -> None:
        take_step(self.trainer, random_batch(number, size=8))

    def save(self, number: int) -> None:
        self.checkpoints.save(RunState(step=number))


# the file with what is no tensor: since 0.19 that of the first rank's first writer
COMMON = r"common\.pt" if RELEASE < (0, 19) else r"__0_0\.distcp"
# what a save does, in order: an audit event and the path that goes with it; each is met in the save
# of step 2
MOMENTS = {
    "folder": ("os.mkdir", r"step_000002\.\w+\.tmp$"),
    "common": ("open", rf"step_000002\.\w+\.tmp/{COMMON}$"),
    "writing": ("open", r"step_000002\.\w+\.tmp/__0_1\.distcp$"),
    "metadata": ("open", r"step_000002\.\w+\.tmp/\.metadata(\.tmp)?$"),
    "format": ("open", r"step_000002\.\w+\.tmp/metadata\.json$"),
    "state": ("open", r"step_000002\.\w+\.tmp/run_state\.json$"),
    "rename": ("os.rename", r"step_000002\.\w+\.tmp$"),
    "forget": ("shutil.rmtree", r"step_000001\.\w+\.tmp$"),
}


def begin_and_be_killed(folder: str, moment: str | None) -> None:
    """Two steps, each saved; the first save is completed as the second begins."""
    torch.set_num_threads(1)
    config = config_of(Path(folder))
    run = Run(config, f"file://{folder}/ranks", RunDir.create(config))
    run.step(1)
    run.save(1)
    run.step(2)
    if moment is not None:
        kill_at(*MOMENTS[moment])
    run.save(2)
    run.step(3)
    run.checkpoints.finish()
    torch.save(run.trainer.export(), f"{folder}/step_3")
    run.group.close()


def go_on(folder: str, model: str) -> None:
    """Reopens what is left of a run and continues it to step 3."""
    torch.set_num_threads(1)
    config = config_of(Path(folder), model={"path": model})
    run = Run(config, f"file://{folder}/ranks-again", RunDir.reopen(Path(folder) / "run"))
    (newest,) = run.dir.checkpoints()[-1:]
    step = RunState.read(newest).step
    run.group.load(str(newest))
    for number in range(step + 1, 4):
        run.step(number)
    left = sorted(entry.name for entry in newest.parent.iterdir())
    torch.save((step, left, run.trainer.export()), f"{folder}/again")
    run.group.close()


def in_a_process(function: Any, *args: Any) -> int:
    process = forking_context().Process(target=function, args=args)
    process.start()
    process.join(JOIN_S)
    assert process.exitcode is not None, "it hangs"
    return process.exitcode


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Tensor]]:
    """The model's path, and the weights after three steps that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    save_model(folder / "model", "qwen2_tied")
    assert in_a_process(begin_and_be_killed, str(folder), None) == 0
    checkpoints = sorted(entry.name for entry in (folder / "run/checkpoints").iterdir())
    assert checkpoints == ["step_000002"]  # the run keeps one
    return str(folder / "model"), torch.load(folder / "step_3")


@pytest.mark.wide
@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_at_any_moment(
    whole: tuple[str, dict[str, Tensor]], tmp_path: Path, moment: str
) -> None:
    model, want = whole
    (tmp_path / "model").symlink_to(model)
    assert in_a_process(begin_and_be_killed, str(tmp_path), moment) == -signal.SIGKILL
    assert in_a_process(go_on, str(tmp_path), model) == 0
    step, left, got = torch.load(tmp_path / "again")
    renamed = moment == "forget"
    assert step == (2 if renamed else 1)
    # nothing half-written, or half-removed
    assert left == (["step_000002"] if renamed else ["step_000001"])
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


def saved_by_a_writer_that_waits(
    rank: int, init: str, config: Config, folder: str
) -> tuple[list[bool], bool]:
    """Saves with writers that wait. Returned are whether the save counts as written before, while
    and after they wait, and whether the loaded weights are those from when it began."""
    trainer = Trainer(resolve_run(config), rank, init)
    take_step(trainer, random_batch(1, size=8))
    want = trainer.export()
    release = hold_children_at("open", re.escape(folder) + r"/__0_\d\.distcp$")
    trainer.save(folder)
    seen = [trainer.saved()]
    take_step(trainer, random_batch(2, size=8))
    seen.append(trainer.saved())
    seen.append((Path(folder) / ".metadata").exists())
    release()
    trainer.finish_save()
    seen.append(trainer.saved())
    trainer.load(folder)
    got = trainer.export()
    trainer.close()
    return seen, all(torch.equal(got[name], want[name]) for name in want)


def test_training_goes_on_while_it_is_written(writers: RankPool, tmp_path: Path) -> None:
    save_model(tmp_path / "model", "qwen2_tied")
    (tmp_path / "saved").mkdir()
    (found,) = writers.run(
        saved_by_a_writer_that_waits, 1, config_of(tmp_path), str(tmp_path / "saved")
    )
    assert found == ([False, False, False, True], True)


def saved_by_forks_that_hang(
    rank: int, init: str, config: Config, folder: str, hanging: int
) -> tuple[str, int, bool]:
    """Saves with first forks that never begin. Returned are the error, the number of processes
    left, and whether the loaded weights are the saved ones."""
    trainer = Trainer(resolve_run(config), rank, init)
    take_step(trainer, random_batch(1, size=8))
    want = trainer.export()
    forks = iter(range(hanging))
    before, turn = os.getpid(), [False]

    def first() -> None:
        turn[0] = next(forks, None) is not None

    def hang() -> None:
        while turn[0] and os.getppid() == before:
            signal.pause()

    os.register_at_fork(before=first, after_in_child=hang)
    said = ""
    with substituted(background_save, "_BEGIN_S", 1.0):
        try:
            trainer.save(folder)
            trainer.finish_save()
            trainer.load(folder)
        except UserError as error:
            said = str(error)
    got, left = trainer.export(), len(mp.active_children())
    trainer.close()
    return said, left, all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.wide
@pytest.mark.parametrize("hanging", [2, 3])
def test_a_fork_that_never_begins_is_made_again(
    writers: RankPool, tmp_path: Path, hanging: int
) -> None:
    """Two are; a third is an error, and nothing is left of it."""
    save_model(tmp_path / "model", "qwen2_tied")
    (tmp_path / "saved").mkdir()
    arguments = (config_of(tmp_path), str(tmp_path / "saved"), hanging)
    ((said, left, equal),) = writers.run(saved_by_forks_that_hang, 1, *arguments)
    assert (left, equal) == (0, True)
    assert said == "" if hanging == 2 else "its writer processes do not start" in said


def saved_onto_a_full_disk(rank: int, init: str, config: Config, folder: str) -> str:
    trainer = Trainer(resolve_run(config), rank, init)
    os.symlink("/dev/full", f"{folder}/__0_0.distcp")
    trainer.save(folder)
    try:
        trainer.finish_save()
    except UserError as error:
        return str(error)
    finally:
        trainer.close()
    return "written"


def test_a_full_disk_is_named(writers: RankPool, tmp_path: Path) -> None:
    save_model(tmp_path / "model", "qwen2_tied")
    (tmp_path / "saved").mkdir()
    (said,) = writers.run(saved_onto_a_full_disk, 1, config_of(tmp_path), str(tmp_path / "saved"))
    assert "the checkpoint could not be written (No space left on device)" in said
    assert str(tmp_path / "saved") in said


def saved_and_loaded(rank: int, init: str, config: Config, folder: str) -> int:
    """Bytes of tensors that this rank reads from the checkpoint."""
    trainer = Trainer(resolve_run(config), rank, init)
    take_step(trainer, random_batch(1, size=8))
    trainer.save(folder)
    trainer.finish_save()
    read = 0
    read_data = FileSystemReader.read_data

    def counted(self: FileSystemReader, plan: Any, planner: Any) -> Any:
        nonlocal read
        read += sum(item.lengths.numel() for item in plan.items)
        return read_data(self, plan, planner)

    with substituted(FileSystemReader, "read_data", counted):
        trainer.load(folder)
    trainer.close()
    return read


@pytest.mark.parametrize("distributed", [False, True])
def test_every_element_is_written_once_and_read_once(
    writers: RankPool, tmp_path: Path, distributed: bool
) -> None:
    save_model(tmp_path / "model", "qwen2_tied")
    (tmp_path / "saved").mkdir()
    config = config_of(tmp_path, parallel={"data": 2}, optimizer={"distributed": distributed})
    read = writers.run(saved_and_loaded, 2, config, str(tmp_path / "saved"))
    with TorchDist(tmp_path / "saved") as saved:
        whole = {key: torch.Size(size).numel() for key, size in saved.sizes.items()}
        chunks = [(key, chunk) for key in whole for chunk in saved.chunks[key]]
    written = {
        key: sum(torch.Size(c.sizes).numel() for k, c in chunks if k == key) for key in whole
    }
    assert written == whole
    total = sum(whole.values())
    # weights and two moments
    assert total < 3.1 * sum(n for key, n in whole.items() if "optimizer" not in key)
    for rank in range(2):
        share = sum(
            torch.Size(c.sizes).numel() for _, c in chunks if c.file.startswith(f"__{rank}_")
        )
        assert 0.4 * total < share < 0.6 * total
        assert 0.4 * total < read[rank] < 0.6 * total
