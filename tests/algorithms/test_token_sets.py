"""STARE's ablation by worked numbers: which tokens every operator reweights, behind which gate."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.token_batches import ask, state_of
from torch import Tensor

from megatron_stare.algorithms.stare import Stare
from megatron_stare.algorithms.token_sets import token_sets
from megatron_stare.config.load import build_method
from megatron_stare.config.schema import Config
from megatron_stare.errors import ConfigError
from megatron_stare.planning.preflight import check_statistics
from megatron_stare.records.batch import TokenBatch

W, M = 1.5, 0.5
# responses of advantage 1, -1 and 0; the second is masked at its third token
SURPRISAL = [[0.0, 3.0, 0.1, 1.0, 0.2], [4.0, 0.0, 9.0, 0.5, 2.0], [7.0, 0.0]]
# means .25, .3125 without the masked token and .1875, all exact
ENTROPY = [[0.0, 1.0, 0.0625, 0.125, 0.0625], [0.75, 0.0, 5.0, 0.25, 0.25], [0.1875, 0.1875]]
COMPLEMENT = {
    "O1": [[1, W, 1, W, 1], [1, 1, 1, 1, 1]],
    "O2": [[M, 1, M, 1, M], [1, 1, 1, 1, 1]],
    "O3": [[1, 1, 1, 1, 1], [1, W, 1, W, 1]],
    "O4": [[1, 1, 1, 1, 1], [M, 1, 1, 1, M]],
    "C1": [[1, W, 1, W, 1], [1, W, 1, W, 1]],
    "C2": [[1, W, 1, W, 1], [M, 1, 1, 1, M]],
    "C3": [[M, 1, M, 1, M], [1, W, 1, W, 1]],
    "C4": [[M, 1, M, 1, M], [M, 1, 1, 1, M]],
}
BOTTOM = COMPLEMENT | {
    "O2": [[M, 1, M, 1, 1], [1, 1, 1, 1, 1]],
    "C3": [[M, 1, M, 1, 1], [1, W, 1, W, 1]],
    "C4": [[M, 1, M, 1, 1], [M, 1, 1, 1, M]],
}
BELOW_HALF = {  # p < 0.5 is s > 0.693
    "C2": [[1, W, 1, W, 1], [M, 1, 1, 1, M]],
    "C3": [[M, 1, M, 1, M], [1, W, 1, W, 1]],
}
BELOW_A_TENTH = {"C2": [[1, W, 1, 1, 1], [M, 1, 1, 1, 1]], "C3": [[M, 1, M, M, M], [1, W, 1, W, W]]}


def batch_of() -> TokenBatch:
    sequence = torch.tensor([i for i, row in enumerate(SURPRISAL) for _ in row])
    surprisal = torch.tensor([x for row in SURPRISAL for x in row])
    mask = torch.ones(12, dtype=torch.bool)
    mask[7] = False
    return TokenBatch(
        log_prob=-surprisal,
        old_log_prob=-surprisal,
        rollout_log_prob=-surprisal,
        entropy=torch.tensor([x for row in ENTROPY for x in row]),
        advantage=torch.tensor([1.0, -1.0, 0.0])[sequence],
        loss_mask=mask,
        sequence=sequence,
        position=torch.zeros(12, dtype=torch.int64),
        index=torch.arange(12),
        num_sequences=3,
        sequence_lengths=torch.tensor([5, 4, 2]),
    )


def method_of(variant: str, **settings: Any) -> Stare:
    found = build_method(
        {
            "name": "stare",
            "variant": variant,
            "share": 0.4,
            "amplify": W,
            "attenuate": M,
            **settings,
        }
    )
    assert isinstance(found, Stare)
    return found


def weights_of(variant: str, **settings: Any) -> Tensor:
    method, batch = method_of(variant, entropy_target=None, **settings), batch_of()
    return method.weights(batch, ask(method, batch), state_of(method))


def flat(rows: list[list[float]]) -> Tensor:
    return torch.tensor([float(x) for row in [*rows, [1, 1]] for x in row])


@pytest.mark.parametrize("variant", COMPLEMENT)
def test_each_variant_reweights_its_quadrants(variant: str) -> None:
    assert torch.equal(weights_of(variant), flat(COMPLEMENT[variant]))  # type: ignore[arg-type]
    assert torch.equal(weights_of(variant, common="bottom"), flat(BOTTOM[variant]))  # type: ignore[arg-type]


@pytest.mark.parametrize("variant", BELOW_HALF)
def test_a_fixed_bound_parts_rare_from_common(variant: str) -> None:
    assert torch.equal(weights_of(variant, rare_below=0.5), flat(BELOW_HALF[variant]))  # type: ignore[arg-type]
    assert torch.equal(weights_of(variant, rare_below=0.1), flat(BELOW_A_TENTH[variant]))  # type: ignore[arg-type]


def test_the_bound_itself_is_common() -> None:
    batch, method = batch_of(), method_of("O1", rare_below=0.5)
    batch.old_log_prob = torch.tensor([0.5, 0.5 - 1e-6, 0.5 + 1e-6] * 4).log()
    chosen = method.selected(batch, ask(method, batch))
    assert chosen.tolist() == [0, 1, 0, 0, 1] + [0] * 7


@pytest.mark.parametrize(
    ("variant", "signs"), [("C1", {1, -2}), ("C2", {1, -1}), ("C3", {2, -2}), ("C4", {2, -1})]
)
def test_what_is_selected_is_told_apart(variant: str, signs: set[int]) -> None:
    # the gate is closed: weights are 1
    method, batch = method_of(variant, entropy_target=1e-9), batch_of()
    statistics = ask(method, batch)
    state = state_of(method, statistics)
    assert set(method.weights(batch, statistics, state).tolist()) == {1.0}
    chosen = method.selected(batch, statistics)
    assert set(chosen.tolist()) == {0} | signs
    logged = method.metrics(statistics, state)
    for each in token_sets(variant):  # type: ignore[arg-type]
        members = batch.surprisal[chosen == each.code]
        others = batch.surprisal[
            batch.loss_mask & (batch.advantage == each.sign) & (chosen != each.code)
        ]
        assert len(members) == int(logged[f"stare/selected_{each.name}"])
        bound = float(logged[f"stare/threshold_{each.name}"])
        assert (
            min(members) == bound > max(others)
            if each.rare
            else max(members) < bound == min(others)
        )
    assert len([name for name in logged if "selected" in name]) == 2


def test_what_is_logged_of_the_bottom_and_of_a_fixed_bound() -> None:
    batch = batch_of()
    for settings, number, bound in (
        ({"common": "bottom"}, 2, 0.1),
        ({"rare_below": 0.1}, 4, math.log(10)),
    ):
        method = method_of("O2", **settings)
        logged = method.metrics(ask(method, batch), state_of(method))
        assert int(logged["stare/selected_common_plus"]) == number
        assert float(logged["stare/threshold_common_plus"]) == pytest.approx(bound)


def test_equal_surprisals_are_parted_once() -> None:
    """Rare and common by complement never overlap and leave none out; the bottom takes the first of
    equals."""
    batch, everyone = batch_of(), torch.ones(12)
    batch.old_log_prob = torch.zeros(12)
    for variant, common in (("O1", "complement"), ("O2", "complement"), ("O2", "bottom")):
        method = method_of(variant, common=common, entropy_target=None)
        everyone *= 1 + 99 * (method.weights(batch, ask(method, batch), state_of(method)) != 1)
    assert everyone.tolist() == [1e4, 1e4, 1e2, 1e2, 1e2] + [1.0] * 7


@pytest.mark.parametrize(
    ("gate", "target", "opened"),
    [
        ("token", 0.125, [1, 0, 1, 0, 1, 0, 1, 0, 0, 0, 0, 0]),  # strict
        ("token", 0.126, [1, 0, 1, 1, 1, 0, 1, 0, 0, 0, 0, 0]),
        ("sample", 0.25, [0] * 10 + [1, 1]),
        ("sample", 0.3125, [1] * 5 + [0] * 5 + [1, 1]),
        ("sample", 0.32, [1] * 12),
    ],
)
def test_gates_of_samples_and_of_tokens(gate: str, target: float, opened: list[int]) -> None:
    method, batch = method_of("C2", share=1.0, gate=gate, entropy_target=target), batch_of()
    statistics = ask(method, batch)
    state = state_of(method, statistics)
    want = torch.tensor([W] * 5 + [M] * 5 + [1.0] * 2)
    want = torch.where(torch.tensor(opened, dtype=torch.bool) & batch.loss_mask, want, 1.0)
    assert torch.equal(method.weights(batch, statistics, state), want)
    assert "stare/gate" not in method.metrics(statistics, state)  # which is that of a batch
    shares = method.token_loss(batch, statistics, state).shares
    assert shares["stare/open"].tolist() == opened


def test_only_the_gate_of_a_batch_moves_with_it() -> None:
    for gate, state in (("batch", 0.0), ("sample", 1.0), ("token", 1.0)):
        method = method_of("C2", gate=gate, entropy_target=0.2, adaptive=True)
        after = state_of(method, ask(method, batch_of()))
        assert float(after["gate"]) == state
        # by the mean, 0.26
        assert (float(after["amplify"]), float(after["attenuate"])) == (W - 0.01, M + 0.01)


@pytest.mark.parametrize("gate", ["batch", "sample", "token"])
def test_a_gate_that_reads_entropies_needs_the_pass_that_gives_them(gate: str) -> None:
    config = Config.model_validate(
        {
            "model": {"path": "assets/tiny-adder"},
            "statistics": {"surprisal": "rollout", "gate": "lagged"},
            "observability": {"entropy_forecast": False},
            "algorithm": {"name": "stare", "gate": gate},
        }
    )
    if gate == "batch":
        check_statistics(config, config.algorithm.method)
        return
    with pytest.raises(
        ConfigError, match=f"the gate of every {gate} reads the entropies of the log-prob pass"
    ):
        check_statistics(config, config.algorithm.method)
