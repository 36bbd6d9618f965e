"""Lets unpatched megatron-core run on a machine without CUDA. Also lets megatron-core build models
on the meta device, where tensors have no data. A model can be built on the meta device of any
machine, with or without CUDA.

The context manager `cpu_backend` replaces the CUDA calls in the parts of megatron-core that this
project uses, and restores them on exit. Without CUDA, every call into Megatron runs inside
`cpu_backend`. `cpu_backend` raises an error if CUDA is available, unless the model is on the meta
device.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe import token_dispatcher
from torch.overrides import TorchFunctionMode

from megatron_stare.megatron.upstream import UNDEFINED

_ABSENT = object()
_CUDA_TYPES = {
    "torch.FloatTensor": "torch.cuda.FloatTensor",
    "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor",
    "torch.HalfTensor": "torch.cuda.HalfTensor",
    "torch.meta.FloatTensor": "torch.cuda.FloatTensor",
    "torch.meta.BFloat16Tensor": "torch.cuda.BFloat16Tensor",
    "torch.meta.HalfTensor": "torch.cuda.HalfTensor",
}


@contextlib.contextmanager
def substituted(owner: Any, name: str, value: Any, *, absent: bool = False) -> Iterator[None]:
    """Sets the attribute `name` of `owner` to `value` while the context is open. On exit, restores
    the earlier value, or removes the attribute if it did not exist before.

    Args:
        absent: true if the attribute may be missing at the start.

    Raises:
        AttributeError: the attribute is missing. The installed release of the upstream library is
            then not the release that this code was written for.
    """
    before = vars(owner).get(name, _ABSENT)
    if before is _ABSENT and not absent:
        raise AttributeError(f"{owner.__name__} has no {name} to substitute")
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


class _CudaMeansOurs(TorchFunctionMode):
    """Redirects torch calls that request a CUDA device to this rank's device. Inside this mode,
    `device="cuda"` means this rank's device, and `.cuda()` returns the tensor itself. Requests for
    pinned memory are ignored. `.type()` returns the name of the CUDA type, e.g.
    torch.cuda.FloatTensor, because optimizers look for this name."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if not kwargs:
            result = func(*args)
            return (
                _CUDA_TYPES.get(result, result)
                if func is torch.Tensor.type and len(args) == 1
                else result
            )
        asked = kwargs.get("device")
        if asked is not None and torch.device(asked).type == "cuda":
            kwargs = {**kwargs, "device": device().type}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


class _InertStream:
    """Substitute for the CUDA stream on which mixture-of-experts layers copy tensors to the host. A
    CPU has no streams."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self) -> _InertStream:
        return self


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Substitute for Megatron's function that copies tensors to the host. Copies nothing, because
    the tensors are already on the host."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _get_random_state(
    device: Any = "cuda", clone: bool = False, graph_safe: bool = False
) -> torch.Tensor:
    """Returns the random state of the CPU generator. Megatron's recomputation of activations calls
    this substitute to get the random state of the CUDA generator."""
    return torch.get_rng_state()


def _set_random_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
    """Restores a random state that `_get_random_state` returned."""
    torch.set_rng_state(new_state)


@contextlib.contextmanager
def cpu_backend() -> Iterator[None]:
    """Redirects megatron-core's CUDA calls to the CPU or the meta device. Restores every attribute
    on exit.

    Raises:
        RuntimeError: CUDA is available and the model is not on the meta device. Substitutions would
            then hide the GPU from Megatron.
    """
    if uses_cuda():
        raise RuntimeError("cpu_backend() on a machine with CUDA would hide the GPU from Megatron")
    with (
        substituted(torch.cuda, "current_device", lambda: device().type),
        substituted(torch.cuda, "synchronize", lambda device=None: None),
        substituted(torch.cuda, "Stream", _InertStream),
        substituted(torch.cuda, "current_stream", _InertStream),
        substituted(torch.cuda, "stream", contextlib.nullcontext),
        substituted(random, "_get_cuda_rng_state", _get_random_state),
        substituted(random, "_set_cuda_rng_state", _set_random_state),
        substituted(token_dispatcher, "maybe_move_tensor_to_cpu", _to_host),
        contextlib.ExitStack() as undefined,
        _CudaMeansOurs(),
    ):
        for owner, name in UNDEFINED:
            undefined.enter_context(substituted(owner, name, None, absent=True))
        yield


def backend() -> contextlib.AbstractContextManager[None]:
    """Returns the context manager for calls into Megatron. If this rank uses CUDA, the context
    manager does nothing; otherwise, it replaces Megatron's CUDA calls."""
    return contextlib.nullcontext() if uses_cuda() else cpu_backend()


def uses_cuda() -> bool:
    """Returns True if this rank's device is a CUDA device. Does not initialise CUDA."""
    return torch.cuda.is_available() and not _on_meta


def has_transformer_engine() -> bool:
    """Returns True if the model uses Transformer Engine's layers, including attention. Returns
    False if the model uses Megatron's local layers."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def device() -> torch.device:
    """Returns the device of this rank."""
    if uses_cuda():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("meta" if _on_meta else "cpu")


_on_meta = False


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Makes this process use the meta device while the context is open, even if CUDA is available.
    If a model is built while the context manager is active, the model's tensors have names, shapes
    and dtypes, but no data."""
    with substituted(sys.modules[__name__], "_on_meta", True):
        yield
