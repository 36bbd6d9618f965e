"""Real TRL selects the tokens of the reference, on one process and on two, and resumes alike.

Runs in the environment that scripts/setup_other_trainer.sh trl makes; skipped without it.
"""

from __future__ import annotations

import json
import os
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


def program(what: str, folder: Path, ranks: int = 1) -> None:
    folder.mkdir()
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [str(PYTHON), *(launcher if ranks > 1 else []), str(PROGRAM), what, str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


def updates(folder: Path, ranks: int, name: str = "") -> list[dict[str, np.ndarray]]:
    """Returns each update of the whole batch, rows of rank 0 first."""
    found = []
    while (folder / f"{name}{len(found)}-0.npz").exists():
        parts = [np.load(folder / f"{name}{len(found)}-{rank}.npz") for rank in range(ranks)]
        found.append({key: np.concatenate([part[key] for part in parts]) for key in parts[0]})
    return found


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
