"""Engines that misbehave as real ones have been seen to."""

from __future__ import annotations

from megatron_stare.rollout.local import LocalEngine


class FrozenEngine(LocalEngine):
    """Takes every weight update after the first and goes on with the weights it had."""

    _updates = 0

    def begin_weight_update(self, version: int) -> None:
        self._updates += 1
        if self._updates == 1:
            super().begin_weight_update(version)

    def update_weights(self, named_tensors) -> None:  # type: ignore[no-untyped-def]
        if self._updates == 1:
            super().update_weights(named_tensors)

    def end_weight_update(self) -> dict[str, str]:
        return super().end_weight_update() if self._updates == 1 else {}
