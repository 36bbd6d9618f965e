"""Prompts from Parquet and JSON Lines in the shapes that are in use, mixed, cleaned and resumed."""

from __future__ import annotations

import json
import sys
import zlib
from collections import Counter
from fractions import Fraction
from types import SimpleNamespace

import hypothesis
import pytest
from hypothesis import strategies as st
from support.char_tokenizer import CHAT_TEMPLATE, char_tokenizer, ids
from support.real_tokenizers import NAMES
from support.real_tokenizers import tokenizer as published

from megatron_stare.config.load import validate, with_absolute_paths
from megatron_stare.config.rollout_sections import MixtureFile
from megatron_stare.data.cleaning import Contamination, without_repeats
from megatron_stare.data.file_prompts import FilePrompts, _Part
from megatron_stare.data.prompt_source import held_out, make_source
from megatron_stare.data.records import read_records
from megatron_stare.errors import ConfigError, DataError
from megatron_stare.tasks.task import Evaluation, Task

TOKENIZER = char_tokenizer()
VERL = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": "1+1="}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "2", "style": "rule"},
    "extra_info": {"index": "9a0b"},
}


def configuration(data, limit=16, truncate="error", seed=1):
    rollout = {"max_prompt_tokens": limit, "truncate_prompt": truncate}
    return validate(
        {"model": {"path": "."}, "run": {"seed": seed}, "rollout": rollout, "data": data}, "test"
    )


def source(tokenizer=TOKENIZER, split="train", seed=1, limit=16, truncate="error", **data):
    return make_source(configuration(data, limit, truncate, seed), tokenizer, split)


def lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_three_shapes_are_told_apart_by_their_keys(tmp_path):
    path = lines(
        tmp_path / "p.jsonl",
        {"prompt": "1+1=", "answer": 2, "id": "own"},
        {"prompt": "1+1=", "label": "2", "metadata": {}},
        {"prompt": [{"role": "user", "content": "1+1="}], "label": "2"},
        VERL,
    )
    records, _ = read_records(path)
    assert [(r.id, r.prompt, r.answer) for r in records] == [
        (n, "1+1=", "2") for n in ("own", "2", "3", "9a0b")
    ]
    assert [prompt.token_ids for prompt in source(path=path).take(4)] == [ids("1+1=")] * 4


def test_columns_of_other_names(tmp_path):
    path = lines(
        tmp_path / "p.jsonl", {"problem": {"text": "1+1="}, "answer": "no", "solution": "2"}
    )
    (prompt,) = source(path=path, prompt_key="problem.text", answer_key="solution").take(1)
    assert (prompt.text, prompt.answer) == ("1+1=", "2")
    with pytest.raises(
        DataError, match=r"no 'prompt'; the keys here are 'problem', 'answer', 'solution'"
    ):
        source(path=path)


def test_a_conversation_goes_through_the_chat_template(tmp_path):
    turns = [("user", "1+1="), ("assistant", "2"), ("user", "2+2=")]
    messages = [{"role": role, "content": content} for role, content in turns]
    path = lines(tmp_path / "p.jsonl", {"prompt": messages, "label": 4})
    roles = CHAT_TEMPLATE.replace("u {{", "{{ m['role'][0] }} {{")
    (prompt,) = source(
        char_tokenizer(roles), path=path, chat_template=True, limit=40, template="+{prompt}"
    ).take(1)
    assert (prompt.text, prompt.answer) == ("2+2=", "4")
    assert prompt.token_ids == ids("u 1+1=;a 2;u +2+2=;a ")
    with pytest.raises(DataError, match="several messages") as error:
        source(path=path)
    assert error.value.where == f"{path}:1"


@pytest.mark.parametrize("name", NAMES)
def test_published_templates_get_the_prompts_that_transformers_makes(tmp_path, name):
    turns = [("system", "Be brief.\n"), ("user", "1+1 "), ("assistant", "<think>a</think>2")]
    messages = [{"role": role, "content": text} for role, text in [*turns, ("user", " 2+2")]]
    path = lines(tmp_path / "p.jsonl", {"prompt": messages, "answer": 4})
    (prompt,) = source(published(name), path=path, chat_template=True, limit=90).take(1)
    assert list(prompt.token_ids) == published(name).apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )


