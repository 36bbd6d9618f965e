"""Represents a conversation, including its tool calls, as a sequence of tokens. Reads the tool
calls in the policy's turn, and renders the tokens between the policy's turns.

The tokenizer's chat template defines the tokens between turns. Tokens that the policy sampled stay
unchanged in the context of later turns. The text of sampled tokens is tokenized again only for the
context of a new branch. Tool calls have the format of Hermes, Qwen2.5 and Qwen3.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jinja2 import TemplateError

from megatron_stare.errors import ConfigError

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(rf"{OPEN}\n(.*?)\n{CLOSE}", re.DOTALL)
_TAGS = (OPEN, CLOSE, "<tool_response>", "</tool_response>")
_MARK, _THOUGHT = "qzxqzx", "qzyqzy"  # found again in what the template renders
THINK, THOUGHT = "<think>", "</think>"
WHERE = "data.chat_template"
NEXT = {"role": "user", "content": "next"}


class Call(NamedTuple):
    """Tool call that the policy wrote."""

    name: str
    arguments: Mapping[str, Any]


class Malformed(NamedTuple):
    """Text of a tool call that cannot be parsed, and the reason why it cannot be parsed."""

    text: str
    why: str


class LeftOut(NamedTuple):
    """Text that a chat template removes from a turn of the policy when later messages follow the
    turn.

    `opening`: the last token ids of the turn's opening, if the template removes them. These token
        ids open the thinking, or open it and close it again with nothing inside.
    `thinking`: True if the template removes the thinking that the policy wrote.
    """

    opening: list[int]
    thinking: bool

    def changes(self, text: str) -> bool:
        """Returns True if the template removes something from a turn with this text."""
        return bool(self.opening) or (self.thinking and THOUGHT in text)


def read_calls(text: str) -> list[Call | Malformed]:
    """Returns the tool calls in the text of a turn, in the order in which they occur.

    `read_calls` accepts the same format as SGLang's detector `qwen25`. For each malformed call,
    `read_calls` returns a `Malformed` object, but SGLang's detector returns nothing. A call is also
    malformed if its JSON contains a lone surrogate, such as the escape of one half of an emoji.
    """
    found: list[Call | Malformed] = []
    for body in _CALL.findall(text):
        try:
            read = json.loads(body.strip())
            json.dumps(read, ensure_ascii=False).encode()  # half of a character cannot be encoded
        except (ValueError, RecursionError) as error:
            found.append(Malformed(body, f"not JSON: {error}"))
            continue
        found += [_call(each, body) for each in (read if isinstance(read, list) else [read])]
    if not found and OPEN in text:
        why = "it is not closed: write its tags and its JSON each on a line of its own"
        found.append(Malformed(text[text.index(OPEN) :], why))
    return found


def _call(read: Any, body: str) -> Call | Malformed:
    if not isinstance(read, dict) or not isinstance(read.get("name"), str):
        return Malformed(body, 'not {"name": ..., "arguments": {...}}')
    arguments = read.get("parameters") or read.get("arguments", {})
    if not isinstance(arguments, dict):
        return Malformed(body, "its arguments are not an object")
    return Call(read["name"], arguments)


class ChatFormat:
    """Renders the tokens between the turns of a response, with a tokenizer's chat template.

    `end`: id of the token that ends a turn.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        tools: schemas of the tools, in the form that the template expects. Without tools, the
            template need not support tools.
        settings: further variables of the template (`data.chat_template_kwargs`).

    Raises:
        ConfigError: the tokenizer has no chat template, or the template does not support tools or
            this format of calls.
    """

    def __init__(
        self, tokenizer: Any, tools: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]
    ) -> None:
        self._tokenizer, self._tools, self._settings = tokenizer, list(tools), dict(settings)
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "the tokenizer has no chat template, which tells the policy of its tools",
                where=WHERE,
                fix="add chat_template.jinja to the folder of model.path",
            )
        added = tokenizer.added_tokens_decoder.items()
        self._special = {token.content: id for id, token in added if token.special}
        self._special |= dict(
            zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
        )
        # longest first, so that no part of a broken one is left
        marks = {*_TAGS, *self._special, *(token.content for _, token in added)}
        self._marks = sorted((mark for mark in marks if mark.strip()), key=len, reverse=True)
        whole = self._rendered([_tool_answer("answer")] if self._tools else [NEXT])
        at = whole.rfind(_MARK)
        if self._tools:
            self._check_tools(whole, at)
        if at < 0:
            raise ConfigError(
                "the tokenizer's chat template does not render an earlier turn of the policy",
                where=WHERE,
                fix="use a template for conversations",
            )
        ends = self._turn_end(whole, at)
        self.end = self._special[whole[slice(*ends)]]

    def _check_tools(self, whole: str, at: int) -> None:
        for mark in (OPEN, CLOSE):
            self._require_text(mark, "no call would be found")
        opened = whole.rfind(OPEN, 0, at)
        if at < 0 or read_calls(whole[max(opened, 0) :])[:1] != [Call("call", {"text": _MARK})]:
            raise ConfigError(
                "the tokenizer's chat template does not write calls of tools as <tool_call>, JSON"
                " and </tool_call>",
                where=WHERE,
                fix="use a model whose template does, such as Qwen2.5 or Qwen3, or a template with"
                " its form of calls",
            )
        name = str(self._tools[0]["function"]["name"])
        if name not in whole[: whole.find("question")]:
            raise ConfigError(
                "the tokenizer's chat template does not tell the policy which tools there are",
                where=WHERE,
                fix="use a template that renders `tools`",
            )

    def _require_text(self, mark: str, lost: str) -> None:
        if mark in self._special:
            raise ConfigError(
                f"{mark} is a special token, which no turn's text contains, so {lost}",
                where="model.path",
                fix=f'"special": false for {mark} in tokenizer.json and tokenizer_config.json',
            )

    def between(self, messages: Sequence[Mapping[str, str]]) -> tuple[list[int], str]:
        """Returns the ids [n] and the text of the tokens between two turns of the policy. These
        tokens are `messages` and the template's generation prompt, which opens the policy's next
        turn.

        If the text of a message contains a special token or a tag of tool calls, a space is
        inserted into the token or tag, so that it loses its special meaning.

        Args:
            messages: answers of tools ({"role": "tool", "content": text}), then messages of other
                roles, such as "user". At least one message.
        """
        whole = self._rendered(
            [
                {**message, "content": self._harmless(encodable(message["content"]))}
                for message in messages
            ]
        )
        begin, end = self._turn_end(whole, whole.rfind(_MARK))
        # encoded behind the token that ends the turn, as Phi's takes the white space after it
        ids = self._encoded(whole[begin:])
        return ids[ids.index(self.end) + 1 :], whole[end:]

    def left_out(self) -> LeftOut | None:
        """Describes the text that the chat template removes from a turn of the policy when later
        messages follow the turn. Returns None if the template removes nothing from such a turn.

        Raises:
            ConfigError: the template changes such a turn in another way, or the tag that ends the
                thinking is a special token.
        """
        rest = f"{THINK}\n{_THOUGHT}\n{THOUGHT}\n\nrest"
        answers = [_tool_answer("answer")]
        aloud, silent = (self._rendered(answers, content) for content in (rest, "rest"))
        thinking = _THOUGHT not in aloud
        opening = self._template([{"role": "user", "content": "question"}])
        alike = itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(opening, silent, strict=False)
        )
        common = sum(1 for _ in alike)
        # a template that keeps thoughts may yet omit the empty one of enable_thinking: false
        if not thinking and THOUGHT not in opening[common:]:
            return None
        ids = [self._encoded(text) for text in (opening, opening[common:])]
        changed = (thinking and aloud != silent) or not silent[common:].startswith("rest")
        if changed or ids[0][len(ids[0]) - len(ids[1]) :] != ids[1]:
            raise ConfigError(
                "the tokenizer's chat template changes more of an earlier turn than to leave out"
                f" the text up to {THOUGHT}",
                where=WHERE,
                fix="earlier_thinking: keep, or another template",
            )
        if thinking:
            self._require_text(THOUGHT, "the end of the thinking would not be found")
        return LeftOut(ids[1], thinking)

    def history(self, context: Sequence[int], text: str, left_out: LeftOut) -> list[int]:
        """Returns the token ids of a context, followed by the token ids of the policy's next turn.
        Leaves out the text that `left_out` describes, because the chat template also removes this
        text when later messages follow the turn.

        Args:
            text: text of the turn.
        """
        rest = text.rpartition(THOUGHT)[2].lstrip("\n") if left_out.thinking else text
        ids = self._encoded(_broken(rest, self._special))
        return [*context[: len(context) - len(left_out.opening)], *ids, self.end]

    def _encoded(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False).input_ids

    def _rendered(self, after: Sequence[Mapping[str, str]], content: str = "") -> str:
        """Renders a conversation that consists of a question, a turn of the policy, the messages
        `after`, and the opening of the policy's next turn. The turn of the policy contains one tool
        call for each tool answer in `after`."""
        call = {"name": "call", "arguments": {"text": _MARK}}
        calls = [
            {"type": "function", "function": call} for message in after if message["role"] == "tool"
        ]
        turn: dict[str, Any] = {"role": "assistant", "content": content if calls else _MARK}
        if calls:
            turn["tool_calls"] = calls
        return self._template(
            [{"role": "user", "content": "question"}, turn, *({**each} for each in after)]
        )

    def _template(self, messages: list[dict[str, Any]]) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                messages,
                tools=self._tools or None,
                tokenize=False,
                add_generation_prompt=True,
                **self._settings,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise ConfigError(
                "the chat template cannot render"
                f" {'calls and answers of tools' if self._tools else 'several turns'}: {error}",
                where=WHERE,
                fix=f"use a template that knows {'tools' if self._tools else 'them'}",
            ) from error

    def _turn_end(self, whole: str, after: int) -> tuple[int, int]:
        """Finds the special token that ends a turn in a rendered text. Returns the positions at
        which this token starts and ends. The caller must pass a position `after` that lies inside
        the turn. The token that ends the turn is the first special token from this position on."""
        found = [
            (at, at + len(token))
            for token in self._special
            if (at := whole.find(token, after)) >= 0
        ]
        if not found:
            raise ConfigError(
                "the chat template ends the assistant's turn with no special token",
                where=WHERE,
                fix="use a template whose turns end with one, such as ChatML's",
            )
        return min(found)

    def _harmless(self, answer: str) -> str:
        # An answer must not contain the mark of the call either, which is searched from the right.
        return _broken(answer, [_MARK, *self._marks])


def encodable(text: str) -> str:
    """Returns the text with "?" in place of each lone surrogate, because a lone surrogate can
    neither be tokenized nor written to a file. A service that cuts texts between UTF-16 units may
    send a lone surrogate."""
    return text.encode(errors="replace").decode()


def _tool_answer(text: str) -> dict[str, str]:
    return {"role": "tool", "name": "call", "content": text}


def _broken(text: str, marks: Iterable[str]) -> str:
    """Finds every occurrence of the strings in `marks` in the text, and inserts a space after the
    first character of each occurrence. Returns the changed text."""
    for mark in marks:
        text = text.replace(mark, f"{mark[0]} {mark[1:]}")
    return text
