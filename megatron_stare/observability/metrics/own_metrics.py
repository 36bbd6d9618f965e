"""Computes a user's own metrics by calling the user's functions on a step's batch. In the YAML
configuration, the setting `observability.metrics` lists the functions. docs/howto/metric.md shows
an example."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from megatron_stare.errors import ConfigError
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.registry import resolve

OwnMetric = Callable[[RolloutBatch], Mapping[str, float]]
WHERE = "observability.metrics"


def load_metrics(names: Sequence[str]) -> dict[str, OwnMetric]:
    """Loads the functions in `names`. Each entry of `names` is the dotted path of a function, or
    has the form `file.py:function`.

    Raises:
        ConfigError: a function does not exist or is not callable.
    """
    found: dict[str, OwnMetric] = {}
    for name in names:
        function = resolve(name, {}, WHERE)
        if not callable(function):
            raise ConfigError(f"{name!r} is not a function of a batch", where=WHERE)
        found[name] = function
    return found


def measure(
    function: OwnMetric, batch: RolloutBatch, taken: Mapping[str, float]
) -> dict[str, float]:
    """Computes a user's metrics for a batch, and checks the names of these metrics.

    Args:
        taken: the step's other metrics.

    Raises:
        ValueError: a name has no group (`group/name`), or another metric has the same name.
        TypeError: a value is not a number.
    """
    found = {name: float(value) for name, value in function(batch).items()}
    for name in found:
        if name in taken:
            raise ValueError(f"there is a metric {name!r} already")
        if "/" not in name:
            raise ValueError(f"{name!r} has no group: call it group/{name}")
    return found
