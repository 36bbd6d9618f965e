"""Converts trajectories to the records of rollout files, such as `rollouts/step_000010.jsonl`.
Reads rollout files as `SampledResponse` objects.

docs/runs.md describes the format. The functions that read rollout files need neither torch nor a
tokenizer. The report can therefore be made where torch is not installed.

Shape legend: n is the number of tokens of a response.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_stare.errors import DataError
from megatron_stare.run_dir.json_lines import Record, read_jsonl

if TYPE_CHECKING:  # the report uses this module without torch
    from megatron_stare.records.trajectory import Trajectory

DIGITS = 5  # significant digits of per-token numbers
_SELECTED = {1: "+", -1: "-", 2: "p", -2: "m", 0: "."}
_RARE = {1: "r", 0: "c", -1: "?"}
NOT_TRAINED = " "  # in both columns: a token that an environment wrote


@dataclass(frozen=True)
class Token:
    """One token of a response, with the token's surprisal, entropy, advantage and weight in
    training. Unknown numbers are NaN.

    `text`: text that the token adds to the response. The text of a special token, such as the stop
        token, is the special token's own string.
    `surprisal`, `entropy`: values in nats, under the policy of the log-prob pass, at the run's
        temperature.
    `advantage`: advantage of the token's response.
    `weight`: factor by which the loss multiplies the advantage. The weight includes gates, masks,
        importance corrections and KL terms, but no entropy bonus. The weight is NaN if the
        advantage is 0.
    `selected`: code of the token set to which the token belongs. "+" stands for L+, the
        high-surprisal tokens of positive advantage. "-" stands for L-, the high-surprisal tokens of
        negative advantage. "p" stands for U+, the low-surprisal tokens of positive advantage. "m"
        stands for U-, the low-surprisal tokens of negative advantage. "." stands for no set. The
        run's training method decides to which set a token belongs. A space marks a token without
        loss, such as a token that an environment wrote.
    `rare`: "r" if the token's surprisal exceeds the critical surprisal of its position, "c" if not.
        "?" means that the critical surprisal is unknown, because the run made no entropy forecast.
        A space marks a token without loss, such as a token that an environment wrote.
    """

    text: str
    surprisal: float
    entropy: float
    advantage: float
    weight: float
    selected: str
    rare: str


@dataclass(frozen=True)
class SampledResponse:
    """A response that was read from a rollout file.

    `tokens`: empty if the file has no per-token numbers for the response.
    `record`: the response's whole record from the file.
    """

    step: int
    prompt: str
    response: str
    answer: str
    reward: float | None
    tokens: Sequence[Token]
    record: Mapping[str, Any]


def rollout_file(folder: Path, step: int) -> Path:
    """Returns the path of a step's rollout file in a run's folder `rollouts`."""
    return folder / f"step_{step:06d}.jsonl"


def rollout_files(folder: Path) -> list[Path]:
    """Returns the rollout files in a run's folder `rollouts`, oldest first."""
    return sorted(
        folder.glob("step_*.jsonl"), key=lambda path: int(path.stem.removeprefix("step_"))
    )


def read_rollouts(path: Path) -> list[SampledResponse]:
    """Reads the responses of a rollout file with their per-token numbers. The responses are in
    canonical order (prompt, then sample). Returns [] if the file does not exist.

    Raises:
        DataError: a line is damaged, or its columns differ in length.
    """
    return [
        _response(record, f"{path}:{number}")
        for number, record in enumerate(read_jsonl(Path(path)), start=1)
    ]


def rollout_rows(step: int, trajectories: Sequence[Trajectory], limit: int) -> list[dict[str, Any]]:
    """Returns the records of at most `limit` trajectories of a step. If the step has more than
    `limit` trajectories, the function picks `limit` trajectories at nearly equal distances in the
    canonical order. The records are in canonical order."""
    from megatron_stare.records.token_numbers import spread  # needs torch, readers do not

    ordered = sorted(trajectories, key=lambda t: (t.prompt.cursor, t.sample_index))
    return [_row(step, ordered[i]) for i in spread(len(ordered), limit)]


def _row(step: int, trajectory: Trajectory) -> dict[str, Any]:
    prompt = trajectory.prompt
    row = {
        "step": step,
        "cursor": prompt.cursor,
        "id": prompt.id,
        "sample": trajectory.sample_index,
        "prompt": prompt.text,
        "response": trajectory.text,
        "answer": prompt.answer,
        "reward": trajectory.reward,
        "reward_status": trajectory.reward_status,
        "finish_reason": trajectory.finish_reason,
        "tokens": len(trajectory),
    }
    if trajectory.calls:
        row |= {"turns": trajectory.turns, "calls": list(trajectory.calls)}
    numbers, trained = trajectory.numbers, trajectory.loss_mask.tolist()
    if numbers is None:
        return row
    known = [a for a, here in zip(numbers.advantage.tolist(), trained, strict=True) if here]
    return row | {
        "by_token": {
            "text": list(trajectory.pieces),
            "surprisal": [_rounded(max(-x, 0.0)) for x in numbers.log_prob.tolist()],
            "entropy": [_rounded(x) for x in numbers.entropy.tolist()],
            "advantage": _rounded(known[0]) if known else None,
            "weight": _runs(_rounded(x) for x in numbers.weight.tolist()),
            "selected": _letters(numbers.selected.tolist(), _SELECTED, trained),
            "rare": _letters(numbers.rare.tolist(), _RARE, trained),
        }
    }


def _response(record: Record, where: str) -> SampledResponse:
    try:
        return SampledResponse(
            step=int(record["step"]),
            prompt=str(record["prompt"]),
            response=str(record["response"]),
            answer=str(record["answer"]),
            reward=record["reward"],
            tokens=tuple(_tokens(record["by_token"])) if "by_token" in record else (),
            record=record,
        )
    except (LookupError, TypeError, ValueError) as error:
        raise DataError(
            f"not a sampled response: {error}", where=where, fix="delete the line"
        ) from error


def _tokens(columns: Mapping[str, Any]) -> Iterator[Token]:
    weights = [value for value, count in columns["weight"] for _ in range(count)]
    advantage = _number(columns["advantage"])
    for text, surprisal, entropy, weight, selected, rare in zip(
        columns["text"],
        columns["surprisal"],
        columns["entropy"],
        weights,
        columns["selected"],
        columns["rare"],
        strict=True,
    ):
        trained = selected != NOT_TRAINED
        yield Token(
            text=str(text),
            surprisal=_number(surprisal),
            entropy=_number(entropy),
            advantage=advantage if trained else math.nan,
            weight=_number(weight),
            selected=selected,
            rare=rare,
        )


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _rounded(value: float) -> float | None:
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


def _runs(values: Iterable[float | None]) -> list[list[float | int | None]]:
    """Encodes a column as pairs [value, count]. Each pair stands for `count` consecutive equal
    values of the column."""
    return [[value, sum(1 for _ in same)] for value, same in groupby(values)]


def _letters(values: Sequence[int], names: Mapping[int, str], trained: Sequence[bool]) -> str:
    return "".join(
        names[value] if here else NOT_TRAINED for value, here in zip(values, trained, strict=True)
    )
