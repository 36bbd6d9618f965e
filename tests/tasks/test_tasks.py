"""Tasks: how a section becomes one, templates, and whole evaluations of several tasks beside
training."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.runs import ROOT, metrics, model, train
from transformers import AutoTokenizer

from megatron_stare.config.load import validate
from megatron_stare.config.schema import Config
from megatron_stare.data.encode import PromptEncoder
from megatron_stare.errors import ConfigError, DataError
from megatron_stare.planning.preflight import check
from megatron_stare.run_dir.run_files import evaluated_steps
from megatron_stare.tasks.task import evaluation_tasks, training_task

MODEL = ROOT / "assets" / "tiny-adder"


def config(**sections: Any) -> Config:
    own = {
        "data": {"source": "arithmetic"},
        "reward": {"verifier": "arithmetic"},
        "rollout": {"max_new_tokens": 32},
    }
    own["rollout"] |= {"max_prompt_tokens": 16}
    tree = {key: own.get(key, {}) | sections.get(key, {}) for key in own.keys() | sections.keys()}
    return validate({"model": {"path": str(MODEL)}} | tree, "test.yaml")


def on(**task: Any) -> Config:
    return config(eval={"tasks": [{"name": "mine", **task}]})


def test_what_a_task_leaves_out_is_the_runs_own() -> None:
    (task,) = evaluation_tasks(
        config(
            eval={"prompts": 7, "greedy": False, "tasks": [{"name": "mine"}]},
            rollout={"temperature": 0.9},
        )
    )
    assert task.config == config(
        eval={"prompts": 7, "greedy": False, "tasks": [{"name": "mine"}]},
        rollout={"temperature": 0.9},
    )
    params = task.sampling(step=0, seed=5, stop_token_ids=(1,))
    assert (params.temperature, params.top_p, params.max_new_tokens, params.seed) == (
        0.9,
        1.0,
        32,
        5,
    )
    assert (task.samples, task.verifier.name) == (1, "arithmetic")


def test_what_a_task_has_is_laid_over_the_runs_own() -> None:
    run = config(
        data={"template": "{prompt}", "path": "train.jsonl"},
        eval={
            "prompts": 9,
            "tasks": [
                {
                    "name": "mine",
                    "source": "jsonl",
                    "path": "mine.jsonl",
                    "template": "1+{prompt}",
                    "chat_template": True,
                    "verifier": "math",
                    "environment": "a.B",
                    "prompts": 3,
                    "temperature": 0.6,
                    "top_p": 0.95,
                    "max_new_tokens": 48,
                    "greedy": False,
                    "samples": 8,
                },
                {"name": "other"},
            ],
        },
    )
    mine, other = evaluation_tasks(run)
    data = mine.config.data
    assert (data.source.name, data.path, data.eval_path) == ("jsonl", "train.jsonl", "mine.jsonl")
    assert (data.template, data.chat_template) == ("1+{prompt}", True)
    rollout = mine.config.rollout
    assert (rollout.environment.name, rollout.temperature, rollout.max_new_tokens) == (
        "a.B",
        0.6,
        48,
    )
    assert (mine.verifier.name, mine.config.eval.prompts, mine.config.eval.greedy) == (
        "math",
        3,
        False,
    )
    params = mine.sampling(step=0, seed=1, stop_token_ids=(1,), greedy=True)
    assert (params.temperature, params.top_p, params.max_new_tokens, params.greedy) == (
        0.6,
        0.95,
        48,
        True,
    )
    assert mine.about() == {
        "task": "mine",
        "decoding": {"samples": 8, "temperature": 0.6, "top_p": 0.95, "max_new_tokens": 48},
    }
    assert other.config == run == training_task(run).config
    assert training_task(run).sampling(step=4, seed=1, stop_token_ids=(1,)).top_p == 1


def test_without_tasks_there_is_the_runs_own_or_none() -> None:
    assert evaluation_tasks(config()) == []
    (task,) = evaluation_tasks(config(eval={"prompts": 5}))
    assert (task.name, task.samples, task.top_p) == (None, 1, 1.0)
    assert task.about().keys() == {"decoding"}


def test_all_problems_where_nobody_says_how_many(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(
        "".join(f'{{"prompt": "1+{i}=", "answer": 2}}\n' for i in range(7))
    )
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    settings = {"name": "mine", "source": "jsonl", "path": str(tmp_path / "p.jsonl")}
    for run, wanted in (({}, 7), ({"prompts": 4}, 4)):
        (task,) = evaluation_tasks(config(eval={**run, "tasks": [settings]}))
        assert len({prompt.text for prompt in task.problems(tokenizer)}) == wanted


def test_a_template_is_put_around_the_prompt_before_the_chat_template() -> None:
    class Characters:
        """Tokenizer with an id for each character."""

        chat_template = "there is one"

        def __call__(self, text: str, add_special_tokens: bool) -> Any:
            return type("Encoded", (), {"input_ids": [ord(c) for c in text]})

        def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
            return f"<{messages[0]['content']}>"

    def put(text: str, **data: Any) -> str:
        ids = PromptEncoder(config(data=data, rollout={"max_prompt_tokens": 60}), Characters())(
            text, "line 1"
        )
        return "".join(map(chr, ids))

    boxed = "{prompt}\nAnswer in \\boxed{{}}."
    assert put("1+1") == "1+1"
    assert put("1+1", template=boxed) == "1+1\nAnswer in \\boxed{}."
    assert put("{x} {}", template="{{{prompt}}}") == "{{x} {}}"  # braces of a prompt are its own
    assert put("1+1", template=boxed, chat_template=True) == "<1+1\nAnswer in \\boxed{}.>"
    # the limit holds for what the policy reads
    with pytest.raises(DataError, match="has 61 tokens"):
        put("1" * 60, template="{prompt}=")


@pytest.mark.parametrize(
    "template",
    [
        "",
        "no place",
        "{prompt}{prompt}",
        "{question}",
        "{}",
        "{prompt} {",
        "\\boxed{}{prompt}",
        "{prompt!r}",
    ],
)
@pytest.mark.parametrize("where", ["data.template", "eval.tasks.0.template"])
def test_a_template_has_one_place(template: str, where: str) -> None:
    with pytest.raises(ConfigError, match="written twice") as error:
        on(template=template) if where.startswith("eval") else config(data={"template": template})
    assert error.value.where == f"test.yaml: {where}"


@pytest.mark.parametrize(
    ("tasks", "where", "message"),
    [
        ([{"name": "a"}, {"name": "b"}, {"name": "a"}], "eval.tasks", "two tasks are called 'a'"),
        ([{"name": "a", "sampels": 3}], "eval.tasks.0.sampels", "unknown name 'sampels'"),
        ([{"name": "a"}, {}], "eval.tasks.1.name", "required and missing"),
        ([{"name": "a/b"}], "eval.tasks.0.name", "pattern"),
        ([{"name": "a", "top_p": 1.5}], "eval.tasks.0.top_p", "must be at most 1"),
    ],
)
def test_what_is_wrong_with_a_section_is_named(tasks: list[Any], where: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        config(eval={"tasks": tasks})
    assert error.value.where == f"test.yaml: {where}"


def test_training_cannot_cut_the_support() -> None:
    with pytest.raises(ConfigError, match="unknown name 'top_p'"):
        config(rollout={"top_p": 0.9})


@pytest.mark.parametrize(
    ("task", "where", "fix"),
    [
        ({"max_new_tokens": 2000}, "eval.tasks[mine].max_new_tokens", "at most "),
        ({"source": "jsonl", "path": "none.jsonl"}, "eval.tasks[mine], /", None),
        ({"source": "jsonl"}, "eval.tasks[mine], data.eval_path", "data.eval_path=prompts.jsonl"),
        ({"prompts": 20_000}, "eval.tasks[mine].prompts", "at most 12665"),
        (
            {"environment": "single_turns"},
            "eval.tasks[mine].environment",
            "did you mean 'single_turn'",
        ),
        (
            {"chat_template": True},
            "eval.tasks[mine].chat_template",
            "eval.tasks[mine].chat_template=false",
        ),
    ],
)
def test_an_error_names_the_task_and_what_it_set(
    task: dict[str, Any], where: str, fix: str | None
) -> None:
    def make() -> None:
        (made,) = evaluation_tasks(check(on(**{"prompts": 2, **task})).config)
        tokenizer = AutoTokenizer.from_pretrained(MODEL)
        made.problems(tokenizer)
        made.environment(tokenizer)

    with pytest.raises((ConfigError, DataError)) as error:
        make()
    assert (error.value.where or "").startswith(where)
    assert fix is None or fix in (error.value.fix or "")


def test_a_response_of_an_evaluation_needs_no_micro_batch() -> None:
    """Nothing is trained on it; the model has 96 positions or more."""
    run = on(prompts=2, max_new_tokens=64).model_dump()
    run["batch"]["micro_batch_tokens"] = 48
    check(validate(run, "test"))
    run["rollout"]["max_new_tokens"] = 64
    with pytest.raises(ConfigError, match="exceed a micro-batch of 48"):
        check(validate(run, "test"))


def test_a_file_of_a_task_is_named_from_the_root() -> None:
    tasks = [{"name": "a", "source": "jsonl", "path": "a.jsonl"}, {"name": "b", "path": "theirs"}]
    run = check(config(eval={"prompts": 2, "tasks": tasks})).config
    assert [task.path for task in run.eval.tasks] == [str(Path("a.jsonl").absolute()), "theirs"]


def test_what_was_evaluated_is_known_by_task(tmp_path: Path) -> None:
    rows = [
        {"step": 0},
        {"step": 0, "task": "a"},
        {"step": 5, "task": "a"},
        {"step": 5, "task": "b"},
    ]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert evaluated_steps(tmp_path) == {(0, None), (0, "a"), (5, "a"), (5, "b")}
    assert evaluated_steps(tmp_path / "elsewhere") == set()


def block(page: str, language: str) -> str:
    found = re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)
    assert len(found) == 1
    return found[0]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """Two runs whose weights do not move, for a step of this size is lost in rounding: one
    evaluated on its own task, one on the tasks of docs/tasks.md and others; and what the second
    said."""
    folder = tmp_path_factory.mktemp("runs")
    page = (ROOT / "docs/tasks.md").read_text()
    (folder / "sums.jsonl").write_text(block(page, "json"))
    (folder / "final_sum.py").write_text(block(page, "python"))
    (folder / "always_right.py").write_text("def verify(response, answer):\n    return 1.0\n")
    section = yaml.safe_load(block(page, "yaml"))["eval"]
    section["tasks"] += [
        {"name": "nucleus", "prompts": 32, "top_p": 1e-6, "samples": 2},
        {"name": "cold", "prompts": 32, "temperature": 0.005},
        {"name": "short", "prompts": 4, "max_new_tokens": 5, "greedy": False},
        {"name": "kind", "prompts": 4, "max_new_tokens": 5, "verifier": "always_right.verify"},
        {
            "name": "again",
            "prompts": 4,
            "environment": "environments.check_again.CheckAgain",
            "greedy": False,
        },
    ]
    tree = yaml.safe_load((ROOT / "configs/quickstart.yaml").read_text())
    (folder / "run.yaml").write_text(yaml.safe_dump(tree | {"eval": section}))
    alone = (
        "runtime.runner=inline",
        "parallel.tensor=1",
        "optimizer.lr=1e-30",
        model(),
        "run.dir={}",
    )
    said = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=":")
        for name, settings in (
            ("own", {"eval.prompts": 100, "eval.every": 0}),
            ("tasks", {"config": folder / "run.yaml", "eval.prompts": 0, "eval.every": 1}),
        ):
            overrides = [each.format(folder / name) for each in alone]
            done = train(*overrides, cwd=folder, **settings)
            assert done.returncode == 0, done.stderr
            said = done.stdout
    return folder / "own", folder / "tasks", said


def evals(run_dir: Path, task: str | None) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (run_dir / "eval.jsonl").read_text().splitlines()]
    return [record for record in records if record.get("task") == task]


@pytest.mark.wide
@pytest.mark.distributed
def test_training_does_not_know_what_is_evaluated(runs) -> None:
    own, tasks, _ = runs
    assert len(metrics(own)) == 2
    assert metrics(own) == metrics(tasks)


@pytest.mark.wide
@pytest.mark.distributed
def test_the_runs_own_task_by_name_is_what_it_is_without(runs) -> None:
    own, tasks, _ = runs
    (before, after), named = evals(own, None), evals(tasks, "held_out")
    assert "task" not in before
    assert set(before["correct"]) == {0, 1}
    for record, alone in ((named[0], before), (named[-1], after)):
        assert record.pop("task") == "held_out"
        assert record["decoding"] == {
            "samples": 1,
            "temperature": 1.0,
            "top_p": 1.0,
            "max_new_tokens": 32,
        }
        assert record == alone


@pytest.mark.wide
@pytest.mark.distributed
@pytest.mark.parametrize("task", ["held_out", "sums", "nucleus", "cold", "short", "kind", "again"])
def test_every_evaluation_of_the_same_weights_is_the_same(runs, task: str) -> None:
    first, *others = evals(runs[1], task)
    assert [record["step"] for record in others] == [1, 2]
    for record in others:
        assert record | {"step": 0, "weights": "base"} == first


@pytest.mark.wide
@pytest.mark.distributed
def test_every_task_is_decoded_and_judged_in_its_own_way(runs) -> None:
    sums, nucleus, cold, short, kind, again = (
        evals(runs[1], task)[0] for task in ("sums", "nucleus", "cold", "short", "kind", "again")
    )
    # of three problems, each with its place filled: the policy adds them, most of the time
    assert sorted(s["prompt"] for s in sums["samples"]) == ["12+34+56", "70+11+25", "99+10+48"]
    assert (sums["problems"], sums["failures"], sums["greedy"]) == (3, 0, None)
    assert all(share * 4 == int(share * 4) for share in sums["correct"])
    assert sums["pass1"] == pytest.approx(sum(sums["correct"]) / 3)
    assert sums["pass1"] > 0
    # one token alone has a millionth of the probability, and so has the likeliest at a temperature
    # near 0
    assert nucleus["correct"] == nucleus["greedy_correct"]
    assert cold["correct"] == cold["greedy_correct"]
    assert cold["decoding"]["temperature"] == 0.005
    assert max(len(s["response"]) for s in short["samples"]) <= 5
    # cut off alike, and judged by another
    assert (short["pass1"], kind["pass1"], kind["greedy"]) == (0, 1, 1)
    # what the policy said of two turns, and not what its environment said between them
    assert all("\n" in s["response"] and ";0+" not in s["response"] for s in again["samples"]), (
        again["samples"]
    )


@pytest.mark.wide
@pytest.mark.distributed
def test_every_task_is_shown_by_its_name(runs) -> None:
    _, run_dir, said = runs
    page = (run_dir / "report.html").read_text()
    assert "avg@4 of the base policy on 3 held-out problems of sums: sampled" in said
    for words in ("held_out: pass@1, sampled", "held_out: pass@1, greedy", "sums: avg@4, sampled"):
        assert words in said
        assert words in page
    for task in ("held_out", "sums"):
        assert f"Evaluation, {task}" in page
        assert f"Responses before and after, {task}" in page
    for figure in ("pass@4", "full solve", "distinct solutions"):  # of several responses a problem
        assert f"Evaluation, sums: {figure}" in page
        assert f"Evaluation, held_out: {figure}" not in page
    assert "maj@4" not in page  # the page's verifier does not say what is answered


@pytest.mark.wide
@pytest.mark.distributed
def test_a_resumed_run_evaluates_what_is_missing_alone(runs) -> None:
    """The run was killed between two tasks of its last evaluation."""
    run_dir = runs[1]
    whole = (run_dir / "eval.jsonl").read_text()
    lines = whole.splitlines(keepends=True)
    (run_dir / "eval.jsonl").write_text("".join(lines[:-2]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(run_dir.parent), prepend=":")
        settings = {"config": run_dir / "config.yaml", "eval.prompts": 0}
        done = train("--resume", f"run.dir={run_dir}", cwd=run_dir, **settings)
    assert done.returncode == 0, done.stderr
    assert (run_dir / "eval.jsonl").read_text() == whole
