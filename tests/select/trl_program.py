"""Trains the tiny adder in real TRL on fixed completions, and writes what every rank selected.

test_select_trl.py runs it in TRL's environment, by itself or under torchrun:
`trl_program.py {train,cut,dropped,resume,refuse,dump} FOLDER`. With tools/stare_select/trl.patch in
trl, `patched` and `patched_resume` train TRL's own STARETrainer.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from megatron_stare.errors import UserError
from megatron_stare.select.trl import StareGRPOTrainer, probe

MODEL = Path(__file__).resolve().parents[2] / "assets" / "tiny-adder"
RANKS, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
STARE = {"variant": "C2", "entropy_target": 2.0, "adaptive": True, "share": 0.2}
WIDTH = 12


def fixed(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
    """Returns completions that depend on the prompt alone. Pairs are equal, so log-probs tie; the
    middle of each stands for a tool's answer."""
    tokenizer = trainer.processing_class
    output: dict[str, list] = {name: [] for name in ("prompt_ids", "completion_ids", "env_mask")}
    seen: dict[str, int] = {}
    for prompt in prompts:
        number = seen[prompt] = seen.get(prompt, -1) + 1
        source = np.random.default_rng(zlib.crc32(f"{prompt}{number // 2}".encode()))
        width = WIDTH - zlib.crc32(prompt.encode()) % 3  # ranks have batches of several widths
        length = width if number < 2 else int(source.integers(4, width + 1))
        output["prompt_ids"].append(tokenizer(prompt)["input_ids"])
        output["completion_ids"].append(source.integers(2, 15, length).tolist())
        output["env_mask"].append([int(not 3 <= at < 6) for at in range(length)])
    zeros = [[0.0] * len(each) for each in output["completion_ids"]]
    return {**output, "logprobs": zeros}


def reward(completion_ids: list[list[int]], **_: object) -> list[float]:
    return [float(sum(each) % 4) for each in completion_ids]


class Recording(StareGRPOTrainer):
    """Keeps every update's inputs and answers."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        self.updates = getattr(self, "updates", [])
        update, plain = self.selector.update, {}

        def recorded(log_probs: Any, entropies: Any, advantages: Any, mask: Any) -> Any:
            plain.update(log_probs=log_probs, entropies=entropies, advantages=advantages, mask=mask)
            return update(log_probs, entropies, advantages, mask)

        self.selector.update = recorded  # type: ignore[method-assign]
        try:
            batch = super()._generate_and_score_completions(inputs)
        finally:
            del self.selector.update
        found = self.stare_selected
        assert torch.equal(batch["advantages"], found.advantages)
        answers = {"codes": found.codes, "weights": found.weights}
        self.updates.append({n: v.clone().numpy() for n, v in {**plain, **answers}.items()})
        self.states = [*getattr(self, "states", []), self.selector.state_dict()]
        return batch


def config(folder: Path, of: type[GRPOConfig] = GRPOConfig, **more: Any) -> Any:
    settings: dict[str, Any] = {
        "output_dir": str(folder / "output"),
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2 // RANKS,
        "num_generations": 4,
        "max_completion_length": WIDTH,
        "max_steps": 4,
        "learning_rate": 0.0,
        "loss_type": "dapo",
        "save_steps": 2,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "seed": 3,
    }
    return of(**settings | more)


def trainer(of: type[GRPOTrainer], args: GRPOConfig, **more: Any) -> Any:
    prompts = [{"prompt": f"{10 + each}+{90 - each}+55="} for each in range(64)]
    return of(
        model=AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(MODEL),
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_list(prompts),
        **{"rollout_func": fixed, **more},
    )


def train(folder: Path, **more: Any) -> None:
    running = trainer(Recording, config(folder, **more), stare=STARE)
    running.train()
    _write(folder, "", running)


def dump(folder: Path) -> None:
    """Trains two steps with TRL's own log of completions."""
    args = config(folder, max_steps=2, log_completions=True)
    trainer(StareGRPOTrainer, args, stare=STARE).train()


