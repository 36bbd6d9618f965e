"""Everything a user can get wrong is one clear error on stderr, exit code 2, no traceback, nothing
started."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.models import save_model
from support.runs import ROOT, environment

from megatron_stare.cli import main
from megatron_stare.commands import recipes

QUICKSTART = str(ROOT / "configs/quickstart.yaml")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The error of a command that must be refused."""
    assert main(["train", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert "Traceback" not in captured.err
    return captured.err


def dry(capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    return run(
        capsys, QUICKSTART, f"model.path={ROOT / 'assets/tiny-adder'}", *overrides, "--dry-run"
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lrr=1", "did you mean 'lr'"),
        ("optimzer.lr=1", "did you mean 'optimizer'"),
        ("algorithm=stair", "did you mean 'stare'"),
        ("algorithm.amplfy=2", "did you mean 'amplify'"),
        ("algorithm.share=2", "share"),
        ("parallel.tensor=3", "cannot be cut over 3 tensor-parallel ranks"),
        ("parallel.pipeline=2", "3 layers cannot be cut into 2 stages x 1 chunks"),
        (
            "parallel={tensor: 1, pipeline: 2, first_stage_layers: 3}",
            "3 of 3 layers leave 0 for 1 stages",
        ),
        ("parallel.virtual_pipeline=3", "virtual stages need a pipeline"),
        (
            "parallel={tensor: 1, context: 3, context_comm: a2a}",
            "cannot be cut over 3 context-parallel ones",
        ),
        ("parallel.expert=2", "the model has no experts"),
        ("optimizer={name: sgd, distributed: true}", "sgd has no distributed form"),
        (
            "model.recompute_layers=2",
            "model.recompute_layers: this setting has no effect with model.recompute=none",
        ),
        ("model.reference_path=here", "the method uses no reference policy"),
        (
            "model.reference_refresh_every=10",
            "model.reference_refresh_every: the method uses no reference policy",
        ),
        ("batch.mini_batch_prompts=5", "use a divisor of batch.prompts; the nearest is 4"),
        ("batch.mini_batch_prompts=64", "the nearest is 32"),
        ("batch.epochs=0", "must be at least 1"),
        ("statistics.surprisal=new", "statistics.surprisal"),
        (
            "statistics.gate=lagged",
            "statistics.surprisal=old needs a log-prob pass, which gives the exact gate",
        ),
        ("batch.samples_per_prompt=1", "use at least 2"),
        ("batch.micro_batch_tokens=20", "at least 48"),
        ("rollout.max_new_tokens=1000", "exceed the model's 128 positions"),
        (
            "rollout.max_prompt_tokens=1024",
            "rollout.max_prompt_tokens: prompts of 1024 tokens leave no room",
        ),
        ("rollout.max_prompt_tokens=128", "fix: at most 127, less the tokens of a response"),
        ("sglang.colocated=true", "set rollout.engine=sglang"),
        ("optimizer.lr=fast", "optimizer.lr"),
        ("optimizer.name=sgd", "cannot save the state of SGD"),
        ("optimizer.lr=-1", "must be above 0"),
        ("optimizer.min_lr=0.1", "min_lr 0.1 is above lr"),
        ("model.path=/nowhere", "cannot read the model's config.json"),
        ("model.dtype=float8", "model.dtype: must be 'float32', 'bfloat16' or 'float16'"),
        (
            "optimizer.min_loss_scale=131072",
            "min_loss_scale 131072 is above initial_loss_scale 65536",
        ),
        ("model.head=chunked", "model.head: must be 'auto', 'materialised'"),
        ("model.head_chunk_tokens=0", "must be at least 1"),
        ("run.steps", "section.key=value"),
        ("run.seed.x=1", "run.seed: must be a whole number"),
    ],
)
def test_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    assert message in dry(capsys, override)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("sglang.python=/nowhere/python",), "there is no Python at /nowhere/python"),
        (
            ("rollout.max_new_tokens=112",),
            "are too long: a server fills 126 tokens of its context of 128",
        ),
        (("sglang.cache_tokens=40",), "rollout.max_new_tokens"),
        (("sglang.cache_tokens=18",), "fix: at most 15, less the tokens of a response"),
        (("sglang.urls=[http://127.0.0.1:1]", "rollout.max_new_tokens=112"), "at most 110"),
        (
            ("sglang.urls=[http://far:1]", "sglang.sync=distributed"),
            "http://far:1 is not on loopback, so it must ask for a key",
        ),
    ],
)
def test_sglang_is_refused_before_a_server_starts(
    capsys: pytest.CaptureFixture[str], overrides: tuple[str, ...], message: str
) -> None:
    assert message in dry(
        capsys, "rollout.engine=sglang", f"sglang.python={sys.executable}", *overrides
    )


