"""The batches of steps that were left out or ended a run: written to the run's folder guards/, and read back.

A folder a step, `guards/step_000012`: batch.safetensors is that of --dump-step with the trainer's log-probs beside the
engine's, event.json says what happened, which prompts these were, and which rank and parameter was the first not to be
finite.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from megatron_stare.errors import DataError
from megatron_stare.megatron.step.dump import write_batch
from megatron_stare.megatron.step.not_finite import NotFinite
from megatron_stare.records.rollout_batch import RolloutBatch

FOLDER = "guards"
EVENT = "event.json"


@dataclass(frozen=True)
class GuardedResponse:
    """One response of such a batch. Columns are [n], one number a response token.

    log_probs: of the trainer before the step's updates, nats; NaN where a token carries no loss, and where it was.
    rollout_log_probs: of the engine.
    """

    cursor: int
    prompt_id: str
    sample: int
    prompt_tokens: list[int]
    tokens: Tensor
    text: str
    reward: float
    advantage: float
    log_probs: Tensor
    rollout_log_probs: Tensor


@dataclass(frozen=True)
class GuardedBatch:
    """A step that was left out, or ended the run. ranks: what was not finite on each, of those where anything was."""

    step: int
    why: str
    first: str
    ranks: list[dict[str, Any]]
    responses: list[GuardedResponse]


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}"


def write_guarded(
    folder: Path, batch: RolloutBatch, log_probs: Tensor, why: str, ranks: Sequence[NotFinite] = ()
) -> None:
    """Writes a step's batch, judged, into its folder in `folder`, over what is there.

    Args:
        log_probs: [N] the trainer's, before the step's updates.
        ranks: what each found not to be finite.
    """
    place = step_folder(folder, batch.step)
    write_batch(place, batch, {"log_probs": log_probs})
    found = [rank for rank in ranks if rank.own_gradient or rank.weights or rank.gradient or rank.samples]
    event = {
        "step": batch.step,
        "why": why,
        "first": origin(ranks),
        "ranks": [asdict(rank) for rank in found],
        "responses": [
            {"cursor": t.prompt.cursor, "prompt_id": t.prompt.id, "sample": t.sample_index, "text": t.text}
            for t in batch.trajectories
        ],
    }
    (place / EVENT).write_text(json.dumps(event, indent=2))


def origin(ranks: Sequence[NotFinite]) -> str:
    """Which rank and parameter, or which samples, were the first not to be finite; "" where all are.

    What comes first makes all after it not finite too: weights, then log-probs, advantages and the loss of samples,
    then a rank's own gradient, then the gradient that is left once it is reduced.
    """
    if bad := [rank for rank in ranks if rank.weights]:
        first = min(bad, key=lambda rank: (rank.stage, rank.rank))
        return f"the weight {first.weights} on {_place(first)}"
    samples = sorted({sample for rank in ranks for sample in rank.samples})
    if samples:
        first = next(rank for rank in ranks if samples[0] in rank.samples)
        shown = ", ".join(map(str, samples[:8])) + (", ..." if len(samples) > 8 else "")
        return f"log-prob, advantage or loss of sample {shown}, on {_place(first)}"
    if bad := [rank for rank in ranks if rank.own_gradient] or [rank for rank in ranks if rank.gradient]:
        first = max(bad, key=lambda rank: (rank.stage, -rank.rank))  # backward begins at the last stage
        return f"the gradient of {first.gradient} on {_place(first)}"
    return ""


def _place(rank: NotFinite) -> str:
    return f"rank {rank.rank} (data {rank.data_rank}, tensor {rank.tensor_rank}, stage {rank.stage})"


def read_guarded(place: Path) -> GuardedBatch:
    """What `write_guarded` left in the folder of a step.

    Raises:
        DataError: it is not whole.
    """
    try:
        event: Mapping[str, Any] = json.loads((place / EVENT).read_text())
        columns = load_file(place / "batch.safetensors")
        prompts, lengths = columns["prompt_lengths"].tolist(), columns["response_lengths"].tolist()
        both = columns["tokens"].split([n for pair in zip(prompts, lengths, strict=True) for n in pair])
        by_token = {name: columns[name].split(lengths) for name in ("log_probs", "rollout_log_probs")}
        responses = [
            GuardedResponse(
                **{name: each[name] for name in ("cursor", "prompt_id", "sample", "text")},
                prompt_tokens=both[2 * i].tolist(),
                tokens=both[2 * i + 1],
                reward=float(columns["rewards"][i]),
                advantage=float(columns["advantages"][i]),
                **{name: parts[i] for name, parts in by_token.items()},
            )
            for i, each in enumerate(event["responses"])
        ]
        return GuardedBatch(event["step"], event["why"], event["first"], event["ranks"], responses)
    except (OSError, ValueError, LookupError, TypeError, RuntimeError) as error:
        raise DataError(f"not the batch of a step: {error}", where=str(place)) from error
