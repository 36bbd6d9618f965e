"""Resolves the model shape and the method of a run's configuration. A ResolvedRun is created once
and passed to all parts of the run."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_stare.algorithms.method import Method
from megatron_stare.config.schema import Config
from megatron_stare.models import published_shape, read_shape
from megatron_stare.models.shape import ModelShape


@dataclass(frozen=True)
class ResolvedRun:
    """A configuration together with its method and the shape of its model. Workers receive a
    pickled copy of a ResolvedRun."""

    config: Config
    shape: ModelShape  # of the policy and its reference; names the model family

    @property
    def method(self) -> Method:
        """Method of the section `algorithm`."""
        return self.config.algorithm.method


def resolve_run(config: Config, *, published: bool = False) -> ResolvedRun:
    """Reads the shape of the configuration's model. `resolve_run` does not check the configuration;
    preflight.check does.

    Args:
        published: if true and the model is absent, a shape that ships with the package may replace
            the model's shape (models.published_shape).

    Raises:
        DataError: the model cannot be read.
    """
    shape = published_shape(config.model.path) if published else None
    return ResolvedRun(config, shape or read_shape(config.model.path))
