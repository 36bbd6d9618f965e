"""Makes what a rehearsal trains: a model with the recipe's architecture and heads at a thousandth
of its size, a tokenizer of bytes with a chat template, problems, and a reward that random responses
earn now and then.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from megatron_stare.config.schema import Config
from megatron_stare.process.shipped import SHIPPED

HEAD, LAYERS, PROBLEMS = 16, 2, 256
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# ChatML that knows tools
TEMPLATE = SHIPPED / "assets/tiny-chat/chat_template.jinja"
# a random policy answers nothing right, and a group whose rewards are equal teaches nothing
REWARD = '''"""Rewards about half of all responses, whatever they say."""


def verify(response: str, answer: str) -> float:
    return float(sum(response.encode()) % 2)
'''


def write_model(config: Config, folder: Path) -> int:
    """Writes a model of random weights with the attention heads of the recipe's model, so that it
    can be cut as the recipe cuts it. Returns its parameters."""
    name = Path(config.model.path).name.lower().removeprefix("deepseek-")
    found = AutoConfig.from_pretrained(SHIPPED / "assets/architectures" / name)
    tokenizer = byte_tokenizer()
    hidden = found.num_attention_heads * HEAD
    stages = config.parallel.pipeline * config.parallel.virtual_pipeline
    changed = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "head_dim": HEAD,
        "num_hidden_layers": max(LAYERS, stages),
        "vocab_size": len(tokenizer) // 8 * 8 + 8,
        "max_position_embeddings": 2048,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    kept = {key: value for key, value in found.to_dict().items() if key != "layer_types"}
    small = type(found)(**{**kept, **changed})
    model = AutoModelForCausalLM.from_config(small)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(each.numel() for each in model.parameters())


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with a token for each byte, for the ends of turns, and for padding."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {each: number for number, each in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD, START, END])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)
    made.chat_template = TEMPLATE.read_text()
    return made


def write_data(folder: Path) -> tuple[Path, Path]:
    """Writes problems and a reward. Returns their files."""
    problems, reward = folder / "problems.jsonl", folder / "reward.py"
    rows = ({"prompt": f"{n}+{n + 7}=?", "answer": str(2 * n + 7)} for n in range(PROBLEMS))
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward.write_text(REWARD)
    return problems, reward
