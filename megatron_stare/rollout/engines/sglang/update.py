"""Runs one weight update of the SGLang servers. In an update, the servers pause and receive
weights. The update then makes a full check or a quick check of the weights. An update with a full
check is called a verified update. A full check compares the names and checksums of the servers'
tensors with the names and checksums of the sent tensors. A quick check does not read the servers'
tensors. The quick check compares the names and sizes of the sent tensors with the names and sizes
that an earlier verified update recorded. After the check, the servers receive the number of the new
version and resume.

Weights are changed in place, so an update cannot be undone. After an error, the caller must assume
that every server holds a mixture of old and new weights. After an error, the caller must also leave
the servers paused until another update succeeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megatron_stare.models.shape import ModelShape
from megatron_stare.rollout.engines.engine import WeightUpdateError
from megatron_stare.rollout.engines.sglang.client import PauseMode, SGLangClient, everywhere
from megatron_stare.rollout.engines.sglang.fingerprint import checksums_of, differences
from megatron_stare.rollout.engines.sglang.server_layout import ServerLayout
from megatron_stare.rollout.engines.sglang.sync import Bucket, Sending, Sent, WeightSync
from megatron_stare.weights.sync.stream import tensor_checksum


class WeightUpdate:
    """Update of the servers to one weight version. Each method waits until all servers have
    answered.

    An update starts with `begin`. After `begin`, the training ranks send the weights to the
    servers. The update ends with `end_sent`. Instead of the training ranks, one process that holds
    all tensors of the model can send the weights. This process calls `send` for each bucket, and
    then calls `end` in place of `end_sent`.

    Args:
        shape: shape of the model.
        dtype: compute dtype of the servers.
        mode: handling of the responses in flight. `abort` ends the responses. `retract` continues
            the responses and recomputes their cache with the new weights.
        proven: sizes of the servers' tensors by name, from an earlier verified update. If `proven`
            is given, the sizes of the sent tensors are compared with `proven`, and nothing is
            hashed. If `proven` is None, every server verifies its weights.
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
        self._clients, self._sync, self._proven = list(clients), sync, proven
        self.version, self._mode = version, mode
        self._shape, self._dtype = shape, dtype
        self.layouts: list[ServerLayout] = []  # one per server
        self.sizes: Mapping[str, torch.Size] = {}  # sizes of the sent tensors
        self._sending: Sending | None = None  # the Sending of this process
        self._checksums: dict[str, str] = {}  # of the tensors that this process sent

    @property
    def proves(self) -> bool:
        """True if this update compares the values of the weights by checksum."""
        return self._proven is None

    async def begin(self) -> None:
        """Pauses the servers and opens their update sessions. After `begin`, the servers can
        receive weights."""
        # layouts are requested meanwhile, because a restarted server may have another one
        _, *infos = await everywhere(
            self._opened(), *(client.server_info() for client in self._clients)
        )
        self.layouts = [
            ServerLayout.of(info, c.url) for info, c in zip(infos, self._clients, strict=True)
        ]

    async def _opened(self) -> None:
        await everywhere(*(client.pause(self._mode) for client in self._clients))
        await self._sync.open()

    async def send(self, bucket: Bucket) -> None:
        """Sends a bucket from this process. Raises WeightUpdateError if a tensor with the same name
        was already sent in this update."""
        if self._sending is None:
            self._sending = Sending(self._sync, self._shape, self._dtype, self.layouts, self.proves)
            await self._sending.begin()
        await self._sending.send(bucket)
        self._checksums |= {name: tensor_checksum(t) if self.proves else "" for name, t in bucket}

    async def end(self) -> dict[str, str]:
        """Ends an update whose weights this process sent; see `end_sent`.

        Returns:
            Checksum of each tensor by name (weights/sync/stream.py). Every server was verified to
            hold tensors with these checksums. Each checksum is "" if this update verifies no
            values.
        """
        sent = self._sending.sent() if self._sending is not None else Sent()
        try:
            await self.end_sent(sent)
        finally:
            self._sync.forget()
        return self._checksums

    async def end_sent(self, sent: Sent) -> None:
        """Completes the update. After `end_sent`, every server holds the sent weights and uses them
        for sampling.

        Raises:
            WeightUpdateError: the tensors of a server differ from the sent tensors in name, size or
                value.
        """
        self.sizes = sent.sizes
        await self._sync.load(sent.folder)
        if self._proven is not None and (wrong := _other_sizes(sent.sizes, self._proven)):
            raise _not_held(wrong, ", ".join(client.url for client in self._clients))
        # flush the old weights' cache while the new ones are hashed
        proof = [self._prove(sent)] if self._proven is None else []
        await everywhere(*proof, *(client.flush() for client in self._clients))
        await everywhere(*(client.publish_version(str(self.version)) for client in self._clients))
        await everywhere(*(client.resume() for client in self._clients))

    async def _prove(self, sent: Sent) -> None:
        held_by = await everywhere(*(client.checksums() for client in self._clients))
        for client, layout, held in zip(self._clients, self.layouts, held_by, strict=True):
            if layout not in sent.hashed:
                raise WeightUpdateError(
                    "no rank hashed the weights that this server's ranks must hold",
                    where=client.url,
                )
            if wrong := differences(checksums_of(sent.hashed[layout]), held):
                raise _not_held(wrong, client.url)


def _other_sizes(sent: Mapping[str, torch.Size], proven: Mapping[str, torch.Size]) -> list[str]:
    lines = [f"{name} was not sent" for name in sorted(proven.keys() - sent.keys())]
    lines += [f"{name} does not exist there" for name in sorted(sent.keys() - proven.keys())]
    both = sorted(sent.keys() & proven.keys())
    return lines + [
        f"{n} was sent as {list(sent[n])}, not {list(proven[n])}"
        for n in both
        if sent[n] != proven[n]
    ]


def _not_held(wrong: Sequence[str], where: str) -> WeightUpdateError:
    more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return WeightUpdateError(
        f"the server does not hold the weights that were sent: {'; '.join(wrong[:3])}{more}",
        where=where,
        fix=(
            "sync again; if the error comes back, the server's memory or its loading of this"
            " model is at fault"
        ),
    )
