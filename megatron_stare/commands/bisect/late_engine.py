"""The engine in process one weight update behind: it says that it has the newest weights, and samples with those before
them."""

from __future__ import annotations

import torch

from megatron_stare.rollout.engines.engine import GenerateResult
from megatron_stare.rollout.engines.local import LocalEngine


class LateEngine(LocalEngine):
    """Proves and reports what it was given, as the engine in process does; see LocalEngine."""

    _before: dict[str, torch.Tensor] | None = None  # the weights that the newest ones took the place of

    def begin_weight_update(self, version: int, prove: bool = True) -> None:
        if self._version is not None:
            self._before = {name: parameter.clone() for name, parameter in self._parameters.items()}
        super().begin_weight_update(version, prove)

    def collect(self, wait_s: float) -> list[GenerateResult]:
        if self._before is None:  # the first weights have none before them
            return super().collect(wait_s)
        newest = {name: parameter.clone() for name, parameter in self._parameters.items()}
        self._put(self._before)
        try:
            return super().collect(wait_s)
        finally:
            self._put(newest)

    def _put(self, weights: dict[str, torch.Tensor]) -> None:
        for name, values in weights.items():
            self._parameters[name].copy_(values)
