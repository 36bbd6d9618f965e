"""`megatron-stare eval` with the engine in process: what training says of the same weights, what a
kill leaves, and what is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.models import save_model
from support.runs import ROOT, SMALL, TIMEOUT_S, environment

from megatron_stare.cli import main
from megatron_stare.commands.evaluate import offline_evaluation
from megatron_stare.commands.evaluate.evaluation_folder import EvaluationFolder
from megatron_stare.commands.evaluate.offline_evaluation import Opened, default_out, read, run
from megatron_stare.config.load import load_config
from megatron_stare.config.schema import Config
from megatron_stare.errors import UserError
from megatron_stare.run_dir.heartbeat import FOLDER_VARIABLE, read_heartbeat

MODEL = ROOT / "assets/tiny-adder"
QUICKSTART = str(ROOT / "configs/quickstart.yaml")
INLINE = (f"model.path={MODEL}", "runtime.runner=inline", "parallel.tensor=1", "rollout.threads=1")
ASKED = ("eval.prompts=16", "eval.samples=3", "rollout.max_batch=8")


def quiet(_: str) -> None: ...


def evaluated(
    out: Path,
    *overrides: str,
    checkpoint: Path = MODEL,
    tasks: list[str] | None = None,
    shown: Callable[[int, int], None] = lambda *_: None,
) -> dict[str, dict[str, Any]]:
    """The records of an evaluation in this process."""
    config = load_config(QUICKSTART, [*INLINE, *ASKED, *overrides])
    return run(read(config, checkpoint, tasks or []), out, lambda _: shown, quiet)


def responses(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "responses.jsonl").read_text().splitlines()]


def key(row: dict[str, Any]) -> tuple[str, bool, int, int]:
    return row["task"], row["greedy"], row["prompt"], row["sample"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """An evaluation that nothing cut short."""
    out = tmp_path_factory.mktemp("whole") / "out"
    return out, evaluated(out)["held-out"]


# several runs, of each how many requests its engines were given at a time, by engine in the order
# of their first
TRAIN = """
from megatron_stare.cli import main
from megatron_stare.rollout.engines.local import LocalEngine

given, submit = {{}}, LocalEngine.submit


def counted(self, requests, params):
    given.setdefault(id(self), []).append(len(requests))
    submit(self, requests, params)


LocalEngine.submit = counted
told = []
for command in {commands!r}:
    given.clear()
    assert main(command) == 0
    told.append(dict(enumerate(given.values())))
print(*told, sep="\\n")
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path, str]:
    """Runs of two steps, in one process, to import once: evaluated after every step, never, and by
    engines of the evaluation's own; and what they said."""
    folder = tmp_path_factory.mktemp("trained")
    small = [f"{name}={value}" for name, value in SMALL.items()]
    common = ["train", QUICKSTART, *small, *INLINE, "observability.sinks=[jsonl]"]
    commands = [
        [*common, f"run.dir={folder / 'with'}", *ASKED, "eval.every=1"],
        [*common, f"run.dir={folder / 'without'}", "eval.prompts=0"],
        [*common, f"run.dir={folder / 'own'}", *ASKED, "eval.every=1", "eval.engines=1"],
    ]
    script = TRAIN.format(commands=commands)
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    return folder / "with", folder / "without", folder / "own", done.stdout


@pytest.mark.wide
def test_training_is_the_same_with_and_without_evaluation(
    trained: tuple[Path, Path, Path, str],
) -> None:
    evaluated, alone, own = (run_dir / "hf/model.safetensors" for run_dir in trained[:3])
    assert evaluated.read_bytes() == alone.read_bytes() == own.read_bytes()
    assert evaluated.read_bytes() != (MODEL / "model.safetensors").read_bytes()
    steps = [
        json.loads(line)["step"] for line in (trained[0] / "eval.jsonl").read_text().splitlines()
    ]
    assert steps == [0, 1, 2]


@pytest.mark.wide
def test_engines_of_the_evaluations_own_give_the_same_numbers(
    trained: tuple[Path, Path, Path, str],
) -> None:
    """And training's answer nothing but training's."""
    of_training, _, own, said = trained
    assert (own / "eval.jsonl").read_text() == (of_training / "eval.jsonl").read_text()
    evaluation = [16 * 3, 16] * 3
    assert said.splitlines()[-3:] == [
        str({0: [evaluation[0], 16, 16, 48, 16, 16, 48, 16]}),
        str({0: [16, 16]}),
        str({0: evaluation, 1: [16, 16]}),
    ]


