"""`megatron-stare init`: what it writes trains, on sums and on files of every shape in use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from support.pages import DOCS, blocks
from support.runs import metrics, train

from megatron_stare.cli import main
from megatron_stare.config.load import load_config
from megatron_stare.data.records import read_records
from megatron_stare.run_dir.json_lines import read_jsonl

TWO_STEPS = {
    "run.steps": 2,
    "batch.prompts": 4,
    "batch.samples_per_prompt": 4,
    "run.dir": "runs/first",
}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def verl(text: str, answer: str) -> dict[str, Any]:
    return {
        "data_source": "own",
        "prompt": [user(text)],
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"index": 7},
    }


# shape: rows, and the columns that are found
SHAPES: dict[str, tuple[list[dict[str, Any]], str, str]] = {
    "ours": ([{"prompt": "12+34+56", "answer": 102}] * 4, "prompt", "answer"),
    "question_answer": (
        [{"question": "How many?", "answer": "Two and two.\n#### 4"}] * 4,
        "question",
        "answer",
    ),
    "problem_solution": (
        [{"level": 3, "problem": "What is $1+1$?", "solution": r"It is \boxed{2}."}] * 4,
        "problem",
        "solution",
    ),
    "problem_solution_answer": (
        [{"solution": r"\boxed{2}", "problem": "1+1?", "answer": "2"}] * 4,
        "problem",
        "answer",
    ),
    "capitals": ([{"ID": "x", "Problem": "1+1?", "Answer": 2}] * 4, "Problem", "Answer"),
    "messages": (
        [{"messages": [{"role": "system", "content": "Add."}, user("1+1?")], "label": "2"}] * 4,
        "messages",
        "label",
    ),
    "verl": ([verl("1+1?", "2")] * 4, "prompt", "reward_model.ground_truth"),
    # a column of a usual name that cannot be what it is called
    "other_type": (
        [{"prompt": 3, "question": "1+1?", "answer": ["2"], "target": "2"}] * 4,
        "question",
        "target",
    ),
    "not_in_every_row": (
        [{"question": "1+1?", "answer": "2", "target": "2"}, {"question": "1+2?", "target": "3"}],
        "question",
        "target",
    ),
}


def written(path: Path, rows: list[Any]) -> Path:
    """The rows in a file of its suffix's format."""
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The error; nothing may be written."""
    before = sorted(Path().rglob("*"))
    assert main(["init", *arguments]) == 2
    assert sorted(Path().rglob("*")) == before
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ")
    return captured.err


def two_steps(folder: Path) -> list[dict[str, Any]]:
    done = train(config="config.yaml", cwd=folder, **TWO_STEPS)
    assert done.returncode == 0, done.stderr
    assert "loading PyTorch and Megatron ..." in done.stderr.splitlines()[0]
    rows = metrics(folder / "runs/first")
    assert [row["step"] for row in rows] == [1, 2]
    return rows


@pytest.mark.wide
def test_the_folder_trains_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine").mkdir()
    assert main(["init", "mine"]) == 0
    said = capsys.readouterr().out
    assert "cd mine" in said and "megatron-stare train config.yaml" in said
    names = {each.name for each in Path("mine").iterdir()}
    assert names == {
        "config.yaml", "reward.py", "README.md", "model", "train.jsonl", "test.jsonl",
    }  # fmt: skip
    first, second = two_steps(Path("mine"))
    # reward.py judges: the tiny model has some right, and a wrong number earns number, 0.05
    assert first["reward/mean"] > 0.3 and second["update/finite"] == 1.0
    records = read_jsonl(Path("mine/runs/first/eval.jsonl"))
    assert [record["problems"] for record in records] == [16, 16]


def test_sums_to_train_on_and_to_evaluate_on_differ() -> None:
    main(["init", "mine"])
    trained, _ = read_records("mine/train.jsonl")
    held_out, _ = read_records("mine/test.jsonl")
    config = load_config("mine/config.yaml")
    assert (len(trained), len(held_out), config.eval.prompts) == (1024, 128, 128)
    assert not {each.prompt for each in trained} & {each.prompt for each in held_out}
    for each in [*trained, *held_out]:
        assert sum(map(int, each.prompt.split("+"))) == int(each.answer)


def test_the_reward_is_that_of_the_page() -> None:
    main(["init", "mine"])
    (block,) = (each for each in blocks(DOCS / "howto/own_data.md") if each.file == "my_reward.py")
    assert Path("mine/reward.py").read_text() == block.text


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json"])
@pytest.mark.parametrize("shape", SHAPES)
def test_columns_are_found_and_said(
    capsys: pytest.CaptureFixture[str], shape: str, suffix: str
) -> None:
    rows, prompt, answer = SHAPES[shape]
    data = written(Path(f"problems{suffix}"), rows)
    assert main(["init", "mine", "--data", str(data)]) == 0
    config = load_config("mine/config.yaml").data
    assert (config.prompt_key, config.answer_key) == (prompt, answer)
    assert config.path == str(data.resolve())
    read, _ = read_records(config.path, config.prompt_key, config.answer_key)
    assert len(read) == len(rows)
    said = capsys.readouterr().out
    assert f"chose prompt_key {prompt} (" in said and f"chose answer_key {answer}: " in said
    assert all(name in said for name in rows[0])


@pytest.mark.wide
@pytest.mark.parametrize(
    ("shape", "suffix"),
    [("ours", ".jsonl"), ("question_answer", ".parquet"), ("messages", ".jsonl"),
     ("verl", ".parquet")],
)  # fmt: skip
def test_a_folder_with_data_trains(shape: str, suffix: str) -> None:
    data = written(Path(f"problems{suffix}"), SHAPES[shape][0])
    main(["init", "mine", "--data", str(data)])
    done = train(config="config.yaml", cwd=Path("mine"), **{**TWO_STEPS, "eval.prompts": 0})
    assert done.returncode == 0, done.stderr
    assert len(metrics(Path("mine/runs/first"))) == 2


@pytest.mark.parametrize(
    ("shape", "verifier"),
    [
        ("ours", "reward.py:verify"),
        ("question_answer", "stare"),
        ("problem_solution", "math"),
        ("verl", "math"),
    ],
)
def test_the_verifier_is_one_that_reads_the_answers(shape: str, verifier: str) -> None:
    main(["init", "mine", "--data", str(written(Path("problems.jsonl"), SHAPES[shape][0]))])
    assert load_config("mine/config.yaml").reward.verifier.name == verifier


def test_answers_that_are_words_are_compared_letter_by_letter() -> None:
    rows = [{"prompt": f"Capital {n}?", "answer": "Paris"} for n in range(3)]
    main(["init", "mine", "--data", str(written(Path("problems.jsonl"), rows))])
    assert load_config("mine/config.yaml").reward.verifier.name == "exact"


@pytest.mark.parametrize(
    ("name", "rows", "parts"),
    [
        (
            "p.jsonl",
            [{"text": 1, "a": "x", "b": "y"}],
            ["cannot tell which column is the prompt", "text, a, b", "--prompt-key COLUMN"],
        ),
        (
            "p.parquet",
            [{"question": "1+1?", "a": "x", "b": "y"}],
            ["cannot tell which column is the answer", "question, a, b", "--answer-key COLUMN"],
        ),
        (
            "p.jsonl",
            [{"messages": [user("1+1?"), {"role": "assistant", "content": "2"}], "answer": "2"}],
            ["cannot tell which column is the prompt", "must be the user's"],
        ),
        ("p.csv", [], ["unknown format '.csv'", ".parquet, .jsonl, .json"]),
        ("p", [], ["unknown format 'without a suffix'"]),
        ("p.jsonl", [], ["p.jsonl: the file has no rows"]),
        ("p.json", [], ["p.json: the file has no rows"]),
        ("p.jsonl", [3], ["p.jsonl:1: expected an object"]),
    ],
)
def test_what_is_no_file_of_problems_is_refused(
    capsys: pytest.CaptureFixture[str], name: str, rows: list[Any], parts: list[str]
) -> None:
    written(Path(name), rows)
    error = refused(capsys, "mine", "--data", name)
    assert [part for part in parts if part not in error] == []


def test_an_empty_parquet_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    table = pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())})
    pyarrow.parquet.write_table(table, "p.parquet")
    assert "the file has no rows" in refused(capsys, "mine", "--data", "p.parquet")


def test_a_file_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    written(Path("problems.jsonl"), SHAPES["ours"][0])
    assert "did you mean problems.jsonl" in refused(capsys, "mine", "--data", "problem.jsonl")


def test_columns_may_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"question": "wrong", "answer": "no", "text": {"body": "1+1?"}, "b": "2"}]
    data = str(written(Path("p.jsonl"), rows))
    named = ["--prompt-key", "text.body", "--answer-key", "b"]
    assert main(["init", "mine", "--data", data, *named]) == 0
    config = load_config("mine/config.yaml").data
    assert (config.prompt_key, config.answer_key) == ("text.body", "b")
    capsys.readouterr()
    error = refused(capsys, "other", "--data", data, "--answer-key", "bb")
    assert error.startswith("error: --answer-key: unknown name 'bb'")
    assert "--data FILE" in refused(capsys, "other", "--prompt-key", "text")


def test_a_folder_with_files_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine").mkdir()
    Path("mine/notes").write_text("mine")
    assert "there are files in this folder" in refused(capsys, "mine")
    assert "this is a file" in refused(capsys, "mine/notes")


@pytest.mark.parametrize("template", [False, True])
def test_a_model_folder_is_named_from_the_root(template: bool) -> None:
    model = Path("models/own")
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "tokenizer_config.json").write_text('{"chat_template": "x"}' if template else "{}")
    main(["init", "mine", "--model", "models/own"])
    config = load_config("mine/config.yaml")
    assert config.model.path == str(model.resolve()) and not Path("mine/model").exists()
    assert config.data.chat_template is template
    # the tiny model's sums, put to a model that writes boxes
    assert config.reward.verifier.name == "math" and "boxed" in str(config.data.template)
    assert config.rollout.max_prompt_tokens + config.rollout.max_new_tokens <= 4096


def test_a_model_that_is_not_here_is_fetched_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "mine", "--model", "Qwen/Qwen3-8B"]) == 0
    fetch = "hf download Qwen/Qwen3-8B --local-dir models/Qwen3-8B"
    assert load_config("mine/config.yaml").model.path == "models/Qwen3-8B"
    assert fetch in capsys.readouterr().out and fetch in Path("mine/README.md").read_text()
    assert "owner/name" in refused(capsys, "other", "--model", "Qwen3-8B")
    assert "no config.json" in refused(capsys, "other", "--model", "mine")


def test_the_commands_of_the_readme_are_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the third changes what a cluster needs changed."""
    main(["init", "mine"])
    monkeypatch.chdir("mine")
    lines = [
        line.split() for line in Path("README.md").read_text().splitlines() if line[:4] == " " * 4
    ]
    assert [words[:2] for words in lines] == [
        ["megatron-stare", command] for command in ("train", "report", "train")
    ]
    assert lines[0][2:] == ["config.yaml", "run.dir=runs/first"] and lines[1][2:] == ["runs/first"]
    config = load_config(lines[2][2], lines[2][3:])
    assert config.runtime.runner == "ray" and config.parallel.world_size == 8


def test_names_are_quoted_for_yaml() -> None:
    data = written(Path("a: b # 😀.jsonl"), [{"prompt": "1+1?", "yes": "2"}])
    main(["init", "no", "--data", str(data), "--answer-key", "yes"])
    config = load_config("no/config.yaml")
    assert (config.run.name, config.data.answer_key) == ("no", "yes")
    assert config.data.path == str(data.resolve())
    assert yaml.safe_load(Path("no/config.yaml").read_text())["run"]["name"] == "no"
