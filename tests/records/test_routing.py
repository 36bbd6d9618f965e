"""The column of experts: compact, whole tokens, and with every token where it belongs in batches
and shares."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_stare.errors import DataError
from megatron_stare.records.batch import Prompt
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.records.trajectory import (
    Trajectory,
    routing_column,
    sampled_trajectory,
    unknown,
)

PROMPTS = [Prompt(0, "0", "", "", (5, 6, 7)), Prompt(1, "1", "", "", (8, 9))]


@pytest.mark.parametrize(
    ("experts", "dtype"), [(4, torch.uint8), (255, torch.uint8), (256, torch.int16)]
)
def test_an_entry_takes_as_few_bytes_as_tell_all_experts_from_none(
    experts: int, dtype: torch.dtype
) -> None:
    numbers = np.array([0, 1, 2, experts - 1] * 3, dtype=np.int32)
    column = routing_column(numbers, layers=2, each=2, experts=experts)
    assert column.dtype == dtype
    assert column.shape == (3, 2, 2)
    assert column[1].tolist() == [[0, 1], [2, experts - 1]]  # layer by layer
    assert unknown(dtype) >= experts  # no expert's number


def test_what_is_no_column_is_refused() -> None:
    with pytest.raises(ValueError, match="5 experts are not 2 in each of 2 layers"):
        routing_column(np.zeros(5, dtype=np.int32), 2, 2, 4)
    for wrong in (-1, 4, 260):  # which a byte would take for another
        with pytest.raises(ValueError, match="of 4 experts"):
            routing_column(np.array([0, 1, 2, wrong], dtype=np.int32), 2, 2, 4)


def named(prompt: Prompt, sample: int, tokens: int, known: int) -> Trajectory:
    """A response whose first `known` tokens, the prompt's among them, went to experts of their
    own."""
    trajectory = sampled_trajectory(prompt, sample, range(10, 10 + tokens), [-1.0] * tokens)
    first = 20 * prompt.cursor + 10 * sample
    trajectory.experts = torch.arange(first, first + known, dtype=torch.uint8)[
        :, None, None
    ].expand(known, 2, 3)
    return trajectory


def test_a_batch_and_its_shares_have_a_row_a_token() -> None:
    trajectories = [
        named(PROMPTS[1], 0, 3, 4),
        named(PROMPTS[0], 1, 2, 4),
        named(PROMPTS[0], 0, 1, 0),
    ]
    batch = RolloutBatch.from_trajectories(trajectories)
    wanted = [*[255] * 4, *[10, 11, 12, 13, 255], *[20, 21, 22, 23, 255]]
    assert batch.experts is not None
    assert batch.experts.shape == (batch.tokens.numel(), 2, 3)
    assert batch.experts[:, 1, 2].tolist() == wanted
    # which the driver keeps as well
    assert all(trajectory.experts is None for trajectory in batch.trajectories)
    share, other = batch.shares([[0, 2], [1]])
    assert share.experts is not None and other.experts is not None
    assert share.experts[:, 0, 0].tolist() == wanted[:4] + wanted[9:]
    assert other.experts[:, 0, 0].tolist() == wanted[4:9]
    whole = batch.first(2).experts
    assert whole is not None and whole[:, 0, 0].tolist() == wanted[:9]


def test_all_trajectories_name_their_experts_or_none_does() -> None:
    silent = sampled_trajectory(PROMPTS[0], 1, [3], [-1.0])
    assert RolloutBatch.from_trajectories([silent]).experts is None
    with pytest.raises(DataError, match="1 of 2 trajectories do not name the experts") as error:
        RolloutBatch.from_trajectories([named(PROMPTS[0], 0, 1, 2), silent])
    assert error.value.where == "prompt 0, sample 1"


def test_what_an_engine_never_fed_is_unknown() -> None:
    trajectory = sampled_trajectory(Prompt(0, "0", "", "", (5,)), 0, [6, 7], [-1.0, -1.0])
    trajectory.experts = torch.zeros(2, 1, 1, dtype=torch.int16)
    column = RolloutBatch.from_trajectories([trajectory]).experts
    assert column is not None and column.dtype == torch.int16
    assert column.flatten().tolist() == [0, 0, 32767]


def test_more_experts_than_tokens_are_refused() -> None:
    long = named(PROMPTS[0], 0, 2, 6)
    with pytest.raises(RuntimeError, match="must match the existing size"):
        RolloutBatch.from_trajectories([long, named(PROMPTS[1], 0, 3, 4)])


# In a process of its own, whose peak is not above everything that a batch takes.
ASSEMBLY = """
import re
import torch
from megatron_stare.records.batch import Prompt
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.records.trajectory import sampled_trajectory

def peak():
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

prompt = Prompt(0, "0", "", "", (5,))
made = [sampled_trajectory(prompt, n, range(20), [-1.0] * 20) for n in range(50)]
for trajectory in made:
    trajectory.experts = torch.ones(20, 100, 1000, dtype=torch.uint8)
before = peak()
batch = RolloutBatch.from_trajectories(made)
print((peak() - before) / batch.experts.nbytes)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel tells no peak")
def test_a_batch_takes_over_the_experts_without_a_second_copy() -> None:
    """The experts of these 50 responses take 100 MB."""
    done = subprocess.run([sys.executable, "-c", ASSEMBLY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.5  # of the column, above the trajectories with their experts
