"""A save over several ranks in which a rank, a writer or the driver is killed: the checkpoint
before stays whole, what is left is no checkpoint, and no process stays."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support.killing import kill_at, kill_child_at
from support.models import random_batch, save_model
from support.rank_workers import RankWorkers
from support.ranks import forking_context
from support.steps import take_step
from torch import Tensor

from megatron_stare.cluster.trainer_group import TrainerGroup, plan_rules
from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.driver.checkpoints import Checkpoints
from megatron_stare.errors import UserError
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.run_dir.run_state import RunDir, RunState

pytestmark = pytest.mark.distributed
WAIT_S = 120
LOST = 3  # exit status of a driver that has lost a rank
LAYOUTS: dict[str, dict[str, int]] = {"dp2": {"data": 2}, "tp2-dp2": {"tensor": 2, "data": 2}}
# who is killed, of which rank, at which audit event with which path
Victim = tuple[str, int, str, str]

STAGED = r"step_000002\.\w+\.tmp"
OF_THE_DRIVER = (
    ("os.mkdir", rf"{STAGED}$"),
    ("open", rf"{STAGED}/run_state\.json$"),
    ("os.rename", rf"{STAGED}$"),
    ("os.rename", r"step_000001$"),  # which is forgotten
    ("os.rmdir", r"step_000001\.\w+\.tmp$"),
)


def victims(world: int) -> list[Victim]:
    """Everybody at every moment, in a drawn order."""
    found = [("driver", 0, *moment) for moment in OF_THE_DRIVER]
    for rank in range(world):
        files = [rf"{STAGED}/__{rank}_{number}\.distcp$" for number in range(2)]
        found += [(who, rank, "open", file) for who in ("rank", "writer") for file in files]
    found += [
        ("rank", 0, "open", rf"{STAGED}/{name}$")
        for name in (r"\.metadata\.tmp", r"metadata\.json")
    ]
    random.Random(16).shuffle(found)
    return found


def cases() -> list[Any]:
    """Two ranks, one of each kind (the driver's moments are in test_background_save.py); four
    ranks, all, slow."""
    drawn = victims(2)
    quick = [next(each for each in drawn if each[0] == who) for who in ("rank", "writer")]
    made = [pytest.param("dp2", each, id=f"dp2-{each[0]}") for each in quick]
    return made + [
        pytest.param("tp2-dp2", each, marks=pytest.mark.slow, id=f"tp2-dp2-{number}-{each[0]}")
        for number, each in enumerate(victims(4))
    ]


def config_of(path: Path, layout: str) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(path / "model")},
            "run": {"dir": str(path / "run"), "keep_checkpoints": 1},
            "batch": {"micro_batch_tokens": 48},
            "parallel": LAYOUTS[layout],
            "optimizer": {"lr": 1e-2, "distributed": True},
            "algorithm": {"name": "grpo"},
            "runtime": {"timeout_s": 60.0},
        }
    )


class Rank(Trainer):
    """A rank that can take a step by itself, and be told when to die."""

    def whole_step(self, number: int) -> None:
        take_step(self, random_batch(number, size=8))

    def mortal(self, who: str, event: str, pattern: str) -> None:
        (kill_at if who == "rank" else kill_child_at)(event, pattern)


class Driver:
    """A run as the session drives it, over ranks in processes of their own."""

    def __init__(self, config: Config, run_dir: RunDir, meeting: str) -> None:
        torch.set_num_threads(1)
        run = resolve_run(config)
        self.workers = RankWorkers(
            lambda rank: Rank(run, rank, f"file://{meeting}"), config.parallel.world_size
        )
        self.group, self.dir = TrainerGroup(self.workers, plan_rules(run)), run_dir
        self.checkpoints = Checkpoints(config, self.group, run_dir)

    def step(self, number: int) -> None:
        self.workers.call("whole_step", number)

    def weights(self) -> dict[str, Tensor]:
        return {
            name: tensor for part in self.workers.call("export") for name, tensor in part.items()
        }


def saved_and_killed(folder: str, layout: str, victim: Victim | None) -> None:
    """Two steps, each saved, and a third while the second save is under way."""
    os.setpgid(0, 0)
    config = config_of(Path(folder), layout)
    driver = Driver(config, RunDir.create(config), f"{folder}/ranks")
    driver.step(1)
    driver.checkpoints.save(RunState(step=1))
    driver.checkpoints.finish()
    driver.step(2)
    if victim is not None:
        who, rank, event, pattern = victim
        if who == "driver":
            kill_at(event, pattern)
        else:
            driver.workers.wait([driver.workers.start_on(rank, "mortal", who, event, pattern)])
    try:
        driver.checkpoints.save(RunState(step=2))
        driver.step(3)
        driver.checkpoints.finish()
    except UserError:
        driver.group.close()
        os._exit(LOST)
    torch.save(driver.weights(), f"{folder}/step_3")
    driver.group.close()


def continued(folder: str, layout: str) -> None:
    """Reopens what is left of a run and continues it to step 3."""
    config = config_of(Path(folder), layout)
    driver = Driver(config, RunDir.reopen(Path(folder) / "run"), f"{folder}/ranks-again")
    newest = driver.dir.checkpoints()[-1]
    left = sorted(entry.name for entry in newest.parent.iterdir())
    step = RunState.read(newest).step
    driver.group.load(str(newest))
    for number in range(step + 1, 4):
        driver.step(number)
    torch.save((step, left, driver.weights()), f"{folder}/again")
    driver.group.close()


def status_of(function: Any, *args: Any) -> int:
    """The exit status of a process that runs this; nothing of its group may stay."""
    process = forking_context().Process(target=function, args=args)
    process.start()
    process.join(WAIT_S)
    assert process.exitcode is not None, "it hangs"
    _, alive = psutil.wait_procs(of_group(process.pid), timeout=WAIT_S)
    assert alive == []
    return process.exitcode


def of_group(group: int | None) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By layout: the model's path, and the weights after three steps."""
    known: dict[str, tuple[Path, dict[str, Tensor]]] = {}

    def of(layout: str) -> tuple[Path, dict[str, Tensor]]:
        if layout not in known:
            folder = tmp_path_factory.mktemp(layout)
            save_model(folder / "model", "qwen2_tied")
            assert status_of(saved_and_killed, str(folder), layout, None) == 0
            known[layout] = folder / "model", torch.load(folder / "step_3")
        return known[layout]

    return of


@pytest.mark.wide
@pytest.mark.parametrize(("layout", "victim"), cases())
def test_whoever_is_killed(undisturbed: Any, tmp_path: Path, layout: str, victim: Victim) -> None:
    model, want = undisturbed(layout)
    (tmp_path / "model").symlink_to(model)
    who, *_, event, pattern = victim
    ended = status_of(saved_and_killed, str(tmp_path), layout, victim)
    assert ended == (-signal.SIGKILL if who == "driver" else LOST)
    completed = "step_000001" in pattern  # it was the one before that was being forgotten
    assert status_of(continued, str(tmp_path), layout) == 0
    step, left, got = torch.load(tmp_path / "again")
    assert (step, left[-1]) == ((2, "step_000002") if completed else (1, "step_000001"))
    assert left == (
        ["step_000001", "step_000002"] if event == "os.rename" and completed else left[-1:]
    )
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
