"""Defines `megatron_stare.run`, which trains from a notebook or a program."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from megatron_stare.commands.train.command import read_config, train_and_tell
from megatron_stare.config.layers import Override
from megatron_stare.errors import UserError, exits_refused
from megatron_stare.process.interruption import Interruption, on_driver_thread
from megatron_stare.process.signs_of_life import say
from megatron_stare.registry import forget_files

_one = threading.Lock()  # held by the run of this process
HUB = "huggingface_hub.constants"


def run(
    config: str | os.PathLike[str] | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    *,
    resume: bool = False,
    from_step: int | None = None,
    **settings: Any,
) -> Path:
    """Trains as `megatron-stare train` does, with the same checks, and returns the run directory.

    `run` can be called from any thread, even if an event loop is running in the thread, as in a
    notebook. The environment variables are the same after the call as before. In the main thread,
    `run` handles Ctrl-C and the interrupt of a notebook. The first interrupt saves the last
    complete step, and then raises KeyboardInterrupt. If code that cannot be interrupted is running,
    the run first waits for the end of this code. A second interrupt kills the process and its child
    processes at once, without saving.

    Every call of `run` imports anew the files that the configuration names as file.py:name. Modules
    that these files import are not imported anew.

    Args:
        config: a YAML file, the name of a configuration that ships with the package, or a dict of
            sections. Paths in the configuration are relative to the current folder.
        overrides: values by the dotted name of a setting, such as {"run.steps": 2}.
        resume: true continues from the newest checkpoint of the run in run.dir. If run.dir is not
            set, the newest run of the same name is continued.
        from_step: the step whose checkpoint the run continues from, instead of the newest
            checkpoint. Later checkpoints are set aside.
        settings: more overrides, which are given as `**{...}`.

    Raises:
        UserError: a setting, file or worker cannot be used, or another run is in progress in this
            process.
        KeyboardInterrupt: the run was told to end. `resume=True` continues the run.
    """
    given = [
        Override.of(key, _plain(value)) for key, value in {**(overrides or {}), **settings}.items()
    ]
    source = _plain(config) if isinstance(config, Mapping) else os.fspath(config)
    found: list[Path] = []

    def body(interruption: Interruption) -> int:
        try:
            resumes = resume or from_step is not None
            forget_files()  # the user may have edited them since the last run
            with exits_refused():
                read = read_config(source, given, resume=resumes)
                found.append(train_and_tell(read, resumes, from_step))
        except KeyboardInterrupt:
            say(_how_far(interruption), always=True)
            raise
        return 0

    if not _one.acquire(blocking=False):
        raise UserError(
            "another run is under way in this process", fix="wait for it, or use another process"
        )
    try:
        with _environment_kept():
            _beside_any_loop(partial(on_driver_thread, body, _how_far, hurries=False))
    finally:
        _one.release()
    return found[0]


@contextlib.contextmanager
def _environment_kept() -> Iterator[None]:
    """Undoes a run's changes of the environment variables when the run ends. Otherwise, these
    values would still apply to the next run of the program, and huggingface_hub would refuse
    downloads."""
    before, known = dict(os.environ), HUB in sys.modules
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
        if not known and HUB in sys.modules:
            importlib.reload(sys.modules[HUB])  # the run imported it with HF_HUB_OFFLINE=1


def _beside_any_loop(body: Any) -> None:
    """Calls `body`. If the caller is in the main thread, `body` runs in the main thread, handles
    signals, and starts a separate thread for the run. If the caller is not in the main thread,
    `body` runs in a new thread, because an event loop may run in the caller's thread."""
    if threading.current_thread() is threading.main_thread():
        body()
        return
    done: Future[None] = Future()

    def call() -> None:
        try:
            done.set_result(body())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    done.result()


def _how_far(interruption: Interruption) -> str:
    standing = interruption.standing
    if standing is None:
        return "interrupted before the run began"
    kept = "no checkpoint" if standing.checkpoint is None else f"that of step {standing.checkpoint}"
    asked = standing.from_step
    how = "resume=True" if asked is None else f"from_step={asked}"
    return (
        f"interrupted after step {standing.step} of {standing.steps}; the newest checkpoint:"
        f" {kept}; continue with {how}, **{{'run.dir': '{standing.run_dir}'}}"
    )


def _plain(value: Any) -> Any:
    """Returns the value with every path converted to text."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value
