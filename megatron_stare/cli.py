"""Defines the command line, `megatron-stare train CONFIG key=value ...`. After a user error, the
program exits with code 2 and prints no traceback."""

from __future__ import annotations

import argparse
import ast
import codecs
import io
import math
import os
import select
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_stare import __version__
from megatron_stare.commands import init_folder, suggest, views
from megatron_stare.commands import recipes as recipes_command
from megatron_stare.commands.bisect import bisect_command
from megatron_stare.commands.evaluate import command as eval_command
from megatron_stare.commands.train import command as train_command
from megatron_stare.commands.train.command import PROGRAM
from megatron_stare.config.formats import FORMAT, RENAMED, SERVICES, names_now
from megatron_stare.config.load import former_names, load_config
from megatron_stare.config.schema import Config
from megatron_stare.errors import UserError
from megatron_stare.planning.command import add_arguments, run_command
from megatron_stare.process.shipped import TOOLS, tool
from megatron_stare.process.signs_of_life import say, say_loading


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code. Code 0 means that the command succeeded. Code 1
    means that the doctor or a bisection found a fault, that a planned run does not fit into memory,
    or that `status` found a run dead or silent. Code 2 means a user error. Code 75 means that a run
    ended and can be resumed. If SIGUSR1 or the time limit ends a run, the run saves its state and
    ends with code 75. A run also ends with code 75 if the run lost a process, a node or the whole
    cluster. Code 129 means that the terminal was closed (SIGHUP). Code 130 means that SIGINT
    (Ctrl-C) ended the command. Code 141 means that the reader of stdout, such as `head`, ended
    first. Code 143 means that SIGTERM ended the command."""
    _replace_what_stdout_cannot_encode()
    args, rest = parser().parse_known_args(argv)
    # argparse takes positionals in one run only: overrides after an option come back as unknown
    if rest and (not hasattr(args, "overrides") or any(word.startswith("-") for word in rest)):
        parser().error(f"unrecognized arguments: {' '.join(rest)}{_hint(rest)}")
    if rest:
        args.overrides += rest
    try:
        code = args.run(args) or 0
        if sys.stdout:  # None if the caller closed it
            sys.stdout.flush()  # a lost reader is noticed here, not at exit
        return code
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        if not _reader_is_lost():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for the flush at exit
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def _replace_what_stdout_cannot_encode() -> None:
    """Makes stdout print `?` for a character that stdout's encoding lacks. stderr prints escapes by
    default."""
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and codecs.lookup(out.encoding).name != "utf-8":
        out.reconfigure(errors="replace")


def _reader_is_lost() -> bool:
    """Tells whether stdout is a pipe without a reader. Sockets raise BrokenPipeError, too."""
    stdout = select.poll()
    stdout.register(1, 0)
    return any(event & select.POLLERR for _, event in stdout.poll(0))


def _hint(unrecognized: Sequence[str]) -> str:
    """Returns a hint if the user wrote a setting with leading dashes, like an option, and returns
    "" otherwise. The caller appends the hint to the error message."""
    for word, following in zip(unrecognized, [*unrecognized[1:], "..."], strict=True):
        key, eq, value = word.lstrip("-").partition("=")
        key = names_now(key) or key
        if word.startswith("-") and key.partition(".")[0] in Config.model_fields:
            return f"\n  fix: settings have no dashes: {key}={value if eq else following}"
    return ""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the whole command line."""
    top = argparse.ArgumentParser(
        prog=PROGRAM, description="Stable RL of reasoning models on Megatron."
    )
    top.add_argument("--version", action="version", version=__version__)
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser(
        "train",
        help="train a policy",
        description=(
            "Trains the policy that CONFIG describes. Settings are listed with units in"
            " docs/configuration.md."
        ),
        epilog="example: megatron-stare train configs/quickstart.yaml run.seed=2 algorithm=grpo",
    )
    train_command.add_arguments(train)

    sft = commands.add_parser(
        "sft",
        help="fine-tune a policy on conversations",
        description=(
            "Trains the policy that CONFIG describes on the conversations of data.path, with the"
            " layouts, checkpoints and reports of `train`. Loss: negative log-likelihood of the"
            " tokens that the assistant wrote. See docs/sft.md."
        ),
        epilog="example: megatron-stare sft my_sft.yaml data.path=rows.jsonl run.steps=200",
    )
    train_command.add_arguments(sft, train_command.SFT)

    init = commands.add_parser(
        "init",
        help="write a folder that can train at once: configuration, data, reward, README",
        description=(
            "Writes a folder that can train at once, on sums or on a data file of your own, whose"
            " columns it guesses. See docs/howto/own_data.md."
        ),
        epilog="example: megatron-stare init mine --data problems.parquet --model models/Qwen3-8B",
    )
    init_folder.add_arguments(init)
    init.set_defaults(run=init_folder.run_command)

    recipes = commands.add_parser(
        "recipes",
        help="list the recipes of published runs, or compare one with the published settings",
        description=(
            "Lists the recipes of published runs and the run that each reproduces. With NAME,"
            " lists every published setting, the line of its source, the recipe's value, and the"
            " reason for a difference."
        ),
        epilog="start one: bash scripts/run_recipe.sh NAME, or megatron-stare train recipes/NAME",
    )
    recipes_command.add_arguments(recipes)
    recipes.set_defaults(run=recipes_command.run_recipes)

    formats = commands.add_parser(
        "format",
        help="list the settings that were renamed since earlier releases",
        description=(
            "Lists the sections that were renamed since earlier releases, with their present"
            " names. With CONFIG, lists those that CONFIG uses. Former names are accepted in the"
            " config.yaml of a run's folder, and refused in any other file."
        ),
    )
    formats.add_argument(
        "config", nargs="?", help="YAML file: a run's config.yaml, or one of your own"
    )
    formats.set_defaults(run=_format)

    convert = commands.add_parser(
        "convert",
        help="convert a Hugging Face folder to a distributed checkpoint, or back",
        description=(
            "Converts a Hugging Face folder to a distributed checkpoint that loads in any layout,"
            " or a distributed checkpoint (from a conversion, a run or Megatron-LM) to a Hugging"
            " Face folder. See docs/checkpoints.md."
        ),
    )
    _add_convert_arguments(convert)
    convert.set_defaults(run=_convert)

    status = commands.add_parser(
        "status",
        help=(
            "show a run's status: phase, rates, time left, alerts, and the next command if it ended"
        ),
        description=(
            "Shows the status of a run on this machine or another, from the run's files alone."
            " Exit code 1: the run is unfinished and seems not to be running. See docs/runs.md."
        ),
    )
    views.add_status_arguments(status)
    status.set_defaults(run=views.run_status)

    suggested = commands.add_parser(
        "suggest",
        help="suggest STARE's target and weights from a run's first steps",
        description=(
            "Suggests algorithm.entropy_target, amplify and attenuate from the entropy forecast of"
            " a run's first steps, with the reasons. Any method's run will do. See docs/tuning.md."
        ),
        epilog="example: megatron-stare suggest runs/grpo --steps 50",
    )
    suggest.add_arguments(suggested)
    suggested.set_defaults(run=suggest.run_suggest)

    report = commands.add_parser(
        "report",
        help="write report.html of one or several runs, finished or not",
        description=(
            "Writes the report of a run, or the comparison of several runs: results, problems,"
            " curves, responses and settings, in one HTML file. See docs/runs.md."
        ),
    )
    views.add_report_arguments(report)
    report.set_defaults(run=views.run_report)

    rollouts = commands.add_parser(
        "rollouts",
        help="write a page of a run's sampled responses, or of two runs side by side",
        description=(
            "Writes a page of the responses that a run stored. The page filters them and shows each"
            " token by token, with the tokens that the method selected and the reasons. See"
            " docs/runs.md."
        ),
    )
    views.add_rollouts_arguments(rollouts)
    rollouts.set_defaults(run=views.run_rollouts)

    evaluation = commands.add_parser(
        "eval",
        help="evaluate a checkpoint on tasks: avg@k, pass@k, maj@k with intervals",
        description=(
            "Samples a checkpoint's responses to the problems of CONFIG's tasks and scores them as"
            " evaluations during training do. Repeat an interrupted command to resume it. See"
            " docs/evaluation.md."
        ),
        epilog=(
            "example: megatron-stare eval configs/quickstart.yaml eval.samples=8 --checkpoint"
            " runs/my-run/hf"
        ),
    )
    eval_command.add_arguments(evaluation)
    evaluation.set_defaults(run=eval_command.run_command)

    plan = commands.add_parser(
        "plan",
        help="forecast a run: memory by GPU, time by phase, the nearest layouts that fit",
        description=(
            "Forecasts a run's memory and time, and lists the nearest layouts that fit. This"
            " machine does not need the GPUs. Exit code 1: the run does not fit. See"
            " docs/planning.md."
        ),
        epilog=(
            "example: megatron-stare plan my_32b.yaml --nodes 4 --gpu h100-80g --response-tokens"
            " 6000"
        ),
    )
    add_arguments(plan)
    _add_sft(plan)
    plan.set_defaults(run=run_command)

    doctor = commands.add_parser(
        "doctor",
        help="check what this machine or cluster lacks for a run",
        description=(
            "Checks versions, limits, folders, ports, clocks, GPUs and environment of this"
            " machine, or of all nodes of CONFIG's runtime.ray_address. With CONFIG, checks that"
            " they suit that run. Exit code 1: there is a fault. See docs/doctor.md."
        ),
    )
    doctor.add_argument("config", nargs="?", help="YAML file of the run to check for")
    doctor.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="overrides of the file's settings: section.key=value",
    )
    _add_sft(doctor)
    doctor.add_argument("--json", action="store_true", help="findings as JSON")
    doctor.add_argument(
        "--bandwidth",
        action="store_true",
        help="also measure an all-reduce, which takes some seconds",
    )
    doctor.set_defaults(run=_doctor)

    bisect = commands.add_parser(
        "bisect",
        help=(
            "repeat steps of a run with one cause changed at a time, and report the cause that"
            " explains its record"
        ),
        description=(
            "Repeats steps S + 1 to T of RUN from its checkpoint of step S: first unchanged,"
            " which must reproduce the record, then with gate, correction, staleness, layout and"
            " engine changed one at a time. Reports the changes that move entropy, agreement or"
            " reward, and the change that explains a record that the unchanged steps do not"
            " reproduce. Exit code 0: the record agrees with the configuration; 1: it does not."
            " See docs/bisect.md."
        ),
        epilog="example: megatron-stare bisect runs/my-run --from 100 --to 120",
    )
    bisect_command.add_arguments(bisect)
    bisect.set_defaults(run=bisect_command.run_command)

    run_tool = commands.add_parser(
        "tool",
        help="run one of the tools that ship with the package",
        description="\n".join(f"  {name:18} {_purpose(name)}" for name in TOOLS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run_tool.add_argument("tool", choices=TOOLS, metavar="TOOL", help="name of the tool")
    run_tool.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="arguments of the tool; --help lists them"
    )
    run_tool.set_defaults(run=_tool)
    return top


def _add_sft(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--sft",
        dest="beneath",
        action="store_const",
        const=train_command.BENEATH[train_command.SFT],
        default=(),
        help=f"the file is for `{PROGRAM} sft`, and gets the defaults of that command",
    )


def _purpose(name: str) -> str:
    """Returns the first sentence of a tool's docstring."""
    words = ast.get_docstring(ast.parse(tool(name).read_text(encoding="utf-8"))) or ""
    return " ".join(words.partition("\n\n")[0].split()).partition(". ")[0].rstrip(":.")


def _format(args: argparse.Namespace) -> None:
    if args.config is None:
        print(
            f"configurations and run states are of format {FORMAT}; these settings have other"
            " names since format 6:"
        )
        former = [*RENAMED, *(f"services.{setting}" for setting in SERVICES)]
        print("\n".join(f"  {each:27} now {names_now(each)}" for each in former))
    else:
        print("\n".join(former_names(args.config)) or f"{args.config}: no renamed settings")


def _add_convert_arguments(convert: argparse.ArgumentParser) -> None:
    """Adds the arguments of the `convert` command to its parser."""
    convert.add_argument(
        "source", type=Path, help="Hugging Face folder, distributed checkpoint or run directory"
    )
    convert.add_argument("target", type=Path, help="folder to write; must not exist")
    convert.add_argument(
        "--model",
        type=Path,
        metavar="HF_DIR",
        help=(
            "folder with config.json and tokenizer; default: the checkpoint, or the model that"
            " the run started from"
        ),
    )
    convert.add_argument(
        "--dtype", choices=("bfloat16", "float32"), help="dtype of the result; default: unchanged"
    )
    convert.add_argument(
        "--processes", type=_at_least_one, default=1, metavar="N", help="default 1"
    )
    convert.add_argument(
        "--shard-gb",
        type=_above_zero,
        default=4.0,
        metavar="GB",
        help="largest safetensors file, 10^9 bytes; default 4",
    )
    convert.add_argument(
        "--check",
        action="store_true",
        help="read both sides again and compare every tensor bit for bit",
    )


def _at_least_one(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _above_zero(text: str) -> float:
    if not 0 < (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError("must be a number above 0")
    return value


def _convert(args: argparse.Namespace) -> None:
    if not args.source.exists():
        raise UserError("there is no such folder", where=str(args.source), fix="correct the path")
    say_loading()
    import torch

    from megatron_stare.weights.files.convert import Options, convert

    dtype = getattr(torch, args.dtype) if args.dtype else None
    options = Options(dtype, args.processes, round(args.shard_gb * 1e9), args.check)
    convert(args.source, args.target, args.model, options)
    print(f"wrote {args.target}" + (", and both sides are equal bit for bit" if args.check else ""))


def _doctor(args: argparse.Namespace) -> int:
    config = None
    if args.config:
        config = load_config(
            args.config, args.overrides, before_method=say_loading, beneath=args.beneath
        )
    say_loading()
    from megatron_stare.commands.doctor.examine import as_json, as_text, examine, faults

    found = examine(config, bandwidth=args.bandwidth)
    print(as_json(found) if args.json else as_text(found))
    return 1 if faults(found) else 0


def _tool(args: argparse.Namespace) -> None:
    say(f"starting {args.tool} ...")
    os.execv(sys.executable, [sys.executable, str(tool(args.tool)), *args.arguments])


if __name__ == "__main__":
    sys.exit(main())
