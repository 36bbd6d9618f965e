"""Writes the page of sampled responses, one self-contained HTML file. The page lists and filters
responses, and shows a response token by token.

Turns rollouts/, eval.jsonl, metrics.jsonl and config.yaml of a run directory into rollouts.html.
For two run directories, rollouts.html shows the runs side by side. Like the report, rollouts.html
loads no other file. The page and the report use the same token view (`token_view.*`) to show a
response.

The page contains a list of the responses. The texts and the per-token values of the responses are
stored in the page as compressed blocks. A block contains the texts or the per-token values of at
most `BLOCK` responses. Each block is JSON, compressed with gzip and encoded in base64. The browser
decompresses a block only when a reader opens or searches responses of this block. A page with tens
of thousands of responses therefore opens quickly.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from megatron_stare.errors import DataError
from megatron_stare.observability.report.page import TEMPLATES, write_page
from megatron_stare.observability.report.selection_reasons import selection_reasons
from megatron_stare.run_dir.rollout_files import SampledResponse, read_rollouts, rollout_files
from megatron_stare.run_dir.run_files import ROLLOUTS_DIR, RunRecord, read_runs

MOST_RUNS = 2
TRAINING = "training"  # task name of training prompts, beside those of evaluations
BLOCK = 64  # responses
BLOCK_CHARACTERS = 1_000_000  # size at which a block is closed, for texts and numbers alike
TEXT_BYTES = 48_000_000  # per page and run, packed
NUMBER_BYTES = 48_000_000
READ = 4  # bytes of files that are read for a byte of room; files shrink to about half when packed
T = TypeVar("T")
HEAD, TAIL = 160, 70  # characters that the list shows of a prompt and of a response's end


def write_rollouts(run_dirs: Sequence[Path], out: Path) -> Path:
    """Writes the page of a run's sampled responses. For two runs, the page shows responses to the
    same prompt side by side.

    Returns:
        `out`.

    Raises:
        DataError: a directory contains no files of a run, no directory has responses, more than two
            runs are given, a file is damaged, or `out` cannot be written.
    """
    if not 1 <= len(run_dirs) <= MOST_RUNS:
        raise DataError(
            f"{len(run_dirs)} runs are given, but the page shows one or two",
            fix="name one run, or two",
        )
    runs = read_runs(run_dirs)
    stored = [stored_responses(run) for run in runs]
    if not any(map(len, stored)):
        raise DataError(
            "no sampled responses are stored",
            where=", ".join(map(str, run_dirs)),
            fix="run.rollouts_every sets how often a run stores responses, run.rollouts_kept how"
            " many; supervised fine-tuning samples none",
        )
    page = TEMPLATES.get_template("rollouts.html.jinja").render(
        runs=runs,
        heading="Rows trained on" if all(run.supervised for run in runs) else "Sampled responses",
        remarks=[remark for each in stored for remark in _left_out(each, len(stored) > 1)],
        stored=stored,
        index=packed(
            {
                "runs": [
                    {**_index(each), "supervised": run.supervised}
                    for run, each in zip(runs, stored, strict=True)
                ],
                "pairs": pairs(stored),
            }
        ),
    )
    return write_page(page, Path(out), "the page")


def _index(stored: Stored) -> dict[str, object]:
    return {
        "name": stored.name,
        "rows": stored.rows,
        "prompts": list(stored.prompts),
        "tasks": list(stored.tasks),
        "reasons": stored.reasons,
    }


def _left_out(stored: Stored, named: bool) -> list[str]:
    responses, numbers = stored.left_out
    of = f"{stored.name}: " if named else ""
    said = (
        [f"{of}{responses:,} responses are left out, evenly over the run, to keep the page small."]
        if responses
        else []
    )
    more = (
        f"{of}{numbers:,} responses are shown without their per-token values, to keep the page"
        " small."
    )
    return [*said, more] if numbers else said


@dataclass
class Stored:
    """The responses of one run.

    `rows`: table of the responses, as a dict that maps the name of a column to the column's values.
        The columns `prompt` and `task` contain indices into `prompts` and `tasks`. The column `at`
        contains two indices: the index of the response's block in `texts`, and the response's index
        within the block. The column `numbers` contains the index of the response's block in the
        list `Stored.numbers`, which holds the blocks of per-token values. The index is -1 if the
        page has no per-token values for the response.
    `keys`: one tuple (task, prompt, step, sample) per row. The function `pairs` finds the matching
        response of another run by means of `keys`.
    `texts`, `numbers`: blocks of response texts, and blocks of per-token values.
    `reasons`: the reasons why tokens were selected, by step.
    `left_out`: number of responses that do not fit into the page, and number of shown responses
        whose per-token values do not fit.
    """

    name: str
    rows: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    keys: list[tuple[Any, ...]] = field(default_factory=list)
    prompts: dict[str, int] = field(default_factory=dict)
    tasks: dict[str, int] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    numbers: list[str] = field(default_factory=list)
    reasons: dict[int, dict[str, Any]] = field(default_factory=dict)
    left_out: tuple[int, int] = (0, 0)

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True)
class _Block:
    # rows of the list, with whole prompts; token numbers are not kept unpacked
    rows: Sequence[Mapping[str, Any]]
    texts: str
    numbers: str  # "" if no response has token numbers


def stored_responses(
    run: RunRecord, text_bytes: int = TEXT_BYTES, number_bytes: int = NUMBER_BYTES
) -> Stored:
    """Reads a run's training responses from oldest to newest, and then the run's evaluation
    responses from oldest to newest. The responses are grouped into blocks.

    The parameter `text_bytes` limits the total size of the compressed response texts. If the texts
    of all blocks exceed this limit, the function leaves out some of the blocks. The parameter
    `number_bytes` limits the total size of the compressed per-token values. If the per-token values
    of the remaining blocks exceed this limit, the function drops the per-token values of some
    blocks, and keeps the texts of these blocks. The total size of the rollout files that the
    function reads is limited to `READ` times the sum of `text_bytes` and `number_bytes`. If the
    rollout files exceed this limit, the function skips some of the files. The blocks and files that
    remain lie at even intervals over the whole run.

    Raises:
        DataError: a rollout file is damaged.
    """
    files = rollout_files(run.directory / ROLLOUTS_DIR)
    sizes = [file.stat().st_size for file in files]
    read = _evenly(files, sizes, READ * (text_bytes + number_bytes))
    blocks = list(_blocks(run, read))
    kept = _evenly(blocks, [len(block.texts) for block in blocks], text_bytes)
    with_numbers = [block for block in kept if block.numbers]
    numbered = {
        id(block)
        for block in _evenly(with_numbers, [len(b.numbers) for b in with_numbers], number_bytes)
    }
    found = Stored(run.name)
    for block in kept:
        for place, row in enumerate(block.rows):
            _add(found, row, place, id(block) in numbered)
        found.texts.append(block.texts)
        if id(block) in numbered:
            found.numbers.append(block.numbers)
    without = sum(
        row["known"] for block in with_numbers if id(block) not in numbered for row in block.rows
    )
    unread = sum(file.read_bytes().count(b"\n") for file in set(files).difference(read))
    found.left_out = (
        unread + sum(len(block.rows) for block in blocks) - len(found),
        without,
    )
    metrics = {row["step"]: row for row in run.metrics}
    for step in sorted(set(found.rows["step"])):
        why = selection_reasons(run.config.get("algorithm"), metrics.get(step))
        found.reasons[step] = {"lines": why.lines, "sets": why.sets or {}}
    return found


def pairs(runs: Sequence[Stored]) -> list[list[int]]:
    """Returns the rows of the page's list of responses. With one run, each row contains the index
    of one response. With two runs, a row pairs two responses to the same prompt: [index in the
    first run, index in the second run]. An index of -1 means that the run has no matching response.

    Responses with equal task, prompt, step and sample number are paired before all others. The
    remaining responses to a prompt are then paired in order: the first run's first remaining
    response is paired with the second run's first remaining response, and so on. Rows follow the
    order of the first run. Responses that exist only in the second run come last.
    """
    if len(runs) == 1:
        return [[place] for place in range(len(runs[0]))]
    first, second = runs
    partner: dict[int, int] = {}
    for exact in (lambda key: key, lambda key: key[:2]):  # first exactly, then by task and prompt
        waiting: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        taken = set(partner.values())
        for place, key in reversed(list(enumerate(second.keys))):
            if place not in taken:
                waiting[exact(key)].append(place)
        for place, key in enumerate(first.keys):
            if place not in partner and waiting[exact(key)]:
                partner[place] = waiting[exact(key)].pop()
    alone = sorted(set(range(len(second))) - set(partner.values()))
    return [[place, partner.get(place, -1)] for place in range(len(first))] + [
        [-1, place] for place in alone
    ]


def packed(value: Any) -> str:
    """Converts a value to JSON, compresses the JSON with gzip and encodes the result in base64.
    Equal values give equal texts. UTF-8 cannot encode a lone surrogate, so "?" replaces each lone
    surrogate."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(errors="replace"), 6, mtime=0)).decode()


