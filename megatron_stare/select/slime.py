"""Runs STARE inside slime. slime's option `--rollout-data-postprocess-path` makes slime call
`weigh` for each rollout.

    python train.py --rollout-data-postprocess-path stare_select.slime.weigh \\
        --use-rollout-entropy --get-mismatch-metrics \\
        --custom-tis-function-path stare_select.slime.uncorrected \\
        --custom-config-path stare.yaml ...

The section `stare` of the file stare.yaml contains the selector's settings. slime calls `weigh`
after slime has whitened the advantages, so the whitening does not rescale the weights. `weigh`
needs log-probs that slime computes before the update. The flag `--get-mismatch-metrics` forces
slime's log-prob pass, which slime skips for a rollout with only one update. The function
`uncorrected` leaves slime's loss unchanged. This module imports slime, which this project does not
install. Only users of slime import this module.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_stare.errors import ConfigError
from megatron_stare.select.selector import Selector
from megatron_stare.select.upstream import expect, missing, refuse

try:
    import torch.distributed as dist
    from megatron.core import mpu
    from slime.backends.megatron_utils import cp_utils, loss
except ImportError as error:
    raise ConfigError(
        f"cannot import slime's Megatron backend: {error}",
        fix="install slime 0.3.1 as its documents say, and stare-select beside it with --no-deps",
    ) from error

RELEASE = "0.3.1"
STATES = "stare_select.jsonl"  # in the folder of the checkpoints; a line a rollout
# estimators whose loss is linear in a token's advantage; gspo's ratio is a sequence's
ESTIMATORS = ("grpo", "cispo", "ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
# parameters that the adapter passes, or upstream functions whose results it relies on
CALLED = {"compute_advantages_and_returns": ("args", "rollout_data")}
SLICED = {"slice_log_prob_with_cp": ("log_prob", "total_length", "response_length")}


def probe() -> str | None:
    """Returns a message about the first function or parameter that the adapter needs but slime
    lacks. Returns None if nothing is missing."""
    return missing(loss, CALLED) or missing(cp_utils, SLICED)


def check(args: Any, settings: Mapping[str, Any]) -> None:
    """Raises ConfigError if settings of slime prevent an exact selection of tokens."""
    faults = {
        "--use-rollout-entropy": (
            not args.use_rollout_entropy,
            "is missing: slime then computes no entropies before the update",
        ),
        "--loss-type": (
            args.loss_type != "policy_loss",
            f"{args.loss_type!r}: is not known to be linear in a token's advantage; set it to"
            " policy_loss",
        ),
        "--advantage-estimator": (
            args.advantage_estimator not in ESTIMATORS,
            f"{args.advantage_estimator!r}: a ratio of the whole sequence has no weight for a"
            f" token; one of {', '.join(ESTIMATORS)}",
        ),
        "--use-opsm": (
            args.use_opsm,
            "drops sequences after the selection; leave it out",
        ),
        "--rollout-top-p": (
            args.rollout_top_p != 1.0,
            f"{args.rollout_top_p}: slime's log-probs are then those of the kept tokens, and its"
            " entropies those of all; set it to 1.0",
        ),
    }
    refuse(faults, settings, "slime")


class Weighing:
    """Multiplies the advantages of each rollout by the token weights that a Selector computes.
    slime's option `--rollout-data-postprocess-path` names an object of this class. slime calls this
    object like a function, once per rollout on every rank.

    After each rollout, the selector's state is appended as one line to stare_select.jsonl in the
    folder of `--save`. A resumed run opens stare_select.jsonl in the folder of `--load`, and loads
    the state that the file contains for the previous rollout. If the state is missing, the run
    stops, unless the section `stare` has `fresh_state: true`.
    """

    def __init__(self) -> None:
        self.selector: Selector | None = None
        self.selected: Any = None
        self._trusts = False

    def __call__(self, args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
        """Multiplies the advantages in `rollout_data` by the selector's weights, and adds the
        method's metrics to `rollout_data`.

        Raises:
            ConfigError: a setting of slime makes the selection inexact, slime has computed no
                log-probs before the update, or the checkpoint has no state of the selector.
            UpstreamChangedError: slime's functions or their results changed.
        """
        if not mpu.is_pipeline_last_stage():
            return
        started = time.perf_counter()
        if self.selector is None:
            self.selector = self._begin(args, rollout_id, rollout_data)
        group = mpu.get_data_parallel_group(with_context_parallel=True)
        self.selector.group = group
        rows, columns, sequence = places(rollout_data, group)
        masks = [
            local(mask, rollout_data, row) for row, mask in enumerate(rollout_data["loss_masks"])
        ]
        found = self.selector.update(
            torch.cat(rollout_data["log_probs"]),
            torch.cat(rollout_data["entropy"]),
            torch.cat(rollout_data["advantages"]),
            torch.cat(masks).bool(),
            sequence=sequence,
            index=rows + columns,
        )
        given = rollout_data["advantages"]
        lengths = [len(each) for each in given]
        weighed = found.advantages.to(given[0].dtype).split(lengths)
        rollout_data["advantages"] = list(weighed)
        self.selected = found
        numbers = {**found.metrics, "stare/seconds": time.perf_counter() - started}
        for name, value in numbers.items():
            # slime logs every tensor that it finds here, as rollout/NAME
            rollout_data[name] = torch.tensor(value, device=given[0].device)
        if (
            args.save is not None
            and dist.get_rank(group) == 0
            and mpu.get_tensor_model_parallel_rank() == 0
        ):
            _append(Path(args.save), rollout_id, self.selector)

    def _begin(self, args: Any, rollout_id: int, rollout_data: Mapping[str, Any]) -> Selector:
        settings = dict(getattr(args, "stare", None) or {})
        self._trusts = bool(settings.pop("trust_upstream", False))
        may_begin = bool(settings.pop("fresh_state", False))
        self._expect(probe())
        check(args, settings)
        if not rollout_data.get("log_probs") or not rollout_data.get("entropy"):
            raise ConfigError(
                "slime has computed no log-probs before the update, because a rollout is one update"
                " and its loss can use its own",
                where="--rollout-data-postprocess-path",
                fix="set --get-mismatch-metrics and --custom-tis-function-path"
                f" {__name__}.uncorrected; in train_async.py --keep-old-actor does it too",
            )
        self._expect(changed(rollout_data))
        selector = Selector(settings.pop("method", "stare"), **settings)
        # with a critic, the actor begins to train at this rollout
        first = args.num_critic_only_steps if args.use_critic else 0
        if rollout_id > first:
            saved = _read(args.load, rollout_id - 1)
            if saved is not None:
                selector.load_state_dict(saved)
            elif not may_begin:
                raise ConfigError(
                    f"there is no state of the selector after rollout {rollout_id - 1}",
                    where=str(Path(args.load or "", STATES)),
                    fix="load a checkpoint of a run that had this function, or set fresh_state to"
                    " begin here",
                )
        return selector

    def _expect(self, message: str | None) -> None:
        expect(message, "slime", RELEASE, self._trusts)


weigh = Weighing()


def uncorrected(
    args: Any, *, pg_loss: Tensor, loss_masks: list[Tensor], **_: Any
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """Returns slime's loss and masks unchanged, without metrics. `--custom-tis-function-path` names
    this function."""
    return pg_loss, loss_masks, {}


def local(of_response: Tensor, rollout_data: Mapping[str, Any], row: int) -> Tensor:
    """Returns the part of a response's values that this context-parallel rank holds."""
    total, length = rollout_data["total_lengths"][row], rollout_data["response_lengths"][row]
    return cp_utils.slice_log_prob_with_cp(of_response, int(total), int(length))


