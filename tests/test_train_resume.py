"""Runs that were finished, cut short, moved or begun by an earlier release are resumed or
refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from support.runs import ROOT, command, metrics, train

import megatron_stare
from megatron_stare.cli import main
from megatron_stare.config.formats import FORMAT, RENAMED
from megatron_stare.config.load import dump_yaml, load_config
from megatron_stare.driver.opening import finished_run
from megatron_stare.driver.resuming import find_run, refuse_changes, refuse_other_run, resume_point
from megatron_stare.errors import ConfigError, DataError, UserError
from megatron_stare.planning.preflight import check
from megatron_stare.weights.files.hf_folder import exported_step, write_folder

QUICKSTART = ROOT / "configs/quickstart.yaml"
# one process: seconds a run
ALONE = {"runtime.runner": "inline", "parallel.tensor": 1, "run.steps": 2}


def evaluations(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "eval.jsonl").read_text().splitlines()]


def recorded(run_dir: Path) -> dict:
    return yaml.safe_load((run_dir / "config.yaml").read_text())


@pytest.mark.wide
@pytest.mark.distributed
def test_a_run_is_continued_to_its_end_and_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").symlink_to(ROOT / "assets/tiny-adder")
    begun = ["model.path=model", "run.dir=run"]
    done = train(*begun, cwd=tmp_path, **ALONE)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    assert recorded(run)["model"]["path"] == str(tmp_path / "model")
    whole, evaluated = metrics(run), evaluations(run)
    assert exported_step(run / "hf") == 2
    monkeypatch.chdir(tmp_path / "model")
    # anywhere, without --model
    assert main(["convert", str(run), str(tmp_path / "converted")]) == 0
    monkeypatch.chdir(tmp_path)

    def resume(*overrides: str) -> int:
        """In this process, in which nothing may be started."""
        capsys.readouterr()
        return main([*command(*begun, *overrides, "--resume", **ALONE)[3:]])

    exported = (run / "hf/model.safetensors").stat().st_ino
    (run / "report.html").unlink()
    assert resume() == 0
    assert "all 2 steps of this run are done already" in capsys.readouterr().out
    assert (run / "hf/model.safetensors").stat().st_ino == exported
    assert (run / "report.html").exists()
    assert resume("--dump-step=2") == 2
    assert "the remaining steps: none" in capsys.readouterr().err
    assert resume("run.steps=1") == 2
    assert (
        "run.steps: the run in run has 2 steps already, but run.steps is 1"
        in capsys.readouterr().err
    )
    assert recorded(run)["run"]["steps"] == 2

    # finished is what is finished as it is asked for, in every part
    asked = check(load_config(QUICKSTART, [*command(*begun, **ALONE)[5:]])).config
    assert finished_run(asked) == Path("run")
    assert (
        finished_run(asked.model_copy(update={"run": asked.run.model_copy(update={"steps": 3})}))
        is None
    )
    settings = recorded(run)
    settings["run"]["steps"] = 3  # it was to go on, and may have written more metrics
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    assert finished_run(asked) is None
    settings["run"]["steps"] = 2
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    (run / "hf").rename(tmp_path / "hf")
    assert finished_run(asked) is None
    # of a step it went on from
    write_folder(run / "hf", {"w": torch.ones(1)}, tmp_path / "model", step=1)
    assert finished_run(asked) is None

    # killed between the last checkpoint and what follows it
    (run / "eval.jsonl").write_text(json.dumps(evaluated[0]) + "\n")
    shutil.rmtree(run / "hf")
    done = train(*begun, "--resume", cwd=tmp_path, **ALONE)
    assert done.returncode == 0, done.stderr
    assert evaluations(run) == evaluated
    assert exported_step(run / "hf") == 2
    assert metrics(run) == whole

    # begun by a release that recorded paths as they were given, and faults in five sections;
    # continued to a third step
    tree = {**recorded(run), "format": 5}
    tree["model"]["path"] = "model"
    faults = tree.pop("faults")
    tree |= {former: faults[now.removeprefix("faults.")] for former, now in RENAMED.items()}
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    faster = {
        "batch.micro_batch_tokens": 2048,
        "model.head": "recompute",
        "model.recompute": "full",
        "performance.keep_graph": "false",
        "rollout.max_batch": 7,
    }
    done = train(*begun, "--resume", cwd=tmp_path, **{**ALONE, **faster, "run.steps": 3})
    assert done.returncode == 0, done.stderr
    assert (
        "config.yaml is of an earlier format: limits is faults.requests now, restarts is"
        in done.stdout
    )
    assert (recorded(run)["format"], recorded(run)["faults"]) == (FORMAT, faults)
    assert (recorded(run)["run"]["steps"], recorded(run)["model"]["path"]) == (
        3,
        str(tmp_path / "model"),
    )
    assert [row["step"] for row in metrics(run)] == [1, 2, 3]
    assert [record["step"] for record in evaluations(run)] == [0, 2, 3]
    assert exported_step(run / "hf") == 3

    # ended before its first checkpoint: all that a kill in step 2 leaves
    cut = tmp_path / "cut"
    cut.mkdir()
    (cut / "config.yaml").write_text(yaml.safe_dump(tree))
    (cut / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text().splitlines()[0] + "\n")
    (cut / "eval.jsonl").write_text(json.dumps(evaluated[0]) + "\n")
    done = train("model.path=model", "run.dir=cut", "--resume", cwd=tmp_path, **ALONE)
    assert done.returncode == 0, done.stderr
    assert "the run ended before its first checkpoint: starting from step 0" in done.stdout
    assert metrics(cut) == whole
    assert evaluations(cut) == evaluated


@pytest.mark.wide
@pytest.mark.distributed
def test_a_run_without_a_step_is_not_left(tmp_path: Path) -> None:
    """All is running, and the base is evaluated, when the first batch cannot be scored."""
    (tmp_path / "no_verifier.py").write_text(
        "def verify(response, answer):\n    raise OSError('no such server')\n"
    )
    done = train(
        f"model.path={ROOT / 'assets/tiny-adder'}",
        "run.dir=of/run",
        "reward.verifier=no_verifier.verify",
        cwd=tmp_path,
        **ALONE,
        **{"eval.prompts": 0},
    )
    assert done.returncode == 2
    assert "could not be verified" in done.stderr
    assert not (tmp_path / "of").exists()


@pytest.mark.wide
@pytest.mark.distributed
def test_a_record_on_a_full_disk_ends_the_run_and_the_rest_of_it_goes_on_without_tensorboard(
    tmp_path: Path,
) -> None:
    """The disk is full at the first line of metrics; TensorBoard's folder is lost once the run has
    begun."""
    (tmp_path / "my_sinks.py").write_text(
        "import shutil\n"
        "from megatron_stare.observability.sink import Sink\n"
        "class Thief(Sink):\n"
        "    def start(self, run):\n"
        "        shutil.rmtree(run.dir / 'tensorboard')\n"
        "        (run.dir / 'tensorboard').touch()\n"
    )
    settings = {
        **ALONE,
        "eval.prompts": 0,
        "observability.sinks": "[jsonl, tensorboard, console, my_sinks.Thief]",
    }
    begun = f"model.path={ROOT / 'assets/tiny-adder'}"
    done = train(begun, "run.dir=run", cwd=tmp_path, **settings)
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2]
    assert done.stderr.count("warning: the sink 'tensorboard' of observability.sinks failed") == 1
    assert exported_step(tmp_path / "run/hf") == 2

    (tmp_path / "full").mkdir()
    (tmp_path / "full/metrics.jsonl").symlink_to("/dev/full")
    done = train(
        begun,
        "run.dir=full",
        cwd=tmp_path,
        **{**settings, "observability.sinks": "[jsonl, console]"},
    )
    assert done.returncode == 2
    assert (
        "error: full: the record of the run cannot be written (No space left on device)"
        in done.stderr
    )
    assert "Traceback" not in done.stderr
    assert "step 1/2" not in done.stdout  # nothing is shown that is not recorded


def make_run(folder: Path, *, steps: int = 0, checkpoint: bool = False) -> Path:
    """Makes what a run of the quickstart leaves when it is killed after so many steps."""
    folder.mkdir(parents=True)
    config = load_config(QUICKSTART, [f"model.path={ROOT / 'assets/tiny-adder'}"])
    (folder / "config.yaml").write_text(dump_yaml(check(config).config))
    rows = [json.dumps({"step": step}) + "\n" for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(rows))
    if checkpoint:
        (folder / "checkpoints/step_000100").mkdir(parents=True)
    return folder


def test_starts_that_were_killed_are_no_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(QUICKSTART)
    only = make_run(Path("runs/quickstart-1"))
    assert find_run(config) == only
    stepped = make_run(Path("runs/quickstart-2"), steps=1)
    make_run(Path("runs/quickstart-3"))
    assert find_run(config) == stepped
    saved = make_run(Path("runs/quickstart-4"), checkpoint=True)
    make_run(Path("runs/quickstart-5"))
    make_run(Path("runs/other-6"), steps=1)
    longer = make_run(Path("runs/quickstart-long-7"), steps=1)
    text = (longer / "config.yaml").read_text()
    (longer / "config.yaml").write_text(
        text.replace("name: quickstart", "name: quickstart-long", 1)
    )
    assert find_run(config) == saved
    named = config.model_copy(
        update={"run": config.run.model_copy(update={"name": "quickstart-l"})}
    )
    with pytest.raises(UserError, match="there is no run to resume"):
        find_run(named)


def contents(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("given", [["--resume"], ["--from-step=100"], ["--resume", "--dry-run"]])
@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_a_copy_of_a_run_does_not_resume_the_original(
    given: list[str],
    moved: bool,
    named: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A record of a run without run.dir selects the newest run of its name."""
    monkeypatch.chdir(tmp_path)
    original, copy = Path("runs/quickstart-1"), Path("runs/copy")
    make_run(original, steps=120, checkpoint=True)
    if named:
        settings = recorded(original)
        settings["run"]["dir"] = str(original)
        (original / "config.yaml").write_text(yaml.safe_dump(settings))
    before = contents(original)
    if moved:
        original.rename(copy)
    else:
        shutil.copytree(original, copy)
    assert main(["train", f"{copy}/config.yaml", *given]) == 2
    said = capsys.readouterr().err
    assert "run.dir: runs/copy/config.yaml is the configuration of the run in runs/copy" in said
    assert said.endswith("such as run.dir=runs/copy\n")
    with pytest.raises(ConfigError, match="the run in runs/copy"):
        megatron_stare.run(copy / "config.yaml", resume=True)
    if not moved:
        assert contents(original) == before
    # its checkpoint is an empty folder
    assert main(["train", f"{copy}/config.yaml", "run.dir=runs/copy", *given]) == 2
    assert "error: runs/copy/checkpoints/step_000100" in capsys.readouterr().err


