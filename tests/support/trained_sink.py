"""A sink that writes down what each step was trained on, and what that says once a run is over."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from megatron_stare.observability.sink import RunOutline, Sink
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.weights.files.convert import Options, megatron_to_hf

FILE = "trained.json"


@dataclass(frozen=True)
class Response:
    """Log-probs of its tokens are the engine's, versions those of runs of tokens."""

    cursor: int
    prompt: list[int]
    tokens: list[int]
    log_probs: list[float]
    versions: list[tuple[int, int]]


class Trained(Sink):
    """FILE in the run's folder: the responses of every step."""

    def __init__(self, *args: object) -> None:
        self._file = Path()
        self._steps: dict[str, list[dict[str, object]]] = {}

    def start(self, run: RunOutline) -> None:
        self._file = run.dir / FILE

    def resume(self, run: RunOutline, step: int, rows: object) -> None:
        self.start(run)
        found = json.loads(self._file.read_text()) if self._file.exists() else {}
        self._steps = {number: told for number, told in found.items() if int(number) <= step}

    def step(self, step: int, metrics: Mapping[str, float], batch: RolloutBatch) -> None:
        assert str(step) not in self._steps
        self._steps[str(step)] = [
            asdict(
                Response(
                    t.prompt.cursor,
                    list(t.prompt.token_ids),
                    t.tokens.tolist(),
                    t.log_probs.tolist(),
                    list(t.versions),
                )
            )
            for t in batch.trajectories
        ]
        temporary = self._file.with_suffix(".tmp")  # a run that is killed leaves it whole
        temporary.write_text(json.dumps(self._steps))
        os.replace(temporary, self._file)


def trained_on(run: Path) -> dict[int, list[Response]]:
    """The responses of a run, by step."""
    found = json.loads((run / FILE).read_text())
    return {int(step): [Response(**each) for each in told] for step, told in found.items()}


def cursors_of(responses: Sequence[Response]) -> list[int]:
    """Their prompts, each once."""
    return sorted({each.cursor for each in responses})


def versions_of(responses: Sequence[Response]) -> set[int]:
    """Versions of the weights that sampled the responses' tokens."""
    return {version for each in responses for version, _ in each.versions}


def off(run: Path, model: Path, temperature: float, folder: Path) -> dict[int, tuple[int, float]]:
    """Tokens by the version that is said to have sampled them, and how far at most their log-probs
    are, in nats, from those that plain transformers computes with the weights of that version: of
    those of which the run has a checkpoint, and of the model that it began with, version 0.

    Args:
        folder: for the checkpoints' weights.
    """
    responses = [each for told in trained_on(run).values() for each in told]
    found: dict[int, tuple[int, float]] = {}
    for version in sorted(versions_of(responses)):
        checkpoint, weights = run / f"checkpoints/step_{version:06d}", model
        if version and not checkpoint.exists():
            continue
        if version:
            weights = folder / str(version)
            megatron_to_hf(checkpoint, weights, model, Options())
        policy = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
        count, most = 0, 0.0
        for each in responses:
            if version not in dict(each.versions):
                continue
            with torch.no_grad():
                logits = policy(torch.tensor([each.prompt + each.tokens])).logits[
                    0, len(each.prompt) - 1 : -1
                ]
            expected = (
                (logits / temperature)
                .log_softmax(-1)
                .gather(1, torch.tensor(each.tokens)[:, None])[:, 0]
            )
            sampled_by = torch.tensor([v for v, tokens in each.versions for _ in range(tokens)])
            here = sampled_by == version
            count += int(here.sum())
            most = max(most, float((expected - torch.tensor(each.log_probs))[here].abs().max()))
        found[version] = count, most
    return found
