"""The JSON Lines source: what it refuses and how it says so, epochs, and exact resumption."""

from __future__ import annotations

import json

import pytest
from support.char_tokenizer import CHAT_TEMPLATE, char_tokenizer, ids

from megatron_stare.config.load import validate
from megatron_stare.data.prompt_source import dropped, held_out, make_source
from megatron_stare.errors import ConfigError, DataError
from megatron_stare.rewards.verifier import make_verifier

TOKENIZER = char_tokenizer()


def source(path, *, seed=1, split="train", limit=16, tokenizer=TOKENIZER, truncate="error", **data):
    paths = {} if path is None else {"path": str(path), "eval_path": str(path)}
    data = {"source": "jsonl"} | paths | data
    sections = {
        "run": {"seed": seed},
        "data": data,
        "rollout": {"max_prompt_tokens": limit, "truncate_prompt": truncate},
    }
    return make_source(validate({"model": {"path": "."}} | sections, "test"), tokenizer, split)


@pytest.fixture
def seven(tmp_path):
    path = tmp_path / "seven.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"{i}+{i}=", "answer": 2 * i}) + "\n" for i in range(7))
    )
    return path


def test_long_prompts_are_dropped_or_cut_where_asked(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": text, "answer": 1}) + "\n" for text in ("12345", "678"))
    )
    assert [p.token_ids for p in source(path, limit=3, truncate="drop").take(2)] == [ids("678")] * 2
    cut = sorted(p.token_ids for p in source(path, limit=3, truncate="left").take(2))
    assert cut == sorted([ids("345"), ids("678")])
    with pytest.raises(DataError, match="every prompt is longer"):
        source(path, limit=2, truncate="drop")


def test_fields_are_read(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"prompt": "a", "answer": "x", "id": "first", "level": 3}\r\n'
        b"\n"
        b'{"prompt": "b\xe2\x80\xa8", "answer": 0.5}\n'
        b'{"prompt": "c", "answer": 12, "id": 9}'
    )
    prompts = sorted(source(path).take(3), key=lambda p: p.text)
    assert [(p.id, p.text, p.answer) for p in prompts] == [
        ("first", "a", "x"),
        ("3", "b\u2028", "0.5"),  # the line number; U+2028 is no end of line
        ("9", "c", "12"),
    ]
    assert prompts[0].token_ids == ids("a")


@pytest.mark.parametrize(("written", "read"), [("27.0", "27"), ("-0.0", "0"), ("1e3", "1000")])
def test_a_whole_number_is_read_as_an_integer(tmp_path, written, read):
    """Verifiers that compare text would count the answer 27 as wrong if the reference was 27.0."""
    path = tmp_path / "p.jsonl"
    path.write_text(f'{{"prompt": "a", "answer": {written}}}\n')
    (prompt,) = source(path).take(1)
    assert prompt.answer == read
    for name in ("dapo_boxed", "exact"):
        assert make_verifier(name)(f"\\boxed{{{read}}}", prompt.answer) == 1.0


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b'{"prompt": "a", "answer": }', "not valid JSON at column 27"),
        (b'{"prompt": "a"}', "no 'answer'; the keys here are 'prompt'"),
        (b'{"answer": "a"}', "no 'prompt'"),
        (b'["a", "b"]', "expected an object .* got a list"),
        (b'{"prompt": 3, "answer": "a"}', "'prompt' must be a string, got a number"),
        (b'{"prompt": "a", "answer": null}', "'answer' must be a string or a number, got null"),
        (
            b'{"prompt": "a", "answer": true}',
            "'answer' must be a string or a number, got a boolean",
        ),
        (b'{"prompt": "a", "answer": NaN}', "not a finite number"),
        (b'{"prompt": "a", "answer": "b", "id": 1.5}', "'id' must be a string or an integer"),
        (b'{"prompt": "\xff", "answer": "b"}', "not UTF-8 at byte 12"),
        (b'{"prompt": "a", "answer": ' + b"1" * 5000 + b"}", "not readable JSON"),
        (
            b'{"prompt": "a\\ud83d b", "answer": "b"}',
            r"'prompt' holds \\ud83d at character 1, which is half of a character",
        ),
        (
            b'{"prompt": [{"role": "system", "content": "\\udc00"}, '
            b'{"role": "user", "content": "b"}], "answer": "b"}',
            r"'prompt' holds \\udc00 at character 0",
        ),
        (b'{"prompt": "a", "label": "12\\ud83d"}', r"'label' holds \\ud83d at character 2"),
        (b'{"prompt": "a", "answer": "b", "id": "\\ud83d"}', r"'id' holds \\ud83d at character 0"),
        (b'{"prompt": "", "answer": "b"}', "no tokens"),
        (
            b'{"prompt": "12345678901234567", "answer": "b"}',
            "17 tokens, the limit rollout.max_prompt_tokens is 16",
        ),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, complaint):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "a", "answer": "b"}\n' + line + b"\n")
    with pytest.raises(DataError, match=complaint) as error:
        source(path)
    assert error.value.where == f"{path}:2"


