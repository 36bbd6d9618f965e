"""Uses the dumps of a run to explain how the run's entropy changed. The command is
`python -m stare_select.explain DUMP [DUMP ...]`.

A dump is a file or a folder that was written by slime (`--save-debug-train-data`), verl
(`trainer.rollout_data_dir`) or TRL (the folder `completions` of `log_completions`). If a statistic
needs fields that the dumps lack, the command prints the names of these fields. The exit status is 2
for unusable input.
"""

from __future__ import annotations

import argparse
import codecs
import json
import math
import pickle
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from megatron_stare.errors import DataError, UserError

PADDING = re.compile(r"pad[0-9a-f]{32}_\d+_0")  # verl's rows without a response
NGRAM = 4
SHARE = 0.1  # of a side's tokens that count as rare; STARE's default
PACKINGS = 8  # shuffles into micro-batches
T = TypeVar("T")
Absent = tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """One response of a dump. If the dump lacks a field, the field is None. Each array has one
    value for each response token. The array `advantages` can instead have one value for the whole
    response. Log-probs and entropies are in nats. `mask` is True for tokens that the policy
    sampled."""

    step: int
    group: str | None = None
    prompt: str | None = None
    text: str | None = None
    gold: str | None = None
    reward: float | None = None
    tokens: np.ndarray | None = None
    mask: np.ndarray | None = None
    log_probs: np.ndarray | None = None
    rollout_log_probs: np.ndarray | None = None
    entropy: np.ndarray | None = None
    advantages: np.ndarray | None = None  # [1] if a response has one advantage

    def has(self, names: Sequence[str]) -> bool:
        """Returns True if this response has all fields in `names`. Statistics use the values of an
        array field only at sampled tokens. If any field in `names` is an array, `has` therefore
        returns False for a response without sampled tokens."""
        if any(getattr(self, name) is None for name in names):
            return False
        by_token = any(isinstance(getattr(self, name), np.ndarray) for name in names)
        return not by_token or self.mask is None or bool(self.mask.any())

    def kept(self, name: str) -> np.ndarray:
        """Returns the values of a field at the sampled tokens."""
        values = np.asarray(getattr(self, name), dtype=np.float64)
        if self.mask is None:
            return values
        return np.broadcast_to(values, self.mask.shape)[self.mask]


@dataclass(frozen=True)
class Figure:
    """A statistic of a run, with one value per step. `absent` contains the names of the fields that
    the statistic needs but the dumps lack."""

    name: str
    by_step: dict[int, float]
    absent: Absent = ()


def slime(file: Path) -> Iterator[Row]:
    """Reads a file of slime's train dump."""
    torch.serialization.add_safe_globals(NUMPY)
    dump = torch.load(file, map_location="cpu", weights_only=True)
    raw = dump.get("raw_reward")  # before it is centred on its group's mean
    for sample in dump["samples"]:
        length, tokens = int(sample["response_lengths"]), np.asarray(sample["tokens"])
        mask = _array(sample.get("loss_masks"))
        yield Row(
            step=int(dump["rollout_id"]),
            group=str(tokens[: len(tokens) - length].tolist()),
            reward=_number(
                sample.get("rewards") if raw is None else raw[sample["rollout_position"]]
            ),
            tokens=tokens[len(tokens) - length :],
            mask=None if mask is None else mask.astype(bool),
            log_probs=_array(sample.get("log_probs")),
            rollout_log_probs=_array(sample.get("rollout_log_probs")),
            entropy=_array(sample.get("entropy")),
            advantages=_array(sample.get("advantages")),
        )


def verl(file: Path) -> Iterator[Row]:
    """Reads a file of verl's rollout_data_dir."""
    for line in file.read_text(encoding="utf-8").split("\n"):  # texts may hold other line ends
        if not line:
            continue
        entry = json.loads(line)
        if PADDING.fullmatch(str(entry.get("uid"))):
            continue
        yield Row(
            step=int(entry["step"]),
            group=str(entry["uid"]).rsplit("_", 2)[0] if "uid" in entry else entry["input"],
            prompt=entry["input"],
            text=entry["output"],
            gold=None if entry.get("gts") is None else str(entry["gts"]),
            reward=_number(entry.get("score")),
        )


