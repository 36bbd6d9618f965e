"""Trainers that are wrong in a way that trains happily."""

from __future__ import annotations

from megatron_stare.megatron.trainer import Trainer


class PerRankThresholds(Trainer):
    """Takes the thresholds over each data rank's own tokens, as the published code does per
    micro-batch."""

    def measure(self, state: dict[str, float]) -> None:
        everyone, self.step.group = self.step.group, None
        super().measure(state)
        self.step.group = everyone