def test_missing_and_empty_files(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        source(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="no prompts"):
        source(tmp_path / "empty.jsonl")


@pytest.mark.parametrize(("split", "key"), [("train", "path"), ("eval", "eval_path")])
def test_a_path_is_required(split, key):
    with pytest.raises(ConfigError) as error:
        source(None, split=split)
    assert error.value.where == f"data.{key}"


def test_every_epoch_is_a_new_order_of_everything(seven):
    prompts = source(seven).take(21)
    assert [p.cursor for p in prompts] == list(range(21))
    epochs = [[p.text for p in prompts[start : start + 7]] for start in (0, 7, 14)]
    assert all(len(set(epoch)) == 7 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_how_prompts_are_taken_does_not_matter(seven):
    pieces = source(seven)
    assert [prompt for n in (5, 1, 0, 9, 4) for prompt in pieces.take(n)] == source(seven).take(19)


@pytest.mark.parametrize("taken", [0, 3, 7, 10, 14])
def test_resumes_exactly(seven, taken):
    first = source(seven)
    first.take(taken)
    state = json.loads(json.dumps(first.state()))
    resumed = source(seven)
    resumed.restore(state)
    assert resumed.take(9) == first.take(9)


def test_another_file_cannot_be_resumed(seven):
    state = source(seven).state()
    seven.write_text(seven.read_text().replace("3+3=", "3+4="))
    with pytest.raises(DataError, match="cannot be resumed exactly"):
        source(seven).restore(state)


def test_seed_orders_training_and_leaves_evaluation_alone(seven):
    assert source(seven, seed=1).take(14) != source(seven, seed=2).take(14)
    assert source(seven, seed=1, split="eval").take(14) == source(seven, seed=2, split="eval").take(
        14
    )


def test_chat_template_wraps_the_prompt_and_counts_against_the_limit(seven):
    chat = char_tokenizer(CHAT_TEMPLATE)
    (prompt,) = source(seven, tokenizer=chat, chat_template=True).take(1)
    assert prompt.token_ids == ids(f"u {prompt.text};a ")
    with pytest.raises(DataError, match="has 9 tokens"):
        source(seven, tokenizer=chat, chat_template=True, limit=8)


def test_evaluation_asks_nothing_twice(tmp_path):
    path = tmp_path / "p.jsonl"
    lines = [("1+1=", 2), ("2+2=", 4), ("1+1=", "2"), ("1+1=", 3), ("2+2=", 4)]
    path.write_text("".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in lines))
    held_out, train = source(path, split="eval"), source(path)
    assert (held_out.problems, train.problems) == (3, 5)
    asked = {(p.id, p.text, p.answer) for p in held_out.take(3)}
    assert asked == {("1", "1+1=", "2"), ("2", "2+2=", "4"), ("4", "1+1=", "3")}
    # what trains twice is the user's to say
    assert sorted(p.id for p in train.take(5)) == list("12345")
    # cut to their ends, the prompts are the same to the policy
    assert source(path, split="eval", limit=3, truncate="left").problems == 3
    assert source(path, split="eval", limit=1, truncate="left").problems == 3
    path.write_text(
        "".join(json.dumps({"prompt": f"{i}+1=", "answer": 2}) + "\n" for i in range(5))
    )
    assert source(path, split="eval", limit=3, truncate="left").problems == 1


def test_no_more_problems_than_there_are(seven):
    def asked(prompts):
        data = {"source": "jsonl", "path": str(seven), "eval_path": str(seven)}
        return held_out(
            validate({"model": {"path": "."}, "data": data}, "test"), TOKENIZER, prompts
        )

    assert len({p.text for p in asked(7)}) == 7
    assert asked(None) == asked(7)  # all of them
    with pytest.raises(
        ConfigError, match="8 problems would ask some twice: the source has 7 different ones"
    ) as error:
        asked(8)
    assert (error.value.where, error.value.fix) == ("eval.prompts", "at most 7")


class Silent:
    """A source of the user's own that does not say how many problems it has."""

    def __init__(self, config, tokenizer, split):
        pass


class Endless(Silent):
    problems = None

    def take(self, n):
        return list(range(n))


def test_a_source_of_the_users_own_says_how_many_problems_it_has():
    def asked(name, prompts=9):
        data = {"source": f"{__name__}.{name}"}
        return held_out(
            validate({"model": {"path": "."}, "data": data}, "test"), TOKENIZER, prompts
        )

    with pytest.raises(ConfigError, match="does not say how many different problems it has"):
        asked("Silent")
    assert asked("Endless") == list(range(9))
    with pytest.raises(ConfigError, match="are endless, so an evaluation cannot ask all"):
        asked("Endless", None)


def test_a_source_of_the_users_own_need_not_say_what_it_left_out(tmp_path):
    assert dropped(Endless(None, None, "train")) == {}
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+1+1+1+1=", "answer": "5"}\n')
    assert dropped(source(path, limit=4, truncate="drop")) == {
        "longer than rollout.max_prompt_tokens": 1
    }
