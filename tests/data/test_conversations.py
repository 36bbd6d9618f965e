"""Conversations: what carries loss, what is refused, and the order of the rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from support.real_tokenizers import tokenizer as published
from support.runs import ROOT
from tokenizers import AddedToken
from transformers import AutoTokenizer

from megatron_stare.config.load import load_config
from megatron_stare.config.schema import Config
from megatron_stare.data import messages as messages_module
from megatron_stare.data.messages import Conversations, RowError, conversation, rendered
from megatron_stare.data.prompt_source import held_out
from megatron_stare.errors import ConfigError, DataError
from megatron_stare.records.batch import Demonstration

CHAT = ROOT / "assets/tiny-chat"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ASK = {"role": "user", "content": "What is 1+2?"}
SAY = {"role": "assistant", "content": "It is 3."}
CALL = {
    "role": "assistant",
    "content": "I add.",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
}
RESULT = {"role": "tool", "content": "3"}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(CHAT)


def config_of(tmp_path: Path, rows: list[Any], **more: Any) -> Config:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    tree = {
        "model": {"path": str(CHAT)},
        "algorithm": "sft",
        "batch": {"prompts": 2, "samples_per_prompt": 1},
        "data": {"source": "messages", "path": str(path)},
        "run": {"steps": 5},
    }
    return load_config({**tree, **more})


def learnt(tokenizer: Any, *messages: Any, tools: Any = None) -> str:
    found = rendered(messages, tools, tokenizer)
    whole = tokenizer.apply_chat_template(
        list(messages), tools=tools, tokenize=True, return_dict=False
    )
    assert found.ids == whole
    return tokenizer.decode([id for id, kept in zip(*found, strict=True) if kept])


def test_only_the_assistants_words_and_the_end_of_its_turns(tokenizer: Any) -> None:
    system = {"role": "system", "content": "Be brief."}
    assert learnt(tokenizer, system, ASK, SAY) == "It is 3.<|im_end|>"
    two = learnt(tokenizer, ASK, SAY, {"role": "user", "content": "Sure?"}, SAY)
    assert two == "It is 3.<|im_end|>It is 3.<|im_end|>"
    # what follows the last turn is context alone
    assert learnt(tokenizer, ASK, SAY, ASK) == "It is 3.<|im_end|>"


def test_calls_are_learnt_and_their_results_are_not(tokenizer: Any) -> None:
    text = learnt(tokenizer, ASK, CALL, RESULT, RESULT, SAY, tools=[TOOL])
    assert text == (
        'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
        "It is 3.<|im_end|>"
    )


# in the form of GLM-4.5's
NO_END = (
    "{% for m in messages %}<|{{ m.role }}|>\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def test_a_turn_that_ends_where_the_next_role_begins(tmp_path: Path) -> None:
    """The token that opens the next message is what the policy stops at: also after the last turn,
    whose thinking the template would leave out if it were not the last."""
    other = AutoTokenizer.from_pretrained(CHAT)
    roles = ["<|user|>", "<|assistant|>", "<|tool|>"]
    other.add_special_tokens({"additional_special_tokens": roles})
    other.chat_template = NO_END

    def parts(*messages: Any) -> list[str]:
        found = rendered(messages, None, other)
        cut = [other.decode([id]) for id, kept in zip(*found, strict=True) if kept]
        assert other.decode(found.ids).startswith(
            other.apply_chat_template(list(messages), tokenize=False)
        )
        return "".join(cut).replace("|>", "|>\0").split("\0")[:-1]

    assert parts(ASK, SAY) == ["It is 3.<|user|>"]
    assert parts(ASK, SAY, ASK, SAY) == ["It is 3.<|user|>"] * 2
    assert parts(ASK, SAY, RESULT, SAY) == ["It is 3.<|tool|>", "It is 3.<|user|>"]
    assert parts(ASK, SAY, ASK) == ["It is 3.<|user|>"]
    thinking = {"role": "assistant", "content": "<think>1+2</think>3"}
    assert parts(ASK, thinking) == ["<think>1+2</think>3<|user|>"]
    other.save_pretrained(tmp_path / "model")
    config = config_of(tmp_path, [{"messages": [ASK, SAY]}])
    source = Conversations(config, other, "train")
    assert source.ends == {other.convert_tokens_to_ids("<|user|>")}
    # another turn of the assistant is no place to stop
    found = rendered([ASK, SAY, SAY, ASK], None, other)
    words = other.decode([id for id, kept in zip(*found, strict=True) if kept])
    assert words == "It is 3.It is 3.<|user|>"


# in the form of Phi-3.5's and Phi-4-mini's
END_OF_ALL = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)


def test_a_token_after_the_whole_conversation_is_no_part_of_the_last_turn() -> None:
    other = AutoTokenizer.from_pretrained(CHAT)
    roles = [AddedToken(f"<|{role}|>", rstrip=True) for role in ("end", "user", "assistant")]
    other.add_special_tokens({"additional_special_tokens": roles})
    other.chat_template = END_OF_ALL
    assert learnt(other, ASK, SAY) == "It is 3.<|end|>"
    assert learnt(other, ASK, SAY, ASK, SAY) == "It is 3.<|end|>It is 3.<|end|>"
    # where later messages leave it in its place, it is the turn's own
    other.chat_template = END_OF_ALL.replace("<|end|>\n{% endfor %}", "{{ eos_token }}{% endfor %}")
    other.chat_template = other.chat_template.replace("{% else %}{{ eos_token }}", "")
    said = {**SAY, "content": "It is 3.<|end|>"}
    assert learnt(other, ASK, said, ASK, said) == "It is 3.<|end|><|im_end|>" * 2


def test_a_template_without_special_tokens_ends_no_turn(tokenizer: Any) -> None:
    other = AutoTokenizer.from_pretrained(CHAT)
    other.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    assert learnt(other, ASK, SAY) == "It is 3.\n"


@pytest.mark.parametrize("arguments", [None, "null", {}, "{}"])
def test_a_call_without_arguments_has_an_empty_object(tokenizer: Any, arguments: Any) -> None:
    for function in ({"name": "now", "arguments": arguments}, {"name": "now"}):
        turn = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
        messages, _ = conversation({"messages": [ASK, turn]})
        assert '{"name": "now", "arguments": {}}' in learnt(tokenizer, *messages)


def test_a_template_that_cuts_the_thinking_of_the_last_turn_is_refused(tokenizer: Any) -> None:
    """In the form of DeepSeek-R1-Distill's."""
    other = AutoTokenizer.from_pretrained(CHAT)
    other.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    with pytest.raises(RowError, match=r"does not begin with its generation prompt .*<think>"):
        rendered([ASK, {"role": "assistant", "content": "<think>\n1+2</think>3"}], None, other)


PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("turn", "tools", "fault"),
    [
        ({**CALL, "content": ""}, None, "a tool call, which the chat template leaves out"),
        ({**SAY, "reasoning_content": "1+2"}, None, "a turn whose 'reasoning_content' the chat"),
        (SAY, [TOOL], "tools, which the chat template does not show to the policy"),
    ],
)
def test_what_a_template_leaves_out_is_refused(turn: Any, tools: Any, fault: str) -> None:
    """The templates of Llama 3.1 and of DeepSeek-V3 render a call without text as an
    empty turn."""
    other = AutoTokenizer.from_pretrained(CHAT)
    other.chat_template = PLAIN
    assert learnt(other, ASK, {**SAY, "content": " It is 3.\n"}) == "It is 3.<|im_end|>"
    with pytest.raises(RowError, match=fault):
        rendered([ASK, turn], tools, other)


def test_the_published_templates_lose_nothing() -> None:
    """Qwen3 writes the thinking of `content` and of `reasoning_content` in the same way."""
    thought = {**SAY, "content": "<think>1+2</think>It is 3."}
    apart = {**SAY, "reasoning_content": "1+2"}
    text = "<think>\n1+2\n</think>\n\nIt is 3.<|im_end|>"
    for turn in (thought, apart):
        assert learnt(published("qwen3"), ASK, turn) == text
    with pytest.raises(RowError, match="whose 'reasoning_content' the chat template leaves out"):
        rendered([ASK, apart], None, published("qwen2.5"))
    for name in ("qwen2.5", "qwen3"):
        said = learnt(published(name), ASK, CALL, tools=[TOOL])
        assert said.endswith(
            'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
        )


def test_a_message_that_the_template_leaves_out_is_refused() -> None:
    """Qwen2.5's has no role developer."""
    with pytest.raises(RowError, match="the role 'developer', which the chat template leaves out"):
        rendered(
            [{"role": "developer", "content": "Be brief."}, ASK, SAY], None, published("qwen2.5")
        )


