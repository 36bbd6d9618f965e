"""Passes rollouts through real slime's log-probs and advantages over gloo, and writes what each
rank selected.

test_select_slime.py runs it in slime's environment, by itself or under torchrun:
`slime_program.py {select,resume,refuse,dump} FOLDER [CP [PP]]`. The model is replaced by its
logits, which depend on the tokens alone; all after them is slime's.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from argparse import Namespace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_stare.errors import UserError
from megatron_stare.select import slime as adapter

# after the adapter, as a user's own module may import it first
from slime.utils import reloadable_process_group  # isort: skip
from megatron.core import mpu  # isort: skip
from slime.backends.megatron_utils import cp_utils, loss  # isort: skip
from slime.observability import train_data_utils, train_metric_utils  # isort: skip
from slime.utils.dp_schedule import build_dp_schedule  # isort: skip

STARE = {"variant": "C2", "entropy_target": 2.5, "adaptive": True, "share": 0.3}
VOCAB, PROMPTS, GROUP, WIDTH = 16, 4, 4, 24
RANKS, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))


def source_of(*of: object) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(repr(of).encode()))


def arguments(**more: Any) -> Namespace:
    values = {
        "use_rollout_entropy": True,
        "use_rollout_logprobs": False,
        "loss_type": "policy_loss",
        "advantage_estimator": "grpo",
        "use_opsm": False,
        "use_opd": False,
        "use_critic": False,
        "num_critic_only_steps": 0,
        "kl_coef": 0,
        "custom_advantage_function_path": None,
        "normalize_advantages": False,
        "rollout_top_p": 1.0,
        "rollout_temperature": 1.0,
        "entropy_coef": 0.0,
        "log_probs_chunk_size": -1,
        "allgather_cp": False,
        "global_batch_size": PROMPTS * GROUP,
        "use_dynamic_batch_size": False,
        "micro_batch_size": 1,
        "balance_data": False,
        "balance_by_flops": False,
        "max_tokens_per_gpu": 64,
        "save": None,
        "load": None,
        "stare": STARE,
        "ci_test": False,
        "log_multi_turn": False,
        "log_passrate": False,
        "log_correct_samples": False,
    }
    return Namespace(**values | more)


def rollout(number: int) -> dict[str, list]:
    """Makes the samples of one rollout as slime's rollout manager ships them. The first two
    responses to a prompt are equal, so their log-probs tie; the third has two samples."""
    data: dict[str, list] = {name: [] for name in ("tokens", "response_lengths", "loss_masks")}
    data |= {"rewards": [], "rollout_ids": []}
    for prompt in range(PROMPTS):
        for response in range(GROUP):
            for sample in range(1 + (response == 2)):
                source = source_of(number, prompt, max(response, 1), sample)
                length = int(source.integers(4, WIDTH + 1))
                before = int(source_of(number, prompt).integers(2, 30))
                mask = np.ones(length, int)
                mask[2:4] = 0  # a tool's tokens
                data["tokens"].append(torch.from_numpy(source.integers(0, VOCAB, before + length)))
                data["response_lengths"].append(length)
                data["loss_masks"].append(torch.from_numpy(mask))
                # GRPO's, already centred by slime's rollout manager
                data["rewards"].append(float((number + prompt + response // 2) % 3 - 1))
                data["rollout_ids"].append(100 + prompt * GROUP + response)
    return data


def share_of(number: int, args: Namespace) -> dict[str, Any]:
    """Returns this rank's rows, after slime's own schedule."""
    whole = rollout(number)
    lengths = [len(each) for each in whole["tokens"]]
    ranks = {"dp_size": mpu.get_data_parallel_world_size(), "vpp_size": 1}
    ranks |= {"cp_size": mpu.get_context_parallel_world_size()}
    ranks |= {"microbatch_group_size_per_vp_stage": 1}
    partitions, indices, batches, sizes = build_dp_schedule(
        args,
        ranks,
        lengths,
        global_batch_size=args.global_batch_size,
        rollout_indices=whole["rollout_ids"],
    )
    here = partitions[mpu.get_data_parallel_rank()]
    share: dict[str, Any] = {name: [value[at] for at in here] for name, value in whole.items()}
    share |= {"partition": here, "total_lengths": [lengths[at] for at in here]}
    share |= {"num_microbatches": batches, "global_batch_sizes": sizes}
    share["micro_batch_indices"] = indices[mpu.get_data_parallel_rank()]
    share["rollout_mask_sums"] = torch.tensor([float(each.sum()) for each in share["loss_masks"]])
    return share


def scored(share: dict[str, Any], args: Namespace) -> None:
    """Adds slime's log-probs and entropies, of logits that depend on the tokens."""
    if not mpu.is_pipeline_last_stage():
        return
    logits = []
    for tokens in share["tokens"]:
        source = source_of(*tokens.tolist())
        of_tokens = torch.from_numpy(source.gamma(1.0, 1.5, (len(tokens), VOCAB))).float()
        logits.append(cp_utils.slice_with_cp(of_tokens, 0.0))
    _, found = loss.get_log_probs_and_entropy(
        torch.cat(logits)[None],
        args=args,
        unconcat_tokens=share["tokens"],
        total_lengths=share["total_lengths"],
        response_lengths=share["response_lengths"],
        with_entropy=args.use_rollout_entropy,
    )
    share.update(found)


