"""Extensions that a configuration names have settings of their own, typed by whoever reads them."""

from __future__ import annotations

import functools
import json
import pickle
from pathlib import Path
from typing import Annotated, Any

import pytest
import yaml
from pydantic import Field
from support.runs import ROOT, metrics, train

from megatron_stare.cli import main
from megatron_stare.config.load import dump_yaml, load_config, load_recorded
from megatron_stare.errors import ConfigError
from megatron_stare.registry import Extension, settings_of
from megatron_stare.rewards.verifier import make_verifier
from megatron_stare.rewards.verifier_pool import VerifierPool

QUICKSTART = str(ROOT / "configs/quickstart.yaml")
MODEL = f"model.path={ROOT / 'assets/tiny-adder'}"
OWN = "support.own_settings"
VERIFY = f"{OWN}.verify"


def test_it_is_read_as_it_is_written() -> None:
    for written in ("math", {"name": "a.b", "x": [1, {"y": None}]}):
        extension = Extension.read(written)
        assert extension.written() == written
        for again in (
            Extension.read(extension),
            Extension.read(extension.written()),
            Extension.parse(str(extension)),
            pickle.loads(pickle.dumps(extension)),
        ):
            assert again == extension and hash(again) == hash(extension)
    assert Extension.read({"name": "math"}) == Extension("math") != Extension("math", {"x": 1})
    for wrong in (None, 3, ["math"], {"x": 1}, {"name": 3}):
        with pytest.raises(ValueError, match="must be a name, or"):
            Extension.read(wrong)


def reads(
    a: int, *, steps: Annotated[int, Field(ge=1)], rate: float = 0.5, words: list[str] | None = None
) -> None:
    """Something with settings."""


class Reads:
    def __init__(self, a: int = 0, *, path: Path = Path("."), given: int = 1) -> None: ...


class Calls:
    def __call__(self, *, rate: float = 1.0) -> None: ...


def test_settings_are_of_the_types_that_the_reader_says() -> None:
    assert settings_of(Extension("r", {"steps": 2, "rate": 1, "words": ["a"]}), reads, "w") == {
        "steps": 2,
        "rate": 1.0,
        "words": ["a"],
    }
    assert settings_of(Extension("r", {"path": "a/b"}), Reads, "w", ("given",)) == {
        "path": Path("a/b")
    }
    assert settings_of(Extension("r", {"rate": 2}), Calls(), "w") == {"rate": 2.0}
    assert settings_of(Extension("r"), Reads, "w") == settings_of(Extension("r"), dict, "w") == {}


def unreadable(*, x: NoSuchType = 1) -> None:  # type: ignore[name-defined]  # noqa: F821
    """A setting whose type is not there."""


