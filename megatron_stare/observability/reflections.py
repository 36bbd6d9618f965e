"""How often responses look back at themselves, by words that the configuration names. Pure; goes into a step's metrics
and from there to the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_stare.metric import Metric
from megatron_stare.whole_words import finder

if TYPE_CHECKING:
    from megatron_stare.records.trajectory import Trajectory


METRICS = (
    Metric(
        "response/reflections",
        "words a response",
        "occurrences of any of observability.reflection_words; missing without them",
        "rises with response/length_mean while reward does, where thinking longer pays",
    ),
)


def reflections(samples: Sequence[Trajectory], words: Sequence[str]) -> dict[str, float]:
    """`response/reflections`: occurrences of any of the words a response, mean over the step's samples.

    Args:
        words: counted as whole_words.py says. None: no metric.
    """
    if not words:
        return {}
    found = finder(words)
    return {"response/reflections": sum(len(found(s.text)) for s in samples) / len(samples)}
