"""The conversations of the environments `tools`, with the published tokenizers and templates."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.real_tokenizers import NAMES, tokenizer

from megatron_stare.config.schema import Config
from megatron_stare.data.encode import PromptEncoder
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

    async def __call__(self, context: Sequence[int], *_: Any, **__: Any) -> Turn:
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


def environment_of(name: str, thinks: bool | None = None, **more: Any) -> Tools:
    settings = {"name": "tools", "tools": [f"{OWN}:echoes"], "max_turns": 5, **more}
    values = {} if thinks is None else {"enable_thinking": thinks}
    config = Config.model_validate(
        {
            "model": {"path": "assets/tiny-chat"},
            "data": {"chat_template": True, "chat_template_kwargs": values},
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


def episode(
    name: str, turns: Sequence[str], question: str, **more: Any
) -> tuple[Tools, Prompt, Trajectory]:
    environment = environment_of(name, **more)
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


THINKS = "<think>\nFirst 2, then 3.\n</think>\n\n"
ASKS = '<tool_call>\n{"name": "echoes", "arguments": {"text": "5"}}\n</tool_call>'


def rendered(messages: list[dict[str, Any]], environment: Tools, **values: Any) -> list[int]:
    ids: list[int] = tokenizer("qwen3").apply_chat_template(
        messages,
        tools=environment._format._tools,
        return_dict=False,
        add_generation_prompt=True,
        **values,
    )
    return ids


@pytest.mark.parametrize("policy", ["keep", "branch", "refuse"])
def test_qwen3_keeps_its_thinking_between_calls_under_every_policy(policy: str) -> None:
    """Its template leaves out the thinking of turns before the newest question alone, so the next
    turn's context is the template's, with what was sampled unchanged."""
    turns = [THINKS + ASKS, THINKS + "It is 5."]
    environment, prompt, found = episode("qwen3", turns, "What is 2+3?", earlier_thinking=policy)
    calls = [{"function": {"name": "echoes", "arguments": {"text": "5"}}}]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "What is 2+3?"},
        {"role": "assistant", "content": THINKS, "tool_calls": calls},
        {"role": "tool", "content": "5"},
    ]
    context = rendered(messages, environment)
    last = [*tokenizer("qwen3")(turns[1]).input_ids, tokenizer("qwen3").eos_token_id]
    assert found.branches == ()
    assert [*prompt.token_ids, *found.tokens.tolist()] == [*context, *last]


def test_qwen3_that_is_told_not_to_think() -> None:
    """Each turn is opened with an empty thought. The template leaves it out of an earlier turn, so
    only the policy that keeps what the model has read serves."""
    environment, prompt, found = episode("qwen3", [ASKS, "5"], "What is 2+3?", thinks=False)
    question = {"role": "user", "content": "What is 2+3?"}
    opening = rendered([question], environment, enable_thinking=False)
    assert list(prompt.token_ids) == opening
    told = found.tokens[~found.loss_mask].tolist()
    assert told[-4:] == opening[-4:]
    assert tokenizer("qwen3").decode(opening[-4:]) == "<think>\n\n</think>\n\n"
    for policy in ("branch", "refuse"):
        with pytest.raises(ConfigError, match="opens a turn otherwise"):
            environment_of("qwen3", thinks=False, earlier_thinking=policy)