@pytest.mark.parametrize("role", ["human", "developer"])
def test_a_message_that_the_template_leaves_out_is_named(tmp_path, role):
    turns = [{"role": role, "content": "1+1"}, {"role": "user", "content": "2+2"}]
    path = lines(tmp_path / "p.jsonl", {"prompt": turns, "answer": 4})
    with pytest.raises(DataError, match=f"leaves out the prompt's message of the role '{role}'"):
        source(published("qwen2.5"), path=path, chat_template=True, limit=90)


def test_a_prompt_that_the_template_refuses_is_named(tmp_path):
    """Gemma 2 has such a template, without a system message."""
    refuses = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    )
    turns = [{"role": "system", "content": "a"}, {"role": "user", "content": "1+1"}]
    path = lines(tmp_path / "p.jsonl", {"prompt": turns, "answer": 2})
    with pytest.raises(DataError, match="the chat template refuses the prompt: no system") as error:
        source(char_tokenizer(refuses + CHAT_TEMPLATE), path=path, chat_template=True)
    assert error.value.where == f"{path}:1"


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        ([], "the last message of 'prompt' must be the user's"),
        ([{"role": "assistant", "content": "a"}], "must be the user's"),
        ([{"role": "user"}], "must hold messages"),
        (["a"], "must hold messages"),
    ],
)
def test_broken_messages(tmp_path, prompt, complaint):
    path = lines(tmp_path / "p.jsonl", {"prompt": prompt, "answer": 1})
    with pytest.raises(DataError, match=complaint):
        source(path=path)


