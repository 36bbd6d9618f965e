"""Makes the quickstart's starting model: a tiny Qwen2 that adds three numbers, most of the time.

Random weights and a character tokenizer are written as a Hugging Face folder, loaded through this project's Megatron
path, trained there on worked additions with a supervised loss (some deliberately wrong, so that reinforcement learning
has something left to do), and exported again. The same seed gives the same model on the same machine.

    python tools/make_tiny_model.py assets/tiny-adder
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # Megatron's fused functions would be compiled, for nothing here

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from megatron_stare.batch import Prompt
from megatron_stare.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from megatron_stare.data.arithmetic import ALPHABET, demonstration, draw_problem
from megatron_stare.megatron import layout as parallel_layout
from megatron_stare.megatron.batching.microbatch import MicroBatch, RankBatch
from megatron_stare.megatron.batching.sequence_layout import WholeSequences
from megatron_stare.megatron.cpu_backend import backend, device
from megatron_stare.megatron.export import export_hf
from megatron_stare.megatron.head import Head
from megatron_stare.megatron.model import build_policy, load_hf
from megatron_stare.megatron.optimizer import build_optimizer
from megatron_stare.megatron.passes import accumulate_gradients
from megatron_stare.models import read_shape
from megatron_stare.ops.plan import PlanRules, plan_micro_batches
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.records.trajectory import sampled_trajectory
from megatron_stare.weights.hf_folder import HfFolder
from megatron_stare.weights.hf_shards import write_folder

PAD, EOS = "<pad>", "<eos>"


def main() -> None:
    args = parse()
    torch.manual_seed(args.seed)
    with tempfile.TemporaryDirectory() as scratch:
        start = Path(scratch) / "random"
        tokenizer = make_tokenizer()
        write_random_model(start, tokenizer, args)
        tensors, loss = supervise(start, tokenizer, args, f"file://{scratch}/ranks")
        write_folder(args.out, tensors, companions_from=start)
    print(f"wrote {args.out}: {sum(t.numel() for t in tensors.values()):,} parameters, last loss {loss:.4f} nats/token")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Makes the quickstart's starting model.")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1500, help="supervised steps")
    parser.add_argument("--batch", type=int, default=64, help="demonstrations a step")
    parser.add_argument("--wrong-rate", type=float, default=0.25, help="share of demonstrations with a wrong sum")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character of the task's alphabet, padding and end of sequence."""
    words = {word: i for i, word in enumerate([PAD, EOS, *ALPHABET])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)


def write_random_model(path: Path, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace) -> None:
    config = Qwen2Config(
        vocab_size=len(tokenizer) + 1,  # like published models, a few more rows than the tokenizer has tokens
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 8 // 3,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)


def supervise(
    start: Path, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace, init_method: str
) -> tuple[dict[str, Tensor], float]:
    """The trained model's tensors by Hugging Face name, and the last loss in nats a token."""
    torch.set_num_threads(args.threads)
    parallel, shape = ParallelConfig(), read_shape(start)
    layout = parallel_layout.join(parallel, 0, init_method, args.seed, timeout_s=60)
    model = build_policy(shape, ModelConfig(path=str(start)), parallel, layout, distributed_optimizer=False)
    load_hf(model, HfFolder(start), shape, layout)
    optimizer_config = OptimizerConfig(
        lr=args.lr, min_lr=args.lr / 20, warmup_steps=50, schedule="cosine", beta2=0.98, weight_decay=0.01
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
        here = RankBatch(batch.share(plan.samples_of(0)), plan, 0, device(), WholeSequences())
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


def demonstrations(step: int, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace) -> RolloutBatch:
    """A batch of worked additions of the training split."""
    samples = []
    for i in range(step * args.batch, (step + 1) * args.batch):
        problem = draw_problem(args.seed, "train", i)
        answer = demonstration(problem, seed=i, wrong_rate=args.wrong_rate)
        response = [*tokenizer(answer).input_ids, tokenizer.eos_token_id]
        prompt = Prompt(i, str(i), problem.text, problem.answer, tuple(tokenizer(problem.text).input_ids))
        samples.append(sampled_trajectory(prompt, 0, response, [0.0] * len(response)))
    return RolloutBatch.from_trajectories(samples)


if __name__ == "__main__":
    main()
