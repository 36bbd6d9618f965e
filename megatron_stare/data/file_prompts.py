"""Supplies prompts from files. Evaluation reads one file; training reads one file or a weighted
mixture of several files.

A source reads and checks its files once, when it is built. data/records.py defines the records of a
file. The order of the records within a pass over a file depends only on the seed, the file's
position in the mixture and the index of the pass. In a mixture, the number of prompts taken so far
(the cursor) decides which file supplies the next prompt. A resumed run therefore needs only the
cursor to find its next prompt, and the order of the prompts does not depend on the number of
training ranks.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, TypeVar

from megatron_stare.config.rollout_sections import DataConfig, MixtureFile
from megatron_stare.config.schema import Config
from megatron_stare.data.cleaning import Contamination, without_repeats
from megatron_stare.data.encode import PromptEncoder, PromptTooLongError
from megatron_stare.data.records import Messages, Record, read_records
from megatron_stare.data.streams import Split, counter_hash, stream_seed
from megatron_stare.errors import ConfigError, DataError
from megatron_stare.process.interruption import poll
from megatron_stare.records.batch import Prompt

T = TypeVar("T")


@dataclass
class _Part:
    """A file of a mixture.

    `weight`: weight of the file in the mixture, as an integer; see `whole_weights`.
    `records`: records of the file, without the omitted records.
    `taken`: number of records taken from the file so far.
    `pass_`: index of the current pass over the file; `order` is the order of the records in this
        pass.
    """

    file: MixtureFile
    weight: int
    records: list[Record]
    number: int = 0
    taken: int = 0
    pass_: int = -1
    order: list[int] = field(default_factory=list)


class FilePrompts:
    """A PromptSource over files. Every pass over a file has a new random order.

    `dropped` maps each reason for omitting records to the number of omitted records. `remarks`
    contains notes for the user about the records that were not omitted.

    Args:
        config: the run's configuration.
        tokenizer: a transformers tokenizer.
        split: 'train' reads `data.path` or `data.mixture`, 'eval' reads `data.eval_path`.

    Raises:
        ConfigError: the split has no file.
        DataError: a file is missing, empty or invalid, or a prompt is too long. The message names
            the file, the line and the fault.
    """

    def __init__(self, config: Config, tokenizer: Any, split: Split) -> None:
        self._encode = PromptEncoder(config, tokenizer)
        self._seed = stream_seed(config.run.seed, split)
        self._cursor = 0
        self._by_deadline = True
        self.dropped: dict[str, int] = {}
        # Prompts are only checked here and encoded again when taken, because the ids of a large
        # file would take ten times the memory of its text.
        drop = config.rollout.truncate_prompt == "drop"
        self._checksum = 0
        self._parts: list[_Part] = []
        self._cut: set[str] = set()  # places of records that lose their beginning
        files = _files(config.data, split)
        for file, weight in zip(files, whole_weights([file.weight for file in files]), strict=True):
            records, checksum = read_records(
                file.path,
                config.data.prompt_key,
                config.data.answer_key,
                config.data.columns,
            )
            # for a single file the checksum is its own, as before mixtures existed
            self._checksum = (
                zlib.crc32(f"{checksum} {file.weight}".encode(), self._checksum)
                if self._parts
                else checksum
            )
            fitting = [record for record in _polled(records) if self._fits(record, drop)]
            self._drop("longer than rollout.max_prompt_tokens", len(records) - len(fitting))
            if not fitting:
                raise DataError(
                    "every prompt is longer than rollout.max_prompt_tokens", where=file.path
                )
            self._parts.append(_Part(file, weight, fitting, len(self._parts)))
        # In evaluation a repeated problem would count twice. In training, repeats may be intended.
        if split == "eval":
            self._parts[0].records = self._without_repeats(self._parts[0].records)
        else:
            self._clean(config.data)
        self.problems = sum(len(part.records) for part in self._parts)
        self.remarks = [*self._shortened(), *([] if split == "eval" else self._repeats())]

    def _fits(self, record: Record, drop: bool) -> bool:
        """Returns True if the record's prompt is short enough. For a prompt that is too long,
        returns False if `drop` is true, and raises PromptTooLongError if `drop` is false."""
        before = self._encode.cut
        try:
            self._encode(record.messages or record.prompt, record.where)
        except PromptTooLongError:
            if not drop:
                raise
            return False
        if self._encode.cut > before:
            self._cut.add(record.where)
        return True

    def _without_repeats(self, records: list[Record]) -> list[Record]:
        """Returns the records without repeats. Of several records with the same prompt tokens and
        the same answer, only the first is kept."""
        first: dict[tuple[tuple[int, ...], str], Record] = {}
        for record in _polled(records):
            first.setdefault(
                (self._encode(record.messages or record.prompt, record.where), record.answer),
                record,
            )
        self._drop("a repeat of another", len(records) - len(first))
        return list(first.values())

    def _clean(self, data: DataConfig) -> None:
        """Removes training records according to `data.deduplicate` and `data.decontaminate`."""
        if data.deduplicate:
            places = [(part, record) for part in self._parts for record in part.records]
            found = without_repeats((record.prompt, record.answer) for _, record in _polled(places))
            for part in self._parts:
                part.records = [places[at][1] for at in found.kept if places[at][0] is part]
            self._drop("a repeat of another", len(found.repeated))
            self._drop("a repeat with another answer", len(found.contradicted))
        if data.decontaminate:
            evaluated: list[str] = []
            for path in data.decontaminate:
                records, checksum = read_records(path, data.prompt_key, data.answer_key)
                evaluated += [record.prompt for record in records]
                # the checksum covers these files, because the problems left out change the training
                # data
                self._checksum = zlib.crc32(str(checksum).encode(), self._checksum)
            seen = Contamination(_polled(evaluated), data.ngram)
            for part in self._parts:
                clean = [record for record in _polled(part.records) if not seen.has(record.prompt)]
                self._drop("a problem of data.decontaminate", len(part.records) - len(clean))
                part.records = clean
        for part in self._parts:
            if not part.records:
                raise DataError(
                    "no prompt is left: "
                    + "; ".join(f"{n} {why}" for why, n in self.dropped.items()),
                    where=part.file.path,
                )

    def _shortened(self) -> list[str]:
        """Returns one remark if some prompts are too long and are therefore cut off at the
        beginning. Returns [] if no prompt is cut off. If a prompt is rendered with a chat template,
        the prompt begins with the system message and the descriptions of tools, so these texts are
        cut off first."""
        cut = sum(record.where in self._cut for part in self._parts for record in part.records)
        if not cut:
            return []
        return [
            f"prompts longer than rollout.max_prompt_tokens lose their beginning: {cut};"
            " rollout.truncate_prompt=drop leaves them out"
        ]

    def _repeats(self) -> list[str]:
        """Returns one remark if the same prompt occurs more than once, and [] otherwise."""
        answers: dict[str | Messages, list[str]] = {}
        for part in self._parts:
            for record in part.records:
                answers.setdefault(record.messages or record.prompt, []).append(record.answer)
        several = [each for each in answers.values() if len(each) > 1]
        if not several:
            return []
        differ = sum(len(set(each)) > 1 for each in several)
        odd = f", {differ} of them with different answers" if differ else ""
        return [
            f"{len(several)} prompts come more than once{odd}; data.deduplicate=true leaves"
            " repeats out"
        ]

    def trained_on(self, prompts: Iterable[str]) -> int:
        """Returns how many of the texts in `prompts` are prompts of this source."""
        known = {record.prompt for part in self._parts for record in part.records}
        return sum(prompt in known for prompt in prompts)

    def _drop(self, why: str, number: int) -> None:
        if number:
            self.dropped[why] = self.dropped.get(why, 0) + number

    def take(self, n: int) -> list[Prompt]:
        """Returns the next `n` prompts. Starts new passes over the files if needed."""
        return [self._next() for _ in range(n)]

    def state(self) -> dict[str, int]:
        """Returns the checksum of the files and the number of prompts taken since the run began.
        With several files, the state also contains the mixing rule."""
        state = {"cursor": self._cursor, "checksum": self._checksum}
        return state | {"by_deadline": int(self._by_deadline)} if len(self._parts) > 1 else state

    def restore(self, state: dict[str, int]) -> None:
        """Continues after prompt `state["cursor"]`. Raises DataError if a file has changed since
        `state` was saved."""
        if state.get("checksum") != self._checksum:
            raise DataError(
                "the file has changed since the run was started, so the run cannot be resumed"
                " exactly",
                where=", ".join(part.file.path for part in self._parts),
                fix="put the original file back, or start a new run",
            )
        self._cursor = state["cursor"]
        # runs of earlier releases keep their mixing rule
        self._by_deadline = bool(state.get("by_deadline", 0))
        # Whenever the cursor is a multiple of the summed weights, the target of every file is an
        # integer. Under the deadline rule, the count of a file differs from the target by less than
        # 1, so the two are equal. Only the prompts after the last such multiple are replayed.
        whole = sum(part.weight for part in self._parts)
        rounds = self._cursor // whole if self._by_deadline or len(self._parts) == 1 else 0
        for part in self._parts:
            part.taken = rounds * part.weight
        for cursor in range(rounds * whole, self._cursor):
            self._part(cursor).taken += 1

    def _part(self, cursor: int) -> _Part:
        """Returns the file that supplies the prompt at position `cursor`.

        Each file of a mixture has a target, which is a number of prompts. When all files together
        have supplied c prompts, the target of a file is c times the file's weight, divided by the
        sum of all weights.

        The next prompt is the prompt at position `cursor`. With the next prompt, all files together
        will have supplied c = `cursor` + 1 prompts. The function computes each file's target for
        this c. A file is below its target if the file has supplied fewer prompts than this target.
        Of the files below their targets, the file with the earliest deadline supplies the next
        prompt.

        Let n be the number of prompts that a file has supplied. The deadline of the file is (n + 1)
        times the sum of all weights, divided by the file's weight, and rounded up. This number is
        the smallest total of prompts, over all files together, at which the file's target is at
        least n + 1. If several files have the same earliest deadline, the first of these files
        supplies the next prompt. Under the deadline rule, the number of prompts from a file always
        differs from the file's target by less than 1 (Baruah et al., Proportionate Progress,
        Algorithmica 15, 1996).

        A run that an earlier release started keeps the rule of the earlier release when the run is
        resumed. Under the rule of earlier releases, the prompt comes from the file that is furthest
        below its target.
        """
        if not self._by_deadline:
            whole = sum(part.file.weight for part in self._parts)
            return max(
                self._parts, key=lambda part: part.file.weight / whole * (cursor + 1) - part.taken
            )
        total = sum(part.weight for part in self._parts)
        behind = [part for part in self._parts if part.taken * total < part.weight * (cursor + 1)]
        # the deadline, rounded up
        return min(behind, key=lambda part: -(-(part.taken + 1) * total // part.weight))

    def _next(self) -> Prompt:
        part = self._part(self._cursor)
        pass_, index = divmod(part.taken, len(part.records))
        if pass_ != part.pass_:
            part.pass_, part.order = pass_, self._shuffled(part, pass_)
        record = part.records[part.order[index]]
        prompt = Prompt(
            cursor=self._cursor,
            id=record.id if len(self._parts) == 1 else f"{part.file.label}/{record.id}",
            text=record.prompt,
            answer=record.answer,
            token_ids=self._encode(record.messages or record.prompt, record.where),
            columns=record.columns,
        )
        self._cursor += 1
        part.taken += 1
        return prompt

    def _shuffled(self, part: _Part, pass_: int) -> list[int]:
        # the first file is ordered like a single file, as before mixtures existed
        counters = (self._seed, pass_) if part.number == 0 else (self._seed, pass_, part.number)
        return sorted(range(len(part.records)), key=lambda line: counter_hash(*counters, line))


def _polled(items: Iterable[T]) -> Iterator[T]:
    """Yields the items, and polls for signals before each. The work on all items of a large file
    takes minutes."""
    for each in items:
        poll()
        yield each


def whole_weights(weights: Iterable[float]) -> list[int]:
    """Converts decimal weights to integers with exactly the same ratios. With integer weights, a
    file's share of the prompts is computed without rounding."""
    fractions = [Fraction(str(weight)) for weight in weights]
    unit = math.lcm(*(fraction.denominator for fraction in fractions))
    return [int(fraction * unit) for fraction in fractions]


def _files(data: DataConfig, split: Split) -> list[MixtureFile]:
    """Returns the files of a split. Raises ConfigError if the split has no file."""
    if split == "train" and data.mixture:
        return data.mixture
    key = "path" if split == "train" else "eval_path"
    path = data.path if split == "train" else data.eval_path
    if path is None:
        raise ConfigError(
            f"the source {data.source.name!r} needs a file",
            where=f"data.{key}",
            fix=f"data.{key}=prompts.jsonl",
        )
    return [MixtureFile(path=path)]