def step(number: int, args: Namespace, weigh: Any) -> dict[str, np.ndarray]:
    """Does slime's step up to the training, and returns this rank's tokens with their places."""
    share = share_of(number, args)
    scored(share, args)
    loss.compute_advantages_and_returns(args, share)
    last = mpu.is_pipeline_last_stage()
    plain = [each.clone() for each in share["advantages"]] if last else []
    weigh(args, number, share)
    logged: dict[str, Any] = {}
    train_metric_utils.gather_log_data = lambda name, args, number, numbers: logged.update(numbers)
    train_metric_utils.log_rollout_data(number, args, share)
    if not last:
        return {}
    held = range(len(plain))
    parts = {
        "row": [torch.full((len(plain[row]),), share["partition"][row]) for row in held],
        "column": [
            adapter.local(torch.arange(length), share, row)
            for row, length in enumerate(share["response_lengths"])
        ],
        "mask": [adapter.local(mask, share, row) for row, mask in enumerate(share["loss_masks"])],
        "log_probs": share["log_probs"],
        "entropies": share["entropy"],
        "advantages": plain,
        "weighted": share["advantages"],
        "returns": share["returns"],
    }
    columns = {name: torch.cat(value).detach().numpy() for name, value in parts.items()}
    columns |= {"codes": weigh.selected.codes.numpy(), "weights": weigh.selected.weights.numpy()}
    return {**columns, "logged": np.array(sorted(name for name in logged if "stare" in name))}


def write(folder: Path, name: str, weigh: Any, updates: list[dict[str, np.ndarray]]) -> None:
    for number, update in enumerate(updates):
        np.savez(folder / f"{name}-{number}-{RANK}.npz", **update)
    if weigh.selector is not None:
        state = json.dumps(weigh.selector.state_dict())
        (folder / f"{name}-{RANK}.json").write_text(state)


def select(folder: Path) -> None:
    """Passes two rollouts through slime, plain and whitened, and with one gate a response."""
    by_response = {"variant": "C2", "entropy_target": 1.6, "share": 0.6, "gate": "sample"}
    for name, more in {
        "grpo": {},
        "whitened": {"normalize_advantages": True},
        "by_response": {"stare": by_response},
    }.items():
        weigh = adapter.Weighing()
        write(folder, name, weigh, [step(at, arguments(**more), weigh) for at in range(2)])


