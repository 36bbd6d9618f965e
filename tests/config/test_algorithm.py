"""The `algorithm` section: typed as the others are, with their errors and suggestions, a user's own
method included."""

from __future__ import annotations

import dataclasses
import math
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.runs import ROOT

from megatron_stare.algorithms.stare import Stare
from megatron_stare.config.load import build_method, dump_yaml, load_config
from megatron_stare.driver.resuming import refuse_changes
from megatron_stare.errors import ConfigError

OLD = Path(__file__).parent / "config_of_bfc8822.yaml"
OWN = """
from dataclasses import dataclass
from megatron_stare.algorithms.grpo import Grpo

@dataclass(frozen=True, kw_only=True)
class Bounds:
    lower: float = 0.0

@dataclass(frozen=True, kw_only=True)
class Mine(Grpo):
    strength: int = 1
    bounds: Bounds | None = None

@dataclass(frozen=True, kw_only=True)
class Unreadable(Grpo):
    strength: "NoSuchType" = 1
"""


def refused(tmp_path: Path, section: str, *overrides: str) -> str:
    """The error of a file with this `algorithm` section."""
    file = tmp_path / "mine.yaml"
    file.write_text(f"model: {{path: here}}\nalgorithm: {section}\n")
    with pytest.raises(ConfigError) as error:
        load_config(file, overrides)
    return str(error.value).removeprefix(f"{tmp_path}/")


@pytest.mark.parametrize(
    ("section", "overrides", "error"),
    [
        ("stair", (), "mine.yaml: algorithm.name: unknown name 'stair'\n  fix: did you mean 'stare'?"),
        ("grpo", ("algorithm=stair",), "algorithm=stair: algorithm.name: unknown name 'stair'\n"),
        ("3", (), "mine.yaml: algorithm: this is neither a method's name nor its settings"),
        ("{amplify: 2}", (), "mine.yaml: algorithm.name: the method's name is missing\n  fix: one of cispo, clip_b"),
        ("{name: stare, amplfy: 2}", (), "mine.yaml: algorithm.amplfy: unknown name 'amplfy'\n  fix: did you mean 'am"),
        ("stare", ("algorithm.amplfy=2",), "algorithm.amplfy=2: algorithm.amplfy: unknown name"),
        ("{name: stare, share: much}", ("run.seed=2",), "mine.yaml: algorithm.share: must be a number"),
        ("{name: stare, share: 0.1}", ("algorithm.share=much",), "algorithm.share=much: algorithm.share: must be a"),
        ("{name: stare, variant: O9}", (), "mine.yaml: algorithm.variant: must be 'O1', 'O2', 'O3', "),
        ("{name: stare, share: 2}", (), "mine.yaml: algorithm: share must lie in [0, 1]"),
        (
            "stare",
            ("algorithm.reference_kl.coeff=1",),
            "algorithm.reference_kl.coeff=1: algorithm.reference_kl.coeff: unknown name 'coeff'\n  fix: did you mean",
        ),
        ("stare", ("algorithm.reference_kl={estimator: k9}",), "algorithm.reference_kl={estimator: k9}: algorithm.ref"),
        ("stare", ("algorithm.nothing.here=1",), "algorithm.nothing.here=1: algorithm.nothing: unknown name"),
        ("own.Mine", ("algorithm.strenght=2",), "algorithm.strenght=2: algorithm.strenght: unknown name 'strenght'\n"),
        ("own.Mine", ("algorithm.strength=a",), "algorithm.strength=a: algorithm.strength: must be a"),
        # a dataclass that pydantic was not told to be strict about
        ("own.Mine", ("algorithm.bounds.lover=2",), "algorithm.bounds.lover=2: algorithm.bounds.lover: unknown name"),
        ("own.mine", (), "mine.yaml: algorithm.name: unknown name 'mine'\n  fix: did you mean 'Mine'?"),
        ("owm.Mine", (), "mine.yaml: algorithm.name: cannot import 'owm'"),
        ("own.Bounds", (), "mine.yaml: algorithm.name: 'own.Bounds' is not a subclass of Method"),
        ("own.Unreadable", (), "mine.yaml: algorithm.name: a setting of 'own.Unreadable' has a type that cannot"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_as_of_any_section(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    section: str,
    overrides: tuple[str, ...],
    error: str,
) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code/own.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path / "code")
    monkeypatch.delitem(sys.modules, "own", raising=False)
    assert refused(tmp_path, section, *overrides).startswith(error)


def test_a_misspelt_key_comes_before_a_wrong_value_of_another_section(tmp_path: Path) -> None:
    """But for the method's own keys, which are known when torch is imported."""
    assert "run.steps: must be" in refused(tmp_path, "{name: stare, amplfy: 2}", "run.steps=-1")
    assert "did you mean 'amplify'" in refused(tmp_path, "{name: stare, amplfy: 2, share: 2}")
    assert "did you mean 'steps'" in refused(tmp_path, "{name: stare, share: 2}", "run.step=1")


def test_a_section_alone_is_refused_as_a_file_is() -> None:
    with pytest.raises(
        ConfigError,
        match=r"algorithm: amplfy: unknown name 'amplfy'\n  fix: did you mean 'amplify'",
    ):
        build_method({"name": "stare", "amplfy": 2})


def test_every_setting_is_spelled_out_and_typed_once() -> None:
    config = load_config(ROOT / "configs/quickstart.yaml", ["algorithm.reference_kl={coef: 1}"])
    section = yaml.safe_load(dump_yaml(config))["algorithm"]
    assert list(section) == ["name", *(field.name for field in dataclasses.fields(Stare))]
    assert section["reference_kl"] == {"coef": 1.0, "estimator": "k3"}
    assert pickle.loads(pickle.dumps(config)) == config  # as it travels to the workers
    assert load_config(ROOT / "configs/quickstart.yaml", ["algorithm=grpo"]) != config


def test_a_config_of_an_earlier_release_goes_on() -> None:
    old = load_config(OLD)
    written, read = (
        yaml.safe_load(OLD.read_text())["algorithm"],
        yaml.safe_load(dump_yaml(old))["algorithm"],
    )
    # settings that came later, as they were
    since = {"rare_below": None, "common": "complement", "gate": "batch", "equal_groups": "keep"}
    assert {name: read.pop(name) for name in since} == since
    assert list(read.items()) == list(written.items())
    shipped = ROOT / "configs/quickstart.yaml"
    path, kl = f"model.path={old.model.path}", "algorithm.reference_kl={coef: 0.01}"
    refuse_changes(old, load_config(shipped, [path, kl]))
    with pytest.raises(
        ConfigError, match=r"algorithm\.amplify: the run was started with 2\.0, not 3\.0"
    ):
        refuse_changes(old, load_config(shipped, [path, kl, "algorithm.amplify=3"]))
    with pytest.raises(ConfigError, match=r"algorithm\.reference_kl"):
        refuse_changes(old, load_config(shipped, [path]))


def test_the_command_line_comes_up_without_torch() -> None:
    """Reading a section imports its method, and that torch; asking for help does not."""
    looked = "import sys, megatron_stare.cli; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", looked]).returncode == 0


@pytest.mark.parametrize("target", [0, -0.1, math.nan])
def test_a_target_that_no_entropy_is_below_is_refused(target: float) -> None:
    with pytest.raises(ConfigError, match="entropy_target must be above 0 nats"):
        build_method({"name": "stare", "entropy_target": target})
    assert build_method({"name": "stare", "entropy_target": None}).initial_state()["gate"] == 1.0