def _blocks(run: RunRecord, files: Sequence[Path]) -> Iterator[_Block]:
    for file in files:
        yield from _cut(read_rollouts(file), TRAINING)
    for record in run.evals:
        task = f"evaluation, {record['task']}" if record.get("task") else "evaluation"
        samples = [s for s in record.get("samples") or [] if s.get("response") is not None]
        shown = [
            SampledResponse(
                int(record["step"]),
                str(s["prompt"]),
                str(s["response"]),
                str(s["answer"]),
                s["reward"],
                (),
                s,
            )
            for s in samples
        ]
        yield from _cut(shown, task)


def _cut(responses: Sequence[SampledResponse], task: str) -> Iterator[_Block]:
    part: list[SampledResponse] = []
    size = 0
    for response in responses:
        part.append(response)
        size += len(response.prompt) + len(response.response) + 25 * len(response.tokens)
        if len(part) == BLOCK or size >= BLOCK_CHARACTERS:
            yield _block(part, task)
            part, size = [], 0
    if part:
        yield _block(part, task)


def _block(responses: Sequence[SampledResponse], task: str) -> _Block:
    texts = [
        {
            "prompt": response.prompt,
            "answer": response.answer,
            "response": response.response,
            "status": response.record.get("reward_status"),
            "finish": response.record.get("finish_reason"),
            "calls": response.record.get("calls", []),
        }
        for response in responses
    ]
    numbers = [response.record["by_token"] if response.tokens else None for response in responses]
    rows = [_row(response, task) for response in responses]
    return _Block(rows, packed(texts), packed(numbers) if any(numbers) else "")


