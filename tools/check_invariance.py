"""Checks that a layout trains as one process does: one step on a fixed batch, in the layout and on one rank.

    python tools/check_invariance.py --world 4 --tp 2 --pp 2 --micro-batch-tokens 64 --algorithm stare

Exits 1 unless
- given equal log-probs and entropies, the selected tokens are identical bit for bit;
- end to end they are identical, but for tokens within 1e-5 of a threshold, which are listed;
- loss, gradient norm and every tensor's gradient agree within 1e-5 relative (float32);
- the weights after a step of SGD agree within 1e-6.
Exits 2 for a layout that does not exist or is not supported.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from megatron_stare.batch import Prompt, RolloutBatch, Sample
from megatron_stare.config.schema import Config
from megatron_stare.errors import UserError
from megatron_stare.megatron.export import export_hf
from megatron_stare.megatron.trainer import Trainer, main_grad
from megatron_stare.methods import build_method
from megatron_stare.ops.plan import PlanRules, plan_micro_batches
from megatron_stare.preflight import check
from megatron_stare.statistics import Threshold, TopK

NEAR, RELATIVE, WEIGHTS = 1e-5, 1e-5, 1e-6
VOCAB, LENGTH = 61, 24


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        try:
            alone, cut = config_of(args, folder, alone=True), config_of(args, folder, alone=False)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        # the reference is always the project's own trainer
        (whole,) = run(alone, "megatron_stare.megatron.trainer.Trainer", args, None)
        parts = run(cut, args.trainer, args, whole["scores"])
        faults = compare(whole, merge(parts))
    for fault in faults:
        print("FAIL", fault)
    print("FAILED" if faults else "ok", " ".join(argv if argv is not None else sys.argv[1:]))
    return int(bool(faults))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, help="ranks; default tp x pp x dp")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument("--vpp", type=int, default=1, help="model chunks a stage")
    parser.add_argument("--cp", type=int, default=1, help="context-parallel ranks")
    parser.add_argument("--sp", action="store_true", help="sequence parallelism")
    parser.add_argument("--padded", action="store_true", help="padded instead of packed micro-batches")
    parser.add_argument("--micro-batch-tokens", type=int, default=64)
    parser.add_argument("--algorithm", default="stare", help="method, with its default settings")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of the method")
    parser.add_argument("--seed", type=int, default=1, help="of the batch")
    parser.add_argument("--trainer", default="megatron_stare.megatron.trainer.Trainer", help="class that is checked")
    return parser.parse_args(argv)


def write_model(folder: Path) -> None:
    """A random Qwen2 whose logits spread widely enough for thresholds to mean something."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)


def config_of(args: argparse.Namespace, folder: str, *, alone: bool) -> Config:
    """The run's configuration; raises UserError where the layout cannot be."""
    import yaml

    fixed = args.tp * args.pp * args.cp
    world = args.world or fixed
    if world % fixed:
        raise UserError(f"{world} ranks are not a multiple of tp x pp x cp = {fixed}", where="--world")
    settings = dict(each.split("=", 1) for each in args.set)
    tree: dict[str, Any] = {
        "model": {"path": folder},
        "batch": {"micro_batch_tokens": 10_000 if alone else args.micro_batch_tokens, "packed": not args.padded},
        "rollout": {"max_prompt_tokens": 8, "max_new_tokens": LENGTH},
        "optimizer": {"name": "sgd", "lr": 1.0, "weight_decay": 0.0, "clip_grad": 1e9},
        "algorithm": {"name": args.algorithm, **{key: yaml.safe_load(value) for key, value in settings.items()}},
    }
    if not alone:
        tree["parallel"] = {
            "tensor": args.tp,
            "pipeline": args.pp,
            "virtual_pipeline": args.vpp,
            "context": args.cp,
            "sequence": args.sp,
            "data": world // fixed,
        }
    return check(Config.model_validate(tree))


def fixed_batch(seed: int) -> RolloutBatch:
    """Four groups of four responses of many lengths; one group is all right, and one answer was not verified."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    samples = []
    for i in range(16):
        prompt = Prompt(i // 4, str(i // 4), "", "", tuple(draw(2, VOCAB) for _ in range(3 + i // 4)))
        ids = [draw(2, VOCAB) for _ in range(draw(2, LENGTH))]
        sample = Sample(prompt, i % 4, ids, [-draw(1, 400) / 100 for _ in ids], [0] * len(ids), "stop")
        sample.reward, sample.reward_status = float(i // 4 == 3 or i % 3 == 0), "crash" if i == 5 else "ok"
        samples.append(sample)
    return RolloutBatch.from_samples(samples, step=1)


def run(config: Config, trainer: str, args: argparse.Namespace, scores: tuple[Tensor, ...] | None) -> list[dict]:
    """Every rank's findings."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, context.Pool(config.parallel.world_size) as pool:
        jobs = [
            (config, trainer, rank, f"file://{folder}/ranks", args.seed, scores)
            for rank in range(config.parallel.world_size)
        ]
        return pool.starmap_async(one_rank, jobs, chunksize=1).get(timeout=300)


