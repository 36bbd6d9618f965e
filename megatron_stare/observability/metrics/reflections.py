"""Computes metrics that show how often responses reflect on their own reasoning. One metric counts
the words that the configuration lists. The other metrics use the STARE paper's six categories of
words. Each category of words has two metrics. The metric `reflection/selected_<category>` considers
only the tokens that the training method selects. The metric `reflection/all_<category>` considers
all tokens that the loss counts. Each metric is the number of considered tokens that are part of a
word of the category, divided by the number of all considered tokens. The functions are pure. The
results are logged as metrics of a step and therefore appear in the report."""

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
        "rises with response/length_mean and reward if longer thinking pays",
    ),
    *(
        Metric(
            f"reflection/selected_{category}",
            "share",
            "selected tokens of stored responses that are in a word of"
            f" {category.replace('_', ' ')}; missing if no token is selected",
            f"above reflection/all_{category}: the method selects where a response turns",
        )
        for category in CATEGORIES
    ),
    *(
        Metric(
            f"reflection/all_{category}",
            "share",
            f"tokens of stored responses that are in a word of {category.replace('_', ' ')}",
            "steady or rising",
        )
        for category in CATEGORIES
    ),
)


def reflections(samples: Sequence[Trajectory], words: Sequence[str]) -> dict[str, float]:
    """Counts how often the words in the argument `words` occur in each sample's response. Returns
    the mean number of occurrences per sample as the metric `response/reflections`.

    Args:
        words: words to count, by the rules of records/words.py. Without words, the function returns
            no metric.
    """
    if not words:
        return {}
    found = finder(words)
    return {"response/reflections": sum(len(found(s.said)) for s in samples) / len(samples)}


def selected_reflections(samples: Sequence[Trajectory]) -> dict[str, float]:
    """Returns, for each category of words, the share of tokens that are part of a word of the
    category. The metric `reflection/selected_<category>` is the category's share of the selected
    tokens. The metric `reflection/all_<category>` is the category's share of all tokens that the
    loss counts.

    The rules of records/words.py determine which words are found. A token is part of a word if the
    token contains any of the word's characters. If `Trajectory.numbers` of a sample is None, no
    per-token values were recorded for the sample, and the function ignores the sample. Returns {}
    if no token is selected.
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
