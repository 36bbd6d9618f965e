"""Transfers buckets of weights in the bodies of HTTP requests."""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Sequence
from itertools import islice
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from megatron_stare.rollout.engines.sglang.client import SGLangClient, everywhere
from megatron_stare.rollout.engines.sglang.place import Place, here, require_reach
from megatron_stare.rollout.engines.sglang.server_layout import ServerLayout
from megatron_stare.rollout.engines.sglang.sync import Bucket, WeightSync, meeting_device
from megatron_stare.weights.sync.device_rooms import open_shared, shared_name


class TensorSync(WeightSync):
    """Sends each bucket as pickled tensors in the body of an HTTP request. If trainer and server
    share a GPU, the tensors on this GPU are sent as CUDA IPC handles. CPU tensors in shared memory
    are sent as file names. CPU tensors outside shared memory are sent as bytes. Sending bytes is
    meant for correctness tests, because base64 and JSON limit the speed to about 0.05 GB/s on one
    core.

    Args:
        places: places of the servers, in the order of the clients; None: the places are unknown, so
            no handle is sent.
    """

    def __init__(
        self, clients: Sequence[SGLangClient], places: Sequence[Place] | None = None
    ) -> None:
        super().__init__(clients)
        self._places = list(places) if places is not None else [Place()] * len(self._clients)
        self._where = torch.device("cpu")
        self._layouts: Sequence[ServerLayout] = ()

    async def meet(self, layouts: Sequence[ServerLayout]) -> None:
        self._where, self._layouts = meeting_device(layouts), layouts
        if self._where.type == "cuda":
            for client, place in zip(self._clients, self._places, strict=True):
                require_reach(place, here(self._where), client.url)

    async def send(self, bucket: Bucket, handles: Sequence[str] = ()) -> None:
        sent = iter(handles or self._packed(bucket))
        bodies = [
            {
                "serialized_named_tensors": list(islice(sent, layout.tensor)),
                "load_format": None,
                "flush_cache": False,
            }
            for layout in self._layouts
        ]
        await everywhere(
            *(
                c.post("/update_weights_from_tensor", body)
                for c, body in zip(self._clients, bodies, strict=True)
            )
        )

    def _packed(self, bucket: Bucket) -> list[str]:
        """Returns a list with one pickled copy of the bucket for each rank of each server. On GPUs,
        each rank gets its own handles, because only one process may open a handle."""
        # kept alive until all servers have copied the memory
        lying = [(name, tensor.detach().to(self._where)) for name, tensor in bucket]
        ranks = sum(layout.tensor for layout in self._layouts)
        return (
            [packed(lying) for _ in range(ranks)]
            if self._where.type == "cuda"
            else [packed(lying)] * ranks
        )

    async def close(self) -> None:
        """Does nothing, because this class keeps no resources between updates."""


def packed(bucket: Bucket) -> str:
    """Pickles a bucket as a list of (name, tensor), and encodes the pickle in base64 for the
    servers. Tensors on a GPU or in shared memory (DeviceRooms) are pickled as handles. A handle is
    valid only while its tensor exists. CPU tensors outside shared memory are pickled with their
    bytes."""
    buffer = io.BytesIO()
    pickler: Any
    first = bucket[0][1]
    if first.is_cuda:
        torch.cuda.synchronize()  # the servers read without waiting for this process's streams
        pickler, tensors = _HandlePickler(buffer), list(bucket)
    elif shared_name(first.untyped_storage()) is not None:
        pickler = _SharedPickler(buffer)
        tensors = [(name, tensor.detach()) for name, tensor in bucket]
    else:
        pickler = _BytesPickler(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        # clone, because pickling a view would include its whole bucket
        tensors = [(name, tensor.detach().clone()) for name, tensor in bucket]
    pickler.dump(tensors)
    return base64.b64encode(buffer.getbuffer()).decode("ascii")


class _BytesPickler(pickle._Pickler):  # the C version does its own name lookup
    """Pickles the bytes of a storage. The pickle refers to the torch function
    `torch.storage._load_from_bytes`, with which a server loads the bytes. In this process,
    megatron-core 0.19 has replaced `torch.storage._load_from_bytes` with megatron-core's function
    `safe_load_from_bytes`. Servers do not load megatron-core, and refuse a pickle that refers to
    `safe_load_from_bytes`."""

    dispatch: ClassVar[dict[type, Any]] = dict(pickle._Pickler.dispatch)

    def save_function(self, function: Any) -> None:
        if function is torch.storage._load_from_bytes:
            self.write(pickle.GLOBAL + b"torch.storage\n_load_from_bytes\n")  # type: ignore[attr-defined]
        else:
            self.save_global(function)  # type: ignore[attr-defined]

    dispatch[FunctionType] = save_function


class _HandlePickler(ForkingPickler):
    """Shares CUDA tensors by handle. Identifies devices by UUID, as SGLang does, because device
    numbers differ between processes that see different GPUs."""

    def reducer_override(self, thing: Any) -> Any:
        if not (isinstance(thing, Tensor) and thing.is_cuda):
            return NotImplemented
        rebuild, arguments = reductions.reduce_tensor(thing)
        uuid = str(torch.cuda.get_device_properties(arguments[_DEVICE]).uuid)
        return rebuild, (*arguments[:_DEVICE], uuid, *arguments[_DEVICE + 1 :])


class _SharedPickler(ForkingPickler):
    """Pickles a CPU tensor in shared memory. The pickle contains the name of the shared-memory file
    instead of the tensor's bytes. Only servers with this project's plug-ins can open the
    shared-memory file."""

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, torch.UntypedStorage) and (name := shared_name(thing)) is not None:
            return open_shared, (name, thing.nbytes())
        if isinstance(thing, Tensor):
            # avoids torch's own reduction, which would move the memory
            part = thing.storage_offset(), thing.size(), thing.stride(), False
            return reductions.rebuild_tensor, (
                Tensor,
                torch.storage.TypedStorage(
                    wrap_storage=thing.untyped_storage(), dtype=thing.dtype, _internal=True
                ),
                part,
            )
        if isinstance(thing, torch.storage.TypedStorage):
            return reductions.rebuild_typed_storage, (thing._untyped_storage, thing.dtype)
        return NotImplemented


_DEVICE = 6  # index of the device in the arguments of torch's rebuild_cuda_tensor
