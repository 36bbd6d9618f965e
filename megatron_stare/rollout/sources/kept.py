"""Serializes unfinished prompt groups for a checkpoint, and restores them bit for bit.

The columns (such as tokens and log-probs) of all responses are concatenated and stored as tensors
of a safetensors file. The lengths of the columns and all other fields are stored as JSON. The JSON
is stored as a tensor of bytes, because texts may exceed the size limit of a safetensors header.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import asdict, fields
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from megatron_stare.errors import DataError
from megatron_stare.records.batch import Prompt
from megatron_stare.records.trajectory import Branch, Trajectory
from megatron_stare.rollout.sources.under_way import Answer, UnderWay

COLUMNS = {"tokens": torch.int32, "log_probs": torch.float32, "loss_mask": torch.bool}
# fields of a trajectory stored as JSON; `numbers` and `pieces` are made for training only
PLAIN = [
    each.name
    for each in fields(Trajectory)
    if each.name not in {*COLUMNS, "prompt", "sample_index", "experts", "numbers", "pieces"}
]


class _Writer:
    """Concatenates columns."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Tensor]] = {
            name: [torch.zeros(0, dtype=t)] for name, t in COLUMNS.items()
        }
        self._experts: dict[str, Tensor] = {}

    def add(self, experts: Tensor | None, **columns: Tensor) -> dict[str, Any]:
        """Appends the columns of a trajectory or of an engine's answer to the concatenated columns.
        Returns the index entry that a reader needs to find the appended columns."""
        for name, column in columns.items():
            self._parts[name].append(column)
        where: dict[str, Any] = {"length": len(columns["tokens"])}
        if experts is not None:
            where["experts"] = f"experts.{len(self._experts)}"
            self._experts[where["experts"]] = experts.clone(
                memory_format=torch.contiguous_format
            )  # safetensors refuses views that share a tensor
        return where

    def tensors(self) -> dict[str, Tensor]:
        return {name: torch.cat(parts) for name, parts in self._parts.items()} | self._experts


class _Reader:
    """Returns columns in the order in which they were written."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self._read = dict.fromkeys(COLUMNS, 0)

    def next(self, where: dict[str, Any], *names: str) -> Iterator[Any]:
        """Reads the columns that the index entry `where` describes. Yields the columns in the order
        of `names`. Then yields the routed experts, or None if the entry has no routed experts."""
        for name in names:
            start, end = self._read[name], self._read[name] + where["length"]
            if end > len(self._tensors[name]):
                raise ValueError(f"{name} end too early")
            self._read[name] = end
            yield self._tensors[name][start:end].clone()
        yield self._tensors[where["experts"]] if "experts" in where else None


def to_bytes(groups: list[list[UnderWay]]) -> bytes:
    """Serializes the groups. Returns b"" if there are no groups."""
    if not groups:
        return b""
    columns = _Writer()
    index = [
        {
            "prompt": asdict(group[0].prompt),
            "responses": [_response(each, columns) for each in group],
        }
        for group in groups
    ]
    text = torch.frombuffer(bytearray(json.dumps(index).encode()), dtype=torch.uint8)
    return safetensors.torch.save({"index": text, **columns.tensors()})


def from_bytes(data: bytes) -> list[list[UnderWay]]:
    """Restores the groups that `to_bytes` serialized.

    Raises:
        DataError: the data cannot be read.
    """
    if not data:
        return []
    try:
        tensors = safetensors.torch.load(data)
        columns, groups = _Reader(tensors), []
        for group in json.loads(tensors.pop("index").numpy().tobytes()):
            prompt = Prompt(**{**group["prompt"], "token_ids": tuple(group["prompt"]["token_ids"])})
            groups.append([_read_response(prompt, each, columns) for each in group["responses"]])
    except (ValueError, LookupError, TypeError, safetensors.SafetensorError) as error:
        raise DataError(
            f"the responses that were under way cannot be read: {error}",
            where="checkpoint",
            fix="remove this checkpoint to use the one before",
        ) from error
    return groups


def without(data: bytes, cursors: Collection[int]) -> bytes:
    """Removes from `data`, an output of `to_bytes`, every group whose prompt cursor is in
    `cursors`. Serializes the remaining groups with `to_bytes` and returns the result. Raises
    DataError if the data cannot be read."""
    if not data or not cursors:
        return data
    return to_bytes([group for group in from_bytes(data) if group[0].prompt.cursor not in cursors])


def _response(response: UnderWay, columns: _Writer) -> dict[str, Any]:
    answers = [
        {
            **columns.add(answer.experts, tokens=answer.tokens, log_probs=answer.log_probs),
            "versions": answer.versions,
            "finish_reason": answer.finish_reason,
            "text": answer.text,
            "stop": answer.stop,
        }
        for answer in response.answers
    ]
    done = response.trajectory
    finished = None
    if done is not None:
        finished = {
            **columns.add(
                done.experts, tokens=done.tokens, log_probs=done.log_probs, loss_mask=done.loss_mask
            ),
            **{name: getattr(done, name) for name in PLAIN},
            "branches": [asdict(branch) for branch in done.branches],
        }
    return {
        "sample_index": response.sample_index,
        "step": response.step,
        "context": response.context,
        "answers": answers,
        "calls": response.calls,
        "trajectory": finished,
    }


def _read_response(prompt: Prompt, tree: dict[str, Any], columns: _Reader) -> UnderWay:
    response = UnderWay(prompt, tree["sample_index"], tree["step"], context=tree["context"])
    # older checkpoints have no `calls`
    response.calls = [(asked, call) for asked, call in tree.get("calls", [])]
    for each in tree["answers"]:
        tokens, log_probs, experts = columns.next(each, "tokens", "log_probs")
        versions = tuple((v, n) for v, n in each["versions"])
        reason, text, stop = each["finish_reason"], each["text"], each.get("stop")
        response.answers.append(Answer(tokens, log_probs, versions, reason, text, experts, stop))
    if (done := tree["trajectory"]) is not None:
        tokens, log_probs, loss_mask, experts = columns.next(done, *COLUMNS)
        # older checkpoints lack this field, because the verifier then read the whole text
        done.setdefault("sampled_text", None)
        done.setdefault("turns", 1)  # nor did they count turns and calls
        done.setdefault("calls", [])
        done.setdefault("branches", [])
        plain = {name: done[name] for name in PLAIN} | {
            "versions": tuple((v, n) for v, n in done["versions"]),
            "calls": tuple(done["calls"]),
            "branches": tuple(
                Branch(each["start"], tuple(each["context"])) for each in done["branches"]
            ),
        }
        response.trajectory = Trajectory(
            prompt=prompt,
            sample_index=response.sample_index,
            tokens=tokens,
            log_probs=log_probs,
            loss_mask=loss_mask,
            experts=experts,
            **plain,
        )
    return response
