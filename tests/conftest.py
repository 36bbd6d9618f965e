"""Fixtures that several test modules share."""

from __future__ import annotations

import os

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    # read when Triton's own functions are defined, which whoever imports it first does;
    # megatron-core does
    os.environ.setdefault("TRITON_INTERPRET", "1")

from hypothesis import settings
from support.ranks import RankPool

# no timing asserts, the same examples every run
settings.register_profile("project", deadline=None, derandomize=True)
settings.load_profile("project")
torch.set_num_threads(1)  # two test processes of two threads each would fight over two cores


POOL = RankPool()


@pytest.fixture
def ranks() -> RankPool:
    """Gloo ranks, kept from test to test; see ranks.py."""
    return POOL


@pytest.fixture(scope="module")
def writers() -> Iterator[RankPool]:
    """Gloo ranks that may start processes of their own, as the writers of checkpoints do."""
    pool = RankPool(with_children=True)
    yield pool
    pool.close()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Lets the ranks go before files without them: idle, their gloo threads still take half a
    core."""
    if nextitem is None or (
        nextitem.path != item.path and "ranks" not in getattr(nextitem, "fixturenames", ())
    ):
        POOL.close()