def test_sglang_is_refused_for_a_model_it_would_pad(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    save_model(tmp_path, "qwen2")
    capsys.readouterr()  # transformers' progress bar
    assert "SGLang pads feed-forward layers 48 wide" in dry(
        capsys, "rollout.engine=sglang", f"sglang.python={sys.executable}", f"model.path={tmp_path}"
    )


def test_a_gradient_before_the_whole_response_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    error = dry(capsys, "model.head=gradient_in_forward", "algorithm=gspo")
    assert "gspo couples the tokens of a response" in error and "model.head" in error


def test_what_context_parallelism_needs_room_for(capsys: pytest.CaptureFixture[str]) -> None:
    error = dry(capsys, "batch.micro_batch_tokens=48", "parallel.context=5")
    assert (
        "16 prompt + 32 new tokens, padded to a multiple of 10, exceed a micro-batch of 48 tokens"
        in error
    )
    assert "at least 50" in error


def test_an_average_over_a_micro_batch_that_lies_on_several_ranks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = dry(
        capsys, "parallel.context=2", "algorithm={name: grpo, aggregation: micro_batch_mean}"
    )
    assert (
        "context-parallel ranks hold a part of them each" in error
        and "algorithm.aggregation" in error
    )


@pytest.mark.parametrize("updates", ["batch.epochs=2", "batch.mini_batch_prompts=8"])
def test_a_method_that_measures_one_updates_change_is_refused_several(
    capsys: pytest.CaptureFixture[str], updates: str
) -> None:
    error = dry(capsys, "algorithm=stare_predictive", updates)
    assert "learns from the entropy change of one update" in error
    assert "batch.mini_batch_prompts=null and batch.epochs=1" in error


LAGGED = ("statistics={surprisal: rollout, gate: lagged}", "observability.entropy_forecast=false")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("batch.epochs=2", "2 optimizer steps a rollout batch need old log-probs"),
        ("batch.mini_batch_prompts=8", "batch.mini_batch_prompts=null and batch.epochs=1"),
        ("algorithm=gtpo", "GTPO shapes rewards by the entropies of the log-prob pass"),
        ("algorithm=grpo_s", "GRPO-S shapes rewards"),
        ("algorithm=gspo", "GSPO's ratio"),
        ("algorithm=clip_cov", "Clip-Cov draws"),
        ("algorithm=kl_cov", "KL-Cov holds"),
        ("algorithm=stapo", "STAPO's mask"),
        ("algorithm=stapo_stare", "STAPO's mask"),
        ("algorithm=twenty_entropy", "20-Entropy chooses"),
        ("algorithm=opefo", "OPEFO's weights read"),
        ("algorithm=stare_predictive", "predictive control forecasts from"),
        ("algorithm=clip_b", "Clip_B's mask reads"),
        ("algorithm=clip_v", "Clip_V's mask reads"),
        ("algorithm=repo_r", "REPO-R's centred weights read"),
        ("algorithm=steer", "STEER's weights read"),
        ("algorithm=gepo", "GEPO's first bounds"),
        ("algorithm=grpo_dropout", "GRPODropout drops responses by"),
        ("algorithm=support.reads_sums.ReadsSums", "ReadsSums reads sums over the vocabulary"),
        ("algorithm.correction={mode: truncate}", "the importance correction"),
        ("algorithm.reference_kl={coef: 0.1}", "the reference policy passes"),
        ("algorithm={name: grpo, entropy_bonus: {target: 0.2}}", "entropy_bonus.target"),
        ("observability.entropy_forecast=true", "observability.entropy_forecast=false"),
    ],
)
def test_a_log_prob_pass_that_is_needed_is_not_skipped(
    capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    error = dry(capsys, *LAGGED, override)
    assert message in error
    assert "statistics.gate: " in error
    assert "set statistics.gate=exact" in error


def test_predictive_control_of_micro_batches_is_refused_with_a_setting_that_exists(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = dry(capsys, "algorithm=stare_predictive", "statistics.scope=micro_batch")
    (setting,) = re.findall(r"fix: (statistics\.scope=\w+)$", error, re.M)
    path = f"model.path={ROOT / 'assets/tiny-adder'}"
    wanted = [path, "algorithm=stare_predictive", setting]
    assert main(["train", QUICKSTART, *wanted, "--dry-run"]) == 0


def test_a_log_prob_pass_that_nobody_reads_is_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    path = f"model.path={ROOT / 'assets/tiny-adder'}"
    uncentred = "{name: repo_r, centred: false, entropy_target: 0.3}"
    for method in ("stare", "grpo", "dapo", "justrl", "cispo", "dg", "entropic", uncentred):
        assert main(["train", QUICKSTART, path, *LAGGED, f"algorithm={method}", "--dry-run"]) == 0
    assert "gate: lagged" in capsys.readouterr().out


def test_missing_and_broken_configuration(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "cannot read the configuration" in run(capsys, str(tmp_path / "none.yaml"))
    (tmp_path / "broken.yaml").write_text("run: [1\n")
    assert "not valid YAML line" in run(capsys, str(tmp_path / "broken.yaml"))
    (tmp_path / "empty.yaml").write_text("run: {}\n")
    assert "model: this key is required and missing" in run(capsys, str(tmp_path / "empty.yaml"))


def test_data_errors_name_the_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    common = [
        "data.source=jsonl",
        f"run.dir={tmp_path / 'run'}",
        f"model.path={ROOT / 'assets/tiny-adder'}",
    ]
    assert "data.path" in run(capsys, QUICKSTART, *common)
    assert "none.jsonl" in run(capsys, QUICKSTART, *common, f"data.path={tmp_path / 'none.jsonl'}")
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": \n')
    assert f"{broken}:2" in run(
        capsys, QUICKSTART, *common, f"data.path={broken}", "eval.prompts=0"
    )
    long = tmp_path / "long.jsonl"
    long.write_text('{"prompt": "10+10+10+10+10+10=", "answer": "60"}\n')
    message = run(capsys, QUICKSTART, *common, f"data.path={long}", "eval.prompts=0")
    assert "18 tokens" in message
    assert "16" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/proc/version").exists(), reason="needs /proc")
def test_a_run_directory_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    # /proc refuses writes to everyone, root included
    message = run(
        capsys, QUICKSTART, "run.dir=/proc/run", f"model.path={ROOT / 'assets/tiny-adder'}"
    )
    assert "the run directory cannot be written" in message


def test_dry_run_prints_what_it_would_do_and_does_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = f"model.path={ROOT / 'assets/tiny-adder'}"
    assert main(["train", QUICKSTART, path, "algorithm=grpo", "--dry-run", "run.seed=7"]) == 0
    printed = capsys.readouterr().out
    assert "name: grpo" in printed
    assert "seed: 7" in printed
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "resolved.yaml").write_text(printed)
    assert main(["train", str(tmp_path / "resolved.yaml"), "--dry-run"]) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    ("overrides", "blamed"),
    [
        (["optimizer.lrr=1"], "optimizer.lrr=1: optimizer.lrr: unknown name"),
        (["optimizer.lr=1", "optimizer.lr=-1", "run.steps=3"], "optimizer.lr=-1: optimizer.lr: "),
        (["optimizer={lr: -1}"], "optimizer={lr: -1}: optimizer.lr: "),
        (["model={dtype: float32}"], "model={dtype: float32}: model.path: this key is required"),
        (["run.seed.x=1"], "run.seed.x=1: run.seed: "),
        # the file's own fault stays the file's
        (["optimizer.lr=1"], "broken.yaml: optimizer.eps: "),
        (["optimizer.ep=1"], "optimizer.ep=1: optimizer.ep: unknown name"),  # eps begins alike
    ],
)
def test_the_override_that_is_wrong_is_blamed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, overrides: list[str], blamed: str
) -> None:
    file = tmp_path / "broken.yaml"
    wrong = "optimizer: {eps: -1}\n" if "broken" in blamed else ""
    file.write_text(f"model: {{path: here}}\n{wrong}")
    error = run(capsys, str(file), *overrides)
    assert blamed in error
    assert ("broken.yaml" in error) == ("broken" in blamed)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--run.steps=3"], "run.steps=3"),
        (["--run.steps", "3"], "run.steps=3"),
        (["-optimizer.lr=1"], "optimizer.lr=1"),
        (["--algorithm=grpo"], "algorithm=grpo"),
        (["--steps=3"], None),
    ],
)
def test_settings_with_dashes(
    capsys: pytest.CaptureFixture[str], arguments: list[str], hint: str | None
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["train", QUICKSTART, *arguments])
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert "unrecognized arguments" in error
    assert error.rstrip().endswith(f"fix: settings have no dashes: {hint}") == (hint is not None)