def trl(file: Path) -> Iterator[Row]:
    """Reads a file of TRL's completions."""
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(
            str(error), where=str(file), fix="pip install pyarrow, which reads Parquet"
        ) from error
    known = ("step", "prompt", "completion", "advantage")
    for entry in parquet.read_table(file).to_pylist():
        # other columns with numbers are results of reward functions; one that gives none is NaN
        rewards = [v for n, v in entry.items() if n not in known and isinstance(v, float)]
        rewards = [value for value in rewards if not math.isnan(value)]
        prompt = _text(entry["prompt"])
        yield Row(
            step=int(entry["step"]),
            group=prompt,
            prompt=prompt,
            text=_text(entry["completion"]),
            reward=sum(rewards) if rewards else None,
            advantages=np.array([entry["advantage"]]),
        )


# what makes a number of numpy's, which a reward function may return
NUMPY: list[Any] = [
    np.float64(0).__reduce__()[0],
    codecs.encode,
    np.dtype,
    *(type(np.dtype(each)) for each in (np.float64, np.float32, np.int64, np.bool_)),
]
# what a file that is cut off or of another kind makes its reader raise
UNREADABLE = (
    *(OSError, EOFError, RuntimeError, KeyError, ValueError, TypeError),
    pickle.UnpicklingError,
)
READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".pt": slime,
    ".jsonl": verl,
    ".parquet": trl,
}


def read(dumps: Sequence[Path]) -> list[Row]:
    """Reads all dumps and returns their responses in the order of the steps.

    Raises:
        DataError: a path is no dump, or no file has a response. A file that cannot be read is named
            on stderr and left out.
    """
    rows: list[Row] = []
    for dump in dumps:
        files = [dump] if dump.is_file() else [f for f in dump.rglob("*") if f.suffix in READERS]
        if not files or any(file.suffix not in READERS for file in files):
            raise DataError(
                "is no dump and contains none",
                where=str(dump),
                fix="name files .pt (slime), .jsonl (verl) or .parquet (TRL), or their folder",
            )
        for file in sorted(files):
            try:
                rows.extend(READERS[file.suffix](file))
            except UNREADABLE as error:
                told = str(DataError(f"cannot be read: {type(error).__name__}", where=str(file)))
                print(f"left out: {told}", file=sys.stderr)  # a killed run cuts its last file off
    if not rows:
        raise DataError(
            "no file of the dumps has a response that can be read",
            where=", ".join(map(str, dumps)),
        )
    return sorted(rows, key=lambda row: row.step)


def figures(rows: Sequence[Row], micro_batch: int = 4) -> list[Figure]:
    """Returns all statistics of a run.

    Args:
        rows: the run's responses.
        micro_batch: responses in a micro-batch, for the stability of the selection.
    """
    by_token = ("log_probs", "advantages")
    wanted: list[tuple[str, tuple[str, ...], Callable[[list[Row]], float]]] = [
        ("entropy, nats", ("entropy",), lambda some: _mean(some, "entropy")),
        ("surprisal of sampled tokens, nats", ("log_probs",), lambda s: -_mean(s, "log_probs")),
        (
            "rare tokens kept when selected by micro-batch, share",
            by_token,
            lambda some: stability(some, micro_batch),
        ),
        (
            "log-prob of engine and trainer, mean difference, nats",
            ("log_probs", "rollout_log_probs"),
            lambda some: float(np.abs(_differences(some)).mean()),
        ),
        (
            "same, largest of 1,000 tokens, nats",
            ("log_probs", "rollout_log_probs"),
            lambda some: float(np.quantile(np.abs(_differences(some)), 0.999)),
        ),
        ("repeated 4-grams, share", (), repetition),
        ("response length, tokens or words", (), lambda s: float(np.mean(_lengths(s)))),
        ("different responses to a prompt, share", ("group",), _distinct),
        ("reward", ("reward",), lambda some: float(np.mean([row.reward for row in some]))),
        ("reward and length, correlation", ("reward",), _with_length),
        ("rewarded responses without a token, share", ("reward",), _empty),
        ("prompts that contain their answer, share", ("prompt", "gold"), _leaked),
    ]
    steps: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        steps[row.step].append(row)

    def by_step(
        needs: tuple[str, ...], of: Callable[[list[Row]], T]
    ) -> tuple[Absent, dict[int, T]]:
        absent = tuple(need for need in needs if all(getattr(row, need) is None for row in rows))
        having = {step: [row for row in some if row.has(needs)] for step, some in steps.items()}
        return absent, {} if absent else {step: of(some) for step, some in having.items() if some}

    def figure(name: str, absent: Absent, values: dict[int, float]) -> Figure:
        return Figure(name, {s: v for s, v in values.items() if np.isfinite(v)}, absent)

    found = [figure(name, *by_step(needs, of)) for name, needs, of in wanted]
    absent, shares = by_step(by_token, quadrants)
    sides = [
        figure(f"advantage in {side}, share", absent, {s: each[side] for s, each in shares.items()})
        for side in ("L+", "L-", "U+", "U-")
    ]
    return [*found[:2], *sides, *found[2:]]