def places(rollout_data: Mapping[str, Any], group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Returns three index tensors [N] with one element for each token of this rank. The first
    tensor contains, for each token, the index of the first token in the same response. The second
    tensor contains, for each token, the token's position in the response. The third tensor
    contains, for each token, the index of the rollout to which the response belongs. Tokens and
    rollouts are numbered over the whole batch, so the indices do not depend on the parallel
    layout."""
    device = rollout_data["loss_masks"][0].device
    positions = torch.as_tensor(rollout_data["partition"], device=device)
    lengths = torch.as_tensor(rollout_data["response_lengths"], device=device).long()
    number = positions.max() + 1
    dist.all_reduce(number, dist.ReduceOp.MAX, group=group)
    # positions that slime has dropped stay at -1 and 0
    ids = torch.full((int(number),), -1, dtype=torch.int64, device=device)
    ids[positions] = torch.as_tensor(rollout_data["rollout_ids"], device=device).long()
    dist.all_reduce(ids, dist.ReduceOp.MAX, group=group)
    numbers = ids.unique(return_inverse=True)[1]
    ends = torch.zeros_like(ids)
    ends[positions] = lengths
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
    first = ends.cumsum(0) - ends
    columns = [
        local(torch.arange(int(length), device=device), rollout_data, row)
        for row, length in enumerate(lengths)
    ]
    held = torch.tensor([len(each) for each in columns], device=device)
    return (
        first[positions].repeat_interleave(held),
        torch.cat(columns),
        numbers[positions].repeat_interleave(held),
    )


def changed(rollout_data: Mapping[str, Any]) -> str | None:
    """Checks whether the adapter can use the log-probs, entropies and advantages that slime has
    computed. Returns a message that describes the first problem found, or None if there is no
    problem."""
    for row, mask in enumerate(rollout_data["loss_masks"]):
        kept = local(mask, rollout_data, row).bool()
        for name in ("log_probs", "entropy", "advantages"):
            if rollout_data[name][row].shape != kept.shape:
                return f"{name} have another shape than the responses of this rank"
        if (rollout_data["log_probs"][row][kept] > 1e-4).any():
            return "log_probs lie above 0"
        if (rollout_data["entropy"][row][kept] < -1e-4).any():
            return "entropies lie below 0"
    return None


def _append(folder: Path, rollout_id: int, selector: Selector) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / STATES).open("a") as file:
        # a run that was killed may have left half a line
        file.write("\n" + json.dumps({"rollout_id": rollout_id, **selector.state_dict()}) + "\n")


def _read(folder: str | None, rollout_id: int) -> dict[str, Any] | None:
    """Returns the selector's state after the rollout `rollout_id`, or None if no such state is
    saved. If the file has several states for `rollout_id`, the function returns the last state."""
    file = Path(folder or "", STATES)
    found = None
    for line in file.read_text().splitlines() if file.is_file() else ():
        try:
            state = json.loads(line)
        except ValueError:  # an empty line, or half a line of a run that was killed
            continue
        if state["rollout_id"] == rollout_id:
            found = state
    return found
