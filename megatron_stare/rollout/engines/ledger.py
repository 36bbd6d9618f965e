"""The bookkeeping of one weight-update session, pure: which parameters are due, which came, and in what dtype.

An unknown name in an update returns success from real engines, so completeness is proven here and not taken on trust.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from megatron_stare.rollout.engines.engine import WeightUpdateError


class WeightLedger:
    """Checks that each parameter of `expected` (name to shape) arrives exactly once."""

    def __init__(self, version: int, expected: Mapping[str, torch.Size]) -> None:
        self.version = version
        self.received: dict[str, torch.dtype] = {}  # name to the dtype it was sent in
        self._expected = expected

    def receive(self, name: str, tensor: Tensor) -> None:
        """Books one parameter.

        Raises:
            WeightUpdateError: unknown or repeated name, or wrong shape.
        """
        if name not in self._expected:
            hint = " (the embeddings are tied, so it is not sent)" if name == "lm_head.weight" else ""
            raise WeightUpdateError(f"the model has no parameter {name!r}{hint}")
        if name in self.received:
            raise WeightUpdateError(f"parameter {name!r} was sent twice in one update")
        if tensor.shape != self._expected[name]:
            raise WeightUpdateError(
                f"parameter {name!r} was sent as {list(tensor.shape)}, the model has {list(self._expected[name])}"
            )
        self.received[name] = tensor.dtype

    def require_complete(self) -> None:
        """Raises WeightUpdateError where a parameter did not come."""
        missing = [name for name in self._expected if name not in self.received]
        if missing:
            raise WeightUpdateError(
                f"{len(missing)} of {len(self._expected)} parameters were not sent in the update to version "
                f"{self.version}: {_some(missing)}"
            )


def _some(names: Iterable[str], shown: int = 5) -> str:
    names = list(names)
    rest = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + rest
