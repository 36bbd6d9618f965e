"""A self-test accepts the same bits in one layout, and in another what rounding makes of the same
numbers."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import pytest
import torch
from support.models import random_batch

from megatron_stare.cluster.trainer_group import StateProof
from megatron_stare.config.schema import Config
from megatron_stare.driver import checkpoint_proof
from megatron_stare.driver.checkpoint_proof import (
    FILE,
    LONGEST,
    SEQUENCES,
    SelfTest,
    canary_of,
    differences,
)
from megatron_stare.errors import DataError
from megatron_stare.process.versions import COMPILED, UNORDERED
from megatron_stare.records.batch import Prompt
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.records.trajectory import sampled_trajectory

SAVED = StateProof(
    {"policy": [-1.0, -2.0, -0.5]}, {"optimizer: m": [3.0, 2.0]}, {"steps of Adam": 4.0}
)


def moved(by: float) -> StateProof:
    return replace(SAVED, log_probs={"policy": [-1.0, -2.0 + by, -0.5]})


@pytest.mark.parametrize(
    ("by", "same_layout", "dtype", "passes"),
    [
        (0.0, True, "float32", True),
        (1e-15, True, "float32", False),
        (9e-6, False, "float32", True),
        (1.1e-5, False, "float32", False),
        (0.07, False, "bfloat16", True),  # a mean of 0.023
        (0.08, False, "bfloat16", False),
        (0.008, False, "float16", True),
        (0.01, False, "float16", False),
        (1e-4, True, "bfloat16", False),
        (math.nan, False, "float32", False),
        (math.nan, False, "bfloat16", False),
    ],
)
def test_log_probs(by: float, same_layout: bool, dtype: str, passes: bool) -> None:
    found = differences(SAVED, moved(by), same_layout=same_layout, dtype=dtype)
    assert (
        found == []
        if passes
        else found[0].startswith("log-probs of the policy differ at 1 of 3 tokens")
    )


def test_sums_and_counts_in_any_layout() -> None:
    near = replace(SAVED, sums={"optimizer: m": [3.0 * (1 + 1e-10), 2.0]})
    far = replace(SAVED, sums={"optimizer: m": [3.0, 2.0 * (1 + 1e-8)]})
    fresh = replace(SAVED, counts={"steps of Adam": 0.0})
    less, more = (
        replace(SAVED, sums={}),
        replace(SAVED, sums={**SAVED.sums, "policy: w": [1.0, 1.0]}),
    )
    for same in (True, False):
        assert differences(SAVED, near, same_layout=same, dtype="float32") == []
        former = replace(SAVED, log_probs={**SAVED.log_probs, "reference policy": [-1.0]})
        assert differences(SAVED, former, same_layout=same, dtype="float32") == []
        for wrong, said in [
            (far, "optimizer: m has the squared norm 2.00000002, 2 was saved"),
            (fresh, "steps of Adam: 4 were saved, 0 are there"),
            (less, "optimizer: m is not there"),
            (more, "policy: w was not saved"),
            (replace(SAVED, log_probs={}), "log-probs of the policy cannot be computed"),
        ]:
            assert differences(SAVED, wrong, same_layout=same, dtype="float32") == [said]


def test_a_run_whose_weights_are_nan_is_as_it_was() -> None:
    nan = StateProof({"policy": [math.nan]}, {"policy: w": [math.nan, math.nan]}, {})
    assert differences(nan, nan, same_layout=True, dtype="float32") == []
    assert differences(
        nan, replace(nan, sums={"policy: w": [1.0, 1.0]}), same_layout=True, dtype="float32"
    )


def test_the_canary_is_small_and_of_different_prompts() -> None:
    batch = random_batch(3, size=8)
    found = canary_of(batch)
    assert 1 < len(found) <= SEQUENCES and all(1 < len(each) <= LONGEST for each in found)
    whole = [part.tolist() for part in batch.tokens.split(batch.lengths.tolist())]
    assert [each in whole for each in found] == [True] * len(found)


def test_the_canary_has_half_its_length_of_a_long_prompt_and_all_of_a_short_one() -> None:
    samples = []
    for cursor, tokens in enumerate((100, 64, 10)):
        prompt = Prompt(cursor, str(cursor), "", "", tuple(range(tokens)))
        samples.append(sampled_trajectory(prompt, 0, range(1000, 1090), [-1.0] * 90))
        samples[-1].reward, samples[-1].reward_status = 1.0, "ok"
    response = list(range(1000, 1090))
    assert canary_of(RolloutBatch.from_trajectories(samples)) == [
        [*range(36, 100), *response[:64]],
        [*range(64), *response[:64]],
        [*range(10), *response],
    ]


def test_the_canary_of_a_batch_reads_its_own_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch may have a hundred million."""
    read = [0]
    really = torch.Tensor.tolist

    def counts(tensor: torch.Tensor) -> list:
        read[0] += tensor.numel()
        return really(tensor)

    batch = random_batch(3, size=64)
    monkeypatch.setattr(torch.Tensor, "tolist", counts)
    found = canary_of(batch)
    assert read[0] <= sum(map(len, found)) + 3 * 64 < len(batch.tokens)


def test_what_is_no_self_test_is_named(tmp_path) -> None:
    assert SelfTest.read(tmp_path) is None
    (tmp_path / FILE).write_text("{}")
    with pytest.raises(DataError, match="the self-test cannot be read"):
        SelfTest.read(tmp_path)


@pytest.mark.parametrize(("kernels", "passes"), [("", False), (COMPILED, True), (UNORDERED, True)])
def test_a_device_whose_sums_have_no_fixed_order_is_compared_as_another_layout_is(
    kernels: str, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same text describes the layout at the save and now, and a log-prob has moved a little."""
    config = Config.model_validate({"model": {"path": "none", "dtype": "bfloat16"}})
    monkeypatch.setattr(checkpoint_proof, "layout_of", lambda ranks, config: f"TP2, {kernels}")

    class Ranks:
        def prove(self, batch: object) -> StateProof:
            return moved(0.004)

    saved = SelfTest(f"TP2, {kernels}", [[5, 6, 7, 8]], SAVED)
    with contextlib.nullcontext() if passes else pytest.raises(DataError, match="log-probs"):
        saved.check(Ranks(), config, "here")
