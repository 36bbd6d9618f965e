"""Turns published data sets into tasks, JSON lines {"prompt", "answer", "id", "source"}, or into
conversations with calls of a tool, JSON lines {"messages", "tools", "id", "source"}.

    python tools/prepare_data.py dapo_math_17k dapo-math-17k.parquet --out dapo.jsonl \\
        --against aime24.jsonl aime25.jsonl
    python tools/prepare_data.py aime24 --out aime24.jsonl  # downloads it by its published name
    python tools/prepare_data.py retool_sft --out retool_sft.jsonl  # conversations, for `sft`

Prints how many rows were read, what was dropped and why, and what is left. --against drops the
problems that share 13 words in a row with one of the files of tasks given. Formats and what they
were checked against: docs/data.md.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_stare.data.cleaning import NGRAM, Contamination, without_repeats
from megatron_stare.data.records import read_records, read_rows
from megatron_stare.errors import ConfigError, DataError, UserError
from megatron_stare.rewards.final_answer import last_boxed

DAPO_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the"
    " form Answer: $Answer (without quotes) where $Answer is the answer to the problem."
)
DAPO_AFTER = 'Remember to put your answer on its own line after "Answer:".'
CALLED = "code_interpreter"
RETOOL = "hf:JoeYing/ReTool-SFT"
ASKED = "*user question:*"  # before the problem, behind an instruction that names the tags
_PART = re.compile(r"<(code|interpreter)>(.*?)</\1>", re.DOTALL)
_FENCE = re.compile(r"^[ \t]*```[ \t]*\w*[ \t]*$", re.MULTILINE)  # a line that is a fence
_ANSWER = re.compile(r"</?answer>")
LONGEST_ANSWER = 1_000  # characters that the verifier reads as mathematics
Task = dict[str, str]


class Dropped(Exception):
    """A row is no task; the text says why."""


@dataclass(frozen=True)
class DataSet:
    """A published data set.

    hub: its name where there is a network. read: a row to problem and answer. names: columns of an
    identity, the first that a row has.
    """

    hub: str
    read: Callable[[dict[str, Any]], tuple[str, str]]
    names: tuple[str, ...] = ("id", "ID", "unique_id")


def dapo(row: dict[str, Any]) -> tuple[str, str]:
    """verl's shape, with an instruction before and after the problem, whose answer is an
    integer."""
    text = conversation(row).strip()
    if not (text.startswith(DAPO_BEFORE) and text.endswith(DAPO_AFTER)):
        raise Dropped("not the published instruction around the problem")
    answer = ground_truth(row)
    if not re.fullmatch("-?[0-9]+", answer):
        raise Dropped("the answer is no integer")
    return text[len(DAPO_BEFORE) : -len(DAPO_AFTER)], answer


def skywork(row: dict[str, Any]) -> tuple[str, str]:
    """verl's shape, the reference a JSON list of answers, of which problems with one alone are
    taken."""
    try:
        answers = json.loads(ground_truth(row))
    except ValueError as error:
        raise Dropped("the reference is no JSON list") from error
    if not isinstance(answers, list) or len(answers) != 1 or not isinstance(answers[0], str):
        raise Dropped("the reference is no list of one answer")
    return conversation(row), answers[0]


def olympiad(row: dict[str, Any]) -> tuple[str, str]:
    """OlympiadBench's own columns: text-only problems in English with final answers."""
    if row.get("modality", "Text-only") != "Text-only" or any(
        row.get(f"image_{n}") for n in range(1, 6)
    ):
        raise Dropped("needs an image")
    if row.get("language", "English") != "English" or row.get("subject", "Math") not in (
        "Math",
        "Maths",
        "Mathematics",
    ):
        raise Dropped("not mathematics in English")
    final = row.get("final_answer")
    if row.get("question_type", "Open-ended") != "Open-ended" or not final:
        raise Dropped("a proof, without a final answer")
    context = str(row.get("context") or "").strip()
    return "\n".join(filter(None, (context, str(row.get("question") or "")))), written(final)


def plain(row: dict[str, Any]) -> tuple[str, str]:
    """A column for the problem and one for the answer; without one, the last box of the solution.
    Copies of AMC 2023 hold answers as floats, copies of several sets as lists."""
    problem = first(row, "problem", "question", "Problem", "Question")
    answer = first(row, "answer", "Answer")
    if answer is None:
        answer = last_boxed(str(first(row, "solution", "Solution") or ""))
    return str(problem or ""), "" if answer is None else written(answer)


