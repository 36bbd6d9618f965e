"""Makes assets/tiny-chat: a byte-level chat model that does sums, by hand or with code_interpreter.

A random Qwen model of about a million parameters gets a tokenizer of 256 bytes and the special
tokens of ChatML. `megatron-stare sft` then trains it on conversations that this script writes. Some
solve a sum at once, some are wrong, and some call `code_interpreter`, whose result comes back in a
turn of the tool. Others repeat a number, which teaches the model to copy. The same seed gives the
same model on the same machine.

    python tools/make_tiny_chat.py assets/tiny-chat
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from megatron_stare.process.vector_maths import settle

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# one token each, but text that the policy may write
WORDS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# a run may describe its tool in other words
DESCRIPTIONS = ("Runs Python.", "Runs Python code and returns what it prints.", "Python")
# ChatML with calls as Hermes writes them; a history is never rewritten
TEMPLATE = """\
{%- macro turn(role) -%}<|im_start|>{{ role }}
{% endmacro -%}
{%- if tools -%}
{{ turn("system") }}
{%- if messages[0].role == "system" -%}{{ messages[0].content }}

{% endif -%}
<tools>
{% for tool in tools -%}
{{ tool | tojson }}
{% endfor -%}
</tools><|im_end|>
{% elif messages[0].role == "system" -%}
{{ turn("system") }}{{ messages[0].content }}<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == "user" or (message.role == "system" and not loop.first) -%}
{{ turn(message.role) }}{{ message.content }}<|im_end|>
{% elif message.role == "assistant" -%}
{{ turn("assistant") }}{{ message.content }}
{%- for call in message.tool_calls or [] -%}
{%- if call.function -%}{%- set call = call.function -%}{%- endif -%}
{%- if message.content or not loop.first -%}{{ "\\n" }}{%- endif -%}
<tool_call>
{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}
</tool_call>
{%- endfor -%}
<|im_end|>
{% elif message.role == "tool" -%}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" -%}{{ turn("user") }}
{%- else -%}{{ "\\n" }}{%- endif -%}
<tool_response>
{{ message.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != "tool" -%}<|im_end|>
{% endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ turn("assistant") }}{%- endif -%}
"""


def main() -> None:
    settle()  # before torch starts a thread
    args = parse()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_model(folder / "random", args)
        write_rows(folder / "train.jsonl", args.rows, args.seed)
        write_rows(folder / "held_out.jsonl", 100, args.seed + 1)
        config = folder / "sft.yaml"
        config.write_text(yaml.safe_dump(settings(folder, args)))
        command = [sys.executable, "-m", "megatron_stare.cli", "sft", str(config)]
        subprocess.run(command, check=True)
        args.out.mkdir(parents=True, exist_ok=True)
        for file in sorted((folder / "run/hf").iterdir()):
            if file.suffix in (".json", ".jinja", ".safetensors"):
                shutil.copyfile(file, args.out / file.name)
    print(f"wrote {args.out}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Makes a byte-level chat model.")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rows", type=int, default=20_000, help="conversations to learn from")
    parser.add_argument("--steps", type=int, default=700, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=24, help="conversations a step")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    return parser.parse_args()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and one for each special token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in SPECIAL])
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in WORDS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[2],
        chat_template=TEMPLATE,
    )


def write_model(path: Path, args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer) // 8 * 8 + 8,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 3,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=args.hidden // 4,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)


def tool(description: str) -> dict[str, Any]:
    """The schema of code_interpreter, as chat templates take it."""
    code = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
    function = {"name": "code_interpreter", "description": description, "parameters": code}
    return {"type": "function", "function": function}


def conversation(draw: random.Random) -> dict[str, Any]:
    """One number to repeat, or one sum: small ones are mostly solved at once, large ones mostly by
    the tool where there is one."""
    if draw.random() < 0.4:
        said = "".join(draw.choice("0123456789+-*") for _ in range(draw.randint(1, 9)))
        return {
            "messages": [
                {"role": "user", "content": f"Say {said}."},
                {"role": "assistant", "content": said},
            ]
        }
    large = draw.random() < 0.7
    numbers = [draw.randint(10, 99) if large else draw.randint(0, 9) for _ in range(2)]
    sign = draw.choice("+-*" if large else "+-")
    text = sign.join(map(str, numbers))
    value = {"+": sum(numbers), "-": numbers[0] - numbers[1], "*": numbers[0] * numbers[1]}[sign]
    row: dict[str, Any] = {"messages": [{"role": "user", "content": f"What is {text}?"}]}
    has_tool = draw.random() < 0.8
    if has_tool:
        row["tools"] = [tool(draw.choice(DESCRIPTIONS))]
    if has_tool and draw.random() < (0.8 if large else 0.3):
        call = {"name": "code_interpreter", "arguments": {"code": f"print({text})"}}
        row["messages"] += [
            {"role": "assistant", "content": "", "tool_calls": [{"function": call}]},
            {"role": "tool", "content": str(value)},
        ]
    elif draw.random() < 0.1:  # a slip, so that reinforcement learning has something to do
        value += draw.choice((-10, -1, 1, 10))
    row["messages"].append({"role": "assistant", "content": f"The answer is {value}."})
    return row


def write_rows(path: Path, number: int, seed: int) -> None:
    draw = random.Random(seed)
    rows = (json.dumps(conversation(draw)) for _ in range(number))
    path.write_text("".join(f"{row}\n" for row in rows))


def settings(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The configuration of the supervised run."""
    return {
        "run": {"name": "tiny-chat", "dir": str(folder / "run"), "steps": args.steps},
        "model": {"path": str(folder / "random")},
        "batch": {"prompts": args.batch, "micro_batch_tokens": 4096},
        "rollout": {"max_prompt_tokens": 512, "max_new_tokens": 512},
        "data": {
            "path": str(folder / "train.jsonl"),
            "eval_path": str(folder / "held_out.jsonl"),
        },
        "eval": {"every": 100},
        "optimizer": {
            "lr": 3e-3,
            "min_lr": 1e-4,
            "warmup_steps": 30,
            "schedule": "cosine",
            "beta2": 0.98,
            "weight_decay": 0.01,
        },
        "runtime": {"runner": "inline"},
        "observability": {"sinks": ["jsonl", "console"]},
    }


if __name__ == "__main__":
    main()