@pytest.mark.parametrize(
    ("reader", "settings", "error"),
    [
        (
            reads,
            {"step": 2, "steps": 2},
            "w.step: unknown name 'step'\n  fix: did you mean 'steps'?",
        ),
        (reads, {"a": 2}, "w.a: unknown name 'a'\n  fix: known here: rate, steps, words"),
        (reads, {}, "w.steps: 'r' needs this setting, and it is missing"),
        (reads, {"steps": 0}, "w.steps: must be at least 1 (got 0)"),
        (reads, {"steps": "two"}, "w.steps: must be a whole number (got 'two')"),
        (reads, {"steps": 1, "words": ["a", 3]}, "w.words.1: must be text (got 3)"),
        (Reads, {"given": 2}, "w.given: unknown name 'given'\n  fix: known here: path"),
        (len, {"x": 1}, "w.x: 'r' has no settings of its own\n  fix: leave it out"),
        (
            unreadable,
            {"x": 1},
            "w.x: the type of this setting cannot be read: name 'NoSuchType' is not defined",
        ),
    ],
)
def test_a_setting_that_cannot_be_is_refused(
    reader: Any, settings: dict[str, Any], error: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        settings_of(Extension("r", settings), reader, "w", ("given",))
    assert str(caught.value) == error


@pytest.mark.wide
def test_a_verifier_has_its_settings_here_and_in_its_process() -> None:
    own = Extension(VERIFY, {"always": 0.5, "parity": False})
    assert make_verifier(own)("abc", "") == 0.5
    assert make_verifier(VERIFY)("abc", "") == -1.0
    assert make_verifier(Extension(f"{OWN}.needs", {"reward": 0.25}))("", "") == 0.25
    with VerifierPool(own, 1, 10.0) as pool:
        assert [verdict.reward for verdict in pool.verify([("abc", ""), ("ab", "")])] == [0.5, 0.5]
    with pytest.raises(
        ConfigError,
        match=r"reward\.verifier\.alwys: unknown name 'alwys'\n  fix: did you mean 'always'",
    ):
        VerifierPool(Extension(VERIFY, {"alwys": 1}), 1, 10.0)
    with pytest.raises(
        ConfigError, match=r"reward\.verifier\.always: settings belong to one verifier"
    ):
        make_verifier(Extension(f"math + {VERIFY}", {"always": 1}))
    with pytest.raises(ConfigError, match="'http://a' has no settings of its own"):
        make_verifier(Extension("http://a", {"retries": 1}))


OVERRIDES = {
    "reward.verifier": ({"name": VERIFY, "always": 0.75, "parity": False}, "alway", "always"),
    "rollout.environment": ({"name": f"{OWN}.Brief", "tokens": 2}, "token", "tokens"),
    "data.source": ({"name": f"{OWN}.Few", "problems": 8}, "problem", "problems"),
    "rollout.engine": ({"name": f"{OWN}.Counting", "file": "engine.txt"}, "fil", "file"),
}


def flow(value: Any) -> str:
    return json.dumps(value)


@pytest.mark.wide
@pytest.mark.distributed
def test_a_run_of_nothing_but_extensions_with_settings(tmp_path: Path) -> None:
    sink = {"name": f"{OWN}.Rewards", "file": "mine.jsonl", "rounded": 1}
    task = {
        "name": "brief",
        "prompts": 3,
        "environment": {"name": f"{OWN}.Brief", "tokens": 1},
        "verifier": VERIFY,
    }
    small = {
        "runtime.runner": "inline",
        "parallel.tensor": 1,
        "run.steps": 2,
        "eval.prompts": 0,
        "batch.prompts": 4,
    }
    done = train(
        *(f"{key}={flow(own)}" for key, (own, _, _) in OVERRIDES.items()),
        f"observability.sinks=[jsonl,{flow(sink)}]",
        f"eval.tasks=[{flow(task)}]",
        MODEL,
        "run.dir=run",
        cwd=tmp_path,
        **small,
    )
    assert done.returncode == 0, done.stderr
    rows = metrics(tmp_path / "run")
    assert [row["reward/mean"] for row in rows] == [0.75, 0.75]
    assert all(row["response/length_mean"] == 2 for row in rows)
    assert (tmp_path / "run/mine.jsonl").read_text() == "0.8\n0.8\n"
    assert (tmp_path / "engine.txt").read_text() == "float32"
    config = load_recorded(tmp_path / "run/config.yaml")
    assert (config.data.source.settings, config.observability.sinks[1].written()) == (
        {"problems": 8},
        sink,
    )
    assert config.observability.sinks[0].written() == "jsonl"
    record, *_ = [
        json.loads(line) for line in (tmp_path / "run/eval.jsonl").read_text().splitlines()
    ]
    assert record["task"] == "brief"


@pytest.mark.wide
@pytest.mark.parametrize("key", [*OVERRIDES])
def test_a_wrong_setting_is_refused_by_name_before_a_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.chdir(tmp_path)
    own, wrong, right = OVERRIDES[key]
    given = [MODEL, "runtime.runner=inline", "parallel.tensor=1", f"{key}={flow(own)}"]
    assert main(["train", QUICKSTART, *given, f"{key}.{wrong}=3", "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert said == f"error: {key}.{wrong}: unknown name {wrong!r}\n  fix: did you mean {right!r}?\n"
    assert main(["train", QUICKSTART, *given, f"{key}.{right}=[]", "--dry-run"]) == 2
    assert f"error: {key}.{right}: must be" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "error"),
    [
        (
            f"observability.sinks=[jsonl,{{name: {OWN}.Rewards, file: a, round: 2}}]",
            (
                f"observability.sinks[{OWN}.Rewards].round: unknown name 'round'\n  fix: did you"
                " mean 'rounded'?"
            ),
        ),
        (
            f"observability.sinks=[jsonl,{OWN}.Rewards]",
            (
                f"observability.sinks[{OWN}.Rewards].file: '{OWN}.Rewards' needs this setting, and"
                " it is missing"
            ),
        ),
        (
            "observability.sinks=[{name: jsonl, every: 2}]",
            (
                "observability.sinks[jsonl].every: 'jsonl' has no settings of its own\n  fix: leave"
                " it out"
            ),
        ),
        (
            "observability.sinks=[jsonl, {name: webhook, atempts: 2}]",
            (
                "observability.sinks[webhook].atempts: unknown name 'atempts'\n  fix: did you mean"
                " 'attempts'?"
            ),
        ),
        (
            f"eval.tasks=[{{name: a, prompts: 1, environment: {{name: {OWN}.Brief, tokenz: 2}}}}]",
            (
                "eval.tasks[a].environment.tokenz: unknown name 'tokenz'\n  fix: did you mean"
                " 'tokens'?"
            ),
        ),
        (
            f"eval.tasks=[{{name: a, prompts: 1, verifier: {{name: {VERIFY}, always: 2}}}}]",
            "eval.tasks[a].verifier.always: must be at most 1 (got 2)",
        ),
    ],
)
def test_a_wrong_setting_of_a_sink_or_of_a_task(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    override: str,
    error: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [MODEL, "runtime.runner=inline", "parallel.tensor=1", override]
    assert main(["train", QUICKSTART, *given, "--dry-run"]) == 2
    assert capsys.readouterr().err == f"error: {error}\n"


def test_settings_go_with_their_name_from_layer_to_layer(tmp_path: Path) -> None:
    def config(*layers: Any, overrides: tuple[str, ...] = ()) -> Extension:
        names = [f"{number}.yaml" for number in range(len(layers))]
        for number, verifier in enumerate(layers):
            tree = {
                "model": {"path": "m"},
                "reward": {"verifier": verifier},
                "defaults": names[:number][-1:],
            }
            (tmp_path / names[number]).write_text(yaml.safe_dump(tree))
        return load_config(tmp_path / names[-1], overrides).reward.verifier

    a = {"name": "a.v", "x": 1, "y": 2}
    assert config(a, {"x": 3}) == Extension("a.v", {"x": 3, "y": 2})
    assert config("a.v", {"x": 3}) == Extension("a.v", {"x": 3})
    # as with methods: the same name keeps them
    assert config(a, "a.v") == Extension("a.v", {"x": 1, "y": 2})
    assert config(a, "b.v") == Extension("b.v")
    assert config(a, {"name": "b.v", "z": 1}) == Extension("b.v", {"z": 1})
    assert config(a, overrides=("reward.verifier.x=5",)) == Extension("a.v", {"x": 5, "y": 2})
    assert config("a.v", overrides=("reward.verifier.x=5",)) == Extension("a.v", {"x": 5})
    assert config(a, overrides=("reward.verifier=b.v",)) == Extension("b.v")
    assert config(a, overrides=("reward.verifier.name=b.v", "reward.verifier.x=5")) == Extension(
        "b.v", {"x": 5}
    )
    again = load_config(tmp_path / "0.yaml")
    (tmp_path / "config.yaml").write_text(dump_yaml(again))
    assert load_recorded(tmp_path / "config.yaml") == again


def test_a_section_that_lacks_the_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({"model": {"path": "m"}, "rollout": {"engine": {"speed": 1}}}))
    with pytest.raises(ConfigError, match=r"rollout\.engine: must be a name, or \{name: \.\.\.\}"):
        load_config(file)


def test_partial_functions_keep_what_their_module_says() -> None:
    verify = make_verifier(Extension(VERIFY, {"always": 1}))
    assert isinstance(verify, functools.partial) and verify.func.__module__ == OWN