def stability(rows: Sequence[Row], micro_batch: int) -> float:
    """Selects rare tokens twice: first in the whole batch, and then separately in each micro-batch.
    Returns the share of the first selection's tokens that the second selection also contains.
    STARE's public code selects rare tokens separately in each micro-batch, not in the whole batch.
    The returned share is a mean over `PACKINGS` random divisions of the rows into micro-batches.

    Tokens of positive advantage and tokens of negative advantage are ranked separately by
    surprisal. In each of the two rankings, a token counts as rare if the token belongs to the
    fraction SHARE with the highest surprisal (arXiv 2606.19236, section 3.2).
    """
    whole = _rare(rows)
    number = sum(int(each.sum()) for each in whole)
    if not number:
        return float("nan")
    source, shares = np.random.default_rng(0), []
    for _ in range(PACKINGS):
        order, found = source.permutation(len(rows)), 0
        for at in range(0, len(rows), micro_batch):
            part = order[at : at + micro_batch]
            packed = _rare([rows[row] for row in part])
            found += sum(int((whole[r] & own).sum()) for r, own in zip(part, packed, strict=True))
        shares.append(found / number)
    return float(np.mean(shares))


def repetition(rows: Sequence[Row]) -> float:
    """Returns the share of 4-grams that occurred earlier in the same response. A 4-gram consists of
    token ids, or of words if the dump has no token ids."""
    seen = again = 0
    for row in rows:
        words = _words(row)
        grams = [tuple(words[at : at + NGRAM]) for at in range(len(words) - NGRAM + 1)]
        seen += len(grams)
        again += len(grams) - len(set(grams))
    return again / seen if seen else float("nan")


def _rare(rows: Sequence[Row]) -> list[np.ndarray]:
    """Returns one mask for each row, over the row's sampled tokens. The mask is True for rare
    tokens. Tokens of positive advantage and tokens of negative advantage are ranked separately by
    surprisal. In each of the two rankings, a token counts as rare if the token belongs to the
    fraction SHARE with the highest surprisal."""
    lengths = [len(row.kept("log_probs")) for row in rows]
    surprisals = np.concatenate([-row.kept("log_probs") for row in rows])
    signs = np.sign(np.concatenate([_advantages(row) for row in rows]))
    rare = np.zeros(len(signs), bool)
    for sign in (1, -1):
        side = np.flatnonzero(signs == sign)
        order = np.argsort(-surprisals[side], kind="stable")
        rare[side[order[: int(np.ceil(len(side) * SHARE))]]] = True
    return np.split(rare, np.cumsum(lengths)[:-1])


def quadrants(rows: Sequence[Row]) -> dict[str, float]:
    """Returns each quadrant's share of the sum of all absolute advantages. The quadrants L+ and L-
    contain the rare tokens, and U+ and U- contain the other tokens."""
    rare = np.concatenate(_rare(rows))
    advantages = np.concatenate([_advantages(row) for row in rows])
    total = np.abs(advantages).sum() or np.nan
    return {
        f"{kind}{sign}": float(np.abs(advantages[kept & (np.sign(advantages) == of)]).sum() / total)
        for kind, kept in (("L", rare), ("U", ~rare))
        for sign, of in (("+", 1), ("-", -1))
    }


def _advantages(row: Row) -> np.ndarray:
    return np.broadcast_to(row.kept("advantages"), row.kept("log_probs").shape)


