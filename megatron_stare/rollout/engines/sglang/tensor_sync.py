"""Buckets of weights in the body of a request."""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Sequence
from itertools import islice
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from megatron_stare.rollout.engines.sglang.client import SGLangClient, everywhere
from megatron_stare.rollout.engines.sglang.place import Place, here, require_reach
from megatron_stare.rollout.engines.sglang.server_layout import ServerLayout
from megatron_stare.rollout.engines.sglang.sync import Bucket, WeightSync, meeting_device


class TensorSync(WeightSync):
    """Pickled tensors in the body of a request: of tensors on a GPU that the servers share, handles of CUDA's
    inter-process memory; else their bytes, for correctness: base64 and JSON move about 0.05 GB/s on a core.

    Args:
        places: of the servers, in the order of the clients; None: not known, and then no handle is sent.
    """

    def __init__(self, clients: Sequence[SGLangClient], places: Sequence[Place] | None = None) -> None:
        super().__init__(clients)
        self._places = list(places) if places is not None else [Place()] * len(self._clients)
        self._where = torch.device("cpu")
        self._layouts: Sequence[ServerLayout] = ()

    async def meet(self, layouts: Sequence[ServerLayout]) -> None:
        self._where, self._layouts = meeting_device(layouts), layouts
        if self._where.type == "cuda":
            for client, place in zip(self._clients, self._places, strict=True):
                require_reach(place, here(self._where), client.url)

    async def send(self, bucket: Bucket) -> None:
        lying = [(name, tensor.detach().to(self._where)) for name, tensor in bucket]  # until all servers have copied it
        ranks = sum(layout.tensor for layout in self._layouts)
        # each rank of a server unpickles its own; a handle may be opened by one process alone
        payloads = [packed(lying) for _ in range(ranks)] if self._where.type == "cuda" else [packed(lying)] * ranks
        sent = iter(payloads)
        bodies = [
            {
                "serialized_named_tensors": list(islice(sent, layout.tensor)),
                "load_format": None,
                "flush_cache": False,
            }
            for layout in self._layouts
        ]
        await everywhere(
            *(c.post("/update_weights_from_tensor", body) for c, body in zip(self._clients, bodies, strict=True))
        )

    async def close(self) -> None:
        """Nothing is held."""


def packed(bucket: Bucket) -> str:
    """A bucket as the servers unpickle it, in base64: a list of (name, tensor); CPU tensors with bytes of their own,
    those on a GPU as handles, valid while the tensors live."""
    buffer = io.BytesIO()
    pickler: pickle.Pickler
    if bucket[0][1].is_cuda:
        torch.cuda.synchronize()  # the servers read without waiting for this process's streams
        pickler, tensors = _HandlePickler(buffer), list(bucket)
    else:
        pickler = pickle.Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        tensors = [(name, tensor.detach().clone()) for name, tensor in bucket]  # a view would carry its whole bucket
    pickler.dump(tensors)
    return base64.b64encode(buffer.getbuffer()).decode("ascii")


class _HandlePickler(ForkingPickler):
    """Shares CUDA tensors by handle. Devices are named by their UUID, as SGLang reads them: numbers differ between
    processes that see different GPUs."""

    def reducer_override(self, thing: Any) -> Any:
        if not (isinstance(thing, Tensor) and thing.is_cuda):
            return NotImplemented
        rebuild, arguments = reductions.reduce_tensor(thing)
        uuid = str(torch.cuda.get_device_properties(arguments[_DEVICE]).uuid)
        return rebuild, (*arguments[:_DEVICE], uuid, *arguments[_DEVICE + 1 :])


_DEVICE = 6  # among the arguments of torch's rebuild_cuda_tensor
