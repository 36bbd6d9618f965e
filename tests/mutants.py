"""Trainers that are wrong in a way that trains happily."""

from __future__ import annotations

from megatron_stare.megatron.trainer import Trainer


class PerRankThresholds(Trainer):
    """Takes the thresholds over each data rank's own tokens, as the published code does per micro-batch."""

    _measuring = False

    def measure(self, state: dict[str, float]) -> None:
        self._measuring = True
        super().measure(state)
        self._measuring = False

    @property
    def _group(self):  # type: ignore[no-untyped-def]
        return None if self._measuring else super()._group
