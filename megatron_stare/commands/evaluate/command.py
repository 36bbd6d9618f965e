"""Defines the arguments of `megatron-stare eval` and runs the command. Imports torch only when the
command runs."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from megatron_stare.config.load import load_config
from megatron_stare.errors import exits_refused
from megatron_stare.process.interruption import Interruption, on_driver_thread
from megatron_stare.process.signs_of_life import say_loading

_PARTS = 20  # progress lines per task without a terminal


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments of `eval`."""
    command.add_argument(
        "config", help="YAML file: its model, tasks (eval.tasks), engines and verifiers are used"
    )
    command.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="overrides of the file's settings: section.key=value",
    )
    command.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        metavar="X",
        help=(
            "Hugging Face folder, run directory (its newest checkpoint) or distributed checkpoint;"
            " the same model as model.path"
        ),
    )
    command.add_argument(
        "--tasks",
        metavar="A,B",
        help=(
            "names of tasks in eval.tasks; default: all, even those that training does not evaluate"
        ),
    )
    command.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help=(
            "folder of responses and results; an existing one is resumed. Default: evals/NAME,"
            " made of the run's name and the checkpoint's path"
        ),
    )
    command.add_argument(
        "--json", action="store_true", help="print the results as JSON instead of a table"
    )


def run_command(args: argparse.Namespace) -> int:
    """Evaluates the checkpoint and prints the results. Returns the exit code. Raises UserError."""
    kept = "interrupted; finished responses are kept, and the same command resumes from them"

    def evaluate(interruption: Interruption) -> int:
        try:
            with exits_refused():
                _run(args)
        except KeyboardInterrupt:
            _say(kept)
            return 128 + (interruption.number or signal.SIGINT)
        return 0

    return on_driver_thread(evaluate, lambda interruption: kept)


def _run(args: argparse.Namespace) -> None:
    config = load_config(args.config, args.overrides, before_method=say_loading)
    # tokenizers' threads do not survive the forks of worker processes
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models and tokenizers are local folders
    from megatron_stare.commands.evaluate.offline_evaluation import (
        default_out,
        read,
        refuse_missing,
        run,
    )
    from megatron_stare.evaluation.results import table  # imports torch

    refuse_missing(args.checkpoint)
    tasks = [name.strip() for name in args.tasks.split(",")] if args.tasks is not None else []
    opened = read(config, args.checkpoint, tasks)
    out = args.out or default_out(config, opened.checkpoint.path)
    records = run(opened, out, _shown, _say)
    if args.json:
        print(
            json.dumps(
                {"checkpoint": str(opened.checkpoint.path), "out": str(out), "tasks": records},
                indent=2,
            )
        )
        return
    print(
        f"{opened.checkpoint.path}, after step"
        f" {opened.checkpoint.step}\n\n{table(records)}\n\n{out}/"
    )


def _shown(task: str) -> Callable[[int, int], None]:
    """Returns a callback that prints a task's progress. On a terminal, the callback updates one
    line. Without a terminal, the callback prints at most `_PARTS` + 1 lines."""
    last = -1

    def told(done: int, wanted: int) -> None:
        nonlocal last
        part = done * _PARTS // wanted
        text = f"{task}: {done} of {wanted} responses"
        if sys.stderr.isatty():
            print(
                f"\r\033[K{text}", end="\n" if done == wanted else "", file=sys.stderr, flush=True
            )
        elif part > last:
            _say(text)
        last = max(last, part)

    return told


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
