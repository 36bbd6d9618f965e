"""Makes the starting model of a task that ships: a tiny Qwen that solves its problems some of the
time.

Random weights and a tokenizer of the task's own words are written as a Hugging Face folder, loaded
through this project's Megatron path, trained there on demonstrations with a supervised loss, and
exported again. Some demonstrations are deliberately bad, so that reinforcement learning has
something left to do: sums with a slip, or guesses and searches that are given up. The same seed
gives the same model on the same machine.

    python tools/make_tiny_model.py assets/tiny-adder                  # configs/quickstart.yaml
    python tools/make_tiny_model.py assets/tiny-searcher --task signs  # configs/longchain.yaml
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Megatron's fused functions would be compiled, for nothing here
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from megatron_stare.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from megatron_stare.data import arithmetic, signs
from megatron_stare.data.generated import Problem
from megatron_stare.data.streams import Split
from megatron_stare.megatron.backend import layout as parallel_layout
from megatron_stare.megatron.backend.cpu_backend import backend, device
from megatron_stare.megatron.batching.microbatch import MicroBatch, RankBatch
from megatron_stare.megatron.batching.sequence_layout import WholeSequences
from megatron_stare.megatron.export.export import export_hf
from megatron_stare.megatron.model.head import Head
from megatron_stare.megatron.model.model import build_policy, load_hf
from megatron_stare.megatron.optimizer.optimizer import build_optimizer
from megatron_stare.megatron.step.passes import accumulate_gradients
from megatron_stare.models import read_shape
from megatron_stare.ops.plan import PlanRules, plan_micro_batches
from megatron_stare.records.batch import Prompt
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.records.trajectory import sampled_trajectory
from megatron_stare.weights.files.hf_folder import HfFolder, write_folder

PAD, EOS = "<pad>", "<eos>"


@dataclass(frozen=True)
class Task:
    """Task that a model is made for.

    words: of prompts and demonstrations, one token each.
    apart: spaces part them, else they are characters.
    """

    draw: Callable[[int, Split, int], Problem]
    demonstrate: Callable[[Any, int, argparse.Namespace], str]
    words: Sequence[str]
    apart: bool
    steps: int
    hidden: int


TASKS = {
    "arithmetic": Task(
        draw=arithmetic.draw_problem,
        demonstrate=lambda problem, i, args: arithmetic.demonstration(problem, i, args.wrong_rate),
        words=arithmetic.ALPHABET,
        apart=False,
        steps=1500,
        hidden=96,
    ),
    "signs": Task(
        draw=signs.draw_problem,
        demonstrate=lambda problem, i, args: signs.demonstration(
            problem, i, args.short_rate, args.give_up_rate
        ),
        words=signs.VOCABULARY,
        apart=True,
        steps=3000,
        hidden=64,
    ),
}


def main() -> None:
    args = parse()
    task = TASKS[args.task]
    torch.manual_seed(args.seed)
    with tempfile.TemporaryDirectory() as scratch:
        start = Path(scratch) / "random"
        tokenizer = make_tokenizer(task)
        write_random_model(start, tokenizer, args)
        tensors, loss = supervise(start, tokenizer, args, f"file://{scratch}/ranks")
        write_folder(args.out, tensors, companions_from=start)
    print(
        f"wrote {args.out}: {sum(t.numel() for t in tensors.values()):,} parameters, last loss"
        f" {loss:.4f} nats/token"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Makes the starting model of a task that ships.")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--task", choices=TASKS, default="arithmetic")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, help="supervised steps; default: the task's")
    parser.add_argument("--batch", type=int, default=64, help="demonstrations a step")
    parser.add_argument(
        "--wrong-rate", type=float, default=0.25, help="arithmetic: demonstrations with a wrong sum"
    )
    parser.add_argument(
        "--short-rate", type=float, default=0.6, help="signs: demonstrations that guess"
    )
    parser.add_argument(
        "--give-up-rate", type=float, default=0.2, help="signs: misses after which a search ends"
    )
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--hidden", type=int, help="default: the task's")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    args.steps = args.steps or TASKS[args.task].steps
    args.hidden = args.hidden or TASKS[args.task].hidden
    return args


def make_tokenizer(task: Task) -> PreTrainedTokenizerFast:
    """One token a word of the task, padding and end of sequence."""
    words = {word: i for i, word in enumerate([PAD, EOS, *task.words])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=PAD))
    if task.apart:
        # without a decoder, spaces join what is decoded
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
        tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)


def write_random_model(
    path: Path, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace
) -> None:
    sizes = {
        # like published models, more rows than the tokenizer has tokens
        "vocab_size": len(tokenizer) // 8 * 8 + 8,
        "hidden_size": args.hidden,
        "intermediate_size": args.hidden * 8 // 3,
        "num_hidden_layers": args.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if TASKS[
        args.task
        # transformers reads any qwen2's tokenizer as Qwen2's own, which cuts numbers into digits
    ].apart:
        model: Any = Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=args.hidden // 4))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**sizes))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def supervise(
    start: Path, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace, init_method: str
) -> tuple[dict[str, Tensor], float]:
    """The trained model's tensors by Hugging Face name, and the last loss in nats a token."""
    torch.set_num_threads(args.threads)
    parallel, shape = ParallelConfig(), read_shape(start)
    layout = parallel_layout.join(parallel, 0, init_method, args.seed, timeout_s=60)
    model = build_policy(
        shape, ModelConfig(path=str(start)), parallel, layout, distributed_optimizer=False
    )
    load_hf(model, HfFolder(start), shape, layout)
    optimizer_config = OptimizerConfig(
        lr=args.lr,
        min_lr=args.lr / 20,
        warmup_steps=50,
        schedule="cosine",
        beta2=0.98,
        weight_decay=0.01,
    )
    optimizer, scheduler = build_optimizer(model, optimizer_config, "float32", args.steps)
    head = Head(shape.vocab_size, 1.0, layout)
    loss = float("nan")
    for step in range(args.steps):
        batch = demonstrations(step, tokenizer, args)
        everything = PlanRules(data_parallel=1, budget=int(batch.lengths.sum()) * 2, packed=False)
        plan = plan_micro_batches(batch.lengths.tolist(), everything)
        tokens = int(batch.response_lengths.sum())

        def mean_loss(
            log_prob: Tensor, entropy: Tensor, micro: MicroBatch, n: int = tokens
        ) -> tuple[Tensor, dict[str, Tensor]]:
            return -log_prob.sum() / n, {"log_prob": log_prob.detach()}

        optimizer.zero_grad()
        here = RankBatch(batch.share(plan.branches_of(0)), plan, 0, device(), WholeSequences())
        logged = accumulate_gradients(model, here, head, mean_loss)
        with backend():
            scheduler.step(1)
            optimizer.step()
        loss = float(-logged["log_prob"].mean())
        if step % 100 == 0:
            print(f"step {step:5d}/{args.steps}  loss {loss:.4f} nats/token", flush=True)
    tensors = export_hf(model, shape, layout)
    parallel_layout.leave()
    return tensors, loss


def demonstrations(
    step: int, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace
) -> RolloutBatch:
    """A batch of demonstrations of the training split."""
    task, samples = TASKS[args.task], []
    for i in range(step * args.batch, (step + 1) * args.batch):
        problem = task.draw(args.seed, "train", i)
        response = [
            *tokenizer(task.demonstrate(problem, i, args)).input_ids,
            tokenizer.eos_token_id,
        ]
        prompt = Prompt(
            i, str(i), problem.text, problem.answer, tuple(tokenizer(problem.text).input_ids)
        )
        samples.append(sampled_trajectory(prompt, 0, response, [0.0] * len(response)))
    return RolloutBatch.from_trajectories(samples)


if __name__ == "__main__":
    main()
