"""`megatron_stare.run`: the same run as the command line's, from a program and in an event loop."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.runs import INLINE, ROOT, SMALL, TIMEOUT_S, environment, metrics, train

import megatron_stare
from megatron_stare.config.load import load_config
from megatron_stare.environments.tools import read_tools
from megatron_stare.errors import ConfigError, UserError
from megatron_stare.process import interruption
from megatron_stare.registry import Extension, resolve

QUICKSTART = str(ROOT / "configs/quickstart.yaml")
SETTINGS: dict[str, Any] = {**SMALL, **INLINE, "run.dir": "run"}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def python(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A program of the user's, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", f"import megatron_stare\nsettings = {SETTINGS!r}\n{code}"],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def path_alone(run_dir: Path, columns: int | None) -> str:
    """Stands in for the summary of a run that trained nothing."""
    return str(run_dir)


@pytest.mark.wide
def test_the_run_is_that_of_the_command_line() -> None:
    """Tries a file and a dict, in an event loop and out of it, and a resume in the same process."""
    for name in ("typed", "called"):
        Path(name).mkdir()
    done = train(cwd=Path("typed"), **SETTINGS)
    assert done.returncode == 0, done.stderr
    code = f"""
import asyncio, pathlib, yaml
from megatron_stare.process.shipped import SHIPPED

async def cell():
    return megatron_stare.run({QUICKSTART!r}, settings)

def main():
    found = asyncio.run(cell())
    assert found == pathlib.Path("run"), found
    tree = yaml.safe_load(open({QUICKSTART!r}))
    tree["model"]["path"] = SHIPPED / tree["model"]["path"]
    megatron_stare.run(tree, {{**settings, "run.dir": pathlib.Path("of_a_dict")}})
    more = {{"run.steps": 3, "run.dir": "of_a_dict"}}
    megatron_stare.run(tree, {{**settings, **more}}, resume=True)

main()
"""
    done = python(code, Path("called"))
    assert done.returncode == 0, done.stderr
    ours, theirs, dict_s = (Path(name) for name in ("called/run", "typed/run", "called/of_a_dict"))
    assert (ours / "config.yaml").read_text() == (theirs / "config.yaml").read_text()
    assert metrics(ours) == metrics(theirs) != []
    first_two = metrics(dict_s)[:2]
    assert [row["step"] for row in metrics(dict_s)] == [1, 2, 3]
    assert first_two == metrics(theirs)
    written = yaml.safe_load((dict_s / "config.yaml").read_text())
    assert (written["run"]["dir"], written["run"]["steps"]) == ("of_a_dict", 3)


@pytest.mark.parametrize(
    ("config", "overrides", "message"),
    [
        (QUICKSTART, {"run.stepz": 1}, r"run\.stepz=1: run\.stepz: unknown name 'stepz'"),
        (QUICKSTART, {"run.steps": 0}, r"run\.steps=0: run\.steps: must be at least 1"),
        (QUICKSTART, {"run": 3}, r"run=3: run: "),
        (QUICKSTART, {"algorithm.name": "starr"}, "unknown name 'starr'"),
        ("none.yaml", {}, r"none\.yaml: cannot read the configuration"),
        ({"model": {"path": "m"}, "rum": {}}, {}, r"the dict: rum: unknown name 'rum'"),
        ({"run": {"steps": 1}}, {}, r"the dict: model: this key is required and missing"),
        ({"defaults": ["none.yaml"]}, {}, r"the dict: defaults: there is no layer 'none\.yaml'"),
        # checks of a run, not of its settings alone
        (QUICKSTART, {"model.path": "none"}, r"model\.path"),
        (QUICKSTART, {**INLINE, "reward.verifier": "none.verify"}, "cannot import 'none'"),
    ],
)
def test_what_cannot_run_is_raised(config: Any, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        megatron_stare.run(config, overrides)
    assert list(Path().iterdir()) == []


def test_it_is_raised_inside_an_event_loop_and_on_any_thread() -> None:
    found: list[BaseException] = []

    async def cell() -> None:
        try:
            megatron_stare.run(QUICKSTART, {"model.path": "none"})
        except UserError as error:
            found.append(error)

    asyncio.run(cell())
    thread = threading.Thread(target=asyncio.run, args=(cell(),))
    thread.start()
    thread.join()
    assert len(found) == 2 and all("none/config.json" in str(each) for each in found)


def test_no_event_loop_runs_where_the_run_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own loops could not be run there: asyncio refuses a second one in a thread."""
    seen: list[bool] = []

    def trains(config: Any, **rest: Any) -> Path:
        asyncio.run(asyncio.sleep(0))
        seen.append(interruption._current.drives)
        return Path("run")

    monkeypatch.setattr("megatron_stare.train.train", trains)
    monkeypatch.setattr("megatron_stare.observability.metrics.figures.closing", path_alone)

    async def cell() -> Path:
        return megatron_stare.run(QUICKSTART)

    assert asyncio.run(cell()) == Path("run")
    thread = threading.Thread(target=asyncio.run, args=(cell(),))
    thread.start()
    thread.join()
    assert seen == [True, False]  # on the main thread signals are taken, on others they are not