def test_parquet_gives_what_json_lines_give(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{**VERL, "prompt": [{"role": "user", "content": f"{i}+1="}]} for i in range(2_000)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    found, _ = read_records(tmp_path / "p.parquet")
    expected, _ = read_records(lines(tmp_path / "p.jsonl", *rows))
    assert [r._replace(where="") for r in found] == [r._replace(where="") for r in expected]
    assert found[1_500].where.endswith("p.parquet, row 1501")
    columns, text = (
        source(path=str(tmp_path / f"p.{kind}")).take(5) for kind in ("parquet", "jsonl")
    )
    assert columns == text
    whole = (tmp_path / "p.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[:-40])
    with pytest.raises(DataError, match="not a readable Parquet file"):
        read_records(tmp_path / "cut.parquet")


@pytest.mark.parametrize(
    ("module", "name"), [("pyarrow", "p.parquet"), ("datasets", "hf:owner/name")]
)
def test_a_library_that_is_missing_is_named(tmp_path, monkeypatch, module, name):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match=f"pip install {module}") as error:
        source(path=name)
    assert error.value.where == name


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("hf:owner/name", ("owner/name", None, "train")),
        ("hf:owner/name:test", ("owner/name", None, "test")),
        ("hf:owner/name:main:test", ("owner/name", "main", "test")),
    ],
)
def test_a_dataset_is_named_with_its_configuration_and_its_split(monkeypatch, name, asked):
    """The library is a stand-in that gives back what it is asked for."""

    def load_dataset(path, configuration, split):
        return [{"prompt": f"{(path, configuration, split)}", "answer": 1}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    (record,), _ = read_records(name)
    assert (record.prompt, record.where) == (str(asked), f"{name}, row 1")


def test_a_dataset_is_told_by_all_its_rows(monkeypatch):
    """Earlier runs have recorded the checksum of all rows as one list."""
    rows = [{"prompt": f"{n}=", "answer": n} for n in range(3)]
    library = SimpleNamespace(load_dataset=lambda *_, **__: rows)
    monkeypatch.setitem(sys.modules, "datasets", library)
    polls = []
    monkeypatch.setattr("megatron_stare.data.records.poll", lambda: polls.append(1))
    for count in (1, 3):
        del rows[count:]
        expected = zlib.crc32(json.dumps(rows, sort_keys=True).encode())
        assert read_records("hf:owner/name")[1] == expected
        assert len(polls) == 2 * count  # as the rows are summed, and as they become records
        polls.clear()
        rows += [{"prompt": f"{n}=", "answer": n} for n in range(count, 3)]


def test_mixed_by_weight_and_each_file_walked_through(tmp_path):
    files = {"a": 3, "b": 10, "c": 5}
    mixture = [
        {
            "path": lines(
                tmp_path / f"{name}.jsonl", *({"prompt": f"{i}=", "answer": i} for i in range(n))
            ),
            "weight": w,
        }
        for (name, n), w in zip(files.items(), (1, 2, 5), strict=True)
    ]
    prompts = source(mixture=mixture).take(80)
    assert [p.cursor for p in prompts] == list(range(80))
    assert Counter(p.id.partition("/")[0] for p in prompts) == {"a": 10, "b": 20, "c": 50}
    for end in range(1, 80):  # nowhere is a file more than one prompt off its share
        taken = Counter(p.id.partition("/")[0] for p in prompts[:end])
        assert all(
            abs(taken[name] - end * w / 8) <= 1 for name, w in zip("abc", (1, 2, 5), strict=True)
        )
    of_b = [p.text for p in prompts if p.id.startswith("b")]
    assert len(set(of_b[:10])) == len(set(of_b[10:])) == 10 and of_b[:10] != of_b[10:]
    of_c = [p.text for p in prompts if p.id.startswith("c")]
    assert all(len(set(of_c[at : at + 5])) == 5 for at in range(0, 50, 5))


@pytest.mark.parametrize(
    "weights",
    [
        (1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 60),
        (
            30,
            20,
            30,
            1,
            1,
            1,
            1,
            1,
            1,
            30,
            10,
            30,
        ),  # 1.27 prompts off at worst, when the file furthest behind came next
        (0.1, 0.2, 0.3, 0.4, 0.05, 0.7, 1.1, 0.9, 0.35, 2.5, 3.3, 0.15),
        (1,) * 12,
        (5, 3, 2) * 8,
        (0.001, 1, 7.77),
    ],
)
def test_no_file_is_ever_a_whole_prompt_off_its_share(tmp_path, weights):
    mixture = [
        {"path": lines(tmp_path / f"f{at}.jsonl", {"prompt": "1=", "answer": 1}), "weight": weight}
        for at, weight in enumerate(weights)
    ]
    total = sum(Fraction(str(weight)) for weight in weights)
    taken = Counter()
    for end, prompt in enumerate(source(mixture=mixture).take(2_000), 1):
        taken[prompt.id.partition("/")[0]] += 1
        for at, weight in enumerate(weights):
            assert abs(taken[f"f{at}"] - end * Fraction(str(weight)) / total) < 1, (at, end)


@hypothesis.given(st.lists(st.integers(1, 60), min_size=2, max_size=16))
@hypothesis.settings(max_examples=150, deadline=None)
def test_shares_of_any_weights_are_kept(weights):
    """The rule of `FilePrompts`, on parts without files, over two rounds of all weights."""
    mixed = object.__new__(FilePrompts)
    mixed._by_deadline = True
    mixed._parts = [_Part(None, weight, []) for weight in weights]
    total = sum(weights)
    for cursor in range(2 * total):
        mixed._part(cursor).taken += 1
        assert all(
            abs(part.taken * total - part.weight * (cursor + 1)) < total for part in mixed._parts
        )


class Replayed(FilePrompts):
    """A mixture without files that counts the prompts it replays."""

    def __init__(self, weights):
        self._by_deadline, self._cursor, self._checksum, self.replayed = True, 0, 1, 0
        self._parts = [_Part(MixtureFile(path="", weight=each), each, []) for each in weights]

    def _part(self, cursor):
        self.replayed += 1
        assert self.replayed <= 400, "more than a round"
        return super()._part(cursor)


@hypothesis.given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(0, 400))
@hypothesis.settings(deadline=None)
def test_a_mixture_replays_less_than_a_round_of_its_weights(weights, cursor):
    """At each multiple of the summed weights, every file has supplied exactly its share."""
    walked, resumed = Replayed(weights), Replayed(weights)
    for at in range(cursor):
        walked._part(at).taken += 1
    resumed.restore({"cursor": cursor, "checksum": 1, "by_deadline": 1})
    assert [part.taken for part in resumed._parts] == [part.taken for part in walked._parts]
    far = 10**6 * sum(weights) + cursor
    resumed.replayed = 0
    resumed.restore({"cursor": far, "checksum": 1, "by_deadline": 1})
    assert sum(part.taken for part in resumed._parts) == far
    assert resumed.replayed < sum(weights)