def _mean(rows: Sequence[Row], name: str) -> float:
    return float(np.concatenate([row.kept(name) for row in rows]).mean())


def _differences(rows: Sequence[Row]) -> np.ndarray:
    return np.concatenate([row.kept("log_probs") - row.kept("rollout_log_probs") for row in rows])


def _words(row: Row) -> list:
    if row.tokens is not None:
        kept = row.tokens if row.mask is None else row.tokens[row.mask]
        return kept.tolist()
    return (row.text or "").split()


def _lengths(rows: Sequence[Row]) -> list[int]:
    return [len(_words(row)) for row in rows]


def _distinct(rows: Sequence[Row]) -> float:
    groups: dict[str | None, list[tuple]] = defaultdict(list)
    for row in rows:
        groups[row.group].append(tuple(_words(row)))
    return float(np.mean([len(set(texts)) / len(texts) for texts in groups.values()]))


def _with_length(rows: Sequence[Row]) -> float:
    lengths, rewards = _lengths(rows), [row.reward for row in rows]
    if len(set(lengths)) < 2 or len(set(rewards)) < 2:
        return float("nan")
    return float(np.corrcoef(lengths, np.array(rewards, float))[0, 1])


def _empty(rows: Sequence[Row]) -> float:
    most = max(row.reward or 0.0 for row in rows)
    rewarded = [row for row in rows if row.reward == most and most > 0]
    if not rewarded:
        return float("nan")
    return sum(not _words(row) for row in rewarded) / len(rewarded)


def _leaked(rows: Sequence[Row]) -> float:
    # an answer of one character stands in most prompts by chance
    asked = {(row.prompt, row.gold) for row in rows if len(row.gold or "") > 1}
    if not asked:
        return float("nan")
    return sum(gold in prompt for prompt, gold in asked) / len(asked)  # type: ignore[operator]


def verdict(found: Sequence[Figure]) -> str:
    """Returns one sentence that describes how the entropy changed. If the dumps have no entropies,
    the returned sentence describes how the surprisal changed."""
    curve = next((f for f in found[:2] if f.by_step), None)
    if curve is None:
        return "The dumps have neither entropies nor log-probs, so they show no collapse curve."
    steps = sorted(curve.by_step)
    first, last = curve.by_step[steps[0]], curve.by_step[steps[-1]]
    name = curve.name.partition(",")[0]
    halved = next((s for s in steps if curve.by_step[s] < first / 2), None)
    end = f"from {first:.3f} nats at step {steps[0]} to {last:.3f} at step {steps[-1]}"
    if halved is None:
        return f"The {name} went {end}, and never below half of its start."
    return f"The {name} went {end}; it first fell below half of its start at step {halved}."


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="explain", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dumps", nargs="+", type=Path, metavar="DUMP")
    parser.add_argument("--micro-batch", type=int, default=4, help="responses in a micro-batch")
    parser.add_argument("--json", action="store_true", help="print every step's figures as JSON")
    given = parser.parse_args(arguments)
    try:
        rows = read(given.dumps)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    found = figures(rows, given.micro_batch)
    if given.json:
        print(json.dumps({f.name: {"by_step": f.by_step, "absent": f.absent} for f in found}))
        return 0
    print(verdict(found))
    print(f"{len(rows)} responses of {len({row.step for row in rows})} steps\n")
    print(f"{'':54}{'first':>10}{'last':>10}{'lowest':>10}{'highest':>10}")
    for figure in found:
        if figure.absent:
            print(f"{figure.name:54}absent: {', '.join(figure.absent)}")
        elif not figure.by_step:
            print(f"{figure.name:54}nothing varies")
        else:
            steps = sorted(figure.by_step)
            values = [figure.by_step[steps[0]], figure.by_step[steps[-1]]]
            values += [min(figure.by_step.values()), max(figure.by_step.values())]
            print(f"{figure.name:54}" + "".join(f"{value:10.4f}" for value in values))
    return 0


def _array(value: Any) -> np.ndarray | None:
    return None if value is None else np.asarray(value)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _text(messages: Any) -> str:
    """Returns the text of a prompt or completion. For chat messages, the text is the contents of
    all messages."""
    if isinstance(messages, str):
        return messages
    return "\n".join(str(message.get("content", "")) for message in messages)


if __name__ == "__main__":
    sys.exit(main())
