"""Real slime selects the tokens of the reference over gloo, with data and context parallelism and
two pipeline stages, and resumes alike.

Needs the environment of `scripts/setup_other_trainer.sh slime` and slime's source, whose folder
MEGATRON_STARE_SLIME names; skipped without them. slime 0.3.1 is not on the package index.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from support.runs import ROOT

from megatron_stare.select.explain import figures, read
from megatron_stare.select.reference import reference

PYTHON = Path(
    os.environ.get("MEGATRON_STARE_SLIME_PYTHON", ROOT / ".venv-slime" / "bin" / "python")
)
SLIME = Path(os.environ.get("MEGATRON_STARE_SLIME", "no folder"))
PROGRAM = Path(__file__).with_name("slime_program.py")
STARE = {"variant": "C2", "entropy_target": 2.5, "adaptive": True, "share": 0.3}
GATE = 1.6  # of the case by_response
WIDTH = 24
LAYOUTS = {  # processes, context parallel, pipeline stages
    "one": (1, 1, 1),
    "dp2": (2, 1, 1),
    "pp2cp2": (4, 2, 2),
    "dp2cp2": (4, 2, 1),
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (PYTHON.exists() and SLIME.is_dir()),
        reason="SLIME NOT TESTED: run scripts/setup_other_trainer.sh slime, and set"
        " MEGATRON_STARE_SLIME to a folder of slime 0.3.1's source",
    ),
]
Update = dict[str, np.ndarray]


def program(what: str, folder: Path, ranks: int = 1, *sizes: int) -> None:
    folder.mkdir()
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [str(PYTHON), *(launcher if ranks > 1 else []), str(PROGRAM), what, str(folder)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(SLIME)]),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [*command, *map(str, sizes)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


@pytest.fixture(scope="module")
def selected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("selected")
    for name, (ranks, context, stages) in LAYOUTS.items():
        program("select", folder / name, ranks, context, stages)
    return folder


def whole(folder: Path, name: str, number: int) -> Update:
    """Returns the tokens of all ranks of the last stage, padded, rows in the order of the batch."""
    files = sorted(folder.glob(f"{name}-{number}-*.npz"))
    parts = [part for part in map(np.load, files) if len(part.files)]
    rows = 1 + max(int(part["row"].max()) for part in parts)
    update: Update = {"logged": parts[0]["logged"]}
    held = np.zeros((rows, WIDTH), int)
    for name_ in set(parts[0].files) - {"row", "column", "logged"}:
        update[name_] = np.zeros((rows, WIDTH), parts[0][name_].dtype)
        for part in parts:
            update[name_][part["row"], part["column"]] = part[name_]
    for part in parts:
        np.add.at(held, (part["row"], part["column"]), 1)
    assert held.max() == 1  # no token is held twice
    update["held"] = held
    return update


def both(folder: Path, name: str, numbers: range = range(2)) -> list[Update]:
    return [whole(folder, name, number) for number in numbers]


def agree(updates: list[Update]) -> None:
    for update, expected in zip(updates, reference(updates, STARE), strict=True):
        np.testing.assert_array_equal(update["codes"], expected["codes"])
        assert {1, -1} <= set(np.unique(update["codes"]))
        wanted = update["advantages"] * expected["weights"].astype(np.float32)
        np.testing.assert_allclose(update["weighted"], wanted * update["mask"], rtol=1e-6)


@pytest.mark.parametrize("name", ["grpo", "whitened"])
def test_rollouts_of_slime_get_the_weights_of_the_reference(selected: Path, name: str) -> None:
    agree(both(selected / "one", name))
    state = json.loads((selected / "one" / f"{name}-0.json").read_text())["state"]
    assert state["amplify"] == pytest.approx(1.12)  # the controller has moved with every rollout


def test_whitening_leaves_the_weights_as_they_are(selected: Path) -> None:
    for plain, whitened in zip(
        both(selected / "one", "grpo"), both(selected / "one", "whitened"), strict=True
    ):
        kept = plain["mask"].astype(bool)
        assert abs(whitened["advantages"][kept].mean()) < 1e-6
        assert abs(whitened["weighted"][kept].mean()) > 1e-4
        np.testing.assert_array_equal(plain["returns"], whitened["returns"])
        assert (plain["returns"][kept] == 0).any()  # rows that are whitened away from 0


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one"])
@pytest.mark.parametrize("name", ["grpo", "whitened", "by_response"])
def test_every_layout_selects_the_same_tokens(selected: Path, layout: str, name: str) -> None:
    for one, other in zip(both(selected / "one", name), both(selected / layout, name), strict=True):
        for column in ("held", "mask", "log_probs", "entropies", "codes", "weights"):
            np.testing.assert_array_equal(one[column], other[column], err_msg=column)
        np.testing.assert_allclose(one["weighted"], other["weighted"], rtol=1e-5, atol=1e-6)
    states = {file.read_text() for file in (selected / layout).glob(f"{name}-*.json")}
    assert states == {(selected / "one" / f"{name}-0.json").read_text()}


def test_some_ties_lie_on_both_sides_of_the_threshold(selected: Path) -> None:
    parted = 0
    for update in both(selected / "one", "grpo"):
        for sign in (1, -1):
            side = update["mask"].astype(bool) & (np.sign(update["advantages"]) == sign)
            last = update["log_probs"][update["codes"] == sign].max()
            tied = side & (update["log_probs"] == last)
            parted += 0 < (update["codes"][tied] == sign).sum() < tied.sum()
    assert parted


def test_samples_of_one_response_have_one_gate(selected: Path) -> None:
    responses = [
        prompt * 4 + response
        for prompt in range(4)
        for response in range(4)
        for _ in range(2 if response == 2 else 1)
    ]
    parted = 0
    for update in both(selected / "one", "by_response"):
        mask = update["mask"].astype(bool)
        for response in range(16):
            rows = [row for row, of in enumerate(responses) if of == response]
            is_open = update["entropies"][rows][mask[rows]].mean() < GATE
            weighted = mask[rows] & (update["weights"][rows] != 1)
            np.testing.assert_array_equal(weighted, (update["codes"][rows] != 0) & is_open)
            alone = {bool(update["entropies"][row][mask[row]].mean() < GATE) for row in rows}
            parted += len(alone) > 1 and (update["codes"][rows] != 0).any(1).all()
    assert parted  # a sample of a response would have another gate by itself


def test_metrics_reach_slimes_own(selected: Path) -> None:
    (update,) = both(selected / "pp2cp2", "grpo", range(1))
    assert {"stare/gate", "stare/seconds"} <= set(update["logged"])


def test_a_resumed_run_goes_on_alike(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    program("resume", folder, 4, 1, 2)  # two data ranks on each of two stages
    states = [json.loads(line) for line in (folder / "run/states.txt").read_text().splitlines()]
    assert [state["rollout_id"] for state in states] == [0, 1, 2, 3]  # one rank writes them
    undisturbed = both(folder, "whole", range(4))
    agree(undisturbed)
    for first in (1, 2, 3):
        taken_up = both(folder, f"from{first}", range(4 - first))
        for again, before in zip(taken_up, undisturbed[first:], strict=True):
            for column in ("codes", "weights", "weighted"):
                np.testing.assert_array_equal(again[column], before[column], err_msg=column)
        states_ = {(folder / f"from{first}-{rank}.json").read_text() for rank in (2, 3)}
        assert states_ == {(folder / "whole-2.json").read_text()}


def test_slimes_own_dumps_are_explained(tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    program("dump", folder, 4, 2, 1)
    rows = read([folder])
    assert [row.step for row in rows] == [0] * 20 + [1] * 20
    assert [row.reward for row in rows] == 2 * [float(at) for at in range(20)]  # by position
    first = rows[0]
    assert first.mask is not None and first.tokens is not None
    assert not first.mask[2:4].any() and len(first.mask) == len(first.tokens)
    assert (first.kept("log_probs") < 0).all() and len({row.group for row in rows[:20]}) > 4
    found = {figure.name: figure for figure in figures(rows)}
    assert found["entropy, nats"].by_step.keys() == {0}  # the second dump has none
    assert found["surprisal of sampled tokens, nats"].by_step.keys() == {0, 1}
    assert found["same, largest of 1,000 tokens, nats"].absent == ("rollout_log_probs",)
    assert found["prompts that contain their answer, share"].absent == ("prompt", "gold")


def test_what_makes_it_inexact_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "refusals"
    program("refuse", folder)
    found = json.loads((folder / "refusals.json").read_text())
    expected = {
        "entropy": "--use-rollout-entropy: is missing",
        "log_probs": "--rollout-data-postprocess-path: slime has computed no log-probs",
        "gspo": "--advantage-estimator: 'gspo': a ratio of the whole sequence",
        "loss": "--loss-type: 'custom_loss': is not known to be linear",
        "opsm": "--use-opsm: drops sequences",
        "top_p": "--rollout-top-p: 0.9: slime's log-probs",
        "stapo": "stare: slime divides by all tokens",
        "setting": "clip_high: belongs to the trainer's loss",
        "negative": "slime: entropies lie below 0",
        "positive": "slime: log_probs lie above 0",
        "state": f"{folder}/run/stare_select.jsonl: there is no state of the selector after",
        "share": "the saved state has other settings: share was 0.3, now 0.4",
    }
    assert {name for name, message in found.items() if message} == expected.keys()
    assert {name for name, message in found.items() if not message} == {
        *("trusted", "found", "probe", "fresh", "critic"),
    }
    for name, begins in expected.items():
        assert found[name].startswith(begins), (name, found[name])


def test_slime_calls_the_function_as_this_test_does() -> None:
    """Reads in slime's source what the program above does in its place."""
    actor = (SLIME / "slime/backends/megatron_utils/actor.py").read_text()
    called = actor.index("self.rollout_data_postprocess(self.args, rollout_id, rollout_data)")
    assert actor.index("compute_advantages_and_returns(self.args, rollout_data)\n\n") < called
    assert called < actor.index('with timer("actor_train")')
    arguments = (SLIME / "slime/utils/arguments.py").read_text()
    adapter = (ROOT / "megatron_stare/select/slime.py").read_text()
    read = set(re.findall(r"\bargs\.(\w+)", adapter))
    assert read - {"save", "load"} and "use_rollout_entropy" in read
    for name in read - {"save", "load"}:  # Megatron's own
        flag = f'"--{name.replace("_", "-")}"'
        assert flag in arguments or f"args.{name} = " in arguments, name
    assert "setattr(args, k, v)" in arguments  # of --custom-config-path
    reused = actor[actor.index("can_reuse_log_probs_in_loss = (") :][:900]
    assert "not self.args.get_mismatch_metrics" in reused
    assert "not self.args.keep_old_actor" in reused
    assert "custom_tis_function_path must be set when get_mismatch_metrics is set" in arguments
    loss = (SLIME / "slime/backends/megatron_utils/loss.py").read_text()
    assert "pg_loss, modified_response_masks, tis_metrics = tis_func(**tis_kwargs)" in loss
