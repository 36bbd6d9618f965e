"""Renders conversations of the library `verifiers` with the tokenizer's own chat template.
`verifiers` imports `ChatRenderer` by its dotted path.

The library's own renderers support a fixed list of models. `ChatRenderer` works with every template
that `ChatFormat` accepts, such as the template of Qwen2.5. Later turns continue from exactly the
tokens that were sampled in earlier turns, not from a new encoding of their text.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field
from renderers.base import ParsedResponse, ParsedToolCall, RenderedTokens, ToolCallParseStatus
from renderers.configs import BaseRendererConfig

from megatron_stare.environments.chat import (
    OPEN,
    THINK,
    THOUGHT,
    Call,
    ChatFormat,
    read_calls,
)

_log = logging.getLogger(__name__)


class ChatRendererConfig(BaseRendererConfig):
    """Settings of ChatRenderer.

    `settings`: variables that are passed to the chat template, as in `data.chat_template_kwargs`.
    """

    name: Literal["chat"] = "chat"
    settings: dict[str, Any] = Field(default_factory=dict)
    _internal_fields = frozenset({"settings"})


class ChatRenderer:
    """Implements `renderers.base.Renderer`.

    Args:
        tokenizer: a transformers tokenizer with a chat template.

    Raises:
        ConfigError: ChatFormat does not accept the template. Raised when a conversation is
            rendered.
    """

    config_class = ChatRendererConfig
    supports_tools = True
    is_prefix_stable = False  # some templates rewrite earlier turns

    def __init__(self, tokenizer: Any, config: ChatRendererConfig | None = None) -> None:
        self.config = config or ChatRendererConfig()
        self.effective_thinking_retention = "all"  # of turns that are continued
        self._tokenizer = tokenizer
        self._formats: dict[str, ChatFormat] = {}
        self._known: set[tuple[str, ...]] = set()  # names of tools of earlier conversations

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> RenderedTokens:
        plain = [_plain(message) for message in messages]

        def rendered(schemas: list[dict[str, Any]]) -> list[int]:
            ids: list[int] = self._tokenizer.apply_chat_template(
                plain,
                tools=schemas or None,
                tokenize=True,
                return_dict=False,
                add_generation_prompt=add_generation_prompt,
                **self.config.settings,
            )
            return ids

        schemas = _schemas(tools)
        ids = rendered(schemas)
        names = tuple(str(schema["function"]["name"]) for schema in schemas)
        # a conversation that names the tools itself needs no template that does
        if names and names not in self._known:
            self._known.add(names)
            said = "\n".join(message["content"] for message in plain)
            untold = tuple(name for name in names if name not in said)
            if untold and ids == rendered([]):
                _warn_untold(untold)
        # no boundaries between messages are known: the last message owns all tokens
        return _owned([], ids, messages)

    def render_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        return self.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt
        ).token_ids

    def parse_response(
        self,
        token_ids: Sequence[int],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        prompt_ids: Sequence[int] | None = None,
    ) -> ParsedResponse:
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        thought, closed, rest = text.rpartition(THOUGHT)
        found = read_calls(rest)
        calls = [
            ParsedToolCall(json.dumps(call._asdict()), call.name, dict(call.arguments))
            if isinstance(call, Call)
            else ParsedToolCall(call.text, status=ToolCallParseStatus.MALFORMED_STRUCTURE)
            for call in found
        ]
        said = rest[: rest.index(OPEN)] if found else rest
        return ParsedResponse(
            content=said.strip("\n"),
            reasoning_content=thought.removeprefix(THINK).strip("\n") if closed else None,
            tool_calls=calls,
            reasoning_complete=True if closed else None,
        )

    def get_stop_token_ids(self) -> list[int]:
        """Returns the id of the token that ends a turn. Sampling does not use this id, because
        sampling stops at the run's own stop tokens."""
        return [self._format(None).end]

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: Sequence[int],
        previous_completion_ids: Sequence[int],
        new_messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> RenderedTokens | None:
        """Returns the tokens of the conversation so far, followed by the new messages and the
        opening of the next turn. Returns None if the last turn was truncated, because no template
        continues after a truncated turn."""
        chat = self._format(tools)
        if not previous_completion_ids or previous_completion_ids[-1] != chat.end:
            return None
        between, _ = chat.between([_plain(message) for message in new_messages])
        before = [*previous_prompt_ids, *previous_completion_ids]
        return _owned(before, between, new_messages)

    def _format(self, tools: Sequence[Mapping[str, Any]] | None) -> ChatFormat:
        key = json.dumps(_schemas(tools), sort_keys=True)
        if key not in self._formats:
            self._formats[key] = ChatFormat(self._tokenizer, _schemas(tools), self.config.settings)
        return self._formats[key]


@functools.cache
def _warn_untold(names: tuple[str, ...]) -> None:
    """Warns that the chat template does not tell the policy which tools the policy can call. The
    argument `names` contains the names of these tools. A process may have many renderers, but logs
    the warning for the same `names` only once."""
    _log.warning(
        "the chat template does not tell the policy about its tools (%s), so the policy will not"
        " call them; use a template that renders `tools`, such as that of Qwen2.5 or Qwen3",
        ", ".join(names),
    )


def _owned(
    before: Sequence[int], after: Sequence[int], messages: Sequence[Mapping[str, Any]]
) -> RenderedTokens:
    """Concatenates the token lists `before` and `after`. Assigns the tokens of `after` to the last
    message, and the tokens of `before` to no message."""
    last = len(messages) - 1
    return RenderedTokens(
        token_ids=[*before, *after],
        message_indices=[-1] * len(before) + [last] * len(after),
        message_roles=[str(message["role"]) for message in messages],
    )


def _schemas(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Returns the schemas of the tools, each in the form {"type": "function", "function":
    {...}}."""
    return [
        dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)}
        for tool in tools or ()
    ]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a message to the form that chat templates expect. In a converted message, the
    content is one text, and the arguments of tool calls are objects."""
    plain = {**message, "content": _text(message.get("content"))}
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [_called(call.get("function", call)) for call in calls]
    return plain


def _called(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part for part in content if part["type"] == "text"]
    if len(parts) < len(content):
        raise ValueError("a message has parts that are not text, which the policy cannot read")
    return "\n".join(part["text"] for part in parts)
