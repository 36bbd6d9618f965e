"""One weight update of all servers: pause, stream, compare names and checksums, publish the version, resume.

Weights are changed in place, so there is no way back: whoever sees an error must count every server as holding a
mixture, and leave them paused until another update has gone through to its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import torch

from megatron_stare.models.shape import ModelShape
from megatron_stare.rollout.engine import WeightUpdateError
from megatron_stare.rollout.sglang.client import PauseMode, SGLangClient, everywhere
from megatron_stare.rollout.sglang.fingerprint import Fingerprint, differences
from megatron_stare.rollout.sglang.server_layout import ServerLayout
from megatron_stare.rollout.sglang.sync import Bucket, WeightSync
from megatron_stare.weights.checksum import tensor_checksum


class WeightUpdate:
    """Consumes the buckets of one version, in order; each method waits for every server, and for nothing else.

    Args:
        shape: of the model.
        dtype: that the servers compute in.
        mode: what becomes of responses under way. `abort` ends them; `retract` goes on with them, their cache computed
            anew with the new weights.
        proven: the sizes, by name, of the tensors that the servers were proven to consist of. What is sent is then held
            against it, and nothing is hashed; None: every server proves what it holds.
    """

    def __init__(
        self,
        clients: Sequence[SGLangClient],
        sync: WeightSync,
        version: int,
        shape: ModelShape,
        dtype: torch.dtype,
        mode: PauseMode = "abort",
        proven: Mapping[str, torch.Size] | None = None,
    ) -> None:
        self._proven = proven
        self.sizes: dict[str, torch.Size] = {}  # of what was sent so far
        self.version, self._mode = version, mode
        self._clients, self._sync = list(clients), sync
        self._shape, self._dtype = shape, dtype
        self._fingerprints: dict[ServerLayout, Fingerprint] = {}
        self._layouts: list[ServerLayout] = []  # of each server
        self._received: dict[str, str] = {}

    @property
    def proves(self) -> bool:
        """Whether values are compared."""
        return self._proven is None

    async def begin(self) -> None:
        await everywhere(*(client.pause(self._mode) for client in self._clients))
        infos = await everywhere(*(client.server_info() for client in self._clients))
        self._layouts = [ServerLayout.of(info, c.url) for info, c in zip(infos, self._clients, strict=True)]
        self._fingerprints = {layout: Fingerprint(self._shape, self._dtype, layout) for layout in self._layouts}
        await self._sync.begin(self._layouts)

    async def send(self, bucket: Bucket) -> None:
        """Raises WeightUpdateError for a name that was sent before."""
        for name, tensor in bucket:
            if name in self.sizes:
                raise WeightUpdateError(f"parameter {name!r} was sent twice in one update")
            self.sizes[name], self._received[name] = tensor.shape, ""
        if not self.proves:
            await self._sync.send(bucket)
            return
        # hashed in a thread while the servers take the bucket
        await everywhere(self._sync.send(bucket), asyncio.to_thread(self._hash, bucket))

    def _hash(self, bucket: Bucket) -> None:
        for name, tensor in bucket:
            self._received[name] = tensor_checksum(tensor)
            for fingerprint in self._fingerprints.values():
                fingerprint.add(name, tensor)

    async def end(self) -> dict[str, str]:
        """Checksums (weights/checksum.py) of the tensors that were sent, by name, once every server is proven to hold
        them; "" where nothing is proven.

        Raises:
            WeightUpdateError: a server lacks a tensor, or has other values.
        """
        await self._sync.end()
        if self._proven is None:
            await self._prove()
        elif wrong := _other_sizes(self.sizes, self._proven):
            raise _not_held(wrong, ", ".join(client.url for client in self._clients))
        await everywhere(*(client.flush() for client in self._clients))
        await everywhere(*(client.publish_version(str(self.version)) for client in self._clients))
        await everywhere(*(client.resume() for client in self._clients))
        return self._received

    async def _prove(self) -> None:
        sent = {layout: fingerprint.checksums() for layout, fingerprint in self._fingerprints.items()}
        held_by = await everywhere(*(client.checksums() for client in self._clients))
        for client, layout, held in zip(self._clients, self._layouts, held_by, strict=True):
            if wrong := differences(sent[layout], held):
                raise _not_held(wrong, client.url)


def _other_sizes(sent: Mapping[str, torch.Size], proven: Mapping[str, torch.Size]) -> list[str]:
    lines = [f"{name} was not sent" for name in sorted(proven.keys() - sent.keys())]
    lines += [f"{name} does not exist there" for name in sorted(sent.keys() - proven.keys())]
    both = sorted(sent.keys() & proven.keys())
    return lines + [f"{n} was sent as {list(sent[n])}, not {list(proven[n])}" for n in both if sent[n] != proven[n]]


def _not_held(wrong: Sequence[str], where: str) -> WeightUpdateError:
    more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return WeightUpdateError(
        f"the server does not hold the weights that were sent: {'; '.join(wrong[:3])}{more}",
        where=where,
        fix="sync again; if it lasts, the server's memory or its loading of this model is at fault",
    )
