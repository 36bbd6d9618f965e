"""The self-test of a resume: what a checkpoint is saved with to show, once it is loaded, that all
of it came back.

With the weights are saved a few responses of the last step and their log-probs under these weights,
of a reference policy that moves too, and two sums a tensor of weights and optimizer. After a load
all of it is computed again. In the layout, on the kind of device and with the libraries and the
code of this package that saved it log-probs must be equal bit for bit. Elsewhere sums are made in
another order: in float32 that moves a log-prob by less than LARGEST, in 16 bits by as much as
engine and trainer may differ, whose mean is bounded (rollout/agreement/limits.py;
docs/diagnostics.md has where that is measured).

Shape legend: N response positions of the canary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_stare.cluster.trainer_group import StateProof, TrainerGroup
from megatron_stare.config.schema import Config
from megatron_stare.errors import DataError
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.rollout.agreement.agreement import canary_batch
from megatron_stare.rollout.agreement.limits import BOUNDS

FILE = "self_test.json"  # of a checkpoint
SEQUENCES, LONGEST = 4, 128  # of the canary, and tokens of each, prompt included
LARGEST = 1e-5  # nats
SUMS = 1e-9  # share that a sum in float64 may differ by
_FIX = (
    "nothing was trained; use an earlier checkpoint, or checkpoint.self_test=false to go on all the"
    " same"
)


@dataclass(frozen=True)
class SelfTest:
    """Self-test as a checkpoint holds it.

    layout: of the ranks that computed it, in words; equal words mean equal bits.
    sequences: token ids.
    proof: what the ranks found.
    """

    layout: str
    sequences: list[list[int]]
    proof: StateProof

    @classmethod
    def make(cls, ranks: TrainerGroup, config: Config, batch: RolloutBatch) -> SelfTest:
        """Makes the self-test of the weights that the ranks hold; `batch` is the last that they
        were trained on."""
        sequences = canary_of(batch)
        return cls(layout_of(ranks, config), sequences, ranks.prove(canary_batch(sequences)))

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def read(cls, checkpoint: Path) -> SelfTest | None:
        """Self-test that a checkpoint was saved with; None where it has none.

        Raises:
            DataError: it cannot be read.
        """
        file = checkpoint / FILE
        try:
            tree = json.loads(file.read_text())
            return cls(tree["layout"], tree["sequences"], StateProof(**tree["proof"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise DataError(
                f"the self-test cannot be read: {error}", where=str(file), fix=_FIX
            ) from error

    def check(self, ranks: TrainerGroup, config: Config, where: str) -> None:
        """Computes all of it again.

        Raises:
            DataError: something is not what was saved; says what.
        """
        now = ranks.prove(canary_batch(self.sequences))
        same = self.layout == layout_of(ranks, config)
        if wrong := differences(self.proof, now, same_layout=same, dtype=config.model.dtype):
            raise DataError(
                f"the loaded state differs from the saved state: {'; '.join(wrong[:4])}"
                + (f"; and {len(wrong) - 4} more" if len(wrong) > 4 else ""),
                where=where,
                fix=_FIX,
            )


def canary_of(batch: RolloutBatch) -> list[list[int]]:
    """The first tokens of the first responses of different prompts, with their prompts' last tokens
    before them."""
    lengths, prompts = batch.lengths.tolist(), batch.prompt_lengths.tolist()
    sequences = [part.tolist() for part in batch.tokens.split(lengths)]
    groups = batch.groups.tolist()
    firsts = [groups.index(group) for group in sorted(set(groups))[:SEQUENCES]]
    found = [sequences[i][max(prompts[i] - LONGEST // 2, 0) :][:LONGEST] for i in firsts]
    return [sequence for sequence in found if len(sequence) > 1]


def layout_of(ranks: TrainerGroup, config: Config) -> str:
    """Layout in words, with threads and devices: all that decides in which order sums are made."""
    sizes = ", ".join(f"{name} {value}" for name, value in config.parallel.model_dump().items())
    return f"{sizes}; {config.runtime.trainer_threads} threads; {ranks.place()}"


def differences(saved: StateProof, now: StateProof, *, same_layout: bool, dtype: str) -> list[str]:
    """Differences of `now` from what was saved, in words; [] where there are none."""
    wrong = []
    for name in sorted({*saved.log_probs, *now.log_probs}):
        said = _log_probs(
            saved.log_probs.get(name), now.log_probs.get(name), None if same_layout else dtype
        )
        wrong += [f"log-probs of the {name} {said}"] if said else []
    for what, before in saved.counts.items():
        if now.counts.get(what) != before:
            wrong.append(
                f"{what}: {before:g} were saved, {now.counts.get(what, math.nan):g} are there"
            )
    for name in sorted({*saved.sums, *now.sums}):
        one, other = saved.sums.get(name), now.sums.get(name)
        if one is None or other is None:
            wrong.append(f"{name} {'was not saved' if one is None else 'is not there'}")
        elif not all(_alike(a, b) for a, b in zip(one, other, strict=True)):
            wrong.append(f"{name} has the squared norm {other[1]:.9g}, {one[1]:.9g} was saved")
    return wrong


def _alike(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=SUMS) or (math.isnan(one) and math.isnan(other))


def _log_probs(
    saved: Sequence[float] | None, now: Sequence[float] | None, dtype: str | None
) -> str:
    """How they differ; "" where they do not. `dtype`: of another layout; None: bits are
    compared."""
    if saved is None or now is None:
        return "were not saved" if saved is None else "cannot be computed"
    apart = [_apart(a, b) for a, b in zip(saved, now, strict=True)]
    unequal = sum(each > 0 for each in apart)
    largest, mean = max(apart, default=0.0), sum(apart) / max(len(apart), 1)
    if dtype is None:
        fine, allowed = not unequal, "in the same layout all must be equal"
    elif dtype in BOUNDS:
        fine = mean <= BOUNDS[dtype]["mean"]
        allowed = f"a mean of {BOUNDS[dtype]['mean']:g} is allowed"
    else:
        fine, allowed = largest <= LARGEST, f"{LARGEST:g} is allowed"
    if fine:
        return ""
    return (
        f"differ at {unequal} of {len(apart)} tokens, by up to {largest:.3g} and on average"
        f" {mean:.3g} nats; {allowed}"
    )


def _apart(one: float, other: float) -> float:
    """Nats; of two that are NaN none, of one infinitely many."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    return math.inf if math.isnan(one - other) else abs(one - other)