DATA_SETS = {
    "dapo_math_17k": DataSet("hf:BytedTsinghua-SIA/DAPO-Math-17k", dapo),
    "deepscaler": DataSet("hf:agentica-org/DeepScaleR-Preview-Dataset", plain),
    "skywork_or1": DataSet("hf:Skywork/Skywork-OR1-RL-Data:math", skywork),
    "polaris": DataSet("hf:POLARIS-Project/Polaris-Dataset-53K", plain),
    "aime24": DataSet("hf:HuggingFaceH4/aime_2024", plain),
    "aime25": DataSet("hf:math-ai/aime25:test", plain),
    "amc23": DataSet("hf:math-ai/amc23:test", plain),
    "math500": DataSet("hf:HuggingFaceH4/MATH-500:test", plain),
    "minerva": DataSet("hf:math-ai/minervamath:test", plain),
    "olympiadbench": DataSet("hf:Hothan/OlympiadBench:OE_TO_maths_en_COMP:train", olympiad),
}


def conversation_of(row: Any) -> list[dict[str, Any]]:
    """Messages of a row of ReTool's (arXiv 2504.11536): a problem, and a text with code in `<code>`
    and what it printed in `<interpreter>`. They become calls and their answers.

    Raises:
        Dropped: the row has another form.
    """
    from megatron_stare.environments.tools import PRINTED_NOTHING  # takes seconds

    said = row.get("messages") if isinstance(row, dict) else None
    if (
        not isinstance(said, list)
        or not all(isinstance(each, dict) for each in said)
        or [each.get("role") for each in said] != ["user", "assistant"]
    ):
        raise Dropped("not a question and an answer")
    asked, text = (str(each.get("content") or "").replace("\r\n", "\n") for each in said)
    problem = _ANSWER.sub("", asked.rpartition(ASKED)[2]).strip()
    if not problem:
        raise Dropped("no problem")
    found: list[dict[str, Any]] = [{"role": "user", "content": problem}]
    at, open_call = 0, False
    for part in _PART.finditer(text):
        between = text[at : part.start()].strip()
        if (part[1] == "code") == open_call or (open_call and between):
            raise Dropped("code without its output, or output without code")
        if part[1] == "code":
            call = {
                "type": "function",
                "function": {"name": CALLED, "arguments": {"code": code_of(part[2])}},
            }
            found.append({"role": "assistant", "content": between, "tool_calls": [call]})
        else:
            # an empty output as the tool answers it in training
            found.append({"role": "tool", "content": part[2].strip() or PRINTED_NOTHING})
        at, open_call = part.end(), not open_call
    last = _ANSWER.sub("", text[at:]).strip()
    if open_call or not last:
        raise Dropped("no answer after the last output" if not open_call else "code without output")
    if re.search(r"</?(code|interpreter)>", "".join(each["content"] for each in found) + last):
        raise Dropped("a tag that is not closed")
    return [*found, {"role": "assistant", "content": last}]


def code_of(text: str) -> str:
    """A program without the fence and the indentation that all of its lines share.

    Raises:
        Dropped: there is no program, or it is not in one fence.
    """
    if opening := _FENCE.search(text):
        text, closed, _ = text[opening.end() :].rpartition("```")
        if not closed:
            raise Dropped("a code fence that is not closed")
        if _FENCE.search(text):
            raise Dropped("several code fences in one call")
    code = textwrap.dedent(text).strip()
    if not code:
        raise Dropped("a call without code")
    return code


def conversations(
    rows: Iterable[Any], against: Iterable[str] = (), ngram: int = NGRAM
) -> tuple[list[dict[str, Any]], Counter[str]]:
    """The conversations of ReTool's rows, in their order, and how many rows were dropped, by
    reason; see `prepare`."""
    from megatron_stare.environments.tools import code_interpreter  # takes seconds

    seen = None
    if against := list(against):
        seen = Contamination(
            (record.prompt for path in against for record in read_records(path)[0]), ngram
        )
    dropped: Counter[str] = Counter()
    found: list[dict[str, Any]] = []
    for number, row in enumerate(rows, 1):
        try:
            messages = conversation_of(row)
            require_characters(messages)
        except Dropped as reason:
            dropped[str(reason)] += 1
            continue
        if seen is not None and seen.has(messages[0]["content"]):
            dropped[f"shares {ngram} words in a row with --against"] += 1
            continue
        row_id = str(first(row, "id", "index") or number)
        tools = [code_interpreter.schema]  # type: ignore[attr-defined]
        found.append({"messages": messages, "tools": tools, "id": row_id, "source": "retool_sft"})
    return found, dropped


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument(
        "data_set",
        choices=[*DATA_SETS, "retool_sft"],
        metavar="DATA_SET",
        help=", ".join([*DATA_SETS, "retool_sft"]),
    )
    parser.add_argument(
        "files", nargs="*", help=".parquet, .json or .jsonl; default: the published data set"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="file of tasks to write; must not exist"
    )
    parser.add_argument(
        "--against", nargs="*", default=[], help="files of tasks that training must not contain"
    )
    parser.add_argument(
        "--ngram",
        type=int,
        default=NGRAM,
        help="number of words in a row that makes two problems count as the same",
    )
    args = parser.parse_args(argv)
    try:
        if args.ngram < 1:
            raise ConfigError("needs at least one word", where="--ngram")
        if args.out.exists():
            raise DataError(
                "the file exists", where=str(args.out), fix="give another name, or remove it"
            )
        try:
            args.out.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(
                f"the folder cannot be made ({error.strerror})", where=str(args.out.parent)
            ) from error
        talks = args.data_set == "retool_sft"
        hub = RETOOL if talks else DATA_SETS[args.data_set].hub
        rows = Counted(row for file in args.files or [hub] for _, _, row in read_rows(file)[0])
        tasks: list[Any]
        if talks:
            tasks, dropped = conversations(rows, args.against, args.ngram)
        else:
            tasks, dropped = prepare(args.data_set, rows, args.against, args.ngram)
        for why, number in dropped.most_common():
            print(f"dropped {number:>8,}  {why}")
        print(f"{len(tasks):,} {'conversations' if talks else 'tasks'} of {rows.seen:,} rows")
        if not tasks:
            raise DataError(
                "no row is a task",
                where=args.data_set,
                fix="compare the file with the published format: docs/data.md",
            )
        args.out.write_text("".join(json.dumps(task, ensure_ascii=False) + "\n" for task in tasks))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


