"""Passes batches through real verl's v1 trainer and a real TransferQueue, and writes what the
trainer selected.

test_select_verl.py runs it in verl's environment: `verl_program.py WHAT FOLDER`, where WHAT is
select, resume, refuse or dump. Verl's workers, which would need a GPU, are replaced by `Workers`:
it writes log-probs and entropies into the queue as they do, and files where they save.
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from megatron_stare.errors import UserError
from megatron_stare.select import verl as adapter

STARE = {"variant": "C2", "entropy_target": 1.0, "adaptive": True, "share": 0.2}
PROMPTS, SESSIONS = 3, 4


def source_of(*of: object) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(repr(of).encode()))


def put(step: int) -> Any:
    """Puts one batch of responses into the queue, as verl's agent loop does. Every third session
    has two rows. The sessions 0 and 1 of a prompt are equal, so their log-probs tie."""
    keys, fields, tags = [], [], []
    for prompt in range(PROMPTS):
        for session in range(SESSIONS):
            for row in range(1 + (session == 2)):
                source = source_of(step, prompt, max(session, 1), row)
                prompt_ids = torch.from_numpy(source.integers(2, 15, 4))
                responses = torch.from_numpy(source.integers(2, 15, int(source.integers(5, 13))))
                mask = torch.ones_like(responses)
                mask[2:4] = 0  # a tool's tokens
                ids = torch.cat([prompt_ids, responses])
                rewards = torch.zeros(len(responses))
                rewards[-1] = float((step + prompt + session) % 3 == 0)
                log_probs = torch.from_numpy(source.gamma(1.0, 1.0, len(responses))).float()
                keys.append(f"step{step}-prompt{prompt}_{session}_{row}")
                fields.append(
                    {
                        "uid": f"step{step}-prompt{prompt}",
                        "session_id": session,
                        "prompts": prompt_ids,
                        "responses": responses,
                        "input_ids": ids,
                        "position_ids": torch.arange(len(ids)),
                        "response_mask": mask,
                        "loss_mask": mask,
                        "rm_scores": rewards,
                        "rollout_log_probs": -log_probs,
                        "num_turns": 2,
                    }
                )
                lengths = {"prompt_len": 4, "response_len": len(responses), "seq_len": len(ids)}
                versions = {"min_global_steps": step, "max_global_steps": step}
                tags.append({"status": "success", "global_steps": step, **lengths, **versions})
    fields_ = list_of_dict_to_tensordict(fields)
    return tq.kv_batch_put(keys=keys, partition_id="train", fields=fields_, tags=tags)


class Workers:
    """Stands for verl's worker group."""

    def __init__(self, ranks: int, signs: dict[str, int]) -> None:
        self._dispatch_info = {"actor": list(range(ranks))}
        self.signs = {"log_probs": -1, "entropy": 1} | signs

    def compute_log_prob(self, batch: Any) -> Any:
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["input_ids"]
        )
        rows = [ids.numpy() for ids in data["input_ids"].unbind()]
        columns: dict[str, list] = {"log_probs": [], "entropy": []}
        for ids in rows:
            source = source_of(*ids.tolist())
            # rounded, so that values tie within and between rows
            rounded = np.round(2 * source.gamma(1.0, 1.0, len(ids))) / 2
            columns["log_probs"].append(self.signs["log_probs"] * rounded)
            columns["entropy"].append(self.signs["entropy"] * source.gamma(1.0, 0.5, len(ids)))
        fields = [
            {name: torch.tensor(values[at]).float() for name, values in columns.items()}
            for at in range(len(rows))
        ]
        return tq.kv_batch_put(
            keys=batch.keys,
            partition_id=batch.partition_id,
            fields=list_of_dict_to_tensordict(fields),
        )

    def save_checkpoint(self, local: str, *_: object, **__: object) -> None:
        assert Path(local).with_name("stare_select.json").exists()  # before verl's own files
        Path(local).mkdir(parents=True)

    def load_checkpoint(self, local_path: str, **_: object) -> None:
        assert Path(local_path).is_dir()


def configured(folder: Path, *overrides: str) -> Any:
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(
            "ppo_trainer",
            [
                "algorithm.adv_estimator=grpo",
                f"trainer.default_local_dir={folder}",
                f"data.train_batch_size={PROMPTS}",
                f"actor_rollout_ref.rollout.n={SESSIONS}",
                f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
                "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
                *overrides,
            ],
        )


def stare(**more: Any) -> list[str]:
    settings = {**STARE, **more}
    return ["trainer.v1.trainer_mode=stare_sync"] + [f"+stare.{k}={v}" for k, v in settings.items()]


