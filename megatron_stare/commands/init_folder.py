"""Writes a folder from which a run can start immediately (`megatron-stare init`). The run trains on
sums of three numbers, or on the user's own file."""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_stare.data.columns import Columns, guess_columns
from megatron_stare.data.records import HUB, Record
from megatron_stare.errors import UserError
from megatron_stare.process.shipped import SHIPPED

TINY = SHIPPED / "assets" / "tiny-adder"
TRAIN, TEST = 1024, 128  # problems of the files that are written
_SUM = re.compile(r"\d{2}\+\d{2}\+\d{2}")  # that the tiny model was made for
_BOXED = r"{prompt}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_FIRST = 60  # characters of a problem that are shown

# The reward of docs/howto/own_data.md.
REWARD = '''"""Full reward for the right sum, a part of it for any number after the last '='."""

KNOWN_ANSWERS = [
    ("12+34=46;46+56=102", "102", 1.0),
    ("12+34=46;46+56=103", "102", 0.1),
    ("12+34", "102", 0.0),
]


def verify(response: str, answer: str, *, number: float = 0.1) -> float:
    last = response.rpartition("=")[2].strip()
    if last == answer:
        return 1.0
    return number if "=" in response and last.isdigit() else 0.0
'''

_CONFIG = """\
# What differs from the defaults; docs/configuration.md has every setting.
run:
  name: {name}
  steps: {steps}
model:
  path: {model}
runtime:
  runner: inline            # one process and no Ray; ray: several ranks, GPUs, nodes
batch:
  prompts: {prompts:<17}# prompts a step
  samples_per_prompt: 8     # responses to each
  micro_batch_tokens: 4096
rollout:
  max_prompt_tokens: {prompt_tokens}
  max_new_tokens: {new_tokens}{truncate}
data:
  source: files
  path: {path}
{data}reward:
  # reward.py:verify is yours; ready-made ones are in docs/verifiers.md
  verifier: {verifier}
algorithm:
  name: stare
  entropy_target: {target:<10}# nats; a little below entropy/mean of the first steps
optimizer:
  lr: {lr}
  warmup_steps: 5
eval:
  prompts: {held_out:<17}# held-out problems; 0: no evaluation
"""

_README = """\
# {name}

Run these in this folder.{before}

    megatron-stare train config.yaml run.dir=runs/first
    megatron-stare report runs/first
    megatron-stare train config.yaml runtime.runner=ray runtime.ray_address=HEAD:6379 \
model.path=/shared/MODEL model.dtype=bfloat16 parallel.tensor=2 parallel.data=4 \
rollout.engine=sglang rollout.engines=8 rollout.max_prompt_tokens=1024 \
rollout.max_new_tokens=2048

The first trains and leaves `report.html` and the trained model, `hf/`, in `runs/first`; the second
writes the report again, also while the run goes on. The third is for a cluster of GPUs: put the
head node's address and a model folder that all nodes see. `--dry-run` behind either `train` checks
everything and starts nothing.

| file | |
|---|---|
| `config.yaml` | the settings that differ from the defaults |
| `reward.py` | a reward of your own: edit it, and name it in `reward.verifier` |
{files}"""


