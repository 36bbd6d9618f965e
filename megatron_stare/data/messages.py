"""Reads conversations for supervised fine-tuning. The tokenizer's chat template renders the
messages of each row as text.

A row is {"messages": [{"role": ..., "content": ..., "tool_calls": [...]}, ...], "tools": [...]}. An
assistant's message with "weight": 0 is context, and carries no loss.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple

from jinja2 import TemplateError

from megatron_stare.config.schema import Config
from megatron_stare.data.records import read_rows
from megatron_stare.data.streams import Split, counter_hash, stream_seed
from megatron_stare.errors import ConfigError, DataError
from megatron_stare.process.interruption import poll
from megatron_stare.process.signs_of_life import say
from megatron_stare.records.batch import Demonstration, Prompt

MESSAGES, TOOLS = "messages", "tools"
ROLES = ("system", "developer", "user", "assistant", "tool")
ASSISTANT, CONTENT = "assistant", "content"
WEIGHT = "weight"  # as in OpenAI's format: 0 for a turn that is not learnt
ASKING = ("system", "developer", "user")  # a row is refused if their text is not rendered
# keys under which rows and templates have a turn's thinking, if `content` does not have it
_THINKING = ("reasoning_content", "reasoning", "thinking")
_THINK = "<think>"
_PLAIN = {"add_special_tokens": False}  # the template writes them
_TOLD = 10_000  # rows between two lines of progress; these rows take about a minute
TOO_LONG = "longer than rollout.max_prompt_tokens + rollout.max_new_tokens"
_IS_TOO_LONG = f"is {TOO_LONG}"


class RowError(Exception):
    """Raised for a row that cannot be used as a demonstration.

    `kind`: description of the fault. Two rows count as rows with the same fault if their faults
        have the same description.
    """

    def __init__(self, kind: str, fix: str) -> None:
        super().__init__(kind)
        self.kind, self.fix = kind, fix


class Rendered(NamedTuple):
    """Tokens of a conversation.

    `ids`: [n] token ids.
    `mask`: [n] True for tokens that the assistant wrote, including the tokens that end the
        assistant's turns.
    """

    ids: list[int]
    mask: list[bool]

    def ends(self) -> list[int]:
        """Returns the ids of the last tokens of the assistant's turns, one id per turn."""
        after = zip(self.mask, [*self.mask[1:], False], strict=True)
        return [id for id, (mine, next_) in zip(self.ids, after, strict=True) if mine > next_]


