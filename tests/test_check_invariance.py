"""tools/check_invariance.py: layouts pass, a trainer with thresholds per rank does not."""

from __future__ import annotations

import copy
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import ROOT, environment
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_stare.algorithms import METHODS
from megatron_stare.config.load import build_method


def of(module: str, *names: str) -> list[Any]:
    """These names of a tool's module."""
    return [getattr(importlib.import_module(module), name) for name in names]


# as a script has it: its own folder first
sys.path.insert(0, str(ROOT / "tools"))
Case, fixed_batch, write_model = of("invariance.case", "Case", "fixed_batch", "write_model")
compare, moved, RELATIVE = of("invariance.compare", "compare", "moved", "RELATIVE")
take, ALGORITHMS, LAYOUTS = (
    *of("invariance.step", "take"),
    *of("invariance.table", "ALGORITHMS", "LAYOUTS"),
)
(rank_processes,) = of("rank_processes", "rank_processes")


def check(*arguments: str, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/check_invariance.py"), *arguments]
    return subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=timeout
    )


@pytest.fixture(scope="module")
def pool() -> Iterator[Any]:
    """Ranks for one case after the other."""
    with rank_processes(4) as processes:
        yield processes


@pytest.mark.wide
@pytest.mark.distributed
def test_thresholds_per_rank_are_caught() -> None:
    arguments = [
        "--world",
        "2",
        "--micro-batch-tokens",
        "64",
        "--algorithm",
        "stare",
        "--set",
        "variant=C2",
    ]
    passed = check(*arguments)
    assert (passed.returncode, passed.stderr) == (0, "")  # not a word of an upstream's
    mutant = check(*arguments, "--trainer", "support.mutants.PerRankThresholds")
    assert mutant.returncode == 1
    assert "plus: given equal scores, other tokens are selected" in mutant.stdout


@pytest.mark.wide
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("algorithm", "layout", "cut"),
    [
        # one ratio a response
        ("gspo", {"context": 2, "tensor": 2}, {"budget": 64, "packed": True}),
        ("grpo_s", {"context": 2, "pipeline": 2}, {"budget": 40, "packed": False}),
        ("stare", {"context": 4}, {"budget": 64, "packed": True}),
        # quantiles, N and denominators of sequences without the tokens that are masked for their
        # age
        ("stare", {"context": 2, "data": 2}, {"budget": 40, "packed": True, "stale": True}),
        ("stare C4, rare below a bound", {"tensor": 2, "data": 2}, {"budget": 64, "packed": True}),
        ("stare C2, gate by sample", {"context": 2, "data": 2}, {"budget": 40, "packed": False}),
    ],
    ids=["cp2-tp2", "cp2-pp2-padded", "cp4", "stale-cp2-dp2", "tp2-dp2", "cp2-dp2-padded"],
)
def test_sequences_on_several_ranks_train_as_on_one(
    pool: Any, tmp_path: Path, algorithm: str, layout: dict[str, int], cut: dict[str, Any]
) -> None:
    write_model(tmp_path)
    case = Case(ALGORITHMS[algorithm], off_policy=0.5, parallel=layout, **cut)
    whole = take(pool, case.alone(), str(tmp_path), None)
    found = compare(whole, take(pool, case, str(tmp_path), whole["scores"]))
    assert found.faults == []
    assert (found.selected > 0) == ("stare" in algorithm)


def test_an_impossible_layout_is_refused() -> None:
    refused = check("--world", "3", "--tp", "3")
    assert refused.returncode == 2
    assert "4 attention heads cannot be cut over 3 tensor-parallel ranks" in refused.stderr


def test_a_gradient_that_is_off_is_a_fault() -> None:
    """The comparison itself, on numbers: a tensor off by more than it may, a token selected
    otherwise, another loss."""
    step = {
        "given": {"plus": {1, 2}},
        "selected": {"plus": {1, 2}},
        "near": {"plus": set()},
        "gradients": {"w": torch.tensor([1.0, 2.0]), "small": torch.tensor([1e-9])},
        "before": {"w": torch.tensor([0.5, 0.4])},
        "weights": {"w": torch.tensor([0.5, 0.5])},
        "metrics": {"loss/policy": 0.1, "optimizer/grad_norm": 2.0},
    }
    assert compare(step, copy.deepcopy(step)).faults == []

    def faults(key: str, value: Any) -> list[str]:
        return compare(step, {**copy.deepcopy(step), key: value}).faults

    off = torch.tensor([1.0, 2.0 + 3e-5])
    assert len(faults("gradients", {**step["gradients"], "w": off})) == 1
    # nothing beside the others
    assert faults("gradients", {**step["gradients"], "small": torch.tensor([2e-9])}) == []
    assert len(faults("gradients", {**step["gradients"], "w": off * float("nan")})) == 1
    assert len(faults("gradients", {"w": off})) == 1
    assert len(faults("weights", {"w": torch.tensor([0.5, 0.5 + 3e-6])})) == 1
    assert len(faults("selected", {"plus": {1, 3}})) == 1
    assert len(faults("given", {"plus": {1, 3}})) == 1
    assert len(faults("metrics", {"loss/policy": 0.1001, "optimizer/grad_norm": 2.0})) == 1
    near = compare(
        step, {**copy.deepcopy(step), "selected": {"plus": {1, 3}}, "near": {"plus": {2, 3}}}
    )
    assert near.faults == [] and near.excused == [2, 3]


