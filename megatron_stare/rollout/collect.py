"""Between the driver's records and the engines': prompts become requests, results become Trajectories.

Prompts come from data, requests go to an Engine; Trajectories go on to the rewards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import groupby, pairwise
from typing import Any

import torch

from megatron_stare.batch import Prompt
from megatron_stare.errors import DataError, WeightVersionError
from megatron_stare.records.trajectory import NOT_SAMPLED, Trajectory
from megatron_stare.rollout.engine import GenerateRequest, GenerateResult


def requests_for(prompts: Sequence[Prompt], samples_per_prompt: int) -> list[GenerateRequest]:
    """`samples_per_prompt` requests a prompt, the prompts in the order given."""
    return [
        GenerateRequest(f"{p.cursor}:{i}", p.token_ids, prompt_cursor=p.cursor, sample_index=i)
        for p in prompts
        for i in range(samples_per_prompt)
    ]


def split_over_engines(requests: Sequence[GenerateRequest], engines: int) -> list[list[GenerateRequest]]:
    """One contiguous shard an engine; their sizes differ by at most one, and are 0 where requests are few."""
    if engines < 1:
        raise ValueError(f"cannot split over {engines} engines")
    bounds = [len(requests) * i // engines for i in range(engines + 1)]
    return [list(requests[a:b]) for a, b in pairwise(bounds)]


def samples_from(
    prompts: Sequence[Prompt], results: Sequence[GenerateResult], tokenizer: Any, stop_token_ids: Collection[int]
) -> list[Trajectory]:
    """The results as Trajectories, in canonical order, text decoded without special tokens and without the stop token.

    Args:
        prompts: those given to `requests_for`.
        results: of any number of engines, in any order.
        tokenizer: has transformers' `batch_decode`.
        stop_token_ids: those given to the engines.

    Raises:
        DataError: a result breaks the engine's contract: unknown request, lists of different lengths, or a finish
            reason its tokens contradict.
    """
    prompt_of = {p.cursor: p for p in prompts}
    samples = []
    for result in results:
        _check(result, stop_token_ids)
        cursor, _, index = result.rid.rpartition(":")
        if not cursor or int(cursor) not in prompt_of:
            raise DataError("an engine answered a request that was not made", where=f"request {result.rid}")
        samples.append(
            Trajectory(
                prompt=prompt_of[int(cursor)],
                sample_index=int(index),
                tokens=torch.tensor(result.output_ids, dtype=torch.int32),
                log_probs=torch.tensor(result.output_log_probs, dtype=torch.float32),
                loss_mask=torch.ones(len(result.output_ids), dtype=torch.bool),
                versions=tuple((version, len([*run])) for version, run in groupby(result.weight_versions)),
                finish_reason=result.finish_reason,
            )
        )
    samples.sort(key=lambda s: (s.prompt.cursor, s.sample_index))
    # not every stop token is special to its tokenizer, so it is taken off here: verifiers read what comes before it
    bodies = [(s.tokens[:-1] if s.finish_reason == "stop" else s.tokens).tolist() for s in samples]
    for sample, text in zip(samples, tokenizer.batch_decode(bodies, skip_special_tokens=True), strict=True):
        sample.text = text
    return samples


def _check(result: GenerateResult, stop_token_ids: Collection[int]) -> None:
    where = f"request {result.rid}"
    ids, log_probs, versions = len(result.output_ids), len(result.output_log_probs), len(result.weight_versions)
    if not ids == log_probs == versions:
        raise DataError(
            f"the engine returned {ids} tokens, {log_probs} log-probs and {versions} weight versions", where=where
        )
    if result.finish_reason == "stop" and (not result.output_ids or result.output_ids[-1] not in stop_token_ids):
        raise DataError(
            f"the response stopped, but its last token {result.output_ids[-1:]} is no stop token "
            f"({sorted(stop_token_ids)})",
            where=where,
            fix="the engine must return the stop token with its log-prob, and stop at no other",
        )


def check_versions(samples: Sequence[Trajectory], expected_version: int) -> None:
    """Raises WeightVersionError unless every token that was sampled was so by the weights of `expected_version`."""
    found: Counter[int] = Counter()
    for version, tokens in (run for sample in samples for run in sample.versions if run[0] != NOT_SAMPLED):
        found[version] += tokens
    if set(found) <= {expected_version}:
        return
    counts = ", ".join(f"version {version}: {count} tokens" for version, count in sorted(found.items()))
    raise WeightVersionError(
        f"the trainer holds version {expected_version}, but the rollout was sampled by {counts}",
        where="rollout",
        fix="sync the weights to every engine before generating, and drop the samples of other versions",
    )
