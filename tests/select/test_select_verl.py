"""Real verl selects the tokens of the reference through a real TransferQueue, and resumes alike.

Runs in the environment of `scripts/setup_other_trainer.sh verl`; skipped without it.
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

PYTHON = Path(os.environ.get("MEGATRON_STARE_VERL_PYTHON", ROOT / ".venv-verl" / "bin" / "python"))
PROGRAM = Path(__file__).with_name("verl_program.py")
STARE = {"variant": "C2", "entropy_target": 1.0, "adaptive": True, "share": 0.2}
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON.exists(), reason="VERL NOT TESTED: run scripts/setup_other_trainer.sh verl"
    ),
]
Update = dict[str, np.ndarray]


def program(what: str, folder: Path) -> None:
    command = [str(PYTHON), str(PROGRAM), what, str(folder)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


@pytest.fixture(scope="module")
def selected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("selected")
    program("select", folder)
    return folder


def updates(folder: Path, name: str) -> list[Update]:
    return [dict(np.load(file)) for file in sorted(folder.glob(f"{name}-[0-9].npz"))]


def given(plain: list[Update]) -> list[Update]:
    """Returns verl's own batches under the reference's names."""
    names = {"log_probs": "old_log_probs", "entropies": "entropy", "mask": "response_mask"}
    names["advantages"] = "advantages"
    return [{ours: update[theirs] for ours, theirs in names.items()} for update in plain]


def agree(found: list[Update], plain: list[Update]) -> None:
    """Asserts that the updates are plain verl's, with the reference's weights on the advantages."""
    for update, without, expected in zip(found, plain, reference(given(plain), STARE), strict=True):
        for name in ("old_log_probs", "entropy", "response_mask", "returns"):
            np.testing.assert_array_equal(update[name], without[name], err_msg=name)
        np.testing.assert_array_equal(update["codes"], expected["codes"])
        wanted = without["advantages"] * expected["weights"].astype(np.float32)
        np.testing.assert_allclose(update["advantages"], wanted, rtol=1e-6)
        assert {1, -1} <= set(np.unique(update["codes"]))
        assert not (update["response_mask"][:, 2:4]).any()  # a tool's tokens


def test_batches_of_verl_get_the_weights_of_the_reference(selected: Path) -> None:
    plain = updates(selected, "plain")
    assert len(plain) == 2
    agree(updates(selected, "two"), plain)
    # the controller has moved with every batch
    assert json.loads((selected / "two.json").read_text())["state"]["amplify"] == pytest.approx(
        1.12
    )


def test_ties_do_not_depend_on_how_verl_balances_the_rows(selected: Path) -> None:
    two, four = updates(selected, "two"), updates(selected, "four")
    for first, second in zip(two, four, strict=True):
        for name in ("codes", "weights", "advantages"):
            np.testing.assert_array_equal(first[name], second[name], err_msg=name)
    parted = 0
    for update in two:
        side = update["response_mask"].astype(bool) & (update["returns"] < 0)
        last = update["old_log_probs"][update["codes"] == -1].max()
        tied = side & (update["old_log_probs"] == last)
        parted += 0 < (update["codes"][tied] == -1).sum() < tied.sum()
    assert parted  # some ties lie on both sides of the threshold


def test_tokens_that_verl_rejects_are_no_candidates(selected: Path) -> None:
    plain, rejecting = updates(selected, "plain"), updates(selected, "plain_rejecting")
    assert all(
        (a["response_mask"] > b["response_mask"]).any()
        for a, b in zip(plain, rejecting, strict=True)
    )
    agree(updates(selected, "rejecting"), rejecting)


def test_rows_that_verl_tags_as_padding_are_left_out(selected: Path) -> None:
    two, marked = updates(selected, "two"), updates(selected, "marked")
    for first, second in zip(two, marked, strict=True):
        for name in ("codes", "weights", "mean"):
            np.testing.assert_array_equal(first[name], second[name], err_msg=name)


def test_a_session_with_several_rows_has_one_gate(selected: Path) -> None:
    sessions = [key for key in range(12) for _ in range(2 if key % 4 == 2 else 1)]
    parted = 0
    for update in updates(selected, "by_session"):
        mask = update["response_mask"].astype(bool)
        for session in range(12):
            rows = [row for row, of in enumerate(sessions) if of == session]
            is_open = update["entropy"][rows][mask[rows]].mean() < 0.5
            weighted = mask[rows] & (update["weights"][rows] != 1)
            np.testing.assert_array_equal(weighted, (update["codes"][rows] != 0) & is_open)
            alone = [update["entropy"][row][mask[row]].mean() < 0.5 for row in rows]
            parted += len(set(alone)) > 1 and (update["codes"][rows] != 0).any(1).all()
    assert parted  # a row of a session would have another gate by itself


def test_each_mode_of_verl_has_a_trainer(selected: Path) -> None:
    modes = json.loads((selected / "modes.json").read_text())
    assert modes.keys() == {"sync", "colocate_async", "separate_async"}
    assert all(found == [mode, True] for mode, found in modes.items())


def test_metrics_reach_verls_own(selected: Path) -> None:
    (names,) = {tuple(update["metrics"]) for update in updates(selected, "two")}
    assert {"stare/gate", "entropy/mean", "stare/selected_negative"} <= set(names)
    assert not [name for name in names if "minus" in name]  # verl would log the least of them


def test_a_resumed_trainer_goes_on_alike(tmp_path: Path) -> None:
    program("resume", tmp_path)
    third = updates(tmp_path, "whole")[2]
    state = (tmp_path / "whole.json").read_text()
    for name in ("resumed", "named"):
        (update,) = updates(tmp_path, name)
        for column in ("codes", "weights", "advantages"):
            np.testing.assert_array_equal(update[column], third[column], err_msg=column)
        assert (tmp_path / f"{name}.json").read_text() == state
    assert json.loads(state)["updates"] == 3


def test_verls_own_dumps_are_explained(tmp_path: Path) -> None:
    program("dump", tmp_path)
    rows = read([tmp_path])
    assert [(row.step, row.group, row.gold, row.reward) for row in rows[:3]] == [
        (1, "prompt0", "2", 1.0),
        (1, "prompt0", "2", 0.0),
        (1, "prompt1", "10", 1.0),
    ]
    found = {figure.name: figure for figure in figures(rows)}
    assert found["reward"].by_step == {1: 0.5, 2: 0.5}
    assert found["different responses to a prompt, share"].by_step == {1: 1.0, 2: 1.0}
    assert found["entropy, nats"].absent == ("entropy",)


def test_what_makes_it_inexact_is_refused(tmp_path: Path) -> None:
    program("refuse", tmp_path)
    found = json.loads((tmp_path / "refusals.json").read_text())
    expected = {
        "share": "the saved state has other settings: share was 0.2, now 0.3",
        "state": f"{tmp_path}/lost/global_step_1/stare_select.json: the checkpoint has no state",
        "bypass": "algorithm.rollout_correction.bypass_mode: True: verl then computes neither",
        "estimator": "algorithm.adv_estimator: 'rloo': verl shares one score",
        "loss": "actor_rollout_ref.actor.policy_loss.loss_mode: 'gspo': is not known to be linear",
        "stapo": "stare: verl divides by all tokens",
        "setting": "clip_high: belongs to the trainer's loss",
        "entropies": "verl: entropies lie below 0",
        "log_probs": "verl: old_log_probs lie above 0",
        "probe": "verl: Renamed._compute_advantage has no parameter batch",
        "squared": "verl: the loss is not linear in the advantages",
    }
    assert {name for name, message in found.items() if message} == expected.keys()
    assert {name for name, message in found.items() if not message} == {
        *("trusted", "vanilla", "cispo", "gpg", "fresh"),
    }
    for name, begins in expected.items():
        assert found[name].startswith(begins), (name, found[name])


def test_verls_own_program_finds_the_trainer(tmp_path: Path) -> None:
    def main(**environment: str) -> str:
        command = [
            *(str(PYTHON), "-m", "verl.trainer.main_ppo", f"hydra.run.dir={tmp_path}"),
            *("trainer.v1.trainer_mode=stare_sync", "+stare.entropy_target=0.3"),
            *("algorithm.adv_estimator=grpo", "algorithm.rollout_correction.bypass_mode=True"),
            *("actor_rollout_ref.rollout.name=sglang", "trainer.n_gpus_per_node=1"),
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
            "transfer_queue.backend.SimpleStorage.num_data_storage_units=2",
            "ray_kwargs.ray_init.num_cpus=8",
        ]
        own = {**ENVIRONMENT, **environment}
        done = subprocess.run(command, env=own, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode
        return done.stdout + done.stderr

    # the adapter's own refusal, out of verl's task on Ray
    assert "verl then computes neither log-probs nor entropies" in main(
        VERL_USE_EXTERNAL_MODULES="megatron_stare.select.verl"
    )
    assert "Unknown trainer 'stare_sync'" in main()
    assert "No module named 'megatron_stare.lost'" in main(
        VERL_USE_EXTERNAL_MODULES="megatron_stare.lost"
    )
