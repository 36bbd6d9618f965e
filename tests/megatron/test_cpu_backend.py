"""The CPU substitutions are all taken back, and never made where there is a GPU."""

from __future__ import annotations

import types
from unittest import mock

import pytest
import torch

from megatron_stare.megatron.backend.cpu_backend import cpu_backend, substituted


def test_every_attribute_is_restored_even_after_an_error() -> None:
    before = dict(vars(torch.cuda))
    with pytest.raises(KeyError), cpu_backend():
        raise KeyError(torch.cuda.current_device())
    after = dict(vars(torch.cuda))
    assert {n for n in before.keys() | after.keys() if before.get(n) is not after.get(n)} == set()
    if not torch.cuda.is_available():
        with pytest.raises((AssertionError, RuntimeError)):
            torch.zeros(1, device="cuda")


def test_what_is_not_there_is_not_substituted() -> None:
    holder = types.ModuleType("holder")
    with (
        pytest.raises(AttributeError, match="holder has no gone to substitute"),
        substituted(holder, "gone", 1),
    ):
        pass
    with substituted(holder, "gone", 1, absent=True):
        assert holder.gone == 1
    assert not hasattr(holder, "gone")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_means_cpu_inside() -> None:
    with cpu_backend():
        x = torch.zeros(2, device="cuda")
        assert x.device.type == "cpu"
        assert x.cuda() is x
        assert x.type() == "torch.cuda.FloatTensor"
        assert x.type(torch.float64).dtype == torch.float64
        torch.cuda.synchronize()


def test_refused_where_cuda_is_available() -> None:
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        pytest.raises(RuntimeError, match="hide the GPU"),
        cpu_backend(),
    ):
        pass
