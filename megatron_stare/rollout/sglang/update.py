"""One weight update of all servers: pause, stream, compare names and checksums, publish the version, resume.

Weights are changed in place, so there is no way back: whoever sees an error must count every server as holding a
mixture, and leave them paused until another update has gone through to its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch

from megatron_stare.models.family import ModelFamily
from megatron_stare.rollout.engine import WeightUpdateError
from megatron_stare.rollout.sglang.client import PauseMode, SGLangClient, everywhere
from megatron_stare.rollout.sglang.fingerprint import Fingerprint, differences
from megatron_stare.rollout.sglang.sync import Bucket, WeightSync
from megatron_stare.weights.checksum import tensor_checksum


class WeightUpdate:
    """Consumes the buckets of one version, in order; each method waits for every server, and for nothing else.

    Args:
        family: of the model.
        dtype: that the servers compute in.
        mode: what becomes of responses under way. `abort` ends them; `retract` goes on with them, their cache computed
            anew with the new weights.
    """

    def __init__(
        self,
        clients: Sequence[SGLangClient],
        sync: WeightSync,
        version: int,
        family: ModelFamily,
        dtype: torch.dtype,
        mode: PauseMode = "abort",
    ) -> None:
        self.version, self._mode = version, mode
        self._clients, self._sync = list(clients), sync
        self._fingerprint = Fingerprint(family, dtype)
        self._received: dict[str, str] = {}

    async def begin(self) -> None:
        await everywhere(*(client.pause(self._mode) for client in self._clients))
        await self._sync.begin()

    async def send(self, bucket: Bucket) -> None:
        """Raises WeightUpdateError for a name that was sent before."""
        for name, _ in bucket:
            if name in self._received:
                raise WeightUpdateError(f"parameter {name!r} was sent twice in one update")
            self._received[name] = ""
        # hashed in a thread while the servers take the bucket
        await everywhere(self._sync.send(bucket), asyncio.to_thread(self._hash, bucket))

    def _hash(self, bucket: Bucket) -> None:
        for name, tensor in bucket:
            self._received[name] = tensor_checksum(tensor)
            self._fingerprint.add(name, tensor)

    async def end(self) -> dict[str, str]:
        """Checksums (weights/checksum.py) of the tensors that were sent, by name, once every server is proven to hold
        them.

        Raises:
            WeightUpdateError: a server lacks a tensor, or has other values.
        """
        await self._sync.end()
        sent = self._fingerprint.checksums()
        for client, held in zip(self._clients, await everywhere(*(c.checksums() for c in self._clients)), strict=True):
            if wrong := differences(sent, held):
                more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
                raise WeightUpdateError(
                    f"the server does not hold the weights that were sent: {'; '.join(wrong[:3])}{more}",
                    where=client.url,
                    fix="sync again; if it lasts, the server's memory or its loading of this model is at fault",
                )
        await everywhere(*(client.flush() for client in self._clients))
        await everywhere(*(client.publish_version(str(self.version)) for client in self._clients))
        await everywhere(*(client.resume() for client in self._clients))
        return self._received