class _Model(NamedTuple):
    """A model for the configuration.

    `path`: the value of `model.path`.
    `fetch`: the command that downloads the model to `path`, or "" for a model in a local folder.
    `chat`: true if the model's local folder has a chat template.
    """

    path: str
    fetch: str = ""
    chat: bool = False


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments of `init`."""
    command.add_argument("folder", type=Path, metavar="FOLDER", help="new or empty")
    command.add_argument(
        "--data",
        metavar="FILE",
        help=".parquet, .jsonl or .json with your problems; default: sums of three numbers",
    )
    command.add_argument(
        "--model",
        metavar="HF_DIR_OR_NAME",
        help="Hugging Face folder, or owner/name; default: a tiny model that adds",
    )
    for role in ("prompt", "answer"):
        command.add_argument(
            f"--{role}-key",
            metavar="COLUMN",
            help=f"column of the {role} in --data, A.B if nested; default: guessed",
        )


def run_command(args: argparse.Namespace) -> None:
    """Writes the folder, and prints the chosen settings and the next commands. Raises UserError."""
    folder: Path = args.folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            "there are files in this folder already" if folder.is_dir() else "this is a file",
            where=str(folder),
            fix="give a new folder",
        )
    if args.data is None and (args.prompt_key or args.answer_key):
        raise UserError(
            "columns can only be named for a data file", where="--prompt-key", fix="--data FILE"
        )
    model = _model(args.model)
    columns = guess_columns(args.data, args.prompt_key, args.answer_key) if args.data else None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder, model, args.data, columns)
    except OSError as error:
        raise UserError(
            f"cannot be written: {error.strerror}", where=str(error.filename or folder)
        ) from error
    if columns:
        print("\n".join(_told(args.data, columns, model)))
    fetch = f"  {model.fetch}\n" if model and model.fetch else ""
    print(
        f"wrote {', '.join(sorted(each.name for each in folder.iterdir()))} in {folder}; next:\n"
        f"  cd {folder}\n{fetch}  megatron-stare train config.yaml run.dir=runs/first"
    )


def _model(given: str | None) -> _Model | None:
    """Returns the model that --model names, or None for the tiny model. Raises UserError if --model
    does not name a model."""
    if given is None:
        return None
    folder = Path(given)
    if (folder / "config.json").is_file():
        settings = folder / "tokenizer_config.json"
        chat = (folder / "chat_template.jinja").is_file() or (
            settings.is_file() and '"chat_template"' in settings.read_text(errors="replace")
        )
        return _Model(os.path.abspath(folder), chat=chat)
    if folder.exists():
        raise UserError("no config.json: not a Hugging Face folder", where=f"--model {given}")
    if not _HUB_NAME.fullmatch(given):
        raise UserError(
            "there is no such folder, and a name has the form owner/name", where=f"--model {given}"
        )
    path = f"models/{folder.name}"
    return _Model(path, fetch=f"hf download {given} --local-dir {path}")


def _sums(columns: Columns | None) -> bool:
    """Tells whether all problems are sums of three two-digit numbers. The tiny model was made for
    sums of three two-digit numbers."""
    return columns is None or all(_SUM.fullmatch(each.prompt) for each in columns.records)


def _several(records: Sequence[Record]) -> bool:
    return any(len(each.messages) > 1 for each in records)


def _verifier(columns: Columns | None, tiny: bool) -> str:
    if _sums(columns):
        return "{name: reward.py:verify, number: 0.05}" if tiny else "math"
    answers = [each.answer for each in columns.records] if columns else []
    if any("####" in answer for answer in answers):
        return "stare"  # GSM8K's form, which `math` does not read
    mathematical = sum(bool(re.search(r"[\d\\]", answer)) for answer in answers)
    return "math" if 2 * mathematical >= len(answers) else "exact"


def _write(folder: Path, model: _Model | None, data: str | None, columns: Columns | None) -> None:
    sums, tiny = _sums(columns) and model is None, model is None
    chat = (model is not None and model.chat) or (columns is not None and _several(columns.records))
    # the tiny model knows no letters: without the sign some prompts would have no token
    template = "{prompt}=" if tiny else _BOXED
    section = [f'  template: "{template}"']
    if columns is None:
        section.insert(0, "  eval_path: test.jsonl     # never trained on")
    else:
        section = [
            "  # eval_path: FILE         # held-out problems in these columns, and eval.prompts",
            f"  prompt_key: {_quoted(columns.prompt)}",
            f"  answer_key: {_quoted(columns.answer)}",
            *section,
        ]
    if chat or model is not None:
        section.append(f"  chat_template: {str(chat).lower():<11}# true for a model that chats")
    config = _CONFIG.format(
        name=_quoted(folder.resolve().name),
        steps=60 if sums else 100,
        model=_quoted(model.path if model else "model"),
        prompts=32 if sums else 8,
        prompt_tokens=16 if sums else 64 if tiny else 1024,
        new_tokens=32 if tiny else 2048,
        truncate="" if sums else f"\n  truncate_prompt: {'left' if tiny else 'drop'}",
        path="train.jsonl" if data is None else _quoted(_absolute(data)),
        data="".join(f"{line}\n" for line in section),
        verifier=_verifier(columns, tiny),
        target="0.12" if tiny else "0.3",
        lr="2.0e-4" if tiny else "1.0e-6",
        held_out=TEST if data is None else 0,
    )
    (folder / "config.yaml").write_text(config)
    (folder / "reward.py").write_text(REWARD)
    files = []
    if model is None:
        _copy_tiny(folder / "model", chat)
        files.append("| `model/` | a tiny model that adds three numbers of two digits |")
    if data is None:
        _write_sums(folder)
        files.append("| `train.jsonl`, `test.jsonl` | sums to train on, and to evaluate on |")
    before = f" First fetch the model:\n\n    {model.fetch}" if model and model.fetch else ""
    (folder / "README.md").write_text(
        _README.format(
            name=folder.resolve().name,
            before=before,
            files="".join(f"{line}\n" for line in files),
        )
    )


def _quoted(text: str) -> str:
    """Returns the text as a YAML string that is quoted as in JSON. Non-ASCII characters are not
    escaped, because YAML and JSON interpret the escapes of characters beyond 16 bits
    differently."""
    return json.dumps(text, ensure_ascii=False)


def _absolute(data: str) -> str:
    return data if data.startswith(HUB) else os.path.abspath(data)


def _copy_tiny(target: Path, chat: bool) -> None:
    """Copies the tiny model. If `chat` is true, also writes a chat template that joins the messages
    of a prompt."""
    shutil.copytree(TINY, target)
    if chat:
        (target / "chat_template.jinja").write_text(
            "{% for message in messages %}{{ message.content }}{% endfor %}"
        )


def _write_sums(folder: Path) -> None:
    draw, problems = random.Random(1), dict[str, int]()
    while len(problems) < TRAIN + TEST:
        numbers = [draw.randint(10, 99) for _ in range(3)]
        problems["+".join(map(str, numbers))] = sum(numbers)
    lines = [json.dumps({"prompt": sum_, "answer": of}) + "\n" for sum_, of in problems.items()]
    (folder / "train.jsonl").write_text("".join(lines[:TRAIN]))
    (folder / "test.jsonl").write_text("".join(lines[TRAIN:]))


def _told(data: str, columns: Columns, model: _Model | None) -> list[str]:
    """Returns messages about the rows that the command has read, and about the settings that it has
    chosen."""
    first = columns.records[0]
    turns = f"{len(first.messages)} messages" if first.messages else "text"
    verifier = _verifier(columns, model is None)
    lines = [
        f"looked at {len(columns.records)} rows of {data}: columns {', '.join(columns.names)}",
        f"chose prompt_key {columns.prompt} ({turns}): {_short(first.prompt)}",
        f"chose answer_key {columns.answer}: {_short(first.answer)}",
        f"chose reward.verifier {verifier}; reward.py has one of your own to edit",
    ]
    if model is None and not _sums(columns):
        lines.append(
            "the tiny model reads only digits, +, = and ; so on these problems it learns nothing: a"
            " run only tests the columns and the reward; choose another model with --model"
        )
    return [*lines, "no evaluation: to add one, set data.eval_path and eval.prompts in config.yaml"]


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _FIRST else line[: _FIRST - 3] + "..."