@pytest.mark.parametrize("command", [["recipes"], ["format"]])
def test_a_reader_of_the_output_that_ends_first_is_no_fault(command: list[str]) -> None:
    reader, output = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "megatron_stare.cli", *command],
        env=environment(),
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(output)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_a_broken_connection_is_not_taken_for_such_a_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(args: object) -> None:
        raise BrokenPipeError("of a socket")

    monkeypatch.setattr(recipes, "run_recipes", run)
    with pytest.raises(BrokenPipeError, match="of a socket"):
        main(["recipes"])


def test_a_method_that_does_not_import(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "her_methods"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "helper.py").write_text("one = 1\ntwo = three\n")
    (package / "calls.py").write_text("import her_methods.helper\n")
    (package / "typo.py").write_text("one = 1\ntwo = (\n")
    (package / "lacks.py").write_text('"""Says."""\nimport no_such_library\n')

    def refused(name: str) -> str:
        return dry(capsys, f"algorithm={name}")

    error = refused("his_methods.mine.Method")
    assert (
        "algorithm.name: cannot import 'his_methods.mine': there is no module 'his_methods' on"
        " Python's path" in error
    )
    assert "PYTHONPATH=FOLDER" in error
    error = refused("her_methods.mine.Method")
    assert (
        "there is no module 'her_methods.mine'" in error and "fix: correct the dotted path" in error
    )
    error = refused("her_methods.calls.Method")
    line = f"{package / 'helper.py'}:2"
    assert (
        f"NameError: name 'three' is not defined ({line})" in error and f"fix: mend {line}" in error
    )
    assert f"fix: mend {package / 'typo.py'}:2" in refused("her_methods.typo.Method")
    line = f"{package / 'lacks.py'}:2"
    error = refused("her_methods.lacks.Method")
    assert f"No module named 'no_such_library' ({line})" in error and f"fix: mend {line}" in error