def test_a_mixture_that_an_earlier_release_began_goes_on_in_its_order(tmp_path):
    """Its state does not say how files are mixed: the file furthest behind comes next."""
    weights = (3, 1, 2)
    mixture = [
        {
            "path": lines(
                tmp_path / f"{at}.jsonl", *({"prompt": f"{i}=", "answer": i} for i in range(9))
            ),
            "weight": w,
        }
        for at, w in enumerate(weights)
    ]
    taken, order = [0, 0, 0], []
    for end in range(1, 41):
        at = max(range(3), key=lambda at: weights[at] / 6 * end - taken[at])
        taken[at] += 1
        order.append(at)
    resumed = source(mixture=mixture)
    resumed.restore({"cursor": 17, "checksum": resumed.state()["checksum"]})
    again = source(mixture=mixture)
    assert [int(p.id.partition("/")[0]) for p in resumed.take(5)] == order[17:22]
    again.restore(json.loads(json.dumps(resumed.state())))
    assert [int(p.id.partition("/")[0]) for p in again.take(18)] == order[22:]
    assert "by_deadline" not in source(path=mixture[0]["path"]).state()


@pytest.mark.parametrize("taken", [0, 1, 13, 40])
def test_a_mixture_resumes_exactly_however_it_is_taken(tmp_path, taken):
    mixture = [
        {
            "path": lines(
                tmp_path / f"{n}.jsonl", *({"prompt": f"{i}=", "answer": i} for i in range(n))
            ),
            "weight": n % 3 + 1,
        }
        for n in (3, 7, 2)
    ]
    first, pieces = source(mixture=mixture), source(mixture=mixture)
    before = first.take(taken)
    assert [p for _ in range(taken) for p in pieces.take(1)] == before
    resumed = source(mixture=mixture)
    resumed.take(5)
    resumed.restore(json.loads(json.dumps(first.state())))
    assert resumed.take(30) == first.take(30)
    for file in (tmp_path / "3.jsonl", tmp_path / "7.jsonl", tmp_path / "2.jsonl"):
        before_it_changed = file.read_text()
        lines(file, {"prompt": "9=", "answer": 9})
        with pytest.raises(DataError, match="cannot be resumed exactly"):
            source(mixture=mixture).restore(first.state())
        file.write_text(before_it_changed)
    with pytest.raises(DataError, match="cannot be resumed exactly"):
        source(mixture=[*mixture[:2], {**mixture[2], "weight": 9}]).restore(first.state())