class Counted:
    """Passes rows on, one at a time, and counts them."""

    def __init__(self, rows: Iterable[Any]) -> None:
        self._rows, self.seen = rows, 0

    def __iter__(self) -> Iterator[Any]:
        for row in self._rows:
            self.seen += 1
            yield row


def prepare(
    name: str, rows: Iterable[Any], against: Iterable[str] = (), ngram: int = NGRAM
) -> tuple[list[Task], Counter[str]]:
    """The tasks of a data set's rows, in their order, and how many rows were dropped, by reason.

    Args:
        name: one of DATA_SETS.
        against: files of tasks whose problems are dropped here.
        ngram: see `Contamination`.
    """
    dropped: Counter[str] = Counter()
    tasks: list[Task] = []
    have: set[tuple[str, str]] = set()
    for number, row in enumerate(rows, 1):
        try:
            this = task(name, row, number)
        except Dropped as reason:
            dropped[str(reason)] += 1
            continue
        # DAPO's set holds each problem about a hundred times
        if (pair := (this["prompt"], this["answer"])) in have:
            dropped["repeats another"] += 1
            continue
        have.add(pair)
        tasks.append(this)
    found = without_repeats((each["prompt"], each["answer"]) for each in tasks)
    dropped["repeats another"] += len(found.repeated)
    dropped["repeats another and has another answer (all of them)"] += len(found.contradicted)
    tasks = [tasks[at] for at in found.kept]
    if against := list(against):
        seen = Contamination(
            (record.prompt for path in against for record in read_records(path)[0]), ngram
        )
        clean = [each for each in tasks if not seen.has(each["prompt"])]
        dropped[f"shares {ngram} words in a row with --against"] += len(tasks) - len(clean)
        tasks = clean
    return tasks, +dropped


def task(name: str, row: Any, number: int) -> Task:
    """One row as a task. Raises Dropped."""
    if not isinstance(row, dict):
        raise Dropped("not an object")
    problem, answer = (text.strip() for text in DATA_SETS[name].read(row))
    if not problem:
        raise Dropped("no problem")
    if not answer:
        raise Dropped("no answer")
    if len(answer) > LONGEST_ANSWER:
        raise Dropped(f"an answer of more than {LONGEST_ANSWER} characters")
    require_characters([problem, answer])
    given = first(row, *DATA_SETS[name].names)
    extra = row.get("extra_info")
    if given is None and isinstance(extra, dict):
        given = extra.get("index")
    return {
        "prompt": problem,
        "answer": answer,
        "id": str(number if given is None else given),
        "source": name,
    }


def conversation(row: dict[str, Any]) -> str:
    """Message of the user in a row of verl's shape. Raises Dropped where the prompt is not one
    message."""
    messages = row.get("prompt")
    if not isinstance(messages, list) or len(messages) != 1 or not isinstance(messages[0], dict):
        raise Dropped("the prompt is not one message")
    return str(messages[0].get("content") or "")


def ground_truth(row: dict[str, Any]) -> str:
    """The reference in verl's shape, '' where there is none."""
    judged = row.get("reward_model")
    return str(judged.get("ground_truth") or "") if isinstance(judged, dict) else ""


def require_characters(texts: list[Any]) -> None:
    """Raises Dropped if a text holds half of a surrogate pair, which JSON can express but UTF-8
    cannot."""
    try:
        json.dumps(texts, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise Dropped("half of a character (half of a surrogate pair)") from error


def written(answer: Any) -> str:
    """A reference as a verifier reads it: 27.0 as 27, and several answers with commas between
    them."""
    if isinstance(answer, list):
        return ", ".join(map(written, answer))
    return str(int(answer)) if isinstance(answer, float) and answer.is_integer() else str(answer)


def first(row: dict[str, Any], *columns: str) -> Any:
    """The first column of these that a row has, None where it has none."""
    return next((row[column] for column in columns if row.get(column) is not None), None)


if __name__ == "__main__":
    sys.exit(main())