def test_a_signal_ends_the_reading_of_a_large_file(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(messages_module, "poll", lambda: asked.append(1))
    Conversations(config_of(tmp_path, [{"messages": [ASK, SAY]}] * 3), tokenizer, "train")
    assert len(asked) == 3


def test_a_turn_is_encoded_as_it_would_be_sampled(tokenizer: Any) -> None:
    """A token over the border of the turn would be one that no policy can sample there."""

    other = AutoTokenizer.from_pretrained(CHAT)
    other.add_tokens([AddedToken("\nIt", normalized=False)])
    whole = other.apply_chat_template([ASK, SAY], tokenize=True, return_dict=False)
    assert "\nIt" in other.convert_ids_to_tokens(whole)
    found = rendered([ASK, SAY], None, other)
    assert other.decode(found.ids) == other.decode(whole)
    assert found.ids != whole
    words = other.decode([id for id, kept in zip(*found, strict=True) if kept])
    assert words == "It is 3.<|im_end|>"


def test_a_template_that_rewrites_history_is_refused(tokenizer: Any) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
        "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    thinking = {"role": "assistant", "content": "<think>1+2</think>3"}
    other = AutoTokenizer.from_pretrained(CHAT)
    other.chat_template = template
    assert learnt(other, ASK, thinking) == "<think>1+2</think>3<|im_end|>"
    with pytest.raises(RowError, match="renders differently once later messages follow"):
        rendered([ASK, thinking, ASK, SAY], None, other)


def test_earlier_turns_of_weight_0_are_context() -> None:
    """Qwen3's template writes an empty thought into a turn only while the turn is the last. The
    refusal of a row says how to divide the row, so its parts have to be accepted."""
    model = published("qwen3")
    with pytest.raises(RowError, match="renders differently once later") as refused:
        rendered([ASK, CALL, RESULT, SAY], [TOOL], model)
    assert '"weight": 0' in refused.value.fix
    thought = "<think>\n\n</think>\n\n"
    first = rendered([ASK, CALL], [TOOL], model)
    words = model.decode([id for id, kept in zip(*first, strict=True) if kept])
    assert words.startswith(f"{thought}I add.\n<tool_call>")

    row = {"messages": [ASK, {**CALL, "weight": 0}, RESULT, SAY], "tools": [TOOL]}
    messages, tools = conversation(row)
    second = rendered(messages, tools, model)
    words = model.decode([id for id, kept in zip(*second, strict=True) if kept])
    assert words == f"{thought}It is 3.<|im_end|>"
    assert second.ids == model.apply_chat_template(
        [ASK, CALL, RESULT, SAY], tools=[TOOL], tokenize=True, return_dict=False
    )


def test_a_turn_of_weight_1_is_learnt(tokenizer: Any) -> None:
    messages, _ = conversation({"messages": [ASK, {**SAY, "weight": 1}]})
    found = rendered(messages, None, tokenizer)
    assert found == rendered([ASK, SAY], None, tokenizer)


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"messages": [ASK, {**SAY, "weight": 0.5}]}, "has a message of weight 0.5"),
        (
            {
                "messages": [
                    ASK,
                    {**CALL, "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
                ]
            },
            "has a tool call whose arguments are not an object",
        ),
        ({"prompt": "x"}, "has no column 'messages' (its columns: 'prompt')"),
        ({"messages": "x"}, "'messages' that is not a list of objects"),
        ({"messages": [ASK, {**SAY, "content": "\ud83d"}]}, "has half of a character"),
        ({"messages": [ASK]}, "has no assistant turn"),
        ({"messages": [ASK, {**SAY, "weight": 0}]}, "no assistant turn to learn from"),
        ({"messages": [SAY]}, "begins with the assistant"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "has the unknown role 'bot'"),
        ({"messages": [ASK, {**SAY, "content": " "}]}, "has an empty turn of the assistant"),
        ({"messages": [ASK, {**SAY, "content": [1]}]}, "whose content is not text"),
        ({"messages": [ASK, {**CALL, "tool_calls": [{}]}]}, "a tool call without a name"),
        (
            {"messages": [ASK, {**CALL, "tool_calls": [{"name": "a", "arguments": "{"}]}]},
            "a tool call whose arguments are not JSON",
        ),
        ({"messages": [ASK, SAY], "tools": "{"}, "'tools' that is not JSON"),
    ],
)
def test_rows_that_cannot_be_learnt_from(
    tokenizer: Any, tmp_path: Path, row: Any, fault: str
) -> None:
    good = {"messages": [ASK, SAY]}
    with pytest.raises(DataError) as error:
        Conversations(config_of(tmp_path, [good, row, row]), tokenizer, "train")
    assert error.value.what.startswith("2 of 3 rows: this row")
    assert fault in error.value.what
    assert error.value.where == f"{tmp_path / 'rows.jsonl'}:2"
    assert error.value.fix