def trainer(folder: Path, *overrides: str, ranks: int = 2, **signs: int) -> Any:
    config = configured(folder, *overrides)
    made = get_trainer_cls(config.trainer.v1.trainer_mode)(config)
    made.actor_rollout_wg = Workers(ranks, signs)
    made.tokenizer = SimpleNamespace(eos_token_id=1)
    made.train_dataloader = StatefulDataLoader(list(range(8)), batch_size=2)
    made._load_checkpoint()
    return made


def step(of: Any, marked: bool = False) -> dict[str, np.ndarray]:
    """Does verl's step up to the advantages, and returns what the queue then holds of the batch,
    padded, rows in the order of their keys. If `marked`, verl's padding rows claim to have a
    sampled token."""
    of.global_steps += 1
    metrics: dict[str, Any] = {}
    batch = put(of.global_steps)
    batch.extra_info["temperature"] = 1.0
    batch = of._balance_batch(batch, metrics=metrics)
    padding = [k for k, t in zip(batch.keys, batch.tags, strict=True) if t.get("is_padding", False)]
    assert len(padding) == 9  # 15 rows become 24
    if marked:
        masks = list_of_dict_to_tensordict([{"response_mask": torch.ones(1).long()}] * 9)
        tq.kv_batch_put(keys=padding, partition_id=batch.partition_id, fields=masks)
    batch = of._compute_old_log_prob(batch, metrics=metrics)
    batch = of._compute_advantage(batch, metrics=metrics)
    names = ["old_log_probs", "entropy", "advantages", "response_mask"]
    data = tq.kv_batch_get(
        keys=batch.keys, partition_id=batch.partition_id, select_fields=[*names, "returns"]
    )
    columns = {name: data[name] for name in (*names, "returns")}
    found = getattr(of, "stare_selected", None)
    if found is not None:
        offsets = data["response_mask"].offsets()
        for name in ("codes", "weights"):
            columns[name] = torch.nested.nested_tensor_from_jagged(getattr(found, name), offsets)
    order = sorted(range(len(batch.keys)), key=batch.keys.__getitem__)
    real = [row for row in order if not batch.tags[row].get("is_padding", False)]
    tq.kv_clear(keys=batch.keys, partition_id=batch.partition_id)
    padded = {n: v.to_padded_tensor(0, (len(order), 16)).numpy() for n, v in columns.items()}
    reported = sorted(name for name in metrics if "entropy" in name or name.startswith("stare"))
    mean = {"mean": np.array(metrics.get("entropy/mean", np.nan)), "metrics": np.array(reported)}
    return {**{n: v[real] for n, v in padded.items()}, **mean}


def write(folder: Path, name: str, of: Any, updates: list[dict[str, np.ndarray]]) -> None:
    for number, update in enumerate(updates):
        np.savez(folder / f"{name}-{number}.npz", **update)
    if hasattr(of, "selector"):
        state = json.dumps(of.selector.state_dict())
        (folder / f"{name}.json").write_text(state)


def select(folder: Path) -> None:
    """Passes the same two batches through plain verl, through STARE on two and on four ranks and
    with padding that claims tokens, and through both with tokens that verl's rollout correction
    rejects."""
    rejecting = [
        "algorithm.rollout_correction.rollout_rs=token_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=0.4_2.5",
    ]
    cases: dict[str, tuple[list[str], int]] = {
        "plain": ([], 2),
        "two": (stare(), 2),
        "four": (stare(), 4),
        "marked": (stare(), 2),
        "plain_rejecting": (rejecting, 2),
        "rejecting": ([*stare(), *rejecting], 2),
        "by_session": (stare(gate="sample", entropy_target=0.5), 2),
    }
    modes = {}
    for mode in ("sync", "colocate_async", "separate_async"):
        mine = [*stare(), f"trainer.v1.trainer_mode=stare_{mode}"]
        # as verl asks of the trainer with rollout on other GPUs
        mine += [
            "actor_rollout_ref.rollout.nnodes=1",
            "actor_rollout_ref.rollout.n_gpus_per_node=1",
        ]
        mine += ["actor_rollout_ref.rollout.checkpoint_engine.backend=nccl"]
        mine += ["trainer.v1.separate_async.parameter_sync_step=1"]
        config = configured(folder / "none", *mine)
        made = get_trainer_cls(config.trainer.v1.trainer_mode)(config)
        modes[mode] = [made.trainer_mode, isinstance(made, get_trainer_cls(mode))]
    (folder / "modes.json").write_text(json.dumps(modes))
    for name, (overrides, ranks) in cases.items():
        made = trainer(folder / "none", *overrides, ranks=ranks)
        write(folder, name, made, [step(made, marked=name == "marked") for _ in range(2)])


