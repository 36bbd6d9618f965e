"""The conversations of the environments `tools`, with the published tokenizers and templates."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.real_tokenizers import NAMES, tokenizer
from tokenizers import AddedToken

from megatron_stare.config.schema import Config
from megatron_stare.data.encode import PromptEncoder
from megatron_stare.environments.chat import CLOSE, OPEN, ChatFormat
from megatron_stare.environments.environment import Turn, make_environment
from megatron_stare.environments.tools import Tools
from megatron_stare.errors import ConfigError
from megatron_stare.records.batch import Prompt
from megatron_stare.records.trajectory import Trajectory

OWN = str(Path(__file__).parent / "own_tools.py")
TEXTS = (
    "The sum is 5.",
    "Let x² + y² = 25.\n\nThen  \\boxed{3}",
    "数字を足す 🧮",
    "```python\nprint(1)\n```",
    "\tindented, and ends with a space ",
    "naïve café — “quoted”",
)


class Says:
    """A policy that says given turns, and makes each call of a tool."""

    def __init__(self, name: str, turns: Sequence[str]) -> None:
        self.tokenizer, self.turns = tokenizer(name), list(turns)
        self.contexts: list[list[int]] = []

    async def __call__(self, context: Sequence[int], *_: Any, **__: Any) -> Turn:
        self.contexts.append(list(context))
        text = self.turns.pop(0)
        ids = [*self.tokenizer(text).input_ids, self.tokenizer.eos_token_id]
        return Turn(
            torch.tensor(ids, dtype=torch.int32),
            torch.full((len(ids),), -0.5),
            ((7, len(ids)),),
            "stop",
            text,
        )

    async def call(self, tool: Any, request: Any, **_: Any) -> Any:
        return await tool(request, "id")


def tools_of(name: str, settings: Any = (), **template: Any) -> Tools:
    settings = {"name": "tools", "tools": [f"{OWN}:echoes"], "max_turns": 5, **dict(settings)}
    config = Config.model_validate(
        {
            "model": {"path": "assets/tiny-chat"},
            "data": {"chat_template": True, "chat_template_kwargs": template},
            "rollout": {
                "environment": settings,
                "max_prompt_tokens": 2000,
                "max_new_tokens": 4000,
            },
        }
    )
    environment = make_environment(config.rollout.environment, config, tokenizer(name))
    assert isinstance(environment, Tools)
    return environment


def episode(name: str, turns: Sequence[str], question: str) -> tuple[Tools, Prompt, Trajectory]:
    environment = tools_of(name)
    ids = PromptEncoder(environment.config, tokenizer(name))(question, "here")
    prompt = Prompt(0, "0", question, "5", ids)
    return environment, prompt, asyncio.run(environment.run(prompt, Says(name, turns)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(20))
def test_a_conversation_with_calls_has_the_tokens_of_the_published_template(
    name: str, seed: int
) -> None:
    """Each turn says something and calls a tool once or twice. The whole conversation, rendered at
    once by transformers, has the same ids, and only the turns' own carry loss."""
    draw = random.Random(seed)
    question = draw.choice(TEXTS)
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    turns = []
    for _ in range(draw.randint(1, 3)):
        said = draw.choice(["", *TEXTS])
        asked = [{"text": draw.choice(TEXTS)} for _ in range(draw.randint(1, 2))]
        calls = [{"name": "echoes", "arguments": each} for each in asked]
        written = [
            f"<tool_call>\n{json.dumps(each, ensure_ascii=False)}\n</tool_call>" for each in calls
        ]
        turns.append("\n".join([said, *written] if said else written))
        messages.append(
            {"role": "assistant", "content": said, "tool_calls": [{"function": c} for c in calls]}
        )
        messages += [{"role": "tool", "content": each["text"]} for each in asked]
    turns.append("The answer is \\boxed{5}.")
    messages.append({"role": "assistant", "content": turns[-1]})
    environment, prompt, found = episode(name, turns, question)
    if name == "qwen3":  # the template adds an empty thought to the last turn alone
        messages.pop()
    whole = tokenizer(name).apply_chat_template(
        messages,
        tools=environment._format._tools,
        return_dict=False,
        add_generation_prompt=messages[-1]["role"] == "tool",
    )
    if name == "qwen3":
        whole += [*tokenizer(name)(turns[-1]).input_ids, tokenizer(name).eos_token_id]
    ids = [*prompt.token_ids, *found.tokens.tolist()]
    assert tokenizer(name).decode(ids) == tokenizer(name).decode(whole[: len(ids)])
    assert ids == whole[: len(ids)]
    assert tokenizer(name).decode(whole[len(ids) :]).strip() == ""
    ends = tokenizer(name).eos_token_id
    trained = [id for each in turns for id in (*tokenizer(name)(each).input_ids, ends)]
    assert found.tokens[found.loss_mask].tolist() == trained
    assert len(found.calls) == sum(each.count("<tool_call>") for each in turns)


