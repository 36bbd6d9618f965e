"""Published data sets as tasks: small synthetic files in their formats, what is taken and what is
dropped."""

from __future__ import annotations

import json
import sys

import pytest
from support.runs import ROOT

from megatron_stare.data.records import read_records

sys.path.insert(0, str(ROOT / "tools"))
import prepare_data

DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the"
    " form Answer: $Answer (without quotes) where $Answer is the answer to the"
    ' problem.\n\n{}\n\nRemember to put your answer on its own line after "Answer:".'
)


def verl(text, truth, index="a1", source="math_dapo"):
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": text}],
        "ability": "MATH",
        "reward_model": {"ground_truth": truth, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def olympiad(question, answer, **columns):
    return {
        "id": 1606,
        "question": question,
        "solution": ["..."],
        "final_answer": answer,
        "context": None,
        "modality": "Text-only",
        "is_multiple_answer": False,
        "unit": None,
        "answer_type": "Numerical",
        "error": None,
        "question_type": "Open-ended",
        "subject": "Math",
        "language": "English",
        **columns,
    }


PUBLISHED = {
    "dapo_math_17k": (
        [
            verl(DAPO.format("What is 1+1?"), "2"),
            verl(DAPO.format("What is 1+1?"), "2", "b2"),
            verl(DAPO.format("What is 2+2?"), "4", "c3"),
            verl(DAPO.format("What is  2 + 2?"), "5", "d4"),
            verl("What is 1+2?", "3"),
            verl(DAPO.format("What is 1/2?"), "1/2"),
            verl(DAPO.format("What is the square of x?"), "²"),
        ],
        [("What is 1+1?", "2", "a1")],
        {
            "repeats another": 1,
            "repeats another and has another answer (all of them)": 2,
            "not the published instruction around the problem": 1,
            "the answer is no integer": 2,
        },
    ),
    "deepscaler": (
        [
            {
                "problem": "What is half of 1?",
                "answer": "\\frac{1}{2}",
                "solution": "so $\\boxed{0.5}$",
            },
            {"problem": "What is a third of 1?", "answer": "", "solution": ""},
            {"problem": " ", "answer": "1", "solution": ""},
            {
                "problem": "Write ten to the ten thousand.",
                "answer": "1" + "0" * 10_000,
                "solution": "",
            },
        ],
        [("What is half of 1?", "\\frac{1}{2}", "1")],
        {"no answer": 1, "no problem": 1, "an answer of more than 1000 characters": 1},
    ),
    "skywork_or1": (
        [
            {
                **verl("What is 1+1?", '["2"]', 7, "train-math-numinamath1.5"),
                "model_difficulty": {"R1": 3},
            },
            verl("Roots of x^2=1?", '["1", "-1"]'),
            verl("What is 1+2?", "3x"),
            verl("What is 1+3?", "4"),
        ],
        [("What is 1+1?", "2", "7")],
        {"the reference is no list of one answer": 2, "the reference is no JSON list": 1},
    ),
    "polaris": (
        [{"problem": "What is 1+1?", "answer": "2", "difficulty": "3/8"}, ["What is 1+1?", "2"]],
        [("What is 1+1?", "2", "1")],
        {"not an object": 1},
    ),
    "aime24": (
        [
            {
                "id": 60,
                "problem": "What is 8-1?",
                "solution": "",
                "answer": "007",
                "url": "",
                "year": "2024",
            }
        ],
        [("What is 8-1?", "007", "60")],
        {},
    ),
    "aime25": (
        [{"problem": "What is 8-1?", "answer": 7, "id": "0"}],
        [("What is 8-1?", "7", "0")],
        {},
    ),
    "amc23": (
        [
            {"id": 0, "question": "27?", "answer": "27", "url": ""},
            # of a copy
            {"id": 1, "problem": "A half and 28?", "question": "28?", "answer": 28.0, "url": ""},
            {"id": 2, "question": "A half?", "answer": 0.5, "url": ""},
            {"problem": "29?", "answer": ["29"]},  # of a copy of several sets
        ],
        [
            ("27?", "27", "0"),
            ("A half and 28?", "28", "1"),
            ("A half?", "0.5", "2"),
            ("29?", "29", "4"),
        ],
        {},
    ),
    "math500": (
        [
            {
                "problem": "What is 1+1?",
                "solution": "It is $\\boxed{2}$.",
                "answer": "2",
                "subject": "Algebra",
                "level": 1,
                "unique_id": "test/algebra/1.json",
            }
        ],
        [("What is 1+1?", "2", "test/algebra/1.json")],
        {},
    ),
    "minerva": (
        [
            {"question": "How fast?", "answer": "3e8"},
            {
                "problem": "How far?",
                "solution": "It is \\boxed{4.5e33} here.",
                "type": "Astronomy",
                "idx": 3,
            },
        ],
        [("How fast?", "3e8", "1"), ("How far?", "4.5e33", "2")],
        {},
    ),
    "olympiadbench": (
        [
            olympiad("Find x.", ["$\\frac{1}{2}$"], context="Let 2x=1."),
            olympiad("Find y.", ["1", "2"], is_multiple_answer=True),
            olympiad("Prove it.", None, question_type="Theorem proof"),
            olympiad("See the picture.", ["1"], modality="Multimodal"),
            olympiad("2+2?", ["4"], language="Chinese"),
        ],
        [("Let 2x=1.\nFind x.", "$\\frac{1}{2}$", "1606"), ("Find y.", "1, 2", "1606")],
        {
            "a proof, without a final answer": 1,
            "needs an image": 1,
            "not mathematics in English": 1,
        },
    ),
}


def test_every_data_set_is_here():
    assert set(PUBLISHED) == set(prepare_data.DATA_SETS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_tasks_and_what_is_dropped(name, tmp_path, capsys):
    rows, expected, dropped = PUBLISHED[name]
    kind = "json" if name == "deepscaler" else "jsonl"
    (tmp_path / f"in.{kind}").write_text(
        json.dumps(rows) if kind == "json" else "".join(json.dumps(row) + "\n" for row in rows)
    )
    out = tmp_path / "new/out.jsonl"
    assert prepare_data.main([name, str(tmp_path / f"in.{kind}"), "--out", str(out)]) == 0
    records, _ = read_records(out)  # what a run reads
    assert [(r.prompt, r.answer, r.id) for r in records] == expected
    assert {json.loads(line)["source"] for line in out.read_text().splitlines()} == {name}
    said = capsys.readouterr().out
    found = {
        line[17:].strip(): int(line.split()[1])
        for line in said.splitlines()
        if line.startswith("dropped")
    }
    assert found == dropped
    assert said.splitlines()[-1] == f"{len(expected)} tasks of {len(rows)} rows"
    assert sum(dropped.values()) + len(expected) == len(rows)


def test_parquet_and_what_the_evaluation_holds(tmp_path, capsys):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = ["A man walks 3 miles an hour for 2 hours. How far?", "What is 5 times 5?"]
    rows = [verl(DAPO.format(text), "6", str(n)) for n, text in enumerate(texts)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "dapo.parquet")
    held = tmp_path / "held.jsonl"
    held.write_text(
        json.dumps(
            {"prompt": "A woman walks 3 miles an hour for 2 days. How far?", "answer": "144"}
        )
        + "\n"
    )
    arguments = ["dapo_math_17k", str(tmp_path / "dapo.parquet"), "--against", str(held)]
    for ngram, kept in ((7, [texts[1]]), (8, texts)):  # "walks 3 miles an hour for 2"
        out = tmp_path / f"{ngram}.jsonl"
        assert prepare_data.main([*arguments, "--ngram", str(ngram), "--out", str(out)]) == 0
        assert [record.prompt for record in read_records(out)[0]] == kept
    assert "1  shares 7 words in a row with --against" in capsys.readouterr().out


def test_what_cannot_be_is_said_and_nothing_is_written(tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    (tmp_path / "wrong.jsonl").write_text('{"text": "not what is published"}\n')
    assert prepare_data.main(["polaris", str(tmp_path / "wrong.jsonl"), "--out", str(out)]) == 2
    said = capsys.readouterr()
    assert "no row is a task" in said.err and "dropped" in said.out and not out.exists()
    out.write_text("mine")
    assert prepare_data.main(["polaris", str(tmp_path / "wrong.jsonl"), "--out", str(out)]) == 2
    assert out.read_text() == "mine"
    assert prepare_data.main(["polaris", str(tmp_path / "none"), "--out", f"{out}/x"]) == 2
    assert f"{out}: the folder cannot be made" in capsys.readouterr().err


ASKS = "Write code in <code></code>; its output is in <interpreter></interpreter>.\n"


def retool(*parts, asked=f"{ASKS}*user question:*\nWhat is 3*4? <answer>\\boxed{{}}</answer>"):
    return {
        "messages": [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": "\n".join(parts)},
        ]
    }


CODE = "<code>\n```python\nprint(3*4)\n```\n</code>"
OUTPUT = "<interpreter>\n12\n</interpreter>"
FENCED = "```python\nprint(3*4)\n```"
LAST = "<answer>\n\\boxed{12}\n</answer>"


def test_retools_texts_become_calls_and_answers(tmp_path):
    """Renders what the assistant wrote, in order, as `sft` does, and nothing of the tags."""
    from transformers import AutoTokenizer

    from megatron_stare.data.messages import conversation, rendered

    rows = [
        retool("Let me compute.", CODE, OUTPUT, "Again:", "<code>print(5)</code>", OUTPUT, LAST),
        retool("It is 12.", LAST),
    ]
    file, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert prepare_data.main(["retool_sft", str(file), "--out", str(out)]) == 0
    first, second = map(json.loads, out.read_text().splitlines())

    def call(code):
        function = {"name": "code_interpreter", "arguments": {"code": code}}
        return [{"type": "function", "function": function}]

    assert first["messages"] == [
        {"role": "user", "content": "What is 3*4? \\boxed{}"},
        {"role": "assistant", "content": "Let me compute.", "tool_calls": call("print(3*4)")},
        {"role": "tool", "content": "12"},
        {"role": "assistant", "content": "Again:", "tool_calls": call("print(5)")},
        {"role": "tool", "content": "12"},
        {"role": "assistant", "content": "\\boxed{12}"},
    ]
    assert second["messages"][1:] == [{"role": "assistant", "content": "It is 12.\n\n\\boxed{12}"}]
    assert (first["id"], second["id"]) == ("1", "2")
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets/tiny-chat")
    found = rendered(*conversation(first), tokenizer)
    learnt = tokenizer.decode([id for id, mine in zip(found.ids, found.mask, strict=True) if mine])
    assert learnt.count("<tool_call>") == 2 and "print(3*4)" in learnt
    assert "<tool_response>" not in learnt and learnt.count("<|im_end|>") == 3


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (retool("so", CODE, LAST), "code without output"),
        (retool("so", OUTPUT, LAST), "output without code"),
        (retool("so", CODE, CODE, OUTPUT, LAST), "output without code"),
        (retool("so", CODE, "then", OUTPUT, LAST), "output without code"),
        (retool("so", CODE, OUTPUT), "no answer after"),
        (retool("so", "<code>print(1)", LAST), "not closed"),
        (retool("so", "<code>\n```python\nprint(1)\n</code>", OUTPUT, LAST), "fence that is not"),
        (retool("so", f"<code>{FENCED}\n{FENCED}</code>", OUTPUT, LAST), "several code fences"),
        (retool("so", "<code>\n```python\n\n```\n</code>", OUTPUT, LAST), "without code"),
        (retool("so \ud83d", LAST), "half of a character"),
        ({"messages": [None, {"role": "assistant", "content": "x"}]}, "not a question"),
        (retool("so", LAST, asked=f"{ASKS}*user question:*  "), "no problem"),
        ({"messages": []}, "not a question"),
        ({"text": "x"}, "not a question"),
        ("x", "not a question"),
    ],
)
def test_a_text_of_another_form_is_dropped_with_its_reason(row, why):
    found, dropped = prepare_data.conversations([row])
    assert not found and why in next(iter(dropped))


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (FENCED.replace("python", "Python"), "print(3*4)"),
        (FENCED.replace("python", "python3 "), "print(3*4)"),
        (FENCED.replace("\n", "\r\n"), "print(3*4)"),
        ("```python\n    x = 12\n    print(x)\n```", "x = 12\nprint(x)"),
        ('```python\ns = """```\nhi\n```"""\nprint(s)\n```', 's = """```\nhi\n```"""\nprint(s)'),
    ],
)
def test_a_fence_is_no_part_of_the_program(text, code):
    found, dropped = prepare_data.conversations(
        [retool("so", f"<code>\n{text}\n</code>", OUTPUT, LAST)]
    )
    assert found[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"code": code}
    assert not dropped


