"""How buckets of weights get into SGLang servers: three methods behind one interface.

    engine begins -> `begin`; every bucket of the trainer's stream -> `send`; the stream's end -> `end`

None of them publishes a version; the engine does, after it has compared what the servers hold. A failure anywhere is an
SGLangError, and leaves servers with a mixture of old and new weights.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.multiprocessing import reductions

from megatron_stare.errors import unknown_name
from megatron_stare.rollout.sglang.client import SGLangClient, everywhere

Bucket = Sequence[tuple[str, Tensor]]  # whole tensors of one dtype by Hugging Face name, views of one flat tensor


class WeightSync(ABC):
    """One update after the other; `begin` also cleans up after one that failed."""

    def __init__(self, clients: Sequence[SGLangClient]) -> None:
        self._clients = list(clients)

    async def _device(self) -> torch.device:
        """Where buckets are handed over: this process's GPU where it has one and all servers run on GPUs, else here."""
        infos = await everywhere(*(client.server_info() for client in self._clients))
        on_gpus = torch.cuda.is_available() and all(info["device"] == "cuda" for info in infos)
        return torch.device("cuda", torch.cuda.current_device()) if on_gpus else torch.device("cpu")

    @abstractmethod
    async def begin(self) -> None: ...

    @abstractmethod
    async def send(self, bucket: Bucket) -> None:
        """Returns when every server has taken the bucket, whose memory may be used again."""

    @abstractmethod
    async def end(self) -> None:
        """Returns when every server computes with what was sent."""

    @abstractmethod
    async def close(self) -> None:
        """Lets go of what the method holds between updates."""


class TensorSync(WeightSync):
    """Pickled tensors in the body of a request: of tensors on a GPU that the servers share, handles of CUDA's
    inter-process memory; else their bytes, for correctness: base64 and JSON move about 0.05 GB/s on a core."""

    _where = torch.device("cpu")

    async def begin(self) -> None:
        self._where = await self._device()
        await open_sessions(self._clients)

    async def send(self, bucket: Bucket) -> None:
        lying = [(name, tensor.detach().to(self._where)) for name, tensor in bucket]  # until all servers have copied it
        body = {"serialized_named_tensors": [packed(lying)], "load_format": None, "flush_cache": False}
        await everywhere(*(c.post("/update_weights_from_tensor", body) for c in self._clients))

    async def end(self) -> None:
        await everywhere(*(c.end_weight_update() for c in self._clients))

    async def close(self) -> None:
        """Nothing is held."""


class DiskSync(WeightSync):
    """A Hugging Face folder that the servers load: one file a bucket, in a folder all of them can read.

    Args:
        companions: folder whose config the servers find beside the weights.
        parent: where the folder is made and removed again; None: the system's folder for temporary files.
    """

    def __init__(self, clients: Sequence[SGLangClient], companions: str, parent: str | None = None) -> None:
        super().__init__(clients)
        self._companions, self._parent = Path(companions), parent
        self._folder: Path | None = None
        self._files: dict[str, str] = {}  # name of a tensor to the file it is in

    async def begin(self) -> None:
        await self.close()
        self._folder = Path(tempfile.mkdtemp(prefix="megatron-stare-weights-", dir=self._parent))
        self._files = {}
        for name in ("config.json", "generation_config.json"):
            if (self._companions / name).is_file():
                shutil.copy(self._companions / name, self._folder)

    async def send(self, bucket: Bucket) -> None:
        assert self._folder is not None
        file = f"model-{len(set(self._files.values())) + 1:05d}.safetensors"
        save_file({name: tensor.clone() for name, tensor in bucket}, self._folder / file, {"format": "pt"})
        self._files |= {name: file for name, _ in bucket}

    async def end(self) -> None:
        assert self._folder is not None
        index = {"metadata": {}, "weight_map": self._files}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index))
        body = {"model_path": str(self._folder), "load_format": "safetensors", "flush_cache": False}
        try:
            await everywhere(*(c.post("/update_weights_from_disk", body) for c in self._clients))
        finally:
            await self.close()

    async def close(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


async def open_sessions(clients: Sequence[SGLangClient]) -> None:
    """Opens a weight-update session on every server; one that a failed update left open is ended first."""
    for client in clients:
        try:
            await client.begin_weight_update()
        except Exception:  # whatever it was: if it lasts, the second attempt says so
            await client.end_weight_update()
            await client.begin_weight_update()


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


def make_sync(method: str, clients: Sequence[SGLangClient], model_path: str, timeout_s: float) -> WeightSync:
    """The method that `sglang.sync` names."""
    from megatron_stare.rollout.sglang.broadcast import BroadcastSync

    made: dict[str, Any] = {
        "tensor": lambda: TensorSync(clients),
        "disk": lambda: DiskSync(clients, model_path),
        "distributed": lambda: BroadcastSync(clients, timeout_s),
    }
    if method not in made:
        raise unknown_name(method, made, "sglang.sync")
    sync: WeightSync = made[method]()
    return sync


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