def test_an_empty_thought_that_the_template_leaves_out_begins_a_branch() -> None:
    """With enable_thinking: false, Qwen3 opens each turn with an empty thought, and renders earlier
    turns without it."""
    called = f'{OPEN}\n{{"name": "echoes", "arguments": {{"text": "5"}}}}\n{CLOSE}'
    said = ["I ask.", "Again.", "It is 5."]
    environment = tools_of("qwen3", {"earlier_thinking": "branch"}, enable_thinking=False)
    prompt = Prompt(
        0, "0", "2+3", "5", PromptEncoder(environment.config, tokenizer("qwen3"))("2+3", "")
    )
    policy = Says("qwen3", [f"{said[0]}\n{called}", f"{said[1]}\n{called}", said[2]])
    found = asyncio.run(environment.run(prompt, policy))
    call = {"function": {"name": "echoes", "arguments": {"text": "5"}}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "2+3"}]
    for context, text in zip(policy.contexts, said, strict=True):
        assert context == tokenizer("qwen3").apply_chat_template(
            messages,
            tools=environment._format._tools,
            add_generation_prompt=True,
            return_dict=False,
            enable_thinking=False,
        )
        messages.append({"role": "assistant", "content": text, "tool_calls": [call]})
        messages.append({"role": "tool", "content": "5"})
    assert len(found.branches) == 2
    with pytest.raises(ConfigError, match="earlier_thinking=refuse does not allow"):
        tools_of("qwen3", {"earlier_thinking": "refuse"}, enable_thinking=False)
    for name in NAMES:  # nothing is left out of what is sampled with thinking
        assert tools_of(name, {"earlier_thinking": "refuse"})._left_out is None


def test_the_end_of_a_turn_takes_the_white_space_after_it() -> None:
    """Phi's tokens for the ends of turns do: between two turns are the tokens that the whole
    conversation has there."""
    other = copy.deepcopy(tokenizer("qwen2.5"))
    other.add_special_tokens({"additional_special_tokens": [AddedToken("<|end|>", rstrip=True)]})
    other.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    messages = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    whole = other.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    before = other.apply_chat_template(messages[:2], return_dict=False)
    chat = ChatFormat(other, [], {})
    ids, text = chat.between(messages[2:])
    assert [*before, *ids] == whole
    assert text == "\n<|im_start|>user\nuser<|end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("tag", [OPEN, CLOSE])
def test_a_tag_that_no_turn_s_text_contains_is_refused(tag: str) -> None:
    environment = tools_of("qwen3")
    other = copy.deepcopy(tokenizer("qwen3"))
    other.add_special_tokens({"additional_special_tokens": [tag]})
    assert tag not in other.decode(other(tag).input_ids, skip_special_tokens=True)
    with pytest.raises(ConfigError, match=f"{tag} is a special token") as error:
        ChatFormat(other, environment._format._tools, {})
    assert "tokenizer.json" in str(error.value.fix)
    ChatFormat(other, [], {})  # without tools, no tag is searched


@pytest.mark.parametrize("policy", ["keep", "branch", "refuse"])
def test_qwen3_keeps_its_thinking_between_calls_under_every_policy(policy: str) -> None:
    """Its template leaves out the thinking of turns before the newest question alone, so the next
    turn's context is the template's, with what was sampled unchanged."""
    thinks = "<think>\nFirst 2, then 3.\n</think>\n\n"
    asks = f'{OPEN}\n{{"name": "echoes", "arguments": {{"text": "5"}}}}\n{CLOSE}'
    environment = tools_of("qwen3", {"earlier_thinking": policy})
    encode = PromptEncoder(environment.config, tokenizer("qwen3"))
    prompt = Prompt(0, "0", "2+3", "5", encode("2+3", ""))
    turns = [thinks + asks, f"{thinks}It is 5."]
    found = asyncio.run(environment.run(prompt, Says("qwen3", turns)))
    calls = [{"function": {"name": "echoes", "arguments": {"text": "5"}}}]
    context = tokenizer("qwen3").apply_chat_template(
        [
            {"role": "user", "content": "2+3"},
            {"role": "assistant", "content": thinks, "tool_calls": calls},
            {"role": "tool", "content": "5"},
        ],
        tools=environment._format._tools,
        add_generation_prompt=True,
        return_dict=False,
    )
    last = [*tokenizer("qwen3")(turns[1]).input_ids, tokenizer("qwen3").eos_token_id]
    assert found.branches == ()
    assert [*prompt.token_ids, *found.tokens.tolist()] == [*context, *last]