def test_an_output_of_nothing_is_what_the_tool_answers_in_training():
    from megatron_stare.environments.tools import PRINTED_NOTHING

    (found,), _ = prepare_data.conversations([retool(CODE, "<interpreter></interpreter>", LAST)])
    assert found["messages"][2] == {"role": "tool", "content": PRINTED_NOTHING}


def test_half_of_a_character_drops_a_task_and_leaves_no_file_behind(tmp_path, capsys):
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [{"problem": "Half \ud83d?", "answer": 1}, {"problem": "What is 1+1?", "answer": 2}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert prepare_data.main(["polaris", str(file), "--out", str(out)]) == 0
    assert "dropped        1  half of a character" in capsys.readouterr().out
    assert [each.prompt for each in read_records(out)[0]] == ["What is 1+1?"]


def test_conversations_about_held_out_problems_are_dropped(tmp_path):
    held_out = "How many of the numbers from one to a thousand are divisible by seven and eleven?"
    file = tmp_path / "held_out.jsonl"
    file.write_text(json.dumps({"prompt": held_out, "answer": "12"}) + "\n")
    rows = [retool("so", LAST, asked=held_out), retool("so", LAST)]
    found, dropped = prepare_data.conversations(rows, [str(file)])
    assert [each["id"] for each in found] == ["2"]
    assert list(dropped) == ["shares 13 words in a row with --against"]
