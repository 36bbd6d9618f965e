"""A dry run refuses all that a run would before its workers start, and leaves nothing behind."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.runs import ROOT
from tokenizers import processors
from transformers import AutoTokenizer

from megatron_stare.cli import main
from megatron_stare.config.load import dump_yaml, load_config
from megatron_stare.driver.opening import rehearse
from megatron_stare.run_dir.run_state import RunState
from megatron_stare.weights.files.manifest import sums_of, write_manifest

QUICKSTART = str(ROOT / "configs/quickstart.yaml")
MODEL = f"model.path={ROOT / 'assets/tiny-adder'}"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def dry(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The error of a dry run, which must change nothing below the current folder."""
    before = sorted(Path().rglob("*"))
    assert main(["train", QUICKSTART, MODEL, *arguments, "--dry-run"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.out == ""
    assert sorted(Path().rglob("*")) == before
    return captured.err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("reward.verifier=my_verifiers.verify", "reward.verifier: cannot import 'my_verifiers'"),
        ("reward.verifier=maths", "did you mean 'math'"),
        ("rollout.engine=my_engines.Engine", "rollout.engine: cannot import 'my_engines'"),
        ("rollout.engine=locl", "did you mean 'local'"),
        ("observability.sinks=[jsonl, consol]", "observability.sinks: unknown name 'consol'"),
        (
            "observability.sinks=[console]",
            "observability.sinks: none of these sinks writes the record",
        ),
        (
            "rollout.engine=collections.OrderedDict",
            (
                "'collections.OrderedDict' is not a subclass of"
                " megatron_stare.rollout.engines.engine.Engine"
            ),
        ),
        (
            "rollout.engine=collections.namedtuple",
            "is not a subclass of megatron_stare.rollout.engines.engine.Engine",
        ),
        ("data={source: jsonl}", "data.path: the source 'jsonl' needs a file"),
        ("data={source: jsonl, path: none.jsonl}", "No such file"),
        ("data.source=my_data.Prompts", "data.source: cannot import 'my_data'"),
        ("rollout.max_prompt_tokens=4", "has 9 tokens"),
        ("runtime.runner=inline", "the inline runner has one process, the layout has 2 ranks"),
        ("run.dir=/proc/run", "the run directory cannot be written"),
        ("eval.prompts=12666", "12665 different ones"),
        ("data.template=no place", "data.template: a template has the place {prompt} once"),
        ("rollout.environment=my_tools.Search", "rollout.environment: cannot import 'my_tools'"),
        (
            "rollout.environment=collections.OrderedDict",
            "is not a subclass of megatron_stare.environments",
        ),
        ("eval.tasks=[{name: a}, {name: a}]", "two tasks are called 'a'"),
        (
            "eval.tasks=[{name: a, prompts: 1, verifier: maths}]",
            "eval.tasks[a].verifier: unknown name 'maths'",
        ),
        (
            "eval.tasks=[{name: a, prompts: 1, verifier: no.such}]",
            "eval.tasks[a].verifier: cannot import 'no'",
        ),
        (
            "eval.tasks=[{name: a, source: jsonl, path: none.jsonl}]",
            "none.jsonl: cannot read the prompts",
        ),
        (
            "eval.tasks=[{name: a, prompts: 1, environment: no.Such}]",
            "eval.tasks[a].environment: cannot import 'no'",
        ),
        (
            "eval.tasks=[{name: a, prompts: 1, max_new_tokens: 9999}]",
            "eval.tasks[a].max_new_tokens: 16 prompt + 9999",
        ),
    ],
)
def test_what_does_not_exist(
    capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    assert message in dry(capsys, override)


def test_a_verifier_is_tried_and_not_in_this_process(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "code").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "code")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    (tmp_path / "code/sums_verifier.py").write_text(
        "def verify(response, answer):\n    return 1.0\n\n\ndef self_test():\n    return ['1+1 is"
        " 3']\n"
    )
    assert "gets known answers wrong: 1+1 is 3" in dry(
        capsys, "reward.verifier=sums_verifier.verify"
    )
    assert "sums_verifier" not in sys.modules


def test_a_verifier_must_judge_the_users_known_answers_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("known.jsonl").write_text('{"response": "1+1=2", "answer": "2", "reward": 0}\n')
    error = dry(capsys, "reward.known_answers=known.jsonl")
    assert (
        "reward.known_answers: the verifier gets 1 of 1 known answers wrong: '1+1=2' against '2'"
        " earns 1.0" in error
    )


def test_both_files_of_prompts_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    lines = "".join(
        json.dumps({"prompt": f"{i}+1=", "answer": i + 1}) + "\n" for i in range(10, 60)
    )
    Path("good.jsonl").write_text(lines + lines)
    Path("bad.jsonl").write_text('{"prompt": \n')
    data = "data={source: jsonl, path: good.jsonl, eval_path: %s}"
    assert "data.eval_path" in dry(capsys, "data={source: jsonl, path: good.jsonl}")
    assert "bad.jsonl:1" in dry(capsys, data % "bad.jsonl")
    error = dry(capsys, data % "good.jsonl", "eval.prompts=500")
    assert "has 50 different ones" in error and "fix: at most 50" in error
    assert (
        main(["train", QUICKSTART, MODEL, data % "good.jsonl", "eval.prompts=50", "--dry-run"]) == 0
    )
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["data"]["path"] == str(Path("good.jsonl").absolute())


