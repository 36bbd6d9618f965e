"""How far log-probs move when keys and values, or weights, are stored in 8 bits: simulated in
transformers.

    python benchmarks/eight_bits.py

The trained models of assets/ sample responses in float32. Then their log-probs of these responses
are computed again, with keys and values (after RoPE) rounded to each dtype and back, as SGLang's
cache stores them without scaling factors. `and_query` rounds the queries, too, as SGLang's
FlashAttention backend does. `weights` rounds the matrices of layers as servers with
`sglang.quantization: fp8` store them, and `weights_and_activations` also the matrices' inputs in
groups of 128 columns, as SGLang's kernels do; `computed_in_bfloat16` rounds nothing to 8 bits. In
these small models a block is a whole matrix or much of it. The limits that docs/diagnostics.md
derives from these figures are in megatron_stare/rollout/agreement/limits.py; figures of real
servers are in results/agreement_kv_cache.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from machine import machine
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from megatron_stare.rollout.engines.sglang.fp8_weights import BLOCK, DTYPE, LARGEST, quantized

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results/eight_bits.json"
DTYPES = {
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
PROMPTS = {
    "tiny-adder": [f"{a}+{b}+{a * b % 97}=" for a in range(3, 99, 7) for b in range(2, 99, 9)],
    "tiny-chat": ["How many days has a week?", "Add 17 and 25.", "Write a short note on rivers."],
    "tiny-searcher": ["Who lives in the red house?", "Find the key of the door."],
}
TOKENS = 64  # largest response
SAMPLES = 512  # responses of each model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    found: dict[str, Any] = {
        "machine": machine(),
        "unit": "nats, of the absolute differences of sampled tokens' log-probs from float32's",
    }
    for name in PROMPTS:
        found[name] = measure(name)
        print(name, json.dumps(found[name], indent=1), flush=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")


@torch.inference_mode()
def measure(name: str) -> dict[str, Any]:
    """Figures of one model, by what is rounded."""
    torch.manual_seed(1)
    folder = str(ROOT / "assets" / name)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = (PROMPTS[name] * SAMPLES)[:SAMPLES]
    if tokenizer.chat_template:
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
            for prompt in prompts
        ]
    given = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    tokens = model.generate(**given, do_sample=True, top_k=0, top_p=1.0, max_new_tokens=TOKENS)
    start = given.input_ids.shape[1]
    mask = torch.cat([given.attention_mask, torch.ones_like(tokens[:, start:])], dim=1)
    ended = (tokens[:, start:] == tokenizer.eos_token_id).cumsum(1)
    sampled = (ended == 0) | ((ended == 1) & (tokens[:, start:] == tokenizer.eos_token_id))
    exact = log_probs(model, tokens, mask, start)[sampled]
    figures: dict[str, Any] = {"tokens": int(sampled.sum()), "entropy": float(-exact.mean())}
    for dtype, stored in DTYPES.items():
        for query in (False, True):
            AttentionInterface.register("rounded", rounded(stored, query))
            AttentionMaskInterface.register("rounded", sdpa_mask)
            model.set_attn_implementation("rounded")
            found = log_probs(model, tokens, mask, start)[sampled]
            figures[dtype + "_and_query" * query] = moved(found, exact)
    model.set_attn_implementation("sdpa")
    for activations in (False, True):
        in_blocks(model, activations)
        found = log_probs(model, tokens, mask, start)[sampled]
        figures["weights" + "_and_activations" * activations] = moved(found, exact)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    found = log_probs(model, tokens, mask, start)[sampled].float()
    figures["computed_in_bfloat16"] = moved(found, exact)
    return figures


def moved(found: Tensor, exact: Tensor) -> dict[str, float]:
    apart = (found - exact).abs()
    shares = {
        f"p{share:g}".replace(".", ""): apart.quantile(share / 100) for share in (50, 90, 99, 99.9)
    }
    every = {"mean": apart.mean(), **shares, "max": apart.max()}
    return {name: float(f"{value:.3g}") for name, value in every.items()}


def in_blocks(model: nn.Module, activations: bool) -> None:
    """Rounds the matrices of the model's layers in blocks, and their inputs from now on."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            rows, columns = module.weight.shape
            whole = nn.functional.pad(module.weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
            elements, scales = quantized(whole)
            spread = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            module.weight.copy_((elements.float() * spread)[:rows, :columns])
            if activations:
                module.register_forward_pre_hook(lambda _, given: (in_groups(given[0]),))


def in_groups(x: Tensor) -> Tensor:
    padded = nn.functional.pad(x, (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    scales = padded.abs().amax(-1, keepdim=True).clamp_min(1e-10) / LARGEST
    held = (padded / scales).to(DTYPE).to(x.dtype) * scales
    return held.flatten(-2)[..., : x.shape[-1]]


def rounded(dtype: torch.dtype, query_too: bool) -> Any:
    """Attention over keys and values that were stored in `dtype`."""

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **named: Any
    ) -> Any:
        key, value = (each.to(dtype).to(each.dtype) for each in (key, value))
        if query_too:
            query = query.to(dtype).to(query.dtype)
        return sdpa_attention_forward(module, query, key, value, *args, **named)

    return attend


def log_probs(model: Any, tokens: Tensor, mask: Tensor, start: int) -> Tensor:
    """Log-probs of the tokens from `start` on, [responses, tokens]."""
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    found = []
    for part, held, where in zip(
        *(each.split(256) for each in (tokens, mask, positions)), strict=True
    ):
        logits = model(part, attention_mask=held, position_ids=where).logits[:, start - 1 : -1]
        chosen = part[:, start:, None]
        found.append(logits.log_softmax(-1).gather(-1, chosen).squeeze(-1))
    return torch.cat(found)


if __name__ == "__main__":
    main()