def test_one_run_at_a_time_and_none_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def trains(config: Any, **rest: Any) -> Path:
        with pytest.raises(UserError, match="another run is under way in this process"):
            megatron_stare.run(QUICKSTART)
        raise ConfigError("no")

    monkeypatch.setattr("megatron_stare.train.train", trains)
    before = signal.getsignal(signal.SIGINT)
    for _ in range(2):
        with pytest.raises(ConfigError, match="no"):
            megatron_stare.run(QUICKSTART)
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_is_raised_where_the_run_was_called(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from_step = None

    def trains(config: Any, **rest: Any) -> Path:
        interruption.stopped_at(interruption.Standing(Path("runs/a"), 7, 9, 5, from_step))
        signal.raise_signal(signal.SIGINT)
        while True:
            interruption.pause(1)

    monkeypatch.setattr("megatron_stare.train.train", trains)
    with pytest.raises(KeyboardInterrupt):
        megatron_stare.run(QUICKSTART)
    said = capsys.readouterr().err
    assert "after step 7 of 9; the newest checkpoint: that of step 5" in said
    assert "resume=True" in said and "'run.dir': 'runs/a'" in said
    from_step = 3
    with pytest.raises(KeyboardInterrupt):
        megatron_stare.run(QUICKSTART)
    assert "continue with from_step=3, **" in capsys.readouterr().err


def test_a_file_that_was_edited_between_two_runs_is_read_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file, seen = Path("mine.py"), []

    def trains(config: Any, **rest: Any) -> Path:
        found = resolve("mine.py:lookup", {}, "rollout.environment")
        assert resolve("mine.py:lookup", {}, "rollout.environment") is found  # one version a run
        (tool,) = read_tools([Extension("mine.py:lookup")])
        seen.append((found(), tool.function()))
        return Path("run")

    monkeypatch.setattr("megatron_stare.train.train", trains)
    monkeypatch.setattr("megatron_stare.observability.metrics.figures.closing", path_alone)
    for answer in (1, 250):
        file.write_text(f'def lookup() -> int:\n    """Looks it up."""\n    return {answer}\n')
        megatron_stare.run(QUICKSTART)
    assert seen == [(1, 1), (250, 250)]


def test_sys_exit_in_a_run_does_not_end_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def trains(config: Any, **rest: Any) -> Path:
        sys.exit(0)

    monkeypatch.setattr("megatron_stare.train.train", trains)
    with pytest.raises(UserError, match=r"sys\.exit\(0\) was called"):
        megatron_stare.run(QUICKSTART)


def test_one_interrupt_leaves_the_program_and_its_children_alive(tmp_path: Path) -> None:
    """Interrupts code that cannot be interrupted for longer than a command would be given."""
    code = f"""
import os, signal, subprocess, sys, time, types
from megatron_stare.process import interruption
interruption.UNHEARD_S = 0.1
signal.signal(signal.SIGINT, signal.default_int_handler)
child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
def trains(config, **rest):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)
    interruption.poll()
sys.modules["megatron_stare.train"] = types.SimpleNamespace(train=trains)
try:
    megatron_stare.run({QUICKSTART!r})
except KeyboardInterrupt:
    print("interrupted; the child's code:", child.poll())
finally:
    child.kill()
"""
    done = python(code, tmp_path)
    assert done.stdout.endswith("interrupted; the child's code: None\n"), done.stderr
    assert done.stderr.count("waiting for code that cannot be interrupted") == 1


def test_values_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that looks like a number stays text, and paths become text."""
    seen: list[Any] = []

    def trains(config: Any, **rest: Any) -> Path:
        seen.append((config, rest))
        return Path("run")

    monkeypatch.setattr("megatron_stare.train.train", trains)
    monkeypatch.setattr("megatron_stare.observability.metrics.figures.closing", path_alone)
    sections = {"defaults": [QUICKSTART], "run": {"name": "1e3"}, "model": {"path": Path("m")}}
    megatron_stare.run(sections, {"data.eval_path": Path("e")}, from_step=4, **{"run.steps": 5})
    ((config, rest),) = seen
    assert (config.run.name, config.run.steps, config.data.eval_path) == ("1e3", 5, "e")
    assert config.model.path == "m" and config.batch == load_config(QUICKSTART).batch
    assert rest == {"resume": True, "from_step": 4, "dump_step": None, "limit": None}
    assert sections["defaults"] == [QUICKSTART]  # what was given is not changed
    megatron_stare.run(QUICKSTART, {"run.name": "1e3", "algorithm": "grpo"})
    config, rest = seen[1]
    assert (config.run.name, config.algorithm.name, rest["resume"]) == ("1e3", "grpo", False)


def test_the_package_has_no_other_lazy_names() -> None:
    assert megatron_stare.UserError is UserError
    with pytest.raises(AttributeError, match="has no attribute 'runn'"):
        _ = megatron_stare.runn


def test_the_environment_is_the_same_after_a_run() -> None:
    """So are the constants that huggingface_hub reads from it, whether the run ends or fails."""
    code = f"""
import importlib, os, sys, types
from pathlib import Path

os.environ.pop("HF_HUB_OFFLINE", None)
os.environ["CHANGED"] = "before"
failing = []

def trains(config, **rest):
    import huggingface_hub.constants
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    os.environ.update(ADDED="1", CHANGED="after")
    if failing:
        raise LookupError
    assert huggingface_hub.constants.HF_HUB_OFFLINE
    return Path("run")

import megatron_stare.observability.metrics.figures as figures
figures.closing = lambda run_dir, columns: str(run_dir)
sys.modules["megatron_stare.train"] = types.SimpleNamespace(train=trains)
assert "huggingface_hub.constants" not in sys.modules
before = dict(os.environ)
megatron_stare.run({QUICKSTART!r}, settings)
assert dict(os.environ) == before
assert not sys.modules["huggingface_hub.constants"].HF_HUB_OFFLINE
failing.append(True)
try:
    megatron_stare.run({QUICKSTART!r}, settings)
except LookupError:
    assert dict(os.environ) == before
    print("kept")
"""
    done = python(code, Path())
    assert done.stdout == "run\nkept\n", done.stderr