@pytest.mark.parametrize("step", [1e-4, 0.1, 10.0])
def test_weights_are_held_to_what_the_step_moves(step: float) -> None:
    """A hundred-thousandth of the step, and the rounding of weights of 0.5, whatever the size of
    the step."""
    before = {"w": torch.tensor([0.5, -0.5]), "still": torch.tensor([0.25])}
    after = {"w": before["w"] - step, "still": before["still"]}
    whole = {
        "given": {},
        "selected": {},
        "near": {},
        "gradients": {name: torch.ones(1) for name in before},
        "before": before,
        "weights": after,
        "metrics": {"loss/policy": 0.1, "optimizer/grad_norm": 2.0},
    }

    def faults(name: str, by: float) -> int:
        return len(compare(whole, {**whole, "weights": {**after, name: after[name] + by}}).faults)

    size = max(0.5, step)
    assert faults("w", 0.5e-5 * step) == 0
    assert faults("w", 2e-5 * step + 2.5e-7 * size) == 1
    # a tensor that does not move, beside one that does
    assert faults("still", 2e-8 * step + 6e-8) == 1


STEEP = [
    Case({"name": "twenty_entropy"}, parallel={"tensor": 4}, budget=77, seed=6),
    Case(
        ALGORITHMS["grpo with correction and entropy bonus"],
        parallel={"tensor": 4},
        budget=77,
        off_policy=0.5,
    ),
]


@pytest.fixture(scope="module")
def steep(
    pool: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[tuple[dict[str, Any], dict[str, Any]]]]:
    """The model, and steps at a learning rate of 1 whose gradient is large: on one rank and on
    four."""
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    wholes = [take(pool, case.alone(), str(folder), None) for case in STEEP]
    cuts = [
        take(pool, case, str(folder), w["scores"]) for case, w in zip(STEEP, wholes, strict=True)
    ]
    return folder, list(zip(wholes, cuts, strict=True))


def twenty_entropy_in_float64(
    folder: Path, case: Case
) -> tuple[dict[str, Tensor], dict[str, Tensor], set[int]]:
    """Weights before and after the step of SGD by plain transformers, and the tokens selected."""
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    batch, start = fixed_batch(case.seed), 0
    advantages = build_method(case.algorithm).judge(batch).advantages
    rows = []
    for i, (p, n) in enumerate(
        zip(batch.prompt_lengths.tolist(), batch.response_lengths.tolist(), strict=True)
    ):
        tokens = batch.tokens[start : start + p + n]
        start += p + n
        log_p = policy(tokens[None]).logits[0, p - 1 : -1].log_softmax(-1)
        taken = log_p.gather(1, tokens[p:, None]).squeeze(1)
        counts = (advantages[i] * batch.verified[i]).expand(n)
        rows.append((taken, -(log_p.exp() * log_p).sum(1).detach(), counts))
    log_prob, entropy, advantage = (torch.cat(column) for column in zip(*rows, strict=True))
    candidates = (advantage != 0).nonzero().squeeze(1)
    chosen = candidates[
        entropy[candidates].argsort(descending=True)[: max(1, int(len(candidates) * 0.2 + 0.9999))]
    ]
    (-(advantage * log_prob)[chosen].mean()).backward()
    after = {name: (p - case.lr * p.grad).detach() for name, p in policy.named_parameters()}
    return before, after, set(chosen.tolist())


@pytest.mark.wide
@pytest.mark.distributed
def test_float32_explains_what_a_large_step_differs_by(steep: Any) -> None:
    """The step in float64 lies within half the limit of that on one rank and of that on four, so
    two right steps may be that far apart; and more than 0.5e-6 from either, so an absolute limit of
    1e-6 is not one they must keep.

    Shown for one batch, not for all: of the seeds 5 to 12, seed 9 is 5.3e-6 of its move off, over
    half the limit.
    """
    folder, ((whole, cut), _) = steep
    before, after, chosen = twenty_entropy_in_float64(folder, STEEP[0])
    assert whole["selected"]["forks"] == chosen
    scale = moved(before, after)
    for step in (whole, cut):
        errors = {
            name: float((step["weights"][name] - want).abs().max()) for name, want in after.items()
        }
        for name, error in errors.items():
            assert error <= RELATIVE / 2 * scale[name], name
        assert max(errors.values()) > 0.5e-6


@pytest.mark.wide
@pytest.mark.distributed
def test_large_steps_are_held_to_the_same_rule(steep: Any) -> None:
    for case, (whole, cut) in zip(STEEP, steep[1], strict=True):
        assert whole["metrics"]["optimizer/grad_norm"] > 5 and case.lr == 1.0
        assert compare(whole, cut).faults == [], case


def test_the_table_has_every_method() -> None:
    assert ALGORITHMS.keys() >= METHODS.keys()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_method_in_every_layout(name: str, tmp_path: Path) -> None:
    out = tmp_path / "invariance.json"
    done = check("--all", "--methods", name, "--out", str(out), timeout=1200)
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-10_000:]
    rows = json.loads(out.read_text())["methods"]
    assert rows.keys() == {name} and len(rows[name]) == len(LAYOUTS) == 14
    assert all(entry["faults"] == 0 for entry in rows[name].values())
    # the check would be empty where a method selects nothing
    method = re.split("[ ,]", name)[0]
    selecting = ("stare", "stare_predictive", "stapo_stare", "twenty_entropy", "kl_cov")
    selects = method in selecting and name != "twenty_entropy by quantile"
    assert not selects or all(entry["selected"] > 0 for entry in rows[name].values())