def resume(folder: Path) -> None:
    """Does three steps and saves after each; then takes up the second in a new trainer."""
    whole = trainer(folder / "run", *stare())
    updates = []
    for _ in range(3):
        updates.append(step(whole))
        if whole.global_steps == 2:
            whole._save_checkpoint()
    write(folder, "whole", whole, updates)
    resumed = trainer(folder / "run", *stare())
    assert resumed.global_steps == 2
    write(folder, "resumed", resumed, [step(resumed)])
    path = folder / "run" / "global_step_2"
    named = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}"]
    again = trainer(folder / "other", *stare(), *named)
    write(folder, "named", again, [step(again)])


def refuse(folder: Path) -> None:
    """Writes the message of every refusal."""
    lost = folder / "lost"
    whole = trainer(lost, *stare())
    step(whole)
    whole._save_checkpoint()
    changed = json.loads((lost / "global_step_1" / "stare_select.json").read_text())

    def without_state(*overrides: str) -> None:
        (lost / "global_step_1" / "stare_select.json").unlink(missing_ok=True)
        trainer(lost, *stare(), *overrides)

    def started(*overrides: str, **more: Any) -> Any:
        return lambda: trainer(folder / "none", *stare(**more), *overrides)

    loss = "actor_rollout_ref.actor.policy_loss.loss_mode"
    cases = {
        "share": lambda: trainer(lost, *stare(share=0.3)),
        "state": without_state,
        "bypass": started("algorithm.rollout_correction.bypass_mode=True"),
        "estimator": started("algorithm.adv_estimator=rloo"),
        "loss": started(f"{loss}=gspo"),
        "stapo": lambda: trainer(
            folder, "trainer.v1.trainer_mode=stare_sync", "+stare.method=stapo"
        ),
        "setting": started(clip_high=0.28),
        "entropies": lambda: step(trainer(folder / "none", *stare(), entropy=-1)),
        "log_probs": lambda: step(trainer(folder / "none", *stare(), log_probs=1)),
        "probe": lambda: RenamedStare(configured(folder, *stare())),
        "fresh": lambda: without_state("+stare.fresh_state=true"),
        "squared": squared(started()),
        "trusted": squared(started(trust_upstream=True)),
        "vanilla": started(f"{loss}=vanilla"),
        "cispo": started(f"{loss}=cispo"),
        "gpg": started(f"{loss}=gpg"),
    }
    found = {name: _message(call) for name, call in cases.items()}
    assert changed["updates"] == 1
    (folder / "refusals.json").write_text(json.dumps(found))


def dump(folder: Path) -> None:
    """Writes verl's own dump of two steps."""
    for number in (1, 2):
        uids = [f"prompt{at}_{session}_0" for at in range(2) for session in range(2)]
        adapter.PPOTrainer._write_generations(
            inputs=["1+1=", "1+1=", "12-2=", "12-2="],
            outputs=["2", "3", "10", "ten"],
            gts=["2", "2", "10", "10"],
            scores=[1.0, 0.0, 1.0, 0.0],
            reward_extra_infos_dict={"uid": uids},
            dump_path=str(folder),
            global_steps=number,
        )


class Renamed(adapter.PPOTrainerSync):
    """An upstream with another parameter."""

    def _compute_advantage(self, data: Any, metrics: Any) -> None:
        raise NotImplementedError


class RenamedStare(adapter.StareMixin, Renamed):
    """The adapter over it."""


def squared(call: Any) -> Any:
    """An upstream whose loss is not linear in the advantages."""

    def within() -> None:
        given = adapter.get_policy_loss_fn

        def loss(name: str) -> Any:
            return lambda **inputs: (given(name)(**inputs)[0] ** 2, {})

        adapter.get_policy_loss_fn = loss
        try:
            call()
        finally:
            adapter.get_policy_loss_fn = given

    return within


def _message(call: Any) -> str | None:
    try:
        call()
    except UserError as error:
        return str(error)
    return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "dump":
        sys.exit(dump(Path(sys.argv[2])))
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    backend = {"SimpleStorage": {"num_data_storage_units": 2, "total_storage_size": 1000}}
    tq.init(OmegaConf.create({"backend": backend}))
    try:
        {"select": select, "resume": resume, "refuse": refuse}[sys.argv[1]](Path(sys.argv[2]))
    finally:
        tq.close()
        ray.shutdown()
