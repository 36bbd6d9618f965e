"""Real TRL selects the tokens of the reference, on one process and on two, and resumes alike.

Runs in the environment that scripts/setup_other_trainer.sh trl makes; skipped without it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from support.runs import ROOT

from megatron_stare.select.explain import figures, read
from megatron_stare.select.reference import reference

PYTHON = Path(os.environ.get("MEGATRON_STARE_TRL_PYTHON", ROOT / ".venv-trl" / "bin" / "python"))
PROGRAM = Path(__file__).with_name("trl_program.py")
STARE = {"variant": "C2", "entropy_target": 2.0, "adaptive": True, "share": 0.2}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON.exists(), reason="TRL NOT TESTED: run scripts/setup_other_trainer.sh trl"
    ),
]


def program(what: str, folder: Path, ranks: int = 1, trl: Path | None = None) -> None:
    """Runs trl_program.py, with the trl in the folder `trl` instead of the environment's."""
    folder.mkdir()
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [str(PYTHON), *(launcher if ranks > 1 else []), str(PROGRAM), what, str(folder)]
    finished(command, *([trl] if trl else []), ROOT)


def finished(command: list[str], *first: Path, cwd: Path | None = None) -> str:
    """Returns the output of a command that must succeed, with the folders `first` on its path."""
    path = os.pathsep.join(map(str, first))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


def updates(folder: Path, ranks: int, name: str = "") -> list[dict[str, np.ndarray]]:
    """Returns each update of the whole batch, rows of rank 0 first, padded to the widest rank.
    Values outside the mask are 0."""
    found = []
    while (folder / f"{name}{len(found)}-0.npz").exists():
        files = [np.load(folder / f"{name}{len(found)}-{rank}.npz") for rank in range(ranks)]
        width = max(file["mask"].shape[1] for file in files)
        parts = [{key: padded(file[key], file["mask"], width) for key in file} for file in files]
        found.append({key: np.concatenate([part[key] for part in parts]) for key in parts[0]})
    return found


def padded(values: np.ndarray, mask: np.ndarray, width: int) -> np.ndarray:
    if values.ndim == 1:  # one value a row
        return values
    return np.pad(np.where(mask, values, 0), [(0, 0), (0, width - mask.shape[1])])


def states(folder: Path, rank: int, name: str = "") -> list[dict]:
    return json.loads((folder / f"{name}report-{rank}.json").read_text())["states"]


def agrees_with_the_reference(found: list[dict[str, np.ndarray]]) -> None:
    for update, expected in zip(found, reference(found, STARE), strict=True):
        np.testing.assert_array_equal(update["codes"], expected["codes"])
        kept = update["mask"].astype(bool)
        np.testing.assert_allclose(update["weights"][kept], expected["weights"][kept], rtol=1e-6)


def test_one_and_two_processes_select_alike_ties_included(tmp_path: Path) -> None:
    program("train", tmp_path / "one")
    program("train", tmp_path / "two", ranks=2)
    one, two = updates(tmp_path / "one", 1), updates(tmp_path / "two", 2)
    assert len(one) == len(two) == 4
    parted = 0
    for first, second in zip(one, two, strict=True):
        for name in ("log_probs", "mask", "advantages", "codes", "weights"):
            np.testing.assert_array_equal(first[name], second[name], err_msg=name)
        assert {1, -1} <= set(np.unique(first["codes"]))
        assert not first["mask"][:, 3:6].any()  # a tool's tokens
        chosen = first["log_probs"][first["codes"] == 1].max()
        side = first["mask"].astype(bool) & (first["advantages"] > 0)[:, None]
        tied = side & (first["log_probs"] == chosen)
        parted += 0 < (first["codes"][tied] == 1).sum() < tied.sum()
    assert parted  # some ties lie on both sides of the threshold
    agrees_with_the_reference(one)
    assert states(tmp_path / "two", 0) == states(tmp_path / "two", 1) == states(tmp_path / "one", 0)


@pytest.mark.parametrize(("what", "ranks"), [("cut", 1), ("cut", 2), ("dropped", 1)])
def test_responses_without_loss_are_no_change_of_trl(tmp_path: Path, what: str, ranks: int) -> None:
    """Rows without loss say nothing of the loss's use of advantages. Where the first two rows of a
    rank have none, its run starts all the same, and so do those of the other ranks."""
    program(what, tmp_path / "run", ranks)
    (found,) = updates(tmp_path / "run", ranks)
    empty = ~found["mask"].astype(bool).any(1)
    first = len(empty) - len(empty) // ranks
    assert empty[first : first + 2].all() == (what == "cut") and not empty.all()
    agrees_with_the_reference([found])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_run_goes_on_alike(tmp_path: Path, ranks: int) -> None:
    folder = tmp_path / "run"
    program("resume", folder, ranks)
    whole, resumed = updates(folder, ranks, "whole-"), updates(folder, ranks, "resumed-")
    agrees_with_the_reference(whole)
    assert len(whole) == 4 and len(resumed) == 2
    for first, second in zip(whole[2:], resumed, strict=True):
        for name in ("log_probs", "codes", "weights"):
            np.testing.assert_array_equal(first[name], second[name], err_msg=name)
    for rank in range(ranks):
        kept = states(folder, rank, "whole-")
        assert states(folder, rank, "resumed-") == kept[2:]
        assert kept[3]["state"] != kept[1]["state"]  # the controller moves


def test_trls_own_completions_are_explained(tmp_path: Path) -> None:
    program("dump", tmp_path / "run")
    rows = read([tmp_path / "run" / "output" / "completions"])
    assert {row.step for row in rows} == {1, 2} and len(rows) == 32
    found = {figure.name: figure for figure in figures(rows)}
    assert all(row.reward in (0.0, 1.0, 2.0, 3.0) for row in rows)
    assert found["different responses to a prompt, share"].by_step[1] < 1  # pairs are equal
    assert found["surprisal of sampled tokens, nats"].absent == ("log_probs",)