def test_a_mixture_that_cannot_be():
    for data, complaint in (
        ({"path": "a.jsonl", "mixture": [{"path": "b.jsonl"}]}, "set one of them"),
        (
            {"mixture": [{"path": "x/a.jsonl"}, {"path": "y/a.jsonl"}]},
            "called 'a': give one a `name`",
        ),
        ({"mixture": [{"path": "a.jsonl", "weight": 0}]}, "must be above 0"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            configuration(data)


def test_repeats_are_dropped_across_files_and_counted(tmp_path):
    a = lines(
        tmp_path / "a.jsonl", {"prompt": "1 + 1 =", "answer": 2}, {"prompt": "2+2=", "answer": 4}
    )
    b = lines(
        tmp_path / "b.jsonl",
        {"prompt": "$1+1=$", "answer": "2"},
        {"prompt": "2+2", "answer": 5},
        {"prompt": "3+3=", "answer": 6},
    )
    prompts = source(mixture=[{"path": a}, {"path": b}], deduplicate=True)
    assert prompts.problems == 2
    assert {p.text for p in prompts.take(4)} == {"1 + 1 =", "3+3="}
    assert prompts.dropped == {"a repeat of another": 1, "a repeat with another answer": 2}
    assert source(mixture=[{"path": a}, {"path": b}]).problems == 5


def test_problems_of_the_evaluation_are_not_trained_on(tmp_path):
    held = lines(
        tmp_path / "held.jsonl",
        {"prompt": "1 2 3 4 5 6", "answer": 1},
        {"prompt": "7 8", "answer": 1},
    )
    train = lines(
        tmp_path / "t.jsonl",
        *(
            {"prompt": text, "answer": 1}
            for text in ("0 2,3,4,5 0", "2 3 4 0 5 6", "7, 8", "7 8 9", "0 7 8")
        ),
    )
    prompts = source(path=train, decontaminate=[held], ngram=4)
    assert {p.text for p in prompts.take(3)} == {"2 3 4 0 5 6", "7 8 9", "0 7 8"}
    assert prompts.dropped == {"a problem of data.decontaminate": 2}
    state = prompts.state()
    lines(tmp_path / "held.jsonl", {"prompt": "2 3 4 0", "answer": 1})
    with pytest.raises(DataError, match="cannot be resumed exactly"):
        source(path=train, decontaminate=[held], ngram=4).restore(state)
    with pytest.raises(DataError, match=r"no prompt is left: 5 a problem of data\.decontaminate"):
        source(path=train, decontaminate=[train], ngram=4)


@pytest.mark.parametrize(
    ("split", "data", "read", "worked_on"),
    [
        # 3 records are fitted, 3 are compared, 2 of the evaluation are cut into words, 3 looked up
        ("train", {"deduplicate": True, "decontaminate": ["e.jsonl"]}, 3 + 2, 3 + 3 + 2 + 3),
        ("eval", {"eval_path": "p.jsonl"}, 3, 3 + 3),
    ],
)
def test_large_files_are_read_and_cleaned_interruptibly(
    tmp_path, monkeypatch, split, data, read, worked_on
):
    """Polls at each record of each pass, since one pass over a large file takes minutes."""
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "p.jsonl", *({"prompt": f"{n}+1=", "answer": n + 1} for n in range(3)))
    lines(tmp_path / "e.jsonl", *({"prompt": f"{n}+9=", "answer": n + 9} for n in range(2)))
    polls = Counter()
    for module in ("records", "file_prompts"):
        monkeypatch.setattr(
            f"megatron_stare.data.{module}.poll", lambda module=module: polls.update([module])
        )
    source(split=split, path="p.jsonl", **data)
    assert polls == {"records": read, "file_prompts": worked_on}


def test_words_in_a_row():
    text = "Let ABC be a triangle with AB = 13, BC = 14 and CA = 15. Find the area."
    seen = Contamination([text])
    assert seen.has("let $ABC$ be a triangle with $AB=13$, $BC=14$ and $CA=15$. Find the area")
    assert seen.has(
        "Hard! Let ABC be a triangle with AB = 13, BC = 14 and CA = 15. Find its radius."
    )
    # 12 words
    assert not seen.has(
        "Hard! Let ABC be a triangle with AB = 13, BC = 14 and CA = 19. Find its radius."
    )
    assert not seen.has(
        "Let ABC be a triangle with AB = 12, BC = 14 and CA = 15. Find the circumradius."
    )
    assert not seen.has("") and not Contamination([]).has("a b c")


def test_of_contradicting_repeats_none_stays():
    found = without_repeats(
        [("a", "1"), ("b", "1"), ("A.", "2"), ("b!", "1 "), ("+", "1"), ("-", "2")]
    )
    assert found == ([1, 4, 5], [3], [0, 2])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Solve x+2=5.", "Solve x-2=5."),
        ("What is 3+4?", "What is 3-4?"),
        ("What is 3 \u2212 4?", "What is 3 4?"),
        ("Find 2^3.", "Find 2/3."),
        ("Is 3<4?", "Is 3>4?"),
        ("2*3=", "2**3="),
        ("(3+4)*2", "3+4*2"),
        ("Find $x^{n+1}$", "Find $x^n+1$"),
        ("on [0, 1)", "on (0, 1)"),
        ("5! = ", "5 = "),
        ("Compute n! + 1", "Compute n + 1"),
        ("the ratio 3:4", "the ratio 3/4"),
        ("50% of 8", "50 of 8"),
        ("|x-2|=3", "x-2=3"),
        ("x \u2264 3", "x \u2265 3"),
        ("a-b", "ab"),
        ("find 3.5", "find 3, 5"),
        ("\u221a2", "2"),
    ],
)
def test_problems_that_differ_in_an_operator_are_two(one, other):
    for prefix in ("", "Let a, b, c, d, e, f, g, h, i, j, k and l be whole numbers. "):
        assert without_repeats([(prefix + one, "1"), (prefix + other, "2")]) == ([0, 1], [], []), (
            prefix
        )
    assert not Contamination([one]).has(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Solve $x+2 = 5$.", "solve x + 2 = 5"),
        ("a two-digit number", "A two digit number!"),
        ("the $x$-axis, and an $n$-sided die", "the x axis and an n sided die"),
        ("**Find** \\(x^{2}\\), please.", "Find x^2 please"),
        ("* Find x", "Find x"),
        ("3 \u2212 4", "3 - 4"),
        ("\\left(x\\right) \\, y", "(x) y"),
        ("2+2=", "2 + 2 = ?"),
        ("2+2=", "2+2"),
    ],
)
def test_problems_that_differ_in_layout_are_one(one, other):
    assert without_repeats([(one, "1"), (other, "1")]) == ([0], [1], [])
    assert Contamination([one]).has(other)


