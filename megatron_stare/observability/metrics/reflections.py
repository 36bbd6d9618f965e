"""How often responses look back at themselves: by words that the configuration names, and by the
STARE paper's six categories among the tokens that a method selects. Pure; goes into a step's
metrics and from there to the report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_stare.records.metric import Metric
from megatron_stare.records.words import CATEGORIES, finder, tokens_by_category

if TYPE_CHECKING:
    from megatron_stare.records.trajectory import Trajectory

METRICS = (
    Metric(
        "response/reflections",
        "words a response",
        "occurrences of any of observability.reflection_words; missing without them",
        "rises with response/length_mean while reward does, where thinking longer pays",
    ),
    *(
        Metric(
            f"reflection/selected_{category}",
            "share",
            "of the selected tokens of stored responses, those in a word of"
            f" {category.replace('_', ' ')}; missing where none is selected",
            f"above reflection/all_{category}: what the method picks is where a response turns",
        )
        for category in CATEGORIES
    ),
    *(
        Metric(
            f"reflection/all_{category}",
            "share",
            f"of all tokens of stored responses, those in a word of {category.replace('_', ' ')}",
            "steady or rising",
        )
        for category in CATEGORIES
    ),
)


def reflections(samples: Sequence[Trajectory], words: Sequence[str]) -> dict[str, float]:
    """`response/reflections`: occurrences of any of the words a response, mean over the step's
    samples.

    Args:
        words: counted as records/words.py says. None: no metric.
    """
    if not words:
        return {}
    found = finder(words)
    return {"response/reflections": sum(len(found(s.said)) for s in samples) / len(samples)}


def selected_reflections(samples: Sequence[Trajectory]) -> dict[str, float]:
    """`reflection/selected_<category>` and `reflection/all_<category>`: shares of the selected
    tokens, and of all that carry loss, that lie in a word of a category. Words are counted as
    records/words.py says; a token that any of a word's characters stand in lies in it. Over the
    samples whose tokens' numbers are known; {} where none is selected.
    """
    selected, everything = Counter[str](), Counter[str]()
    for sample in samples:
        if sample.numbers is None:
            continue
        trained = sample.loss_mask.tolist()
        picked = [
            chosen != 0 and here
            for chosen, here in zip(sample.numbers.selected.tolist(), trained, strict=True)
        ]
        everything["tokens"] += sum(trained)
        selected["tokens"] += sum(picked)
        for category, where in tokens_by_category(sample.pieces).items():
            everything[category] += sum(trained[i] for i in where)
            selected[category] += sum(picked[i] for i in where)
    if not selected["tokens"]:
        return {}
    return {
        f"reflection/{kind}_{category}": counts[category] / counts["tokens"]
        for category in CATEGORIES
        for kind, counts in (("selected", selected), ("all", everything))
    }