def cut(folder: Path) -> None:
    """Trains where the first responses of a rank, or of the last of two ranks, were cut: TRL gives
    them no loss."""

    def ending(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        output = fixed(prompts, trainer)
        for number, ids in enumerate(output["completion_ids"]):
            if number % 4 >= 2 or RANK < RANKS - 1:
                ids[-1] = trainer.processing_class.eos_token_id
        return output

    args = config(folder, max_steps=1, mask_truncated_completions=True)
    running = trainer(Recording, args, stare=STARE, rollout_func=ending)
    running.train()
    _write(folder, "", running)


def dropped(folder: Path) -> None:
    """Trains where TRL's correction for an engine's log-probs drops the first responses."""

    class Dropping(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            batch = super()._generate_and_score_completions(inputs)
            ratio = torch.ones(len(batch["advantages"]), 1)
            ratio[:2] = 0.0
            self.use_vllm = True  # read by the loss, which then takes the ratio
            return batch | {"importance_sampling_ratio": ratio}

    class Both(Recording, Dropping):
        """The adapter over it."""

    running = trainer(Both, config(folder, max_steps=1), stare=STARE)
    running.train()
    _write(folder, "", running)


def resume(folder: Path) -> None:
    """Trains with a learning rate, then again from the checkpoint of step 2."""
    whole = trainer(Recording, config(folder, learning_rate=1e-3), stare=STARE)
    whole.train()
    _write(folder, "whole-", whole)
    resumed = trainer(Recording, config(folder, learning_rate=1e-3), stare=STARE)
    resumed.train(resume_from_checkpoint=str(folder / "output" / "checkpoint-2"))
    _write(folder, "resumed-", resumed)


def _write(folder: Path, name: str, running: Any) -> None:
    for number, update in enumerate(running.updates):
        np.savez(folder / f"{name}{number}-{RANK}.npz", **update)
    seconds = [each.get("stare/pass_seconds") for each in running.state.log_history]
    report = {"states": running.states, "pass_seconds": [s for s in seconds if s is not None]}
    (folder / f"{name}report-{RANK}.json").write_text(json.dumps(report))


def _patched(folder: Path, **more: Any) -> Any:
    """Returns TRL's own trainer of the patch, with the settings STARE. Keeps every update."""
    from trl.experimental.stare import STAREConfig, STARETrainer  # only a patched TRL has them

    class Kept(STARETrainer):
        def _get_stare_weights(self, log_probs: Any, entropies: Any, advantages: Any, mask: Any):
            weights = super()._get_stare_weights(log_probs, entropies, advantages, mask)
            given = {"log_probs": log_probs, "entropies": entropies, "weights": weights}
            given |= {"advantages": advantages, "mask": mask}
            update = {name: value.clone().numpy() for name, value in given.items()}
            self.updates = [*getattr(self, "updates", []), update]
            state = {"amplify": self.amplification, "attenuate": self.attenuation}
            self.states = [*getattr(self, "states", []), state]
            return weights

    stare = {
        "stare_variant": STARE["variant"],
        "entropy_target": STARE["entropy_target"],
        "use_adaptive_weights": STARE["adaptive"],
        "surprisal_fraction": STARE["share"],
    }
    return trainer(Kept, config(folder, STAREConfig, **stare | more))


def patched(folder: Path) -> None:
    running = _patched(folder)
    running.train()
    _write(folder, "", running)


def patched_resume(folder: Path) -> None:
    """Trains with a learning rate, then again from the checkpoint of step 2."""
    whole = _patched(folder, learning_rate=1e-3)
    whole.train()
    _write(folder, "whole-", whole)
    resumed = _patched(folder, learning_rate=1e-3)
    resumed.train(resume_from_checkpoint=str(folder / "output" / "checkpoint-2"))
    _write(folder, "resumed-", resumed)


class WholeSum(GRPOTrainer):
    """An upstream whose loss ignores which token an advantage belongs to."""

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        return super()._compute_loss(model, inputs) ** 2


class Renamed(GRPOTrainer):
    """An upstream with another parameter."""

    def _save_checkpoint(self, model: Any, attempt: Any) -> None:
        raise NotImplementedError


class RenamedStare(StareGRPOTrainer, Renamed):
    """The adapter over it."""


def refuse(folder: Path) -> None:
    """Writes the message of every refusal."""
    cases: dict[str, dict[str, Any]] = {
        "steps_per_generation": {"steps_per_generation": 4},
        "num_iterations": {"num_iterations": 2},
        "loss_type": {"loss_type": "sapo"},
        "importance_sampling_level": {"importance_sampling_level": "sequence"},
        "top_entropy_quantile": {"top_entropy_quantile": 0.2},
        "use_adaptive_entropy": {"use_adaptive_entropy": True},
        "off_policy_mask_threshold": {"off_policy_mask_threshold": 0.5},
    }
    found: dict[str, str | None] = {"probe": probe()}
    for name, more in cases.items():
        found[name] = _message(lambda more=more: trainer(StareGRPOTrainer, config(folder, **more)))
    stapo = {"stare": {"method": "stapo"}}
    found["stapo"] = _message(lambda: trainer(StareGRPOTrainer, config(folder), **stapo))
    found["renamed"] = _message(lambda: trainer(RenamedStare, config(folder)))

    class Changed(StareGRPOTrainer, WholeSum):
        pass

    found["changed"] = _message(lambda: trainer(Changed, config(folder)).train())
    brave = config(folder, max_steps=1)
    found["trusted"] = _message(lambda: trainer(Changed, brave, trust_upstream=True).train())
    (folder / "refusals.json").write_text(json.dumps(found))


def _message(call: Any) -> str | None:
    try:
        call()
    except UserError as error:
        return str(error)
    return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    programs = (train, cut, dropped, resume, refuse, dump, patched, patched_resume)
    {each.__name__: each for each in programs}[sys.argv[1]](Path(sys.argv[2]))
