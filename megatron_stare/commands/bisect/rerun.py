"""Repeats steps of a run from a checkpoint, in a separate folder and process. Does not change the
folder of the run."""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from megatron_stare.commands.bisect.causes import ChangedRun, changes
from megatron_stare.config.load import dump_yaml, load_recorded, validate
from megatron_stare.config.schema import Config
from megatron_stare.driver.held_run import HeldRun
from megatron_stare.driver.opening import Inputs, read_inputs
from megatron_stare.driver.session import Session
from megatron_stare.errors import RollBack, UserError
from megatron_stare.rollout.sources.calls import CALLS
from megatron_stare.run_dir.json_lines import read_jsonl, write_atomically
from megatron_stare.run_dir.run_files import METRICS_FILE, read_metrics
from megatron_stare.run_dir.run_state import CONFIG, ROLLBACKS, RUN_STATE
from megatron_stare.train import make_steps

LOG = "log.txt"
_SHOWN = 12  # log lines shown in an error

# settings of a re-run, which only trains and writes metrics
SETTINGS: dict[str, Any] = {
    "run.checkpoint_every": 0,
    "run.keep_checkpoints": 1_000_000,
    "run.rollouts_kept": 0,
    "eval": {"prompts": 0},
    # A changed layout may fail the bit-exact self-test, and the unchanged steps are a better test.
    "checkpoint.self_test": False,
    "checkpoint.keep_best": 0,
    "checkpoint.best_by": None,
    "faults.hangs.enabled": False,
    "observability.sinks": ["jsonl"],
    "observability.metrics": [],
}


def prepare(run: Path, checkpoint: Path, folder: Path, settings: Mapping[str, Any]) -> None:
    """Creates the directory of a run that continues from another run's checkpoint. Hard-links the
    checkpoint's files instead of copying them, because no process changes these files.

    Args:
        settings: settings by dotted key, which replace the run's settings. The value None means the
            default.

    Raises:
        UserError: the folder cannot be written, or the settings conflict.
    """
    config = with_settings(
        load_recorded(run / CONFIG), {**SETTINGS, **settings, "run.dir": str(folder)}
    )
    step = int(checkpoint.name.removeprefix("step_"))
    target = folder / "checkpoints" / checkpoint.name
    try:
        for file in sorted(path for path in checkpoint.rglob("*") if path.is_file()):
            place = target / file.relative_to(checkpoint)
            place.parent.mkdir(parents=True, exist_ok=True)
            _share(file, place)
        (folder / CONFIG).write_text(dump_yaml(config))
        rows = [row for row in read_jsonl(run / METRICS_FILE) if row["step"] <= step]
        write_atomically(folder / METRICS_FILE, rows)
        if (run / ROLLBACKS).exists():
            shutil.copyfile(run / ROLLBACKS, folder / ROLLBACKS)
        # the re-run reads the recorded answers of an environment's tools
        if (run / CALLS).exists():
            shutil.copytree(run / CALLS, folder / CALLS)
    except OSError as error:
        raise UserError(
            f"the folder of the repeated steps cannot be written ({error.strerror})",
            where=str(folder),
        ) from error


def _share(file: Path, place: Path) -> None:
    """Makes `place` a hard link to `file`, which avoids a copy. A hard link is safe, because no
    process modifies the content of `file`. Copies the file if the hard link fails, for example
    because `file` and `place` are on different disks. Always copies the run state, which is
    small."""
    if file.name != RUN_STATE:
        with contextlib.suppress(OSError):
            os.link(file, place)
            return
    shutil.copyfile(file, place)


def with_settings(config: Config, settings: Mapping[str, Any]) -> Config:
    """Returns a copy of the configuration with some settings replaced. `settings` contains the new
    values by dotted key. The value None resets a setting to its default. Raises ConfigError if
    settings conflict."""
    tree = copy.deepcopy(yaml.safe_load(dump_yaml(config)))
    tree.pop("format", None)
    for dotted, value in settings.items():
        *sections, key = dotted.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        if value is None:
            node.pop(key, None)
        else:
            node[key] = value
    return validate(tree, "bisect")


def make_again(folder: Path, change: str, last: int) -> list[dict[str, Any]]:
    """Runs the steps up to `last` in a separate process. Returns the metrics of the steps.

    Raises:
        UserError: the process failed. The message is the last error or output of the process.
    """
    command = [
        sys.executable,
        "-m",
        "megatron_stare.commands.bisect.rerun",
        str(folder),
        change,
        str(last),
    ]
    with (folder / LOG).open("w") as log:
        done = subprocess.run(
            command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False
        )
    if done.returncode:
        said = [line for line in (folder / LOG).read_text().splitlines() if line.strip()]
        errors = [line for line in said if line.startswith("error: ")]
        raise UserError(
            errors[-1].removeprefix("error: ") if errors else "\n".join(said[-_SHOWN:]),
            where=str(folder / LOG),
        )
    return read_metrics(folder / METRICS_FILE)


def main(folder: Path, change: str, last: int) -> int:
    """Runs the steps up to `last` in this process. Returns exit code 0, or prints an error and
    returns 2."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        run_steps(folder, change, last)
    except (UserError, RollBack) as error:
        print(f"error: {error}")
        return 2
    return 0


def run_steps(folder: Path, change: str, last: int) -> None:
    """Resumes the run in the directory `folder`, and trains until step `last` is done. Schedules,
    such as the learning-rate schedule, still extend over the full length of the run."""
    config = load_recorded(folder / CONFIG)
    inputs = read_inputs(config)
    # only changes of the method; changed settings are in the configuration already
    methods = {each.name: each.method for each in changes(inputs.config, inputs.run.method)[0]}
    if (changed := methods.get(change)) is not None:
        run = inputs.run
        inputs = replace(inputs, run=ChangedRun(run.config, run.shape, changed(run.method)))
    with (
        HeldRun(config, inputs, resume=True, dump_step=None) as held,
        _UpTo(last, inputs, held) as session,
    ):
        make_steps(session)


class _UpTo(Session):
    """Session that ends after the training of step `last`. After step `last`, the session leaves
    out all that `Session.steps` does after a step: the check of the guards, the checkpoint and the
    evaluation.

    The session removes the limits on the difference between the engine's and the trainer's
    log-probs. A change that simulates stale weights makes this difference larger, and a limit could
    then end the session.
    """

    def __init__(self, last: int, inputs: Inputs, held: HeldRun) -> None:
        super().__init__(inputs, held)
        self.agreement.lift_limits()
        self._last = last

    def steps(self) -> Iterator[int]:
        for step in super().steps():
            yield step
            if step == self._last:
                return


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