@pytest.mark.parametrize("checkpoint", ["hf", "", "checkpoints/step_000002"])
def test_training_and_the_command_give_the_same_numbers(
    trained: tuple[Path, ...], tmp_path: Path, checkpoint
) -> None:
    """For the same weights, from an exported folder and from the distributed checkpoint, by run and
    by step."""
    ours = json.loads((trained[0] / "eval.jsonl").read_text().splitlines()[-1])
    found = evaluated(tmp_path / "out", checkpoint=trained[0] / checkpoint)["held-out"]
    assert found["decoding"].pop("seed") == 20240917
    assert json.loads(json.dumps(found)) == ours
    assert (found["step"], found["weights"]) == (2, "trained")
    assert 0 < found["pass1"] < 1  # else anything would be equal
    base = json.loads((trained[0] / "eval.jsonl").read_text().splitlines()[0])
    assert base["correct"] != found["correct"] or base["samples"] != found["samples"]
    assert not (tmp_path / "out/weights").exists()


def test_what_is_written(whole: tuple[Path, dict[str, Any]]) -> None:
    out, record = whole
    rows = responses(out)
    assert sorted(key(row) for row in rows) == sorted(
        [("held-out", False, p, s) for p in range(16) for s in range(3)]
        + [("held-out", True, p, 0) for p in range(16)]
    )
    problems = [json.loads(line) for line in (out / "problems.jsonl").read_text().splitlines()]
    assert [row["right"] / 3 for row in problems] == pytest.approx(record["correct"])
    for row in rows:
        assert row["reward"] == float(
            row["text"].rpartition("=")[2] == problems[row["prompt"]]["answer"]
        )
    assert record["results"].keys() == {"avg@3", "pass@1", "pass@2", "pass@3", "maj@2", "maj@3"}
    kept = json.loads((out / "results.json").read_text())
    assert kept == {"held-out": json.loads(json.dumps(record))}
    about = json.loads((out / "evaluation.json").read_text())
    task = about["tasks"]["held-out"]
    assert (task["temperature"], task["top_p"], task["max_new_tokens"]) == (1.0, 1.0, 32)
    assert (task["seed"], task["verifier"], task["problems"]) == (20240917, "arithmetic", 16)
    assert record["decoding"] == {
        **{k: task[k] for k in ("temperature", "top_p", "max_new_tokens", "seed")},
        "samples": 3,
    }


