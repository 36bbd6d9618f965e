"""Guards a run. The guards check every step against rules, and can end the run or roll it back. The
batches of bad steps are stored.

The module observability/metrics/rules.py defines the rules, and the section `faults.guards` sets
the thresholds of the rules. The guards compare the metrics of each step with the metrics of the
steps before it. When a run is resumed, the driver restores the metrics of the earlier steps.

The batch of a bad step is written to a folder such as `guards/step_000012`. In the folder of a bad
step, batch.safetensors has the format of a batch written by --dump-step, and contains the log-probs
of both trainer and engine. The file event.json contains the reason, the prompts, and the place
where a non-finite value appeared first (see `origin`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_stare.config.fault_sections import GuardsConfig
from megatron_stare.errors import DataError, GuardError, RollBack
from megatron_stare.megatron.step.dump import write_batch
from megatron_stare.megatron.step.not_finite import NotFinite
from megatron_stare.observability.metrics.conditions import Condition, Judge, Spike
from megatron_stare.observability.metrics.rules import LEAST_AGREEMENT, RULES, said
from megatron_stare.records.metric import Metric
from megatron_stare.records.rollout_batch import RolloutBatch

METRICS = (
    *(
        metric
        for name, what, key, side in (
            ("loss", "loss/policy", "loss", "away from"),
            ("grad_norm", "the largest gradient norm of the step's updates", "grad_norm", "above"),
            ("agreement", "the mean difference of engine and trainer", "agreement", "above"),
        )
        for metric in (
            Metric(
                f"guard/{name}",
                "spreads",
                f"distance of {what} from the median of the faults.guards.window steps before",
                f"below faults.guards.{key}.spreads",
            ),
            Metric(
                f"guard/{name}_spike",
                "0 or 1",
                f"1: {what} is more than faults.guards.{key}.spreads spreads {side} the median of"
                " the faults.guards.window steps before",
                f"0; 1 is an alert, or what faults.guards.{key}.action says",
            ),
        )
    ),
    Metric(
        "guard/entropy_outside",
        "0 or 1",
        "1: entropy/mean is below faults.guards.entropy.low or above faults.guards.entropy.high",
        "0; 1 is an alert, or what faults.guards.entropy.action says",
    ),
    Metric(
        "guard/rollbacks",
        "rollbacks",
        "rollbacks of the run so far; missing before the first",
        "few; more than faults.guards.rollbacks stop the run",
    ),
    Metric(
        "guard/left_out",
        "prompts",
        "prompts that the run skips after rollbacks so far",
        "a few steps' batches",
    ),
    Metric(
        "update/held",
        "updates",
        "updates that were not applied because their gradient norm was a spike, with"
        " faults.guards.grad_norm.action: stop or rollback",
        "0",
    ),
)

ENDS = ("stop", "rollback")
FOLDER = "guards"
EVENT = "event.json"


@dataclass(frozen=True)
class Fired:
    """Record of a guard that fired in a step, with the guard's action. A guard fires if its metric
    is out of bounds.

    `text`: describes the measured values.
    """

    step: int
    guard: str
    action: str
    text: str
    prompts: tuple[int, ...]  # cursors of the step's prompts


# In the order in which messages list a step's reasons.
BY_GUARD = {
    name: next(r for r in RULES.values() if r.guard == name)
    for name in ("loss", "grad_norm", "agreement", "entropy")
}


class Guards:
    """The guards of a run.

    Args:
        dtype: see `coarsest_dtype`.
    """

    def __init__(self, config: GuardsConfig, dtype: str) -> None:
        self._config = config
        self._actions = {name: getattr(config, name).action for name in BY_GUARD}
        self._conditions = {name: _configured(name, config, dtype) for name in BY_GUARD}
        self._judge = Judge(self._conditions)
        self.fired: list[Fired] = []  # of the last step

    def restore(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Restores the metrics of earlier steps, with which the guards compare later steps. Each
        entry of `rows` contains the metrics of one earlier step. The oldest step comes first."""
        for row in rows:
            self._judge.remember(row)

    def norm_limit(self, agreement: Mapping[str, float]) -> float:
        """Returns the gradient norm above which the optimizer must skip an update. Returns inf if
        no limit applies to the gradient norm.

        Args:
            agreement: metrics from the comparison of engine and trainer in the log-prob pass. If
                these metrics show a spike that ends the run, the limit is 0.
        """
        if self._actions["agreement"] in ENDS and self._judge.judge("agreement", agreement).holds:
            return 0.0
        spike = self._conditions["grad_norm"]
        assert isinstance(spike, Spike)
        return (
            spike.limit(self._judge.windows["grad_norm"])
            if self._actions["grad_norm"] in ENDS
            else math.inf
        )

    def judge(
        self, step: int, metrics: Mapping[str, float], prompts: Sequence[int]
    ) -> dict[str, float]:
        """Returns the guards' metrics of a step. Sets `fired` to the list of guards that fired at
        this step.

        Args:
            metrics: the trainer's metrics of the step.
            prompts: cursors of the step's prompts.
        """
        told: dict[str, float] = {}
        self.fired = []
        for name, rule in BY_GUARD.items():
            found = self._judge.judge(name, metrics)
            # the guard has no earlier values to compare with yet
            if self._actions[name] == "off" or not found.measured:
                continue
            if "away" in found.measured:
                told[f"guard/{name}"] = float(found.measured["away"])
            told[rule.flag] = float(found.holds)
            if found.holds:
                text = said(rule.error, metrics, found)
                self.fired.append(Fired(step, name, self._actions[name], text, tuple(prompts)))
        self._judge.remember(metrics)
        return told

    @property
    def ends(self) -> bool:
        """True if one of the guards in `fired` ends the run or rolls the run back. The list `fired`
        contains the guards that fired at the newest step. If `ends` is True, the run must not save
        a checkpoint of the newest step, because a resumed run would start from this bad step."""
        return any(each.action in ENDS for each in self.fired)

    def heed(self, rollbacks: int) -> None:
        """Raises an error if a guard ends or rolls back the run. Call `heed` after the step's
        metrics are logged and before a checkpoint of the step is saved.

        Args:
            rollbacks: number of rollbacks so far.

        Raises:
            RollBack: the run must roll back and leave out the step's prompts.
            GuardError: the run must stop, or must roll back but has no rollbacks left.
        """
        ending = sorted(
            (each for each in self.fired if each.action in ENDS),
            key=lambda each: ENDS.index(each.action),
        )
        if not ending:
            return
        first = ending[0]
        where, text = f"step {first.step}", "; ".join(each.text for each in ending)
        fix = (
            f"look at the step's batch in the folder guards/, or change faults.guards.{first.guard}"
        )
        if first.action == "stop":
            raise GuardError(text, where=where, fix=fix)
        if rollbacks >= self._config.rollbacks:
            raise GuardError(
                f"{text}; the run was rolled back {rollbacks} times already",
                where=where,
                fix=f"{fix}, or raise faults.guards.rollbacks",
            )
        raise RollBack(first.step, text, first.prompts)