def test_words_in_a_row_are_shared_with_the_operators_between_them():
    words = "one two three four five six seven"
    seen = Contamination([f"{words} 3+4 nine ten eleven twelve"])
    assert seen.has(f"Hard: {words} 3 + 4 nine ten eleven twelve!")  # 13 words
    assert not seen.has(f"Hard: {words} 3-4 nine ten eleven twelve!")
    # 12 words and an operator are not 13 words
    assert not seen.has(f"Hard: {words} 3 + 4 nine ten eleven")


def test_too_long_prompts_are_counted(tmp_path):
    path = lines(
        tmp_path / "p.jsonl", *({"prompt": text, "answer": 1} for text in ("12345", "678", "90123"))
    )
    assert source(path=path, limit=3, truncate="drop").dropped == {
        "longer than rollout.max_prompt_tokens": 2
    }


def test_a_tasks_own_prompt_length(tmp_path):
    from megatron_stare.tasks.task import evaluation_tasks

    path = lines(
        tmp_path / "p.jsonl", {"prompt": "12345", "answer": 1}, {"prompt": "678", "answer": 1}
    )
    tree = {"name": "mine", "path": path}
    for settings, problems in (
        (tree | {"max_prompt_tokens": 5}, 2),
        (tree | {"truncate_prompt": "drop"}, 1),
    ):
        config = configuration({}, limit=3).model_copy()
        config = validate(config.model_dump(mode="json") | {"eval": {"tasks": [settings]}}, "test")
        assert len(evaluation_tasks(config)[0].problems(TOKENIZER)) == problems
    config = validate(config.model_dump(mode="json") | {"eval": {"tasks": [tree]}}, "test")
    with pytest.raises(DataError) as error:
        evaluation_tasks(config)[0].problems(TOKENIZER)
    assert (
        error.value.fix.startswith("set eval.tasks[mine].max_prompt_tokens")
        or "max_prompt_tokens" in error.value.fix
    )


def test_files_are_named_from_the_root_and_datasets_are_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = configuration(
        {"mixture": [{"path": "a.jsonl"}, {"path": "hf:o/n"}], "decontaminate": ["e.jsonl"]}
    )
    data = with_absolute_paths(config).data
    assert [file.path for file in data.mixture] == [str(tmp_path / "a.jsonl"), "hf:o/n"]
    assert data.decontaminate == [str(tmp_path / "e.jsonl")]


def test_prompts_that_stay_and_come_twice_are_remarked_on(tmp_path):
    rows = (
        {"prompt": text, "answer": answer}
        for text, answer in (("1=", 1), ("2=", 2), ("1=", 1), ("2=", 3))
    )
    twice = source(path=lines(tmp_path / "p.jsonl", *rows, {"prompt": "4=", "answer": 4}))
    (remark,) = twice.remarks
    assert remark.startswith("2 prompts come more than once, 1 of them with different answers; ")
    assert source(path=lines(tmp_path / "q.jsonl", {"prompt": "1=", "answer": 1})).remarks == []


def test_prompts_that_are_cut_are_remarked_on_and_an_evaluation_tells_what_it_leaves_out(tmp_path):
    rows = [{"prompt": text, "answer": 1} for text in ("1=", "1234=", "1234=", "12345=")]
    path = lines(tmp_path / "p.jsonl", *rows)
    cut = source(path=path, limit=3, truncate="left", deduplicate=True)
    (remark,) = cut.remarks
    assert remark.startswith(
        "prompts longer than rollout.max_prompt_tokens lose their beginning: 2"
    )
    config = configuration({"path": path, "eval_path": path}, limit=5, truncate="drop")
    assert held_out(config, TOKENIZER, None).told == [
        "1 prompts left out: longer than rollout.max_prompt_tokens",
        "1 prompts left out: a repeat of another",
    ]
    config = configuration({"path": path, "eval_path": path}, limit=5, truncate="left")
    evaluation = Evaluation(Task(config, "sums"), held_out(config, TOKENIZER, None), None)
    assert [line.rpartition(":")[0] for line in evaluation.told()] == [
        "eval.tasks[sums]: 1 prompts left out",
        "eval.tasks[sums]: prompts longer than rollout.max_prompt_tokens lose their beginning",
    ]