def one_rank(
    config: Config, trainer: str, rank: int, init: str, seed: int, scores: tuple[Tensor, ...] | None
) -> dict[str, Any]:
    """One step on this rank.

    Args:
        scores: log-probs and entropies [M] of the whole batch in canonical order, of the one-process run.
    """
    module, _, name = trainer.rpartition(".")
    worker: Trainer = getattr(importlib.import_module(module), name)(config, rank, init)
    method, batch = build_method(config.algorithm), fixed_batch(seed)
    batch.advantages = method.response_advantages(batch)
    parallel = config.parallel
    rules = PlanRules(
        data_parallel=parallel.data,
        budget=config.batch.micro_batch_tokens,
        packed=config.batch.packed,
        multiple=parallel.pipeline if parallel.virtual_pipeline > 1 else 1,
        hidden=worker.shape.hidden,
    )
    worker.score(batch, plan_micro_batches(batch.lengths.tolist(), rules))
    found: dict[str, Any] = {"given": {}, "selected": {}, "near": {}, "scores": None}
    measured = worker._measured
    state = method.initial_state()
    if measured is not None:
        own = measured.tokens
        if scores is not None:
            log_prob, entropy = (score[own.index] for score in scores)
            measured.tokens = replace(own, log_prob=log_prob, old_log_prob=log_prob, entropy=entropy)
            worker.measure(state)
            found["given"], _ = selections(worker)
            worker._measured = type(measured)(own)
        else:
            order = own.index.argsort()
            found["scores"] = (own.old_log_prob[order], own.entropy[order])
    worker.measure(state)
    if worker._measured is not None:
        found["selected"], found["near"] = selections(worker)
        found["given"] = found["given"] or found["selected"]
    result = worker.update()
    found["gradients"] = export_hf(worker.model, worker.shape, worker.layout, of=main_grad)
    found["weights"] = worker.export()
    found["metrics"] = result[0] if result else None
    worker.close()
    return found


def selections(worker: Trainer) -> tuple[dict[str, set[int]], dict[str, set[int]]]:
    """By request: the canonical numbers of this rank's selected tokens, and of those near the threshold."""
    assert worker._measured is not None
    tokens, statistics = worker._measured.tokens, worker._measured.statistics
    selected, near = {}, {}
    for name, request in worker.method.requests(tokens, statistics).items():
        threshold = statistics.get(name)
        if isinstance(request, TopK) and isinstance(threshold, Threshold):
            chosen = threshold.select(request.key, request.index, request.mask)
            close = request.mask & ((request.key - threshold.value).abs() <= NEAR)
            selected[name] = set(request.index[chosen].tolist())
            near[name] = set(request.index[close].tolist())
    return selected, near


def merge(parts: list[dict]) -> dict[str, Any]:
    """What all ranks found, as if one had."""
    whole: dict[str, Any] = {"given": {}, "selected": {}, "near": {}, "gradients": {}, "weights": {}, "metrics": None}
    for part in parts:
        for key in ("given", "selected", "near"):
            for name, tokens in part[key].items():
                whole[key][name] = whole[key].get(name, set()) | tokens
        whole["gradients"] |= part["gradients"]
        whole["weights"] |= part["weights"]
        whole["metrics"] = part["metrics"] or whole["metrics"]
    return whole


def compare(whole: dict[str, Any], cut: dict[str, Any]) -> list[str]:
    """What differs more than it may; prints the largest differences and the tokens near a threshold."""
    faults = []
    for name, wanted in whole["selected"].items():
        if cut["given"].get(name, set()) != wanted:
            faults.append(f"{name}: given equal scores, other tokens are selected")
        excused = whole["near"].get(name, set()) | cut["near"].get(name, set())
        strangers = cut["selected"].get(name, set()) ^ wanted
        if strangers - excused:
            faults.append(f"{name}: selected otherwise: tokens {sorted(strangers - excused)}")
        if strangers & excused:
            print(f"{name}: within {NEAR} of the threshold and selected otherwise: {sorted(strangers & excused)}")
    for key in ("loss/policy", "optimizer/grad_norm"):
        want, got = whole["metrics"][key], cut["metrics"][key]
        # a loss of weighted advantages is a small difference of large sums: relative to the gradient it comes with
        scale = max(abs(want), whole["metrics"]["optimizer/grad_norm"])
        print(f"{key}: {got:.8g} against {want:.8g}")
        if not abs(got - want) <= RELATIVE * scale:
            faults.append(f"{key}: {got} against {want}")
    for key, limit in (("gradients", RELATIVE), ("weights", WEIGHTS)):
        if whole[key].keys() != cut[key].keys():
            faults.append(f"{key}: other tensors: {sorted(whole[key].keys() ^ cut[key].keys())}")
            continue
        relative = key == "gradients"
        largest = max(float(g.abs().max()) for g in whole[key].values())
        worst = ("", 0.0)
        for name, want in whole[key].items():
            scale = max(float(want.abs().max()), 1e-3 * largest) if relative else 1.0
            difference = float((cut[key][name] - want).abs().max()) / scale
            worst = max(worst, (name, difference), key=lambda pair: pair[1])
            if not difference <= limit:
                faults.append(f"{key} of {name}: {difference:.2e} above {limit:.0e}")
        print(f"{key}: largest difference {worst[1]:.2e} ({worst[0]})")
    return faults


if __name__ == "__main__":
    sys.exit(main())