def rendered(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    tokenizer: Any,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> Rendered:
    """Renders a conversation with the tokenizer's chat template. The mask of the returned
    `Rendered` is True for the tokens that count in the loss. The tokens that the assistant wrote
    count in the loss, except the tokens of a turn with weight 0. The function does not check how
    the template renders an assistant's turn with weight 0.

    An assistant's turn begins after the generation prompt and ends with the last special token of
    the turn. The template's text after the turn's last special token does not count in the loss.
    Some templates, such as Phi's, add an end-of-sequence token after the end of the last turn. This
    additional token does not count in the loss either.

    In some chat templates, such as GLM-4.5's, an assistant's turn contains no special token. If an
    assistant's turn contains no special token, the special token that opens the next role's message
    ends the turn and counts in the loss. If the last turn of a conversation contains no special
    token, the function appends the special token that would open a user's message.

    In a rollout, no token spans the border between two turns, because each turn is sampled or
    encoded separately. The function also encodes each turn separately, so that no token spans the
    border between two turns.

    Args:
        settings: further values for the template (`data.chat_template_kwargs`).

    Raises:
        RowError: the template rejects the messages, renders a message differently once later
            messages follow, does not begin an assistant's turn with the generation prompt, or
            leaves out the tools, an asking message or a part of an assistant's turn.
    """

    def text(turns: Sequence[Mapping[str, Any]], *, asks: bool, tells: bool = True) -> str:
        try:
            return tokenizer.apply_chat_template(
                list(turns),
                tools=list(tools) if tools and tells else None,
                tokenize=False,
                add_generation_prompt=asks,
                **settings,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise RowError(
                f"is refused by the chat template ({error})",
                "correct its messages, or use another template",
            ) from error

    skipped = [message.get(WEIGHT) == 0 for message in messages]
    messages = [{k: v for k, v in message.items() if k != WEIGHT} for message in messages]
    whole = text(messages, asks=False)
    for message in messages:
        if message["role"] in ASKING and not keeps(whole, message[CONTENT]):
            raise _left_out(
                f"a message of the role {message['role']!r}, which the chat template leaves out"
            )
    special = special_ids(tokenizer)
    ending = tokenizer.eos_token or ""
    endings = tuple(tokenizer.convert_ids_to_tokens(sorted(special)))
    ids: list[int] = []
    mask: list[bool] = []
    at, open_ = 0, False  # open_: True if the turn before `at` has no special token

    def add(end: int, *, learnt: bool) -> None:
        nonlocal at, open_
        part = tokenizer(whole[at:end], **_PLAIN).input_ids
        closing = open_ and not learnt and not special.isdisjoint(part[:1])
        ends = max((n for n, each in enumerate(part, 1) if each in special), default=0)
        ids.extend(part)
        mask.extend(learnt and n < (ends or len(part)) for n in range(len(part)))
        if closing:
            mask[len(ids) - len(part)] = True
        at, open_ = end, learnt and not ends

    for number, message in enumerate(messages):
        if message["role"] != ASSISTANT or skipped[number]:
            continue
        begin = text(messages[:number], asks=True)
        through = text(messages[: number + 1], asks=False)
        # Phi writes one more token behind the last message of all: it is not the turn's own
        shorter = through.removesuffix(ending)
        if shorter != through and shorter.rstrip().endswith(endings):
            more = text(messages[: number + 1], asks=True)
            through = through if more.startswith(through) else shorter
        if not through.startswith(begin):
            raise RowError(
                "has a turn that the chat template does not begin with its generation prompt"
                f" {begin[-20:]!r}, as for sampling",
                "use a template that renders an assistant's turn as it was sampled, with its"
                " thinking",
            )
        if not (whole.startswith(through) and len(begin) >= at):
            raise RowError(
                "has a turn that the chat template renders differently once later messages follow",
                'give each such turn a row of its own that ends with the turn, with "weight": 0 in'
                " the assistant's earlier messages; or use a template that keeps the history",
            )
        if tools and not mask and begin == text(messages[:number], asks=True, tells=False):
            raise _left_out("tools, which the chat template does not show to the policy")
        _check_turn(message, through[len(begin) :])
        add(len(begin), learnt=False)
        add(len(through), learnt=True)
        # the policy must not stop where it goes on itself
        open_ = open_ and [each["role"] for each in messages[number + 1 :][:1]] != [ASSISTANT]
    if open_ and at == len(whole) and (end := _next_role(text, tokenizer, special)) is not None:
        return Rendered([*ids, end], [*mask, True])
    add(len(whole), learnt=False)
    return Rendered(ids, mask)


def _check_turn(message: Mapping[str, Any], turn: str) -> None:
    """Raises RowError if the text that the template renders for an assistant's turn lacks a part of
    the message. For example, a template that ignores tool calls renders a message that contains
    only a tool call as an empty turn."""
    if not all(call["function"]["name"] in turn for call in message.get("tool_calls", ())):
        raise _left_out("a tool call, which the chat template leaves out")
    for key in (CONTENT, *_THINKING):
        said = message.get(key)
        # a template may open the thinking in the generation prompt
        if isinstance(said, str) and not keeps(turn, said.lstrip().removeprefix(_THINK)):
            raise _left_out(f"a turn whose {key!r} the chat template leaves out or shortens")


def keeps(rendered: str, said: str) -> bool:
    """Returns True if the text `rendered` contains the text `said`. The comparison ignores white
    space, because chat templates change the white space around and inside messages."""
    return said in rendered or "".join(said.split()) in "".join(rendered.split())


def _left_out(what: str) -> RowError:
    return RowError(f"has {what}", "use a template that renders this, or remove this from the row")


def _next_role(text: Callable[..., str], tokenizer: Any, special: Collection[int]) -> int | None:
    """Returns the id of the first token that the template writes between an assistant's turn and a
    user's message. Returns None if the first token after the assistant's turn is not a special
    token."""
    said, mark = {"role": "user", "content": "question"}, "answer"
    try:
        later = text([said, {"role": ASSISTANT, "content": mark}, said], asks=False)
    except RowError:  # a template for tasks of another kind
        return None
    found = tokenizer(later[later.rfind(mark) + len(mark) :], **_PLAIN).input_ids
    return found[0] if found and found[0] in special else None


def special_ids(tokenizer: Any) -> set[int]:
    """Returns the ids of a tokenizer's special tokens."""
    added = tokenizer.added_tokens_decoder.items()
    return {*tokenizer.all_special_ids, *(id for id, token in added if token.special)}


def conversation(row: Any) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """Returns the messages and the tools of a row in the form that chat templates expect.

    Omits a message's keys whose value is null, because Parquet adds null for missing keys. The
    arguments of a tool call may be given as an object or as JSON text. The column `tools` may be
    given as a list or as JSON text.

    Raises:
        RowError: a column is missing or has an unexpected form.
    """
    turns = row.get(MESSAGES) if isinstance(row, dict) else None
    if turns is None:
        keys = ", ".join(map(repr, row)) if isinstance(row, dict) else "none"
        raise RowError(f"has no column {MESSAGES!r} (its columns: {keys})", "rename the column")
    if not isinstance(turns, list) or not all(isinstance(each, dict) for each in turns):
        raise RowError(f"has {MESSAGES!r} that is not a list of objects", "see docs/sft.md")
    messages = [_message(each) for each in turns]
    if not any(each["role"] == ASSISTANT and each.get(WEIGHT) != 0 for each in messages):
        raise RowError("has no assistant turn to learn from", "leave the row out")
    if messages[0]["role"] == ASSISTANT:
        raise RowError("begins with the assistant", "begin it with a user or system message")
    tools = row.get(TOOLS)
    if isinstance(tools, str):
        tools = _json(tools, f"has {TOOLS!r} that is not JSON")
    if tools is not None and not isinstance(tools, list):
        raise RowError(f"has {TOOLS!r} that is not a list", "give a list of function schemas")
    try:
        json.dumps([messages, tools], ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:  # JSON can express it, tokenizers refuse it
        raise RowError(
            "has half of a character (half of a surrogate pair)", "write the whole character"
        ) from error
    return messages, tools or None


def _message(turn: Mapping[str, Any]) -> dict[str, Any]:
    message = {key: value for key, value in turn.items() if value is not None}
    role, content = message.get("role"), message.setdefault("content", "")
    if role not in ROLES:
        raise RowError(f"has the unknown role {role!r}", f"use {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise RowError("has a message whose content is not text", "give the content as text")
    if message.get(WEIGHT, 1) not in (0, 1):
        raise RowError(
            f"has a message of weight {message[WEIGHT]!r}",
            "set it to 1, or to 0 for a turn that is not to be learnt",
        )
    calls = message.pop("tool_calls", None)
    if calls:
        message["tool_calls"] = [_call(each) for each in calls]
    if role == ASSISTANT and not content.strip() and not calls:
        raise RowError("has an empty turn of the assistant", "remove the turn or the row")
    return message


def _call(call: Any) -> dict[str, Any]:
    call = {key: value for key, value in call.items() if value} if isinstance(call, dict) else {}
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError("has a tool call without a name", "see docs/sft.md")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _json(arguments, "has a tool call whose arguments are not JSON")
    arguments = {} if arguments is None else arguments  # a call without any, in Parquet
    if not isinstance(arguments, dict):
        raise RowError("has a tool call whose arguments are not an object", "write an object")
    return {
        **{key: value for key, value in call.items() if key == "id"},
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _json(text: str, fault: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise RowError(fault, "write JSON") from error


class Conversations:
    """A PromptSource of demonstrations from one file. Every pass over the file has a new random
    order.

    `dropped` contains the number of omitted rows for each reason. `remarks` reports the numbers of
    conversations, of tokens and of tokens in the loss. `ends` contains the ids of the special
    tokens that end the assistant's turns in the file. At the end of a run, `driver/session.py` adds
    the ids in `ends` to the stop tokens of the exported model.

    Args:
        config: the run's configuration.
        tokenizer: a transformers tokenizer with a chat template.
        split: 'train' reads `data.path`, 'eval' reads `data.eval_path`.
        too_long: treatment of rows with more than rollout.max_prompt_tokens plus
            rollout.max_new_tokens tokens. 'error' stops the run; 'drop' leaves these rows out.

    Raises:
        ConfigError: the split has no file, the tokenizer has no chat template, or the tokenizer
            adds a space to every text.
        DataError: some rows cannot be used as demonstrations. The message names the fault, the
            number of rows with the fault, and the first such row.
    """

    demonstrates: ClassVar[bool] = True

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        split: Split,
        *,
        too_long: Literal["error", "drop"] = "error",
    ) -> None:
        self._tokenizer, self._seed = tokenizer, stream_seed(config.run.seed, split)
        self._limit = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
        self._template_kwargs = config.data.chat_template_kwargs
        path = config.data.path if split == "train" else config.data.eval_path
        key = f"data.{'path' if split == 'train' else 'eval_path'}"
        if path is None:
            raise ConfigError(
                "there is no file of conversations", where=key, fix=f"{key}=conversations.jsonl"
            )
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "the tokenizer has no chat template, which renders the messages",
                where=config.model.path,
                fix="add chat_template.jinja to this folder",
            )
        parts = [id for text in ("a", "b") for id in tokenizer(text, **_PLAIN).input_ids]
        if tokenizer.decode(parts) != "ab":
            raise ConfigError(
                "the tokenizer adds a space to every text, so turns cannot be encoded apart",
                where=config.model.path,
                fix="use a tokenizer that adds none, such as a byte-level one",
            )
        self._path, self._cursor, self._pass, self._order = path, 0, -1, list[int]()
        self.dropped: dict[str, int] = {}
        self.ends: set[int] = set()
        self._special = special = special_ids(tokenizer)
        self._stops = {tokenizer.eos_token_id, tokenizer.pad_token_id}
        rows, self._checksum = read_rows(path)
        # Rendered again when taken: ids of a large file would take ten times the memory of text.
        self._rows: list[tuple[str, Any]] = []
        faults: dict[str, tuple[RowError, list[str]]] = {}
        number, tokens, learnt = 0, 0, 0
        for _, where, row in rows:
            number += 1
            poll()
            if number % _TOLD == 0:
                say(f"rendering conversations: {number:,} rows ...")
            try:
                found = self._rendered(row)
            except RowError as error:
                if too_long == "drop" and error.kind == _IS_TOO_LONG:
                    self.dropped[TOO_LONG] = self.dropped.get(TOO_LONG, 0) + 1
                else:
                    faults.setdefault(error.kind, (error, []))[1].append(where)
                continue
            tokens, learnt = tokens + len(found.ids), learnt + sum(found.mask)
            self.ends |= special & set(found.ends())
            self._rows.append((where, row))
        for kind, (fault, places) in faults.items():
            raise DataError(
                f"{len(places)} of {number} rows: this row {kind}", where=places[0], fix=fault.fix
            )
        if not self._rows:
            raise DataError("the file has no conversation to learn from", where=path)
        self.problems = len(self._rows)
        self.remarks = []
        if split == "train":
            taken = config.run.steps * config.batch.prompts
            self.remarks = [
                f"{self.problems:,} conversations of {tokens:,} tokens, of which {learnt:,} carry"
                f" loss; the run takes {taken:,} rows, {taken / self.problems:.2f} passes"
            ]

    def _rendered(self, row: Any) -> Rendered:
        messages, tools = conversation(row)
        found = rendered(messages, tools, self._tokenizer, self._template_kwargs)
        self._require_one_end(messages, found)
        if len(found.ids) > self._limit:
            raise RowError(
                _IS_TOO_LONG,
                f"raise one of them (the limit is {self._limit}, this row has {len(found.ids)}"
                " tokens), or data.source={name: messages, too_long: drop}",
            )
        if not any(found.mask):
            raise RowError("has no token that carries loss", "leave it out")
        return found

    def _require_one_end(self, messages: Sequence[Mapping[str, Any]], found: Rendered) -> None:
        """Raises RowError if a message of the assistant contains, in its text, the padding token or
        a token that ends turns. Messages with weight 0 are not checked, because they carry no loss.
        Training on a message that contains the padding token or a token that ends turns would teach
        the policy to end a turn before the turn is complete."""
        tokens: list[str] = self._tokenizer.convert_ids_to_tokens(
            sorted(self._special & {*found.ends(), *self._stops})
        )
        for message in messages:
            if message["role"] == ASSISTANT and message.get(WEIGHT) != 0:
                said = json.dumps(message, ensure_ascii=False)
                for token in tokens:
                    # one character is a word, such as the padding "!" of some models
                    if len(token) > 1 and token in said:
                        raise RowError(
                            f"has {token} in the text of the assistant, a token that ends a turn",
                            "remove it from the text; the chat template ends the turns",
                        )

    def take(self, n: int) -> list[Prompt]:
        """Returns the next `n` demonstrations. Starts new passes over the file if needed."""
        return [self._next() for _ in range(n)]

    def state(self) -> dict[str, int]:
        """Returns the number of demonstrations taken since the run began, and the checksum of the
        file."""
        return {"cursor": self._cursor, "checksum": self._checksum}

    def restore(self, state: dict[str, int]) -> None:
        """Continues after demonstration `state["cursor"]`. Raises DataError if the file has changed
        since `state` was saved."""
        if state.get("checksum") != self._checksum:
            raise DataError(
                "the file has changed since the run was started, so the run cannot be resumed"
                " exactly",
                where=self._path,
                fix="put the original file back, or start a new run",
            )
        self._cursor = state["cursor"]

    def _next(self) -> Demonstration:
        pass_, index = divmod(self._cursor, len(self._rows))
        if pass_ != self._pass:
            self._pass = pass_
            self._order = sorted(
                range(len(self._rows)), key=lambda row: counter_hash(self._seed, pass_, row)
            )
        where, row = self._rows[self._order[index]]
        ids, mask = self._rendered(row)
        first = mask.index(True)
        messages, _ = conversation(row)
        asked = [each["content"] for each in messages if each["role"] == "user"]
        demonstration = Demonstration(
            cursor=self._cursor,
            id=str(row.get("id", where)),
            text=asked[0] if asked else "",
            answer="",
            token_ids=tuple(ids[:first]),
            response=tuple(ids[first:]),
            loss_mask=tuple(mask[first:]),
            written=self._tokenizer.decode(ids[first:]),
        )
        self._cursor += 1
        return demonstration