def _configured(name: str, config: GuardsConfig, dtype: str) -> Condition:
    """Returns a guard's condition with the thresholds of this run."""
    rule = BY_GUARD[name]
    if name == "entropy":
        low, high = config.entropy.low, config.entropy.high
        return rule.given(
            low=-math.inf if low is None else low, high=math.inf if high is None else high
        )
    least = LEAST_AGREEMENT[dtype] if name == "agreement" else -math.inf
    return rule.given(
        spreads=getattr(config, name).spreads, steps=config.window, known=config.known, least=least
    )


@dataclass(frozen=True)
class GuardedResponse:
    """One response in the batch of a bad step. Each tensor is [n], with one number per response
    token.

    `log_probs`: the trainer's log-probs before the step's updates, in nats. A token's log-prob is
        NaN if its loss mask is 0, or if the trainer computed NaN.
    `rollout_log_probs`: the engine's log-probs, in nats.
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
    """Contents of the batch of a bad step. A step is bad if a guard ended or rolled back the run
    after this step, or if an update of the step was non-finite.

    `ranks`: one record for every rank that found non-finite values. Each record names the
        non-finite values of its rank.
    """

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
    """Writes a step's batch, including the advantages, into the step's own folder inside `folder`.
    Overwrites existing files.

    Args:
        log_probs: [N] the trainer's log-probs before the step's updates.
        ranks: the non-finite values that each rank found.
    """
    place = step_folder(folder, batch.step)
    write_batch(place, batch, {"log_probs": log_probs})
    found = [
        rank for rank in ranks if rank.own_gradient or rank.weights or rank.gradient or rank.samples
    ]
    event = {
        "step": batch.step,
        "why": why,
        "first": origin(ranks),
        "ranks": [asdict(rank) for rank in found],
        "responses": [
            {
                "cursor": t.prompt.cursor,
                "prompt_id": t.prompt.id,
                "sample": t.sample_index,
                "text": t.text,
            }
            for t in batch.trajectories
        ],
    }
    (place / EVENT).write_text(json.dumps(event, indent=2))


def origin(ranks: Sequence[NotFinite]) -> str:
    """Describes where a non-finite value first appeared: on which rank, and in which parameter or
    samples. Returns "" if all values are finite.

    A non-finite value spreads from the weights to the log-probs, advantages and loss of samples,
    then to a rank's own gradient, and then to the reduced gradient.
    """
    if bad := [rank for rank in ranks if rank.weights]:
        first = min(bad, key=lambda rank: (rank.stage, rank.rank))
        return f"the weight {first.weights} on {_place(first)}"
    samples = sorted({sample for rank in ranks for sample in rank.samples})
    if samples:
        first = next(rank for rank in ranks if samples[0] in rank.samples)
        shown = ", ".join(map(str, samples[:8])) + (", ..." if len(samples) > 8 else "")
        return f"log-prob, advantage or loss of sample {shown}, on {_place(first)}"
    if bad := [rank for rank in ranks if rank.own_gradient] or [
        rank for rank in ranks if rank.gradient
    ]:
        # backward begins at the last pipeline stage, so the fault most likely arose there
        first = max(bad, key=lambda rank: (rank.stage, -rank.rank))
        return f"the gradient of {first.gradient} on {_place(first)}"
    return ""


def _place(rank: NotFinite) -> str:
    return (
        f"rank {rank.rank} (data {rank.data_rank}, tensor {rank.tensor_rank}, stage {rank.stage})"
    )


def read_guarded(place: Path) -> GuardedBatch:
    """Reads the batch that `write_guarded` wrote into a step's folder.

    Raises:
        DataError: the folder is incomplete or damaged.
    """
    try:
        event: Mapping[str, Any] = json.loads((place / EVENT).read_text())
        columns = load_file(place / "batch.safetensors")
        lengths = columns["response_lengths"].tolist()
        prompts, tokens = _parted(columns, len(lengths))
        by_token = {
            name: columns[name].split(lengths) for name in ("log_probs", "rollout_log_probs")
        }
        responses = [
            GuardedResponse(
                **{name: each[name] for name in ("cursor", "prompt_id", "sample", "text")},
                prompt_tokens=prompts[i].tolist(),
                tokens=tokens[i],
                reward=float(columns["rewards"][i]),
                advantage=float(columns["advantages"][i]),
                **{name: parts[i] for name, parts in by_token.items()},
            )
            for i, each in enumerate(event["responses"])
        ]
        return GuardedBatch(event["step"], event["why"], event["first"], event["ranks"], responses)
    except (OSError, ValueError, LookupError, TypeError, RuntimeError) as error:
        raise DataError(f"not a saved batch of a step: {error}", where=str(place)) from error


def _parted(columns: Mapping[str, Tensor], samples: int) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the prompt tokens and the response tokens of every sample. The branches of a response
    are concatenated."""
    alone = (torch.arange(samples), columns["prompt_lengths"], columns["response_lengths"])
    names = ("samples", "contexts", "responses")
    of, contexts, parts = (
        columns.get(f"branch_{name}", each).tolist()
        for name, each in zip(names, alone, strict=True)
    )
    both = columns["tokens"].split([n for pair in zip(contexts, parts, strict=True) for n in pair])
    prompts = {sample: both[2 * i] for i, sample in reversed(list(enumerate(of)))}
    responses: dict[int, list[Tensor]] = {}
    for i, sample in enumerate(of):
        responses.setdefault(sample, []).append(both[2 * i + 1])
    return [prompts[i] for i in range(samples)], [torch.cat(responses[i]) for i in range(samples)]