@pytest.mark.parametrize("step", ["0", "-1", "301"])
def test_a_step_to_write_out_that_is_not_made(
    capsys: pytest.CaptureFixture[str], step: str
) -> None:
    assert "--dump-step: this run will not make step" in dry(capsys, f"--dump-step={step}")


def test_the_last_step_can_be_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", QUICKSTART, MODEL, "--dump-step=300", "--dry-run"]) == 0
    assert not Path("runs").exists()


def test_a_directory_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").touch()
    assert "cannot be written (Not a directory)" in dry(capsys, "run.dir=file/run")
    Path("run").mkdir()
    with Path("run/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another process is running in this directory" in dry(capsys, "run.dir=run")
    Path("run/config.yaml").touch()
    assert "there is a run in this directory already" in dry(capsys, "run.dir=run")


def test_a_file_system_that_locks_differently(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS gives an exclusive lock only to a file that is open for writing; a Lustre that is mounted
    without flock gives none."""
    really = fcntl.flock
    Path("run").mkdir()
    Path("run/.lock").touch()

    def nfs(file: Any, kind: int) -> None:
        if kind & fcntl.LOCK_EX and not file.writable():
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        really(file, kind)

    monkeypatch.setattr(fcntl, "flock", nfs)
    assert main(["train", QUICKSTART, MODEL, "run.dir=run", "--dry-run"]) == 0
    capsys.readouterr()
    with Path("run/.lock").open("w") as lock:
        really(lock, fcntl.LOCK_EX)
        assert "another process is running in this directory" in dry(capsys, "run.dir=run")

    def lustre(file: Any, kind: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", lustre)
    error = dry(capsys, "run.dir=run")
    assert "cannot lock files (Function not implemented)" in error and "-o flock" in error


def test_a_run_to_resume(capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no run to resume" in dry(capsys, "--resume")
    assert "there is no run to resume" in dry(capsys, "--resume", "run.dir=nowhere")

    run = Path("runs/quickstart-20260101-000000")
    step = run / "checkpoints/step_000100"
    assert main(["convert", str(ROOT / "assets/tiny-adder"), str(step)]) == 0
    resolved = rehearse(load_config(QUICKSTART, [MODEL]), resume=False, dump_step=None).config
    (run / "config.yaml").write_text(dump_yaml(resolved))
    (step / "run_state.json").write_text(RunState(step=100, data={"cursor": 3200}).to_json())
    write_manifest(step, sums_of(step, [file.name for file in step.iterdir()]))
    (run / "checkpoints/step_000200.tmp").mkdir()
    capsys.readouterr()
    assert main(["train", QUICKSTART, MODEL, "--resume", "--dry-run"]) == 0
    # what a killed save left is not a rehearsal's to remove
    assert (run / "checkpoints/step_000200.tmp").exists()
    capsys.readouterr()
    assert "optimizer.lr: the run was started with 0.00045" in dry(
        capsys, "--resume", "optimizer.lr=1"
    )
    error = dry(capsys, "--resume", "run.steps=99")
    assert "run.steps: " in error and "has 100 steps already, but run.steps is 99" in error
    assert "the remaining steps: 101 to 300" in dry(capsys, "--resume", "--dump-step=100")
    assert "the remaining steps: none" in dry(
        capsys, "--resume", "run.steps=100", "--dump-step=100"
    )
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another process is running" in dry(capsys, "--resume")
    (shard,) = step.glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:-1])
    assert str(shard.name) in dry(capsys, "--resume")


def rehearsed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The lines about data of a dry run that refuses nothing."""
    assert main(["train", QUICKSTART, MODEL, *arguments, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [line.removeprefix("# ") for line in lines if line.startswith(("# data:", "# warning:"))]


def test_a_tokenizer_larger_than_the_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Its last id may be the last row; the next one has none."""
    model = tmp_path / "model"
    shutil.copytree(ROOT / "assets/tiny-adder", model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = json.loads((model / "config.json").read_text())["vocab_size"]
    largest = max(tokenizer.get_vocab().values())
    tokenizer.add_tokens([f"<extra_{n}>" for n in range(rows - largest - 1)])
    tokenizer.save_pretrained(model)
    assert max(tokenizer.get_vocab().values()) == rows - 1
    assert main(["train", QUICKSTART, f"model.path={model}", "--dry-run"]) == 0
    tokenizer.add_tokens(["<one_too_many>"])
    tokenizer.save_pretrained(model)
    capsys.readouterr()
    error = dry(capsys, f"model.path={model}")
    assert (
        f"ids up to {rows} ('<one_too_many>')" in error
        and f"vocab_size {rows}" in error
        and "fix: " in error
    )


def test_prompts_without_the_bos_of_the_models_texts_are_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = f"model.path={tmp_path / 'model'}"
    shutil.copytree(ROOT / "assets/tiny-adder", tmp_path / "model")
    assert rehearsed(capsys, model) == []
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.bos_token = "<pad>"
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(tmp_path / "model")
    assert rehearsed(capsys, model) == []  # a BOS token that texts do not begin with, as Qwen's
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<pad> $A", special_tokens=[("<pad>", tokenizer.bos_token_id)]
    )
    tokenizer.save_pretrained(tmp_path / "model")
    warning = (
        "warning: this model's tokenizer begins texts with <pad>, prompts do not: begin"
        " data.template with it"
    )
    assert rehearsed(capsys, model) == [warning]
    assert rehearsed(capsys, model, "data.template='{prompt}<pad>'") == [warning]
    assert rehearsed(capsys, model, "data.template=<pad>{prompt}") == []
    assert rehearsed(capsys, model, "data.chat_template=true") == []


def test_turns_of_a_template_that_end_where_responses_do_not_are_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Qwen2.5-7B has the template of Qwen2.5-7B-Instruct, and ends texts with <|endoftext|>."""
    folder = tmp_path / "model"
    model, chat = f"model.path={folder}", "data.chat_template=true"
    limit = "rollout.max_prompt_tokens=100"
    shutil.copytree(ROOT / "assets/tiny-chat", folder)
    assert rehearsed(capsys, model, chat, limit) == []
    tokenizer = AutoTokenizer.from_pretrained(folder)
    end, other = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|endoftext|>")
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | {"eos_token_id": other}))
    assert rehearsed(capsys, model, chat, limit) == [
        "warning: the chat template ends turns with <|im_end|>, but responses continue after it"
        f" until <|endoftext|>; to end them there, set eos_token_id to {sorted([other, end])} in"
        " generation_config.json"
    ]
    assert rehearsed(capsys, model, limit) == []
    content = json.loads((folder / "generation_config.json").read_text())
    content["eos_token_id"] = sorted([other, end])
    (folder / "generation_config.json").write_text(json.dumps(content))
    assert rehearsed(capsys, model, chat, limit) == []


def problems(name: str, *texts: str, answer: str = "2") -> None:
    Path(name).write_text(
        "".join(json.dumps({"prompt": text, "answer": answer}) + "\n" for text in texts)
    )


def test_repeats_and_small_files_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("data={source: files, path: p.jsonl}", "eval.prompts=0", "batch.prompts=4")
    problems("p.jsonl", "1+1=", "2+0=", "0+2=", "3-1=")
    assert rehearsed(capsys, *small) == []
    assert rehearsed(capsys, *small, "batch.prompts=5") == [
        "data: batch.prompts is 5, but there are only 4 problems: a step repeats some of them"
    ]
    assert rehearsed(capsys, *small, "batch.generate_prompts=6") == [
        "data: batch.generate_prompts is 6, but there are only 4 problems:"
        " a step repeats some of them"
    ]
    problems("p.jsonl", "1+1=", "2+0=", "1+1=", "1+1=", "2+0=")
    assert rehearsed(capsys, *small) == [
        "data: 2 prompts come more than once; data.deduplicate=true leaves repeats out"
    ]
    with Path("p.jsonl").open("a") as file:
        file.write('{"prompt": "2+0=", "answer": "3"}\n')
    assert (
        "2 prompts come more than once, 1 of them with different answers"
        in rehearsed(capsys, *small)[0]
    )


def test_training_on_what_is_evaluated_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """The same file, or a copy of some of it; not where the training leaves it out."""
    problems("p.jsonl", "1+1=", "2+0=", "0+2=", "3-1=")
    problems("e.jsonl", "1+1=", "5-3=")
    data = ("data={source: files, path: p.jsonl, eval_path: %s}", "batch.prompts=2")
    same = rehearsed(capsys, data[0] % "p.jsonl", *data[1:], "eval.prompts=3")
    assert [line.split(";")[0] for line in same] == [
        "warning: 3 of 3 problems of the evaluation are trained on"
    ]
    some = rehearsed(capsys, data[0] % "e.jsonl", *data[1:], "eval.prompts=2")
    assert [line.split(";")[0] for line in some] == [
        "warning: 1 of 2 problems of the evaluation are trained on"
    ]
    named = (
        "data={source: files, path: p.jsonl}",
        "batch.prompts=2",
        "eval.prompts=0",
        "eval.tasks=[{name: e, path: e.jsonl}]",
    )
    assert [line.split(";")[0] for line in rehearsed(capsys, *named)] == [
        "warning: 1 of 2 problems of eval.tasks[e] are trained on"
    ]
    left_out = "data={source: files, path: p.jsonl, eval_path: e.jsonl, decontaminate: [e.jsonl]}"
    assert rehearsed(capsys, left_out, "batch.prompts=2", "eval.prompts=2") == [
        "data: 1 prompts left out: a problem of data.decontaminate"
    ]