def test_a_failed_start_leaves_what_it_found(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The verifier is the first thing of a run to start, when the run directory has been made and
    written to."""
    model = f"model.path={ROOT / 'assets/tiny-adder'}"

    def start(place: Path) -> None:
        assert "cannot import" in run(
            capsys, QUICKSTART, model, f"run.dir={place}", "reward.verifier=nowhere.verify"
        )

    start(tmp_path / "of/no/one")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    start(tmp_path / "mine")
    assert [p.name for p in tmp_path.rglob("*")] == ["mine"]
    (tmp_path / "mine/notes").mkdir()
    (tmp_path / "mine/notes/today").write_text("lr too high\n")
    start(tmp_path / "mine/runs")
    start(tmp_path / "mine")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["mine", "notes", "today"]


def test_a_run_that_is_there_is_not_touched(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text("model: {path: here}\n")
    message = run(
        capsys, QUICKSTART, f"model.path={ROOT / 'assets/tiny-adder'}", f"run.dir={tmp_path}"
    )
    assert "there is a run in this directory already" in message
    assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"]


def test_a_step_to_write_out_must_be_made(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = [
        QUICKSTART,
        f"model.path={ROOT / 'assets/tiny-adder'}",
        f"run.dir={tmp_path / 'run'}",
    ]
    assert "the remaining steps: 1 to 300" in run(capsys, *arguments, "--dump-step=301")
    assert not (tmp_path / "run").exists()


def test_reports_go_where_nothing_is_lost(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        Path(name).mkdir()
        Path(name, "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
        Path(name, "report.html").write_text(f"the report of {name}")

    def written(*arguments: str) -> str:
        assert main(["report", *arguments]) == 0
        return capsys.readouterr().out.strip()

    assert written("a", "b") == "comparison.html"
    monkeypatch.chdir("a")
    assert written(".", "../b") == "comparison.html"  # also from within a run
    monkeypatch.chdir("..")
    for name in ("a", "b"):
        assert Path(name, "report.html").read_text() == f"the report of {name}"
    Path("there").mkdir()
    assert written("a", "--out", "there") == "there/report.html"
    assert written("a", "b", "--out", "there") == "there/comparison.html"
    assert written("a", "b", "--out", "new/one.html") == "new/one.html"
    assert written("a") == "a/report.html"
    assert "</html>" in Path("a/report.html").read_text()

    assert main(["report", "a", "--out", "a/metrics.jsonl/report.html"]) == 2
    error = capsys.readouterr().err
    assert "the report cannot be written" in error and "fix: " in error
    assert sorted(p.name for p in Path("a").iterdir()) == [
        "comparison.html",
        "metrics.jsonl",
        "report.html",
    ]


def test_the_page_of_settings_says_what_a_run_refuses() -> None:
    (row,) = [
        line
        for line in (ROOT / "docs/configuration.md").read_text().splitlines()
        if "`sgd`" in line
    ]
    assert "refused in a run" in row


def test_code_of_the_user_s_that_calls_sys_exit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With code 0 the run would look finished to a shell, Slurm and --supervise."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "environment.py"
    file.write_text("import sys\n\nsys.exit(0)\n")
    model = f"model.path={ROOT / 'assets/tiny-adder'}"
    error = run(capsys, QUICKSTART, model, f"rollout.environment={file}:Environment")
    assert f"calls sys.exit(0) ({file}:3, in <module>)" in error
    assert not (tmp_path / "runs").exists()

    def trains(config: object, **rest: object) -> None:
        sys.exit(0)

    monkeypatch.setattr("megatron_stare.train.train", trains)
    error = run(capsys, QUICKSTART, model)
    assert re.search(rf"sys\.exit\(0\) was called \({re.escape(__file__)}:\d+, in trains\)", error)