def resume(folder: Path) -> None:
    """Does four rollouts. Then a run that was killed after the second one is taken up, and twice
    more from other checkpoints: the states of all are in one file."""
    saved = arguments(save=str(folder / "run"), load=str(folder / "run"))
    whole = adapter.Weighing()
    write(folder, "whole", whole, [step(at, saved, whole) for at in range(4)])
    states = folder / "run" / adapter.STATES
    dist.barrier()
    if RANK == 0:
        lines = [line for line in states.read_text().splitlines() if line]
        (folder / "run" / "states.txt").write_text("\n".join(lines))
        states.write_text("\n".join(lines[:2]) + '\n{"rollout_id": 2, "ver')
    dist.barrier()
    for first in (2, 3, 1):
        dist.barrier()
        again = adapter.Weighing()
        write(folder, f"from{first}", again, [step(at, saved, again) for at in range(first, 4)])


def refuse(folder: Path) -> None:
    """Writes the message of every refusal."""

    def begun(at: int = 0, without: str = "", times: dict | None = None, **more: Any) -> None:
        args = arguments(**more)
        share = share_of(at, args)
        scored(share, args)
        if "entropy" in share:
            loss.compute_advantages_and_returns(args, share)
            for name, factor in (times or {}).items():
                share[name] = [factor * each for each in share[name]]
        adapter.Weighing()(args, at, {k: v for k, v in share.items() if k != without})

    saved = arguments(save=str(folder / "run"))
    step(0, saved, adapter.Weighing())
    cases: dict[str, dict[str, Any]] = {
        "entropy": {"use_rollout_entropy": False},
        "log_probs": {"without": "log_probs"},
        "gspo": {"advantage_estimator": "gspo"},
        "loss": {"loss_type": "custom_loss"},
        "opsm": {"use_opsm": True},
        "top_p": {"rollout_top_p": 0.9},
        "stapo": {"stare": {"method": "stapo"}},
        "setting": {"stare": {"clip_high": 0.28}},
        "negative": {"times": {"entropy": -1}},
        "positive": {"times": {"log_probs": -1}},
        "state": {"at": 3, "load": str(folder / "run")},
        "share": {"at": 1, "load": str(folder / "run"), "stare": {**STARE, "share": 0.4}},
        "trusted": {"times": {"entropy": -1}, "stare": {**STARE, "trust_upstream": True}},
        "fresh": {"at": 3, "stare": {**STARE, "fresh_state": True}},
        "critic": {"at": 3, "use_critic": True, "num_critic_only_steps": 3},
        "found": {"at": 1, "load": str(folder / "run")},
    }
    found = {name: _message(begun, **more) for name, more in cases.items()}
    found["probe"] = adapter.probe()
    (folder / "refusals.json").write_text(json.dumps(found))


def dump(folder: Path) -> None:
    """Writes slime's own dumps of two rollouts, the second without entropies."""
    for number in range(2):
        args = arguments(save_debug_train_data=str(folder / "{rollout_id}.pt"))
        args.use_rollout_entropy = number == 0
        share = share_of(number, args)
        scored(share, args)
        loss.compute_advantages_and_returns(args, share)
        if number == 0:
            adapter.Weighing()(args, number, share)
        share["raw_reward"] = [float(each) for each in range(PROMPTS * (GROUP + 1))]
        train_data_utils.save_debug_train_data(args, rollout_id=number, rollout_data=share)


def _message(call: Any, **more: Any) -> str | None:
    try:
        call(**more)
    except UserError as error:
        return str(error)
    return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, folder, *sizes = sys.argv[1:]
    context, stages = [int(each) for each in sizes] + [1, 1][len(sizes) :]
    if RANKS == 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0"}
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
    else:
        dist.init_process_group("gloo")
    if RANKS > 1:
        # every group is then slime's wrapper, whose watch on a GPU's memory has none here
        reloadable_process_group.monkey_patch_torch_dist()
        reloadable_process_group.register_default_process_group(timedelta(minutes=5))
        reloadable_process_group.available_memory = lambda: {"free_GB": 80.0}
    mpu.initialize_model_parallel(
        pipeline_model_parallel_size=stages,
        context_parallel_size=context,
        create_gloo_process_groups=True,
    )
    {"select": select, "resume": resume, "refuse": refuse, "dump": dump}[what](Path(folder))
    dist.destroy_process_group()
