"""Engines that misbehave as real ones have been seen to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_stare.records.batch import SamplingParams
from megatron_stare.rollout.engines.engine import EngineLostError, GenerateRequest
from megatron_stare.rollout.engines.local import LocalEngine
from megatron_stare.weights.sync.stream import tensor_checksum


class FrozenEngine(LocalEngine):
    """Takes every weight update after the first and goes on with the weights it had, but vouches
    for those sent."""

    _updates = 0
    _sent: dict[str, str]

    def begin_weight_update(self, version: int, prove: bool = True) -> None:
        self._updates += 1
        self._sent = {}
        if self._updates == 1:
            super().begin_weight_update(version, prove)

    def update_weights(self, named_tensors) -> None:  # type: ignore[no-untyped-def]
        if self._updates == 1:
            super().update_weights(named_tensors)
        self._sent |= {name: tensor_checksum(tensor) for name, tensor in named_tensors}

    def end_weight_update(self) -> dict[str, str]:
        return super().end_weight_update() if self._updates == 1 else self._sent


class CorruptedEngine(LocalEngine):
    """Loses one bit of one weight after every update but the first."""

    _updates = 0

    def end_weight_update(self) -> dict[str, str]:
        self._updates += 1
        if self._updates > 1:
            self._parameters["model.norm.weight"].view(torch.int32)[0] ^= 1
        return super().end_weight_update()


class LostEngine(LocalEngine):
    """Is lost in the middle of a rollout, once: at the prompt whose cursor is in the file that
    LOSE_AT names."""

    def submit(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> None:
        order = Path(os.environ["LOSE_AT"])
        if order.exists() and any(
            request.prompt_cursor >= int(order.read_text()) for request in requests
        ):
            order.unlink()
            raise EngineLostError("its device has failed")
        super().submit(requests, params)