def test_a_run_resumes_from_its_own_record_and_from_files_of_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_run(Path("runs/quickstart-1"), steps=1)
    config = load_config(QUICKSTART)
    refuse_other_run(run / "config.yaml", config)
    Path("link").symlink_to(run)
    refuse_other_run(Path("link/config.yaml"), config)
    shutil.copy(run / "config.yaml", "config.yaml")  # no run
    refuse_other_run(Path("config.yaml"), config)
    Path("starts.jsonl").touch()
    with pytest.raises(ConfigError, match="selects runs/quickstart-1 to resume"):
        refuse_other_run(Path("config.yaml"), config)
    shutil.copy("config.yaml", "mine.yaml")
    refuse_other_run(Path("mine.yaml"), config)


def test_the_last_started_run_is_resumed_whatever_its_name_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first two start 20 minutes apart, around the end of summer time."""
    monkeypatch.chdir(tmp_path)
    config = load_config(QUICKSTART)
    summer = make_run(Path("runs/quickstart-20261101-015000"), steps=1)
    winter = make_run(Path("runs/quickstart-20261101-011000"), steps=1)
    write_starts(summer, "2026-11-01T01:50:00-0400")
    assert find_run(config) == summer  # the other says nothing
    write_starts(winter, "2026-11-01T01:10:00-0500")
    assert find_run(config) == winter
    elsewhere = make_run(Path("runs/quickstart-20261101-080000"), steps=1)
    write_starts(elsewhere, "2026-11-01T08:00:00+0200")
    assert find_run(config) == winter
    write_starts(summer, "2026-11-01T01:50:00-0400", "2026-11-02T10:00:00-0500")
    assert find_run(config) == summer  # it was resumed since
    (summer / "starts.jsonl").write_text("not JSON\n\n{}\n")
    assert find_run(config) == winter


def write_starts(run: Path, *dates: str) -> None:
    lines = [json.dumps({"step": 0, "date": date}) + "\n" for date in dates]
    (run / "starts.jsonl").write_text("".join(lines))


def test_checkpoints_that_are_gone(tmp_path: Path) -> None:
    """The quickstart saves every 100 steps, in the background: of a run of 200 the first save may
    still have been under way, one of 201 had it. Where a step waits for its checkpoint, of a run of
    100 it may have been killed."""
    config = check(load_config(QUICKSTART, [f"model.path={ROOT / 'assets/tiny-adder'}"])).config
    assert resume_point(make_run(tmp_path / "killed", steps=200), config) == (None, None)
    with pytest.raises(DataError, match="no complete checkpoint, though it made 201 steps"):
        resume_point(make_run(tmp_path / "cleared", steps=201), config)
    for steps in (100, 101):
        run = make_run(tmp_path / str(steps), steps=steps)
        waited = recorded(run)
        waited["checkpoint"]["background"] = False
        (run / "config.yaml").write_text(yaml.safe_dump(waited))
    assert resume_point(tmp_path / "100", config) == (None, None)
    with pytest.raises(DataError, match="no complete checkpoint, though it made 101 steps"):
        resume_point(tmp_path / "101", config)
    # an exported policy shows that there was a checkpoint
    exported = make_run(tmp_path / "exported", steps=200)
    write_folder(exported / "hf", {"w": torch.ones(1)}, ROOT / "assets/tiny-adder", step=200)
    with pytest.raises(DataError, match="no complete checkpoint, though it made 200 steps"):
        resume_point(exported, config)


def test_paths_are_compared_by_what_they_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def config(base: str, **data: str):
        overrides = [
            f"model={{path: {base}model, reference_path: {base}reference}}",
            f"sglang.python={base}bin/python",
        ]
        overrides.append("rollout.engine=sglang")
        overrides.append(
            f"data={{source: jsonl, path: {base}train.jsonl, eval_path: {base}eval.jsonl}}"
        )
        return load_config(
            QUICKSTART, overrides + [f"data.{key}={value}" for key, value in data.items()]
        )

    refuse_changes(config(""), config(f"{tmp_path}/"))
    refuse_changes(config("./"), config(""))
    for key in ("path", "eval_path"):
        with pytest.raises(Exception, match=f"data.{key}: the run was started with '{tmp_path}"):
            refuse_changes(config(""), config("", **{key: "other.jsonl"}))


@pytest.mark.parametrize(
    "scope", ["statistics.scope=micro_batch", "algorithm.aggregation=micro_batch_mean"]
)
@pytest.mark.parametrize(
    "setting", ["batch.micro_batch_tokens=77", "batch.packed=false", "parallel.tensor=1"]
)
def test_micro_batches_may_not_change_if_the_loss_depends_on_them(scope: str, setting: str) -> None:
    before, after = load_config(QUICKSTART, [scope]), load_config(QUICKSTART, [scope, setting])
    with pytest.raises(Exception, match=setting.partition("=")[0]):
        refuse_changes(before, after)


@pytest.mark.parametrize(
    ("setting", "free"),
    [
        ("faults.requests.request_s=77", True),
        ("faults.hangs.floor_s=77", True),
        ("faults.run.attempts=1", True),
        ("faults.guards.window=77", True),
        ("run.steps=77", True),
        ("run.seed=77", False),
        ("optimizer.lr=0.77", False),
        ("rollout.max_new_tokens=7", False),
        # what an error's advice changes: memory, speed, limits, servers
        ("batch.micro_batch_tokens=77", True),
        ("batch.prompts=77", False),
        ("batch.packed=false", True),
        ("model.recompute=full", True),
        ("model.head=recompute", True),
        ("model.dtype=bfloat16", False),
        ("memory.device_gb=77", True),
        ("performance.automatic=false", True),
        ("agreement.mean=0.77", True),
        ("reward.max_failure_rate=0.77", True),
        ("reward.verifier=math", False),
        ("rollout.engines=7", True),
        ("rollout.prove_every=7", True),
        ("rollout.staleness=1", False),
        ("sglang.memory_fraction=0.77", True),
        ("sglang.start_timeout_s=77", True),
        ("sglang.dtype=float16", False),
        ("sglang.kv_cache_dtype=fp8_e4m3", False),
        ("sglang.quantization=fp8", False),
        ("sglang.seeds=true", False),
    ],
)
def test_how_a_run_computes_may_change_and_what_is_trained_may_not(
    setting: str, free: bool
) -> None:
    served = ["rollout.engine=sglang"] if setting.startswith("sglang.") else []
    before = load_config(QUICKSTART, served)
    after = load_config(QUICKSTART, [*served, setting])
    if free:
        refuse_changes(before, after)
    else:
        with pytest.raises(Exception, match=setting.partition("=")[0]):
            refuse_changes(before, after)