def _row(response: SampledResponse, task: str) -> dict[str, Any]:
    record = response.record
    selected = record["by_token"]["selected"] if response.tokens else None
    return {
        "step": response.step,
        "cursor": record.get("cursor"),
        "sample": record.get("sample"),
        "reward": response.reward,
        "tokens": record.get("tokens"),
        "plus": None if selected is None else selected.count("+"),
        "minus": None if selected is None else selected.count("-"),
        "selected": selected is not None and not set("+-pm").isdisjoint(selected),
        "prompt": response.prompt,
        "task": task,
        "tail": _tail(response.response),
        "known": bool(response.tokens),
    }


def _add(found: Stored, row: Mapping[str, Any], place: int, numbered: bool) -> None:
    columns, known = found.rows, numbered and row["known"]
    for name in (
        "step",
        "cursor",
        "sample",
        "reward",
        "tokens",
        "plus",
        "minus",
        "selected",
        "tail",
    ):
        columns[name].append(row[name])
    columns["prompt"].append(found.prompts.setdefault(_head(row["prompt"]), len(found.prompts)))
    columns["task"].append(found.tasks.setdefault(row["task"], len(found.tasks)))
    columns["at"].append([len(found.texts), place])
    columns["numbers"].append(len(found.numbers) if known else -1)
    found.keys.append((row["task"], row["prompt"], row["step"], row["sample"]))


def _evenly(blocks: Sequence[T], sizes: Sequence[int], room: int) -> list[T]:
    """Thins out `blocks`. The elements of `blocks` are blocks of responses or rollout files.
    Returns the whole list if its elements have a total size of at most `room`. Otherwise, returns
    some of the elements, spread evenly over `blocks`, and always the first one. The total size of
    the returned elements is at most `room`, unless the first element alone is larger than
    `room`."""
    total = sum(sizes)
    if total <= room:
        return list(blocks)
    kept: list[T] = []
    used = seen = 0
    for block, size in zip(blocks, sizes, strict=True):
        seen += size
        if not kept or used + size <= room * seen / total:  # within its share of the room
            kept.append(block)
            used += size
    return kept


def _head(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= HEAD else f"{line[: HEAD - 1]}…"


def _tail(text: str) -> str:
    line = " ".join(text[-4 * TAIL :].split())
    return line if len(line) <= TAIL else f"…{line[1 - TAIL :]}"
