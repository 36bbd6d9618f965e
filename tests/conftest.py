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
from hypothesis import settings
from ranks import RankPool

settings.register_profile("project", deadline=None, derandomize=True)  # no timing asserts, the same examples every run
settings.load_profile("project")
torch.set_num_threads(1)  # two test processes of two threads each would fight over two cores


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Gloo ranks; see ranks.py."""
    pool = RankPool()
    yield pool
    pool.close()
