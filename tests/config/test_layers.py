"""A configuration laid over others with `defaults`."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from support.runs import ROOT

from megatron_stare.algorithms.grpo import Grpo
from megatron_stare.algorithms.kl import ReferenceKl
from megatron_stare.algorithms.method import Method
from megatron_stare.algorithms.stare import Stare
from megatron_stare.cli import main
from megatron_stare.config.load import load_config
from megatron_stare.errors import ConfigError


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files are written below a folder that is not the current one, so that what is relative to
    which is seen."""
    (tmp_path / "current").mkdir()
    monkeypatch.chdir(tmp_path / "current")
    (tmp_path / "files").mkdir()
    return tmp_path / "files"


def write(file: Path, text: str) -> Path:
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    return file


def refused(file: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(file, overrides)
    return str(error.value).replace(f"{file.parent}/", "")


def test_later_layers_and_the_file_itself_win_and_sections_merge(elsewhere: Path) -> None:
    write(
        elsewhere / "low.yaml",
        "model: {path: low, dtype: bfloat16}\noptimizer: {lr: 1.0, eps: 1.0, beta1: 0.1}\n",
    )
    write(elsewhere / "high.yaml", "optimizer: {eps: 2.0, beta1: 0.2}\nsglang: {urls: [a, b]}\n")
    top = write(
        elsewhere / "top.yaml",
        "defaults: [low.yaml, high.yaml]\noptimizer: {beta1: 0.3}\nsglang: {urls: [c]}\nrollout:"
        " {engine: sglang}\n",
    )
    config = load_config(top, ["optimizer.beta2=0.4"])
    assert (config.model.path, config.model.dtype) == ("low", "bfloat16")
    optimizer = config.optimizer
    assert (optimizer.lr, optimizer.eps, optimizer.beta1, optimizer.beta2) == (1.0, 2.0, 0.3, 0.4)
    assert config.sglang.urls == ["c"]  # a list is a value


def test_layers_of_layers_are_found_from_the_file_that_names_them(elsewhere: Path) -> None:
    write(elsewhere / "parts/model.yaml", "defaults: [sizes.yaml]\nmodel: {path: parts/model}\n")
    write(elsewhere / "parts/sizes.yaml", "batch: {prompts: 7}\nmodel: {path: sizes}\n")
    write(elsewhere / "sizes.yaml", "batch: {prompts: 9}\n")  # beside the wrong file
    config = load_config(write(elsewhere / "top.yaml", "defaults: [parts/model.yaml]\n"))
    # a user's path is one of the current folder
    assert (config.batch.prompts, config.model.path) == (7, "parts/model")


def test_what_two_layers_share_does_not_undo_what_one_of_them_changes(elsewhere: Path) -> None:
    write(elsewhere / "base.yaml", "model: {path: here}\nbatch: {prompts: 1, epochs: 1}\n")
    write(elsewhere / "a.yaml", "defaults: [base.yaml]\nbatch: {prompts: 2}\n")
    write(elsewhere / "b.yaml", "defaults: [base.yaml]\nbatch: {epochs: 2}\n")
    batch = load_config(write(elsewhere / "top.yaml", "defaults: [a.yaml, b.yaml]\n")).batch
    assert (batch.prompts, batch.epochs) == (2, 2)


@pytest.mark.parametrize(
    ("section", "method"),
    [
        ("grpo", Grpo()),
        ("{name: grpo}", Grpo()),
        ("{name: grpo, clip_low: 0.1}", Grpo(clip_low=0.1)),
        ("stare", Stare(share=0.2, reference_kl=ReferenceKl(coef=0.1, estimator="k2"))),
        ("{share: 0.3}", Stare(share=0.3, reference_kl=ReferenceKl(coef=0.1, estimator="k2"))),
        (
            "{name: stare, reference_kl: {coef: 0.5}}",
            Stare(share=0.2, reference_kl=ReferenceKl(coef=0.5, estimator="k2")),
        ),
        ("{reference_kl: null}", Stare(share=0.2)),
    ],
)
def test_naming_another_method_lets_go_of_the_settings_beneath(
    elsewhere: Path, section: str, method: Method
) -> None:
    stare = "algorithm: {name: stare, share: 0.2, reference_kl: {coef: 0.1, estimator: k2}}\n"
    write(elsewhere / "stare.yaml", "model: {path: here}\n" + stare)
    top = write(elsewhere / "top.yaml", f"defaults: [stare.yaml]\nalgorithm: {section}\n")
    assert load_config(top).algorithm.method == method
    back = write(elsewhere / "back.yaml", "defaults: [top.yaml]\nalgorithm: stare\n")
    if isinstance(method, Grpo) and not isinstance(method, Stare):
        # what was let go of does not come back
        assert load_config(back).algorithm.method == Stare()


def test_settings_laid_over_a_method_named_short(elsewhere: Path) -> None:
    write(elsewhere / "short.yaml", "model: {path: here}\nalgorithm: stare\n")
    top = write(elsewhere / "top.yaml", "defaults: [short.yaml]\nalgorithm: {share: 0.3}\n")
    assert load_config(top).algorithm.method == Stare(share=0.3)


def test_a_config_that_ships_is_a_layer_from_anywhere(elsewhere: Path) -> None:
    top = write(
        elsewhere / "top.yaml",
        "defaults: [configs/quickstart.yaml, algorithm/grpo.yaml]\nrun: {name: mine}\n",
    )
    config = load_config(top)
    assert config.model.path == str(ROOT / "assets/tiny-adder")
    # not the quickstart's stare
    assert config.algorithm.method == Grpo(reference_kl=ReferenceKl(coef=0.04))
    assert (config.run.name, config.run.steps, config.batch.samples_per_prompt) == ("mine", 300, 64)
    own = "algorithm: {name: grpo, clip_low: 0.1}\nmodel: {path: assets/tiny-adder}\n"
    write(elsewhere / "algorithm/grpo.yaml", own)
    # of the user: a file beside the one that names it, whose paths stay as they are
    mine = load_config(top)
    assert mine.algorithm.method == Grpo(clip_low=0.1)
    assert mine.model.path == "assets/tiny-adder"


@pytest.mark.parametrize(
    "method", sorted((ROOT / "configs/algorithm").glob("*.yaml")), ids=lambda path: path.stem
)
def test_every_shipped_method_is_a_layer(elsewhere: Path, method: Path) -> None:
    top = write(elsewhere / "top.yaml", f"defaults: [quickstart.yaml, algorithm/{method.name}]\n")
    wanted, config = yaml.safe_load(method.read_text()), load_config(top)
    for section, settings in wanted.items():
        found = config.model_dump()[section]
        assert {key: _part(found[key], value) for key, value in settings.items()} == settings


def _part(found, wanted):
    return {key: found[key] for key in wanted} if isinstance(wanted, dict) else found


@pytest.mark.parametrize(
    ("files", "error"),
    [
        (
            {
                "top": "defaults: [a.yaml]\n",
                "a": "defaults: [b.yaml]\n",
                "b": "defaults: [a.yaml]\n",
            },
            "top.yaml > a.yaml > b.yaml > a.yaml: the configuration names itself as a layer",
        ),
        (
            {"top": "defaults: [top.yaml]\n"},
            "top.yaml > top.yaml: the configuration names itself as a layer",
        ),
        (
            {"top": "defaults: [a.yaml]\n", "a": "defaults: [nowhere.yaml]\n"},
            "top.yaml > a.yaml: defaults: there is no layer 'nowhere.yaml'",
        ),
        ({"top": "defaults: [parts]\n"}, "top.yaml: defaults: there is no layer 'parts'"),
        (
            {"top": "defaults: [a.yaml]\n", "a": "- 1\n"},
            "top.yaml > a.yaml: the configuration is not a mapping",
        ),
        (
            {"top": "defaults: [a.yaml]\n", "a": ""},
            "top.yaml > a.yaml: the configuration is not a mapping",
        ),
        (
            {"top": "defaults: [a.yaml]\n", "a": "run: [\n"},
            "top.yaml > a.yaml: not valid YAML line 2",
        ),
        (
            {"top": "run: {steps: 3}\nmodel: {path: here}\nrun: {seed: 1}\n"},
            "top.yaml: not valid YAML line 3: 'run' stands twice in one section",
        ),
        (
            {"top": "defaults: [a.yaml]\n", "a": "run:\n  seed: 1\n  seed: 1\n"},
            "top.yaml > a.yaml: not valid YAML line 3: 'seed' stands twice in one section",
        ),
        (
            {"top": "defaults: a.yaml\n"},
            "top.yaml: defaults: the layers are not a list of files (got 'a.yaml')",
        ),
        ({"top": "defaults: [{a: b}]\n"}, "top.yaml: defaults: the layers are not a list of files"),
        (
            {"top": "defalts: [a.yaml]\nmodel: {path: here}\n"},
            "top.yaml: defalts: unknown name 'defalts'\n",
        ),
    ],
)
def test_layers_that_cannot_be(elsewhere: Path, files: dict[str, str], error: str) -> None:
    (elsewhere / "parts").mkdir()
    for name, text in files.items():
        write(elsewhere / f"{name}.yaml", text)
    message = refused(elsewhere / "top.yaml")
    assert message.startswith(error)
    assert "did you mean 'defaults'" in message or "defalts" not in error


@pytest.mark.parametrize(
    ("low", "high", "top", "overrides", "blamed"),
    [
        ("run: {steps: -1}", "run: {seed: 2}", "run: {name: a}", (), "low.yaml: run.steps: "),
        ("run: {steps: -1}", "run: {steps: -2}", "run: {name: a}", (), "high.yaml: run.steps: "),
        (
            "run: {steps: 1}",
            "run: {stps: 2}",
            "run: {steps: 3}",
            (),
            "high.yaml: run.stps: unknown name",
        ),
        (
            "run: {steps: 1}",
            "run: 3",
            "batch: {}",
            (),
            "high.yaml: run: must be a section of settings",
        ),
        (
            "run: {steps: -1}",
            "run: {seed: 2}",
            "run: {name: a}",
            ("run.steps=-3",),
            "run.steps=-3: run.steps: ",
        ),
        (
            "algorithm: stair",
            "algorithm: {share: 0.1}",
            "run: {name: a}",
            (),
            "low.yaml: algorithm.name: unknown name",
        ),
        # what a method says of its settings together is blamed on the layer that made it so
        (
            "algorithm: {name: stare, share: 2}",
            "algorithm: {amplify: 2}",
            "run: {}",
            (),
            "low.yaml: algorithm: share",
        ),
        (
            "algorithm: stare",
            "algorithm: {share: 2}",
            "algorithm: {amplify: 2}",
            (),
            "high.yaml: algorithm: share",
        ),
        (
            "algorithm: stare",
            "algorithm: {share: 2}",
            "run: {}",
            ("algorithm.amplify=2",),
            "high.yaml: algorithm: share",
        ),
        (
            "run: {seed: 2}",
            "run: {steps: 2}",
            "model: {dtype: float32}",
            (),
            "top.yaml: model.path: this key is requ",
        ),
    ],
)
def test_the_layer_that_is_wrong_is_blamed(
    elsewhere: Path, low: str, high: str, top: str, overrides: tuple[str, ...], blamed: str
) -> None:
    model = "" if "model" in top else "model: {path: here}\n"
    write(elsewhere / "low.yaml", f"{low}\n{model}")
    write(elsewhere / "high.yaml", high)
    file = write(elsewhere / "top.yaml", f"defaults: [low.yaml, high.yaml]\n{top}\n")
    assert refused(file, *overrides).startswith(blamed)


def test_layers_are_no_setting_of_the_command_line(elsewhere: Path) -> None:
    file = write(elsewhere / "top.yaml", "model: {path: here}\n")
    assert refused(file, "defaults=[a.yaml]").startswith(
        "defaults=[a.yaml]: layers are named in a file"
    )


def test_the_example_of_the_page(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/configuration.md").read_text()
    (example,) = (
        block.split("```")[0] for block in page.split("```yaml\n")[1:] if "defaults:" in block
    )
    file = write(elsewhere / "mine.yaml", example)
    assert main(["train", str(file), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    tree = yaml.safe_load(printed)
    assert "defaults" not in tree
    assert tree["algorithm"]["name"] == "gtpo" and tree["algorithm"]["alpha2"] == 0.2
    assert tree["algorithm"]["alpha1"] == 1.0 and "amplify" not in tree["algorithm"]
    assert (tree["model"]["path"], tree["rollout"]["max_new_tokens"]) == (
        str(ROOT / "assets/tiny-adder"),
        32,
    )
    assert tree["batch"]["samples_per_prompt"] == 16
    write(elsewhere / "resolved.yaml", printed)
    assert main(["train", str(elsewhere / "resolved.yaml"), "--dry-run"]) == 0
    assert capsys.readouterr().out == printed
