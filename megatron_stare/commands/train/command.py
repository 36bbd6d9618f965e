"""Defines the commands `megatron-stare train` and `megatron-stare sft`, and the arguments of both.
Imports torch only when a command runs.

The command `sft` is `train` with other defaults. The default training method of the command `sft`
learns from given conversations and samples no responses.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron_stare.config.layers import Layer, Override
from megatron_stare.config.load import dump_yaml, former_names, load_config
from megatron_stare.config.schema import Config
from megatron_stare.driver.supervision import attach, driver_of, supervise
from megatron_stare.errors import ConfigError, UnusableCheckpointError, UserError, exits_refused
from megatron_stare.process.interruption import Interruption, on_driver_thread, poll, what_now
from megatron_stare.process.signs_of_life import say_loading
from megatron_stare.process.time_limit import TimeLimit, seconds_of

PROGRAM = "megatron-stare"
TRAIN, SFT = "train", "sft"
# layers beneath the user's file, by command
BENEATH = {
    TRAIN: (),
    SFT: (
        Layer(
            f"defaults of {PROGRAM} {SFT}",
            {
                "algorithm": {"name": "sft"},
                "data": {"source": "messages"},
                "batch": {"samples_per_prompt": 1},
            },
        ),
    ),
}


def add_arguments(command: argparse.ArgumentParser, name: str = TRAIN) -> None:
    """Adds the arguments of a command to the command's parser. Also registers `run_command`, the
    function that runs the command.

    Args:
        name: TRAIN or SFT.
    """
    command.set_defaults(run=run_command, command=name)
    command.add_argument("config", help="YAML file")
    command.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="overrides of the file's settings: section.key=value",
    )
    command.add_argument(
        "--dry-run",
        action="store_true",
        help=("check everything that needs no workers, print the resolved configuration and stop"),
    )
    command.add_argument(
        "--resume", action="store_true", help="continue from the run's newest checkpoint"
    )
    command.add_argument(
        "--supervise",
        action="store_true",
        help=(
            "run in a process of its own, and restart that process if it is killed; see"
            " docs/recovery.md"
        ),
    )
    command.add_argument(
        "--from-step",
        type=int,
        metavar="N",
        help="resume from the checkpoint of step N; later checkpoints are set aside",
    )
    command.add_argument(
        "--stop-after",
        metavar="TIME",
        help=(
            "save and end with exit code 75 before this time is over: 3h50m, 90m or 5400 (seconds)"
        ),
    )
    command.add_argument(
        "--dump-step",
        type=int,
        metavar="N",
        help="write step N's batch, weights, loss and gradients to the run directory",
    )


def run_command(args: argparse.Namespace) -> int:
    """Trains. Returns the exit code; `cli.main` lists the exit codes."""
    begun = time.monotonic()
    args.resume = args.resume or args.from_step is not None
    if args.supervise and not args.dry_run:
        return _supervise(args)
    return on_driver_thread(
        lambda interruption: _train_to_code(args, begun, interruption),
        lambda interruption: what_now(interruption, *_typed(args, interruption)),
    )


def _train_to_code(args: argparse.Namespace, begun: float, interruption: Interruption) -> int:
    args.supervise = attach()
    try:
        with exits_refused():
            _train_or_check(args, begun)
    except KeyboardInterrupt:
        print(what_now(interruption, *_typed(args, interruption)), file=sys.stderr)
        return interruption.exit_code
    except UnusableCheckpointError as error:
        run = f"run.dir={error.run_dir}"
        command, options = _typed(args, interruption, run)
        again = [*command, run, *options, "--from-step", str(error.older)]
        print(f"error: {error}\n  {shlex.join(again)}", file=sys.stderr)
        return 2
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        if interruption.standing is not None and interruption.standing.checkpoint is not None:
            print(
                what_now(interruption, *_typed(args, interruption), ended="ended"), file=sys.stderr
            )
        return error.exit_code
    return 0


def _supervise(args: argparse.Namespace) -> int:
    given = {"--from-step": args.from_step, "--dump-step": args.dump_step}
    options = [f"{option}={value}" for option, value in given.items() if value is not None]
    options += ["--resume"] if args.resume else []
    limit_s = None if args.stop_after is None else seconds_of(args.stop_after)
    return supervise([args.config, *args.overrides, *options], limit_s, driver_of(args.command))


def _typed(
    args: argparse.Namespace, interruption: Interruption, run_dir: str | None = None
) -> tuple[list[str], list[str]]:
    """Splits the run's command line into two lists, which `what_now` takes as its arguments
    `command` and `options`. The list `command` contains the program, the command, the configuration
    file and the overrides. The list `options` contains the command-line options.

    Args:
        run_dir: a run directory that the caller adds to the words. If `run_dir` is given, the words
            contain no override of `run.dir`.
    """
    program = PROGRAM
    if Path(sys.argv[0]).name == program and shutil.which(program) is None:
        program = sys.argv[0]  # .venv/bin/megatron-stare
    given = {"--dump-step": args.dump_step, "--stop-after": args.stop_after}
    overrides = args.overrides
    options = [str(x) for pair in given.items() if pair[1] is not None for x in pair]
    options += ["--supervise"] if args.supervise else []
    if interruption.standing is None and run_dir is None:
        options += [] if args.from_step is None else ["--from-step", str(args.from_step)]
        options += [
            flag
            for flag, given in (("--resume", args.resume), ("--dry-run", args.dry_run))
            if given
        ]
    else:
        # what_now adds the run directory
        overrides = [each for each in overrides if not each.startswith("run.dir=")]
    return [program, args.command, args.config, *overrides], options


def _train_or_check(args: argparse.Namespace, begun: float) -> None:
    limit = TimeLimit(None if args.stop_after is None else seconds_of(args.stop_after), begun)
    config = read_config(args.config, args.overrides, BENEATH[args.command], args.resume)
    if args.command == SFT and not config.supervised:
        raise ConfigError(
            f"{config.algorithm.name} does not learn from conversations",
            where="algorithm.name",
            fix=f"use {PROGRAM} {TRAIN}, or algorithm=sft",
        )
    if args.dry_run:
        from megatron_stare.driver.opening import rehearse, remarks

        resolved, said = rehearse(
            config, resume=args.resume, from_step=args.from_step, dump_step=args.dump_step
        )
        print(
            dump_yaml(resolved),
            *(f"# {line}\n" for line in [*remarks(resolved), *said]),
            sep="",
            end="",
        )
        return
    train_and_tell(config, args.resume, args.from_step, args.dump_step, limit)


def read_config(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str | Override],
    beneath: Sequence[Layer] = (),
    resume: bool = False,
) -> Config:
    """Reads the configuration of a run that is about to start. Prints a message before it reads the
    settings of the training method, because reading these settings imports torch and therefore
    takes some time.

    Args:
        resume: the run is to resume instead of starting anew.

    Raises:
        UserError: as load_config; or `source` is the record of one run, and another run would
            resume.
        KeyboardInterrupt: a signal came.
    """
    config = load_config(
        source, overrides, before_method=partial(say_loading, always=True), beneath=beneath
    )
    poll()
    if not isinstance(source, Mapping) and Path(source).is_file():
        for line in former_names(source):
            print(line, file=sys.stderr)
    # tokenizers' threads do not survive the forks of worker processes
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models and tokenizers are local folders
    if resume and isinstance(source, (str, Path)) and not _sets_run_dir(overrides):
        from megatron_stare.driver.resuming import refuse_other_run  # imports torch

        refuse_other_run(Path(source), config)
    return config


def _sets_run_dir(overrides: Iterable[str | Override]) -> bool:
    given = (each if isinstance(each, Override) else Override(each) for each in overrides)
    return any(each.sets(("run", "dir")) for each in given)


def train_and_tell(
    config: Config,
    resume: bool,
    from_step: int | None = None,
    dump_step: int | None = None,
    limit: TimeLimit | None = None,
) -> Path:
    """Trains the policy, prints a summary of the results and a list of the files, and returns the
    run directory. Raises the same errors as `train`."""
    from megatron_stare.observability.metrics.figures import closing
    from megatron_stare.train import train  # imports torch and transformers: seconds

    poll()
    run_dir = train(config, resume=resume, from_step=from_step, dump_step=dump_step, limit=limit)
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(closing(run_dir, columns))
    return run_dir
