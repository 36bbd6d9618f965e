"""The configuration of a run with its names resolved, read once as it is opened and handed to all
that work for it."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_stare.algorithms.method import Method
from megatron_stare.config.schema import Config
from megatron_stare.models import published_shape, read_shape
from megatron_stare.models.shape import ModelShape


@dataclass(frozen=True)
class ResolvedRun:
    """A configuration with what its names stand for. It travels to the workers as it is."""

    config: Config
    shape: ModelShape  # of the policy and its reference; names the model family

    @property
    def method(self) -> Method:
        """The one that the algorithm section describes."""
        return self.config.algorithm.method


def resolve_run(config: Config, *, published: bool = False) -> ResolvedRun:
    """Reads what the configuration names, and checks no more than that: preflight.check does.

    Args:
        published: whether the shape that ships may stand for a model that is not here
            (models.published_shape).

    Raises:
        DataError: the model cannot be read.
    """
    shape = published_shape(config.model.path) if published else None
    return ResolvedRun(config, shape or read_shape(config.model.path))