def test_what_makes_it_inexact_is_refused(tmp_path: Path) -> None:
    program("refuse", tmp_path / "refusals")
    found = json.loads((tmp_path / "refusals" / "refusals.json").read_text())
    assert found.pop("probe") is None and found.pop("trusted") is None
    expected = {
        "steps_per_generation": "steps_per_generation: is 4, and gradient_accumulation_steps 2",
        "num_iterations": "num_iterations: 2: later iterations",
        "loss_type": "loss_type: 'sapo': is not known to be linear",
        "importance_sampling_level": "importance_sampling_level: 'sequence':",
        "top_entropy_quantile": "top_entropy_quantile: 0.2:",
        "use_adaptive_entropy": "use_adaptive_entropy: True:",
        "off_policy_mask_threshold": "off_policy_mask_threshold: 0.5:",
        "stapo": "stare: TRL divides by all tokens",
        "renamed": "trl: Renamed._save_checkpoint has no parameter trial",
        "changed": "trl: _compute_loss is not linear in the advantages",
    }
    assert found.keys() == expected.keys()
    for name, begins in expected.items():
        assert found[name] and found[name].startswith(begins), (name, found[name])


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment's trl in a folder of its own, with the patch."""
    folder = tmp_path_factory.mktemp("patched")
    where = finished([str(PYTHON), "-c", "import trl; print(trl.__path__[0])"]).splitlines()[-1]
    shutil.copytree(where, folder / "trl", ignore=shutil.ignore_patterns("__pycache__"))
    finished(["git", "apply", "-v", str(ROOT / "tools/stare_select/trl.patch")], cwd=folder)
    return folder


def test_the_patch_for_trl_selects_what_the_reference_selects(
    tmp_path: Path, patched: Path
) -> None:
    program("patched", tmp_path / "one", trl=patched)
    program("patched", tmp_path / "two", ranks=2, trl=patched)
    one, two = updates(tmp_path / "one", 1), updates(tmp_path / "two", 2)
    assert len(one) == len(two) == 4
    for first, second in zip(one, two, strict=True):
        for name, value in first.items():
            np.testing.assert_array_equal(value, second[name], err_msg=name)
    expected = reference(one, STARE)
    for update, found in zip(one, expected, strict=True):
        assert {1, -1} <= set(np.unique(found["codes"]))
        inside = update["mask"].astype(bool)
        np.testing.assert_allclose(update["weights"][inside], found["weights"][inside], rtol=1e-6)
    widths = {np.load(tmp_path / "two" / f"0-{rank}.npz")["mask"].shape[1] for rank in (0, 1)}
    assert len(widths) == 2  # ranks are padded to several widths
    kept = states(tmp_path / "one", 0)
    assert kept == states(tmp_path / "two", 0) == states(tmp_path / "two", 1)
    for state, found in zip(kept, expected, strict=True):
        assert state == pytest.approx({name: found[name] for name in state})


def test_the_patch_for_trl_resumes(tmp_path: Path, patched: Path) -> None:
    folder = tmp_path / "run"
    program("patched_resume", folder, trl=patched)
    whole, resumed = updates(folder, 1, "whole-"), updates(folder, 1, "resumed-")
    assert len(whole) == 4 and len(resumed) == 2
    for first, second in zip(whole[2:], resumed, strict=True):
        for name, value in first.items():
            np.testing.assert_array_equal(value, second[name], err_msg=name)
    assert states(folder, 0, "resumed-") == states(folder, 0, "whole-")[2:]


def test_the_tests_of_the_patch_for_trl_pass(patched: Path) -> None:
    """Runs them on the tiny adder and a data set of this test, in place of those of the Hub."""
    texts = patched / "tests" / "experimental" / "test_stare_trainer.py"
    data = patched / "zen"
    data.mkdir()
    kinds = {
        "standard_prompt_only": [f"{number}+{90 - number}+55=" for number in range(10, 27)],
        "conversational_prompt_only": [
            [{"role": "user", "content": f"{number}+{90 - number}+55="}] for number in range(10, 27)
        ],
    }
    names = "".join(f"  - config_name: {kind}\n    data_files: {kind}.jsonl\n" for kind in kinds)
    (data / "README.md").write_text(f"---\nconfigs:\n{names}---\n")
    for kind, prompts in kinds.items():
        lines = (json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
        (data / f"{kind}.jsonl").write_text("".join(lines))
    model = patched / "adder"
    shutil.copytree(ROOT / "assets" / "tiny-adder", model)
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    local = texts.read_text()
    for hub, here in {
        "trl-internal-testing/zen": data,
        "trl-internal-testing/tiny-Qwen2ForCausalLM-2.5": model,
    }.items():
        assert hub in local
        local = local.replace(hub, str(here))
    texts.write_text(local)
    for package in (texts.parent, texts.parents[1]):
        (package / "__init__.py").touch()
    (texts.parents[1] / "testing_utils.py").write_text(TRL_TEST_CASE)
    told = finished([str(PYTHON), "-m", "pytest", "-q", str(texts)], patched, cwd=patched)
    assert " passed" in told and "skipped" not in told, told


# what the patch uses of TRL's base class of tests; here also, all configurations are for a CPU
TRL_TEST_CASE = """
import functools
import pytest
from trl.experimental.stare import STAREConfig

STAREConfig.__init__ = functools.partialmethod(STAREConfig.__init__, use_cpu=True, bf16=False)


class TrlTestCase:
    @pytest.fixture(autouse=True)
    def set_tmp_dir(self, tmp_path):
        self.tmp_dir = str(tmp_path)
"""
