"""The self-test of a resume. The self-test proves that the state loaded from a checkpoint equals
the state that was saved.

The canary consists of a few token sequences from the last trained batch. A checkpoint stores the
canary and the canary's log-probs under the saved weights. If the run has a reference policy, the
checkpoint also stores the canary's log-probs under the reference policy. For each weight tensor
and each tensor of the optimizer state, the checkpoint stores two sums: of the absolute values, and
of the squares. After loading the checkpoint, the ranks compute the log-probs and the sums again,
and the driver compares them with the stored numbers.

The log-probs must be bit-identical if layout, number of threads, kind of device, libraries and this
package's code are unchanged. This rule does not apply to a run that uses torch.compile or that sums
numbers in an order that varies. A change of layout, threads, device, libraries or code may change
the order in which numbers are summed, and torch.compile may change this order too.

With a different summation order, a log-prob of a float32 model may differ from the stored log-prob
by at most `LARGEST` nats. For a model with a 16-bit dtype, the mean absolute difference between new
and stored log-probs is limited. This limit has the same value as the limit on the mean difference
between the log-probs of engine and trainer (rollout/agreement/limits.py). Measurements are in
docs/diagnostics.md.

Shape legend: N is the number of response positions of the canary.
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
from megatron_stare.process.versions import COMPILED, UNORDERED
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.rollout.agreement.agreement import canary_batch
from megatron_stare.rollout.agreement.limits import BOUNDS

FILE = "self_test.json"  # in a checkpoint's folder
SEQUENCES, LONGEST = 4, 128  # sequences in the canary, and tokens per sequence with its prompt
LARGEST = 1e-5  # nats
SUMS = 1e-9  # relative tolerance of a float64 sum
_FIX = (
    "nothing was trained; use an earlier checkpoint, or checkpoint.self_test=false to go on all the"
    " same"
)


@dataclass(frozen=True)
class SelfTest:
    """Self-test stored in a checkpoint.

    `layout`: text that describes the ranks' layout, threads and devices. A resumed run describes
        its own ranks in the same form, and compares the two descriptions. The resumed run's
        log-probs may differ from the stored log-probs if the descriptions differ, or if `layout`
        mentions compiled functions (COMPILED) or sums in a varying order (UNORDERED). Otherwise,
        the log-probs must be bit-identical.
    `sequences`: token ids of the canary.
    `proof`: log-probs, counts and sums that the ranks computed.
    """

    layout: str
    sequences: list[list[int]]
    proof: StateProof

    @classmethod
    def make(cls, ranks: TrainerGroup, config: Config, batch: RolloutBatch) -> SelfTest:
        """Creates a self-test of the ranks' current state. `batch` is the last batch that the ranks
        trained on."""
        sequences = canary_of(batch)
        return cls(layout_of(ranks, config), sequences, ranks.prove(canary_batch(sequences)))

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def read(cls, checkpoint: Path) -> SelfTest | None:
        """Reads the self-test from the folder of a checkpoint. Returns None if the folder contains
        no self-test.

        Raises:
            DataError: the file cannot be read.
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
        """Computes the numbers in `proof` again and compares them with the saved numbers.

        Raises:
            DataError: a value differs from the saved value. The message names the value.
        """
        now = ranks.prove(canary_batch(self.sequences))
        fixed = COMPILED not in self.layout and UNORDERED not in self.layout
        same = fixed and self.layout == layout_of(ranks, config)
        if wrong := differences(self.proof, now, same_layout=same, dtype=config.model.dtype):
            raise DataError(
                f"the loaded state differs from the saved state: {'; '.join(wrong[:4])}"
                + (f"; and {len(wrong) - 4} more" if len(wrong) > 4 else ""),
                where=where,
                fix=_FIX,
            )


def canary_of(batch: RolloutBatch) -> list[list[int]]:
    """Returns the canary of a batch. The canary contains one token sequence for each of the first
    `SEQUENCES` prompts. A sequence consists of the end of a prompt and the start of the prompt's
    first response, and has at most `LONGEST` tokens."""
    lengths, prompts = batch.lengths.tolist(), batch.branches.contexts.tolist()
    sequences = batch.tokens.split(lengths)
    groups = batch.branch_groups.tolist()
    firsts = [groups.index(group) for group in sorted(set(groups))[:SEQUENCES]]
    found = [sequences[i][max(prompts[i] - LONGEST // 2, 0) :][:LONGEST].tolist() for i in firsts]
    return [sequence for sequence in found if len(sequence) > 1]


def layout_of(ranks: TrainerGroup, config: Config) -> str:
    """Describes in words everything that affects the summation order: layout, kernels, threads and
    devices."""
    parts = {
        **config.parallel.model_dump(),
        **config.model.model_dump(include={"head", "head_chunk_tokens"}),
        **config.batch.model_dump(include={"micro_batch_tokens", "packed"}),
        **config.performance.model_dump(),
    }
    sizes = ", ".join(f"{name} {value}" for name, value in parts.items())
    return f"{sizes}; {config.runtime.trainer_threads} threads; {ranks.place()}"


def differences(saved: StateProof, now: StateProof, *, same_layout: bool, dtype: str) -> list[str]:
    """Returns a list that describes every difference between `now` and `saved`. The list is empty
    if `now` agrees with `saved`. Compares only log-probs that the checkpoint contains, because
    earlier releases did not save the log-probs of a fixed reference policy."""
    wrong = []
    for name, before in sorted(saved.log_probs.items()):
        said = _log_probs(before, now.log_probs.get(name), None if same_layout else dtype)
        wrong += [f"log-probs of the {name} {said}"] if said else []
    for what, count in saved.counts.items():
        if now.counts.get(what) != count:
            wrong.append(
                f"{what}: {count:g} were saved, {now.counts.get(what, math.nan):g} are there"
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


def _log_probs(saved: Sequence[float], now: Sequence[float] | None, dtype: str | None) -> str:
    """Describes how log-probs differ. Returns "" if the log-probs are close enough.

    Args:
        dtype: dtype that sets the tolerance if the layout has changed. None: the bits must be
            equal.
    """
    if now is None:
        return "cannot be computed"
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
    """Returns the distance between two log-probs in nats. The distance is 0 if both log-probs are
    NaN, and inf if only one log-prob is NaN."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    return math.inf if math.isnan(one - other) else abs(one - other)