def test_rows_that_are_too_long_stop_the_run_or_are_left_out(
    tokenizer: Any, tmp_path: Path
) -> None:
    rows = [{"messages": [ASK, SAY]}, {"messages": [ASK, {**SAY, "content": "3" * 50}]}]
    length = len(rendered(rows[0]["messages"], None, tokenizer).ids)
    limits = {"max_prompt_tokens": 10, "max_new_tokens": length - 10}
    config = config_of(tmp_path, rows, rollout=limits)
    with pytest.raises(DataError, match="1 of 2 rows") as error:
        Conversations(config, tokenizer, "train")
    assert "this row is longer than" in str(error.value)
    assert f"the limit is {length}" in str(error.value.fix)
    found = Conversations(config, tokenizer, "train", too_long="drop")
    assert found.problems == 1
    assert list(found.dropped.values()) == [1]
    data = {"source": {"name": "messages", "too_long": "drop"}, "eval_path": config.data.path}
    held = held_out(config_of(tmp_path, rows, rollout=limits, data=data), tokenizer, None)
    assert len(held) == 1
    assert held.told == [f"1 rows left out: {messages_module.TOO_LONG}"]


@pytest.mark.parametrize(
    "turn",
    [
        {**SAY, "content": "It is <|im_end|> 3."},
        {**SAY, "content": "It is 3.<|endoftext|>"},  # the padding
        {
            **CALL,
            "tool_calls": [{"function": {"name": "add", "arguments": {"a": "<|im_end|>"}}}],
        },
    ],
)
def test_a_token_that_ends_turns_inside_of_a_turn_is_refused(tmp_path: Path, turn: Any) -> None:
    """The policy would learn to stop there, before its call is closed."""
    config = config_of(tmp_path, [{"messages": [ASK, turn]}])
    with pytest.raises(DataError, match=r"1 of 1 rows: this row has <.* a token that ends a turn"):
        Conversations(config, published("qwen2.5"), "train")
    rows = [{"messages": [ASK, {**turn, "weight": 0}, {**ASK, "content": "<|im_end|>"}, SAY]}]
    assert Conversations(config_of(tmp_path, rows), published("qwen2.5"), "train").problems == 1


def test_a_demonstration_begins_with_the_first_learnt_token(tokenizer: Any, tmp_path: Path) -> None:
    row = {"messages": [ASK, CALL, RESULT, SAY], "id": "mine"}
    found = Conversations(config_of(tmp_path, [row]), tokenizer, "train").take(1)[0]
    assert isinstance(found, Demonstration)
    whole = rendered(*conversation(row), tokenizer)
    assert [*found.token_ids, *found.response] == whole.ids
    assert [False] * len(found.token_ids) + list(found.loss_mask) == whole.mask
    assert found.loss_mask[0]
    assert not all(found.loss_mask)
    assert (found.id, found.text) == ("mine", ASK["content"])


def test_every_pass_takes_every_row_once_and_goes_on_where_it_was(
    tokenizer: Any, tmp_path: Path
) -> None:
    rows = [{"messages": [ASK, SAY], "id": number} for number in range(7)]
    config = config_of(tmp_path, rows)
    source = Conversations(config, tokenizer, "train")
    whole = [each.id for each in source.take(21)]
    passes = [whole[:7], whole[7:14], whole[14:]]
    assert all(sorted(each) == sorted(map(str, range(7))) for each in passes)
    assert len({tuple(each) for each in passes}) == 3
    again = Conversations(config, tokenizer, "train")
    again.take(9)
    state = again.state()
    resumed = Conversations(config, tokenizer, "train")
    resumed.restore(state)
    assert [each.id for each in resumed.take(12)] == whole[9:]
    other = Conversations(config_of(tmp_path, rows[:6]), tokenizer, "train")
    with pytest.raises(DataError, match="has changed"):
        other.restore(state)


def test_parquet_holds_the_same_rows(tokenizer: Any, tmp_path: Path) -> None:
    """Parquet adds null keys, and calls of unlike arguments are kept as JSON text."""
    text = {**CALL["tool_calls"][0]["function"], "arguments": json.dumps({"a": 1})}
    call = {**CALL, "tool_calls": [{"type": "function", "function": text}]}
    rows = [{"messages": [ASK, call, RESULT, SAY], "tools": json.dumps([TOOL])}]
    config = config_of(tmp_path, [{"messages": [ASK, CALL, RESULT, SAY], "tools": [TOOL]}])
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    data = config.data.model_copy(update={"path": str(path)})
    parquet = Conversations(config.model_copy(update={"data": data}), tokenizer, "train").take(1)
    (plain,) = Conversations(config, tokenizer, "train").take(1)
    assert parquet[0].token_ids == plain.token_ids
    assert parquet[0].response == plain.response  # type: ignore[attr-defined]


def test_a_tokenizer_needs_a_template_and_a_split_a_file(tokenizer: Any, tmp_path: Path) -> None:
    config = config_of(tmp_path, [{"messages": [ASK, SAY]}])
    with pytest.raises(ConfigError, match="no file of conversations"):
        Conversations(config, tokenizer, "eval")
    bare = AutoTokenizer.from_pretrained(ROOT / "assets/tiny-adder")
    with pytest.raises(ConfigError, match="no chat template"):
        Conversations(config, bare, "train")