def test_an_evaluation_is_watched(whole: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """By a process that says so in the evaluation's folder, tells nothing of one that gets on, and
    ends with it."""
    beat = read_heartbeat(whole[0])
    assert beat is not None and (beat.pid, beat.phase, beat.process) == (
        os.getpid(),
        "closing",
        "ended",
    )
    assert not (whole[0] / "blackbox").exists()
    assert FOLDER_VARIABLE not in os.environ
    evaluated(tmp_path / "out", "eval.prompts=1", "faults.hangs.enabled=false")
    assert read_heartbeat(tmp_path / "out") is None


# the verifier of the quickstart, which waits for ever at its twentieth answer while there is a gate
STOPS = """
import os
from megatron_stare.rewards.arithmetic_verifier import normal_answer, verify as judge

answers = 0


def verify(response, answer):
    global answers
    answers += 1
    if answers == 20 and os.path.exists({gate!r}):
        open({gate!r}).read()
    return judge(response, answer)
"""


@pytest.mark.wide
@pytest.mark.distributed
def test_an_evaluation_that_is_killed_goes_on_where_it_stopped(
    whole: tuple[Path, dict[str, Any]], tmp_path
) -> None:
    out, gate, stops = tmp_path / "out", tmp_path / "gate", tmp_path / "stops.py"
    stops.write_text(STOPS.format(gate=str(gate)))
    os.mkfifo(gate)
    verifier = f"reward.verifier={stops}:verify"
    command = [
        sys.executable,
        "-m",
        "megatron_stare.cli",
        "eval",
        QUICKSTART,
        *INLINE,
        *ASKED,
        verifier,
    ]
    process = subprocess.Popen(
        [*command, f"--checkpoint={MODEL}", f"--out={out}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment(),
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if (found := re.match(r"held-out: (\d+) of 64", line)) and int(found[1]) >= 8:
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stderr.close()
    before = (out / "responses.jsonl").read_bytes()
    assert 8 <= before.count(b"\n") < 20
    gate.unlink()
    # as if it was killed while it wrote
    (out / "responses.jsonl").write_bytes(before + b'{"task": "held-out", "gre')
    told: list[tuple[int, int]] = []
    record = evaluated(out, verifier, shown=lambda *seen: told.append(seen))["held-out"]
    assert record.pop("asked") == whole[1]["asked"] | {"verifier": f"{stops}:verify"}
    assert record == {name: value for name, value in whole[1].items() if name != "asked"}
    assert (out / "responses.jsonl").read_bytes().startswith(before)
    assert sorted(responses(out), key=key) == sorted(responses(whole[0]), key=key)
    assert told[0] == (before.count(b"\n"), 64) and told[-1] == (64, 64)


def no_engines(_: object) -> None:
    raise AssertionError("engines were started")


def test_what_is_there_is_not_done_again(
    whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """No engine is started for it; and more samples of the same kind join those that are there."""
    out = tmp_path / "out"
    shutil.copytree(whole[0], out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offline_evaluation, "make_engines", no_engines)
        assert evaluated(out)["held-out"] == whole[1]
    assert len(responses(out)) == 64
    more = evaluated(out, "eval.samples=4", "eval.greedy=false")["held-out"]
    assert more["decoding"]["samples"] == 4
    assert len(responses(out)) == 64 + 16
    assert {(row["greedy"], row["sample"]) for row in responses(out)[64:]} == {(False, 3)}
    fewer = evaluated(out, "eval.samples=2")["held-out"]  # of which some are left out
    assert len(responses(out)) == 80
    assert fewer["results"]["avg@2"]["value"] == pytest.approx(
        sum(row["reward"] for row in responses(whole[0]) if row["sample"] < 2 and not row["greedy"])
        / 32
    )


def test_a_group_that_was_sampled_again_replaces_the_former_one(tmp_path: Path) -> None:
    """A verifier of groups judges all three samples anew when the third one is added."""
    (tmp_path / "sized.py").write_text(
        "def verify(responses, answer):\n    return [float(len(responses) == 3)] * len(responses)\n"
    )
    out = tmp_path / "out"
    asked = (f"reward.verifier={tmp_path}/sized.py:verify", "eval.prompts=2", "eval.greedy=false")
    two = evaluated(out, *asked, "eval.samples=2")["held-out"]
    three = evaluated(out, *asked, "eval.samples=3")["held-out"]
    assert (two["results"]["avg@2"]["value"], three["results"]["avg@3"]["value"]) == (0.0, 1.0)
    assert evaluated(out, *asked, "eval.samples=3")["held-out"] == three
    assert sorted(map(key, responses(out))) == [
        ("held-out", False, prompt, sample) for prompt in range(2) for sample in range(3)
    ]
    assert {row["reward"] for row in responses(out)} == {1.0}


def test_the_limit_of_failures_is_that_of_the_whole_evaluation(tmp_path: Path) -> None:
    """Two of 40 responses may fail, however many are left for the resumed command."""
    (tmp_path / "failing.py").write_text(
        "from pathlib import Path\n\n\ndef verify(response, answer):\n"
        "    for file in Path(__file__).parent.glob('fail-*'):\n"
        "        file.unlink()\n        raise OSError\n    return 1.0\n"
    )
    verifier = f"reward.verifier={tmp_path}/failing.py:verify"
    out, file = tmp_path / "out", tmp_path / "out/responses.jsonl"
    asked = (verifier, "reward.workers=1", "eval.prompts=40", "eval.samples=1", "eval.greedy=false")
    assert evaluated(out, *asked)["held-out"]["failures"] == 0
    kept = file.read_text().splitlines(keepends=True)[:30]
    file.write_text("".join(kept))
    (tmp_path / "fail-1").touch()
    assert evaluated(out, *asked)["held-out"]["failures"] == 1
    failed = [line for line in file.read_text().splitlines(keepends=True) if "crash" in line]
    file.write_text("".join(kept + failed))
    for name in ("fail-1", "fail-2"):
        (tmp_path / name).touch()
    with pytest.raises(UserError, match="3 of 40 answers could not be verified, the limit is 5%"):
        evaluated(out, *asked)


def test_another_seed_is_another_evaluation(
    whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    other = evaluated(tmp_path / "out", "eval.seed=5")["held-out"]
    assert other["greedy_correct"] == whole[1]["greedy_correct"]
    assert [s["response"] for s in other["samples"]] != [s["response"] for s in whole[1]["samples"]]
    # of the run, not of evaluations
    again = evaluated(tmp_path / "again", "run.seed=5")["held-out"]
    assert again == whole[1]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("eval.seed=5",), "tasks.held-out.seed 20240917, not 5"),
        (("rollout.temperature=0.5",), "tasks.held-out.temperature 1.0, not 0.5"),
        (("eval.prompts=17",), "tasks.held-out.problems 16, not 17"),
        (("reward.verifier=exact",), "tasks.held-out.verifier arithmetic, not exact"),
        (("model.dtype=bfloat16",), "engine.dtype float32, not bfloat16"),
    ],
)
def test_a_folder_takes_responses_of_one_kind(
    whole, tmp_path: Path, change: tuple[str, ...], named: str
) -> None:
    with pytest.raises(UserError, match=r"name another --out") as error:
        evaluated(whole[0], *change)
    assert named in error.value.what


@pytest.mark.parametrize(
    ("setting", "value"), [("kv_cache_dtype", "fp8_e4m3"), ("quantization", "fp8")]
)
def test_a_folder_takes_responses_of_one_precision(
    tmp_path: Path, setting: str, value: str
) -> None:
    """Earlier releases, whose servers had no other cache and weights, wrote nothing of them."""

    def opened(**engine: str | None) -> None:
        EvaluationFolder(tmp_path / "out", {"engine": engine, "tasks": {}}, "").close()

    for _ in range(2):
        opened(dtype="bfloat16")
        opened(dtype="bfloat16", **{setting: None})
        with pytest.raises(UserError, match=rf"engine\.{setting} None, not {value}"):
            opened(dtype="bfloat16", **{setting: value})
    config = Config.model_validate({"model": {"path": "m"}, "rollout": {"engine": "sglang"}})
    ids: list[dict[str, Any]] = []
    for held in (None, value):
        sglang = config.sglang.model_copy(update={setting: held})
        checkpoint = SimpleNamespace(identity=dict)
        asked = config.model_copy(update={"sglang": sglang})
        ids.append(Opened(asked, None, checkpoint, (), {}).what())  # type: ignore[arg-type]
    assert ids[0]["engine"][setting] is None and ids[0] != ids[1]


def test_a_folder_takes_responses_of_one_checkpoint(
    whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    with pytest.raises(UserError, match=r"with checkpoint\.path"):
        evaluated(whole[0], checkpoint=tmp_path / "model")
    out = tmp_path / "out"
    evaluated(out, "eval.prompts=1", checkpoint=tmp_path / "model")
    os.utime(tmp_path / "model/model.safetensors")  # other weights may be in it now
    with pytest.raises(UserError, match=r"with checkpoint\.files"):
        evaluated(out, "eval.prompts=1", checkpoint=tmp_path / "model")


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The error of a command that must be refused before it leaves anything."""
    before = set(Path().iterdir())
    assert main(["eval", QUICKSTART, *INLINE, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and "Traceback" not in captured.err
    assert set(Path().iterdir()) == before
    return captured.err


TASKS = "eval.tasks=[{name: sums, prompts: 4, samples: 2}, {name: more, prompts: 4, offline: true}]"
HERE = f"--checkpoint={MODEL}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--checkpoint=/nowhere",), "--checkpoint /nowhere: there is no such folder"),
        (
            (f"--checkpoint={ROOT / 'configs'}",),
            "neither a Hugging Face folder (config.json) nor a distributed checkp",
        ),
        ((HERE, "eval.prompts=0"), "eval: there is nothing to evaluate"),
        ((HERE, "--tasks=aime"), "--tasks: unknown name 'aime'\n  fix: known here: held-out"),
        ((HERE, TASKS, "--tasks=sums,mroe"), "did you mean 'more'"),
        (
            (HERE, "eval.samples=4", "eval.k=[1, 5]"),
            "eval.k: pass@5 cannot be computed from 4 responses a problem",
        ),
        ((HERE, "eval.k=[0]"), "pass@0 cannot be computed"),
        (
            (HERE, "eval.tasks=[{name: sums, samples: 2, k: [4]}]"),
            "eval.tasks[sums].k: pass@4 cannot be computed from 2",
        ),
        ((HERE, "eval.samples=0"), "eval.samples: must be at least 1"),
        ((HERE, "eval.prompts=20000"), "an evaluation of 20000 problems would ask some twice"),
        ((HERE, "rollout.max_new_tokens=1000"), "exceed the model's 128 positions"),
        ((HERE, "reward.verifier=maths"), "did you mean 'math'"),
        ((HERE, "rollout.engine=locl"), "rollout.engine"),
        ((HERE, "model.path=/nowhere"), "cannot read the model's config.json"),
    ],
)
def test_bad_input_is_refused_by_name(
    capsys, monkeypatch, tmp_path: Path, arguments: tuple[str, ...], message
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, *arguments)


def test_a_checkpoint_of_another_model_is_refused(capsys, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "other", "qwen2")
    capsys.readouterr()  # transformers' progress bar
    error = refused(capsys, f"--checkpoint={tmp_path / 'other'}")
    assert (
        "is another model than" in error
        and "layers 4, not 3" in error
        and "fix: give another" in error
    )
    shutil.copytree(MODEL, tmp_path / "cut")
    weights = (tmp_path / "cut/model.safetensors").read_bytes()
    (tmp_path / "cut/model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert "cut short" in refused(capsys, f"--checkpoint={tmp_path / 'cut'}")


def test_a_checkpoint_says_what_model_it_is_of(
    capsys, monkeypatch, trained, tmp_path: Path
) -> None:
    """Its tensors fit a model whose positions are rotated otherwise; what it would say is not what
    it learnt."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(MODEL, tmp_path / "other")
    config = json.loads((MODEL / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] *= 2
    (tmp_path / "other/config.json").write_text(json.dumps(config))
    for checkpoint in (trained[0], trained[0] / "hf"):
        error = refused(capsys, f"--checkpoint={checkpoint}", f"model.path={tmp_path / 'other'}")
        assert "is another model than" in error and "rope_theta" in error


def test_a_folder_with_something_else_in_it_is_left_alone(
    capsys, monkeypatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes.txt").write_text("mine")
    assert "this folder has files that do not belong to an evaluation" in refused(
        capsys, HERE, *ASKED, "--out=out"
    )
    assert (tmp_path / "out/notes.txt").read_text() == "mine"


@pytest.mark.parametrize("sync", ["tensor", "distributed", "disk"])
def test_servers_on_gpus_get_their_weights_through_files(monkeypatch, sync: str) -> None:
    """The command has no GPU of its own: handles reach none of theirs, and NCCL joins none."""
    monkeypatch.setenv("MEGATRON_STARE_SGLANG_PYTHON", sys.executable)

    def chosen(*overrides: str) -> str:
        served = ("rollout.engine=sglang", f"sglang.sync={sync}", *overrides)
        return read(
            load_config(QUICKSTART, [*INLINE, *ASKED, *served]), MODEL, []
        ).config.sglang.sync

    assert chosen("sglang.device=cuda", "rollout.engines=2") == "disk"
    assert chosen("sglang.device=cpu") == chosen("sglang.urls=[http://127.0.0.1:1]") == sync


def test_tasks_are_chosen_and_added(capsys, monkeypatch, tmp_path: Path) -> None:
    """The printed table, --json, and results of both tasks in one folder."""
    monkeypatch.chdir(tmp_path)
    command = ["eval", QUICKSTART, *INLINE, TASKS, "eval.greedy=false", HERE]
    assert main([*command, "--tasks=sums"]) == 0
    shown = capsys.readouterr()
    assert (
        "sums: 8 of 8 responses" in shown.err and "avg@2" in shown.out and "more" not in shown.out
    )
    (out,) = Path("evals").iterdir()
    assert out == default_out(load_config(QUICKSTART), MODEL)
    assert main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["tasks"].keys() == {"sums", "more"} and told["out"] == str(out)
    assert json.loads((out / "results.json").read_text()) == told["tasks"]
    assert [row["task"] for row in responses(out)] == ["sums"] * 8 + ["more"] * 4
    assert told["tasks"]["sums"]["decoding"]["samples"] == 2


def test_code_of_the_user_s_that_calls_sys_exit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_stare.commands.evaluate.command._run", lambda args: sys.exit(0))
    assert main(["eval", QUICKSTART, "--checkpoint", str(MODEL)]) == 2
    assert "error: sys.exit(0) was called" in capsys.readouterr().err
