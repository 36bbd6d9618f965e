"""Guards a run: judges its steps by the guards' rules, ends it or sends it back, and keeps the
batches of such steps.

The rules are those of observability/metrics/rules.py that have settings in the section
`faults.guards`. What a step is compared with comes from the metrics of the run, so a resume goes on
with it.

A batch that was left out or ended the run has a folder, `guards/step_000012`: batch.safetensors is
that of --dump-step with the trainer's log-probs beside the engine's, event.json says what happened,
which prompts these were, and which rank and parameter was the first not to be finite.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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
        for name, what, key in (
            ("loss", "loss/policy", "loss"),
            ("grad_norm", "the largest gradient norm of the step's updates", "grad_norm"),
            ("agreement", "the mean difference of engine and trainer", "agreement"),
        )
        for metric in (
            Metric(
                f"guard/{name}",
                "spreads",
                f"of {what}, its distance from the median of the faults.guards.window steps"
                " before it",
                f"below faults.guards.{key}.spreads",
            ),
            Metric(
                f"guard/{name}_spike",
                "0 or 1",
                f"1: {what} is faults.guards.{key}.spreads or more away from that median",
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
        "of the run so far; missing before the first",
        "few; faults.guards.rollbacks more than that stop the run",
    ),
    Metric(
        "guard/left_out",
        "prompts",
        "that rollbacks left out of the data so far",
        "a few steps' batches",
    ),
    Metric(
        "update/held",
        "updates",
        "not taken because their gradient norm was a spike, with faults.guards.grad_norm.action:"
        " stop or rollback",
        "0",
    ),
)

ENDS = ("stop", "rollback")
FOLDER = "guards"
EVENT = "event.json"


@dataclass(frozen=True)
class Fired:
    """A guard whose figure is out of bounds at a step, and what is to be done. text: what was
    measured."""

    step: int
    guard: str
    action: str
    text: str
    prompts: tuple[int, ...]  # cursors of the step's prompts


# In the order in which a step's reasons are told.
BY_GUARD = {
    name: next(r for r in RULES.values() if r.guard == name)
    for name in ("loss", "grad_norm", "agreement", "entropy")
}


class Guards:
    """The guards of a run.

    Args:
        dtype: of the model in training.
    """

    def __init__(self, config: GuardsConfig, dtype: str) -> None:
        self._config = config
        self._actions = {name: getattr(config, name).action for name in BY_GUARD}
        self._conditions = {name: _configured(name, config, dtype) for name in BY_GUARD}
        self._judge = Judge(self._conditions)
        self.fired: list[Fired] = []  # of the last step

    def restore(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Takes the metrics of a resumed run's steps, oldest first: figures are compared with those
        of the whole run."""
        for row in rows:
            self._judge.remember(row)

    def norm_limit(self, agreement: Mapping[str, float]) -> float:
        """The gradient norm above which an update is not to be taken; inf: none is.

        Args:
            agreement: metrics of the step's log-prob pass, as far as engine and trainer were
                compared there. Where they are a spike that ends the run, no update is to be taken:
                the limit is 0.
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
        """The guards' metrics of a step, from the trainer's; `fired` is what they say is to be
        done.

        Args:
            prompts: cursors of the step's prompts.
        """
        told: dict[str, float] = {}
        self.fired = []
        for name, rule in BY_GUARD.items():
            found = self._judge.judge(name, metrics)
            # no values to compare with yet
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
        """True where the last step is to end the run, or to send it back; its state is not to be
        saved."""
        return any(each.action in ENDS for each in self.fired)

    def heed(self, rollbacks: int) -> None:
        """Ends the run where the last step's figures say so, after they were logged and before the
        step is saved.

        Args:
            rollbacks: made so far.

        Raises:
            RollBack: the run is to go back and leave the step's prompts out.
            GuardError: it is to stop, or too often went back.
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
    """The condition of a guard as a run sets it."""
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
    """One response of such a batch. Columns are [n], one number a response token.

    log_probs: of the trainer before the step's updates, nats; NaN where a token carries no loss,
    and where it was.
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
    """A step that was left out, or ended the run. ranks: what was not finite on each, of those
    where anything was."""

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
    """Which rank and parameter, or which samples, were the first not to be finite; "" where all
    are.

    What comes first makes all after it not finite too: weights, then log-probs, advantages and the
    loss of samples, then a rank's own gradient, then the gradient that is left once it is reduced.
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
        # backward begins at the last stage, so the fault is likeliest there
        first = max(bad, key=lambda rank: (rank.stage, -rank.rank))
        return f"the gradient of {first.gradient} on {_place(first)}"
    return ""


def _place(rank: NotFinite) -> str:
    return (
        f"rank {rank.rank} (data {rank.data_rank}, tensor {rank.tensor_rank}, stage {rank.stage})"
    )


def read_guarded(place: Path) -> GuardedBatch:
    """Reads what `write_guarded` left in the folder of a step.

    Raises:
        DataError: it is not whole.
    """
    try:
        event: Mapping[str, Any] = json.loads((place / EVENT).read_text())
        columns = load_file(place / "batch.safetensors")
        prompts, lengths = columns["prompt_lengths"].tolist(), columns["response_lengths"].tolist()
        both = columns["tokens"].split(
            [n for pair in zip(prompts, lengths, strict=True) for n in pair]
        )
        by_token = {
            name: columns[name].split(lengths) for name in ("log_probs", "rollout_log_probs")
        }
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
        raise DataError(f"not a saved batch of a step: {error}", where=str(place)) from error
