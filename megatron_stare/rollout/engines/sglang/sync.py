"""How buckets of weights get into SGLang servers: one interface, for tensor_sync.py, disk_sync.py and broadcast.py.

It has two ends, which may be two processes: senders have the tensors, and each server has one who watches over it.

    servers `open` -> every sender in turn: `meet`, `send` bucket by bucket, `left` -> servers `load`

None of them publishes a version; the engine does, after it has compared what the servers hold. A failure anywhere is an
SGLangError, and leaves servers with a mixture of old and new weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_stare.rollout.engines.sglang.client import SGLangClient, everywhere
from megatron_stare.rollout.engines.sglang.server_layout import ServerLayout

Bucket = Sequence[tuple[str, Tensor]]  # whole tensors of one dtype by Hugging Face name, views of one flat tensor


class WeightSync(ABC):
    """One update after the other; `open` and `meet` also clean up after one that failed.

    Args:
        clients: of the servers that this end speaks to: a sender's are all of them.
    """

    def __init__(self, clients: Sequence[SGLangClient]) -> None:
        self._clients = list(clients)

    async def open(self) -> None:
        """The servers' end: they may be sent weights when this returns."""
        await open_sessions(self._clients)

    @abstractmethod
    async def meet(self, layouts: Sequence[ServerLayout]) -> None:
        """A sender's end: it may send when this returns. Args: layouts: of the servers, in the order of the clients."""

    @abstractmethod
    async def send(self, bucket: Bucket) -> None:
        """Returns when every server has taken the bucket, whose memory may be used again."""

    def left(self) -> str | None:
        """Where what was sent lies, for the servers to fetch; None: they have it."""
        return None

    async def load(self, folder: str | None) -> None:
        """The servers' end: they compute with what was sent when this returns. Args: folder: that senders named."""
        await everywhere(*(client.end_weight_update() for client in self._clients))

    def forget(self) -> None:  # noqa: B027 - most leave nothing
        """Removes what was left for the servers."""

    @abstractmethod
    async def close(self) -> None:
        """Lets go of what the method holds between updates."""


def meeting_device(layouts: Sequence[ServerLayout]) -> torch.device:
    """Where buckets are handed over: this process's GPU where it has one and all servers run on GPUs, else here."""
    on_gpus = torch.cuda.is_available() and all(layout.device == "cuda" for layout in layouts)
    return torch.device("cuda", torch.cuda.current_device()) if on_gpus else torch.device("cpu")


async def open_sessions(clients: Sequence[SGLangClient]) -> None:
    """Opens a weight-update session on every server; one that a failed update left open is ended first."""

    async def open_one(client: SGLangClient) -> None:
        try:
            await client.begin_weight_update()
        except Exception:  # whatever it was: if it lasts, the second attempt says so
            await client.end_weight_update()
            await client.begin_weight_update()

    await everywhere(*(open_one(client) for client in clients))


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
