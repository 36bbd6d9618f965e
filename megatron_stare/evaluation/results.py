"""Summarises the responses to problems. Computes the figures of a task, a row of figures for every
prompt, and a table that compares several tasks.

Training and the command `eval` both record the entries that `results_of` computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from megatron_stare.evaluation.estimates import majority_at_k, pass_at_k, wilson_interval
from megatron_stare.evaluation.response import Classes, Response
from megatron_stare.records.words import BEHAVIOURS, reflection_counts

_BESIDE = (  # key of the record, its label, its number format
    ("greedy", "greedy", ".3f"),
    ("full_solve", "all responses right", ".3f"),
    ("distinct_answers", "distinct answers", ".2f"),
    ("distinct_solutions", "distinct right solutions", ".2f"),
    ("length_mean", "tokens a response", ",.1f"),
    ("truncated", "cut off at the limit", ".3f"),
    ("tool_calls", "tool calls a response", ".2f"),
    ("tool_calls_failed", "failed tool calls, share", ".3f"),
)


@dataclass(frozen=True)
class Answered:
    """The n sampled responses to a prompt, and the answer class of each response (see
    `answer_classes`).

    `classes`: None if the verifier does not return answers.
    """

    responses: Sequence[Response]
    classes: Classes | None

    @property
    def right(self) -> int:
        """Number of right responses."""
        return sum(response.right for response in self.responses)

    @property
    def share(self) -> float:
        """avg@n, the share of right responses."""
        return self.right / len(self.responses)

    @property
    def votes(self) -> list[tuple[int, float]]:
        """Returns a pair (`number`, `share`) for every answer class, in the order in which the
        classes first appear. `number` is the number of responses in the class, and `share` is the
        fraction of these responses that are right."""
        counts = Counter(each for each in self.classes or () if each is not None)
        rights = Counter(
            each
            for each, response in zip(self.classes or (), self.responses, strict=False)
            if response.right
        )
        return [(counts[each], rights[each] / counts[each]) for each in sorted(counts)]

    @property
    def solutions(self) -> int:
        """Number of different texts among the right responses. Differences in white space are
        ignored."""
        return len(
            {" ".join(response.text.split()) for response in self.responses if response.right}
        )


def default_ks(samples: int) -> tuple[int, ...]:
    """Returns the default values of k for pass@k and maj@k: all powers of two up to `samples`, and
    `samples` itself."""
    powers = (2**power for power in range(samples.bit_length()))
    return tuple(dict.fromkeys([*powers, samples]))


def results_of(
    answered: Sequence[Answered], problems: Sequence[int], ks: Sequence[int]
) -> dict[str, Any]:
    """Returns the figures of a task, computed over all prompts. docs/evaluation.md defines each
    figure.

    Args:
        answered: the responses to every prompt, equally many for each prompt.
        problems: index of each prompt's problem. Several prompts of one problem are not
            independent.
        ks: values of k for pass@k and maj@k, at most the number of responses per prompt.
    """
    samples = len(answered[0].responses)
    responses = [response for each in answered for response in each.responses]
    by_prompt = {f"avg@{samples}": [each.share for each in answered]}
    for k in ks:
        by_prompt[f"pass@{k}"] = [pass_at_k(each.right, samples, k) for each in answered]
    voted = [each for each in answered if each.classes is not None]
    if len(voted) == len(answered):
        for k in ks:
            if k > 1:  # one response's majority is itself
                by_prompt[f"maj@{k}"] = [majority_at_k(each.votes, samples, k) for each in answered]
    counts = [reflection_counts(response.text) for response in responses]
    return {
        "results": {name: _estimate(values, problems) for name, values in by_prompt.items()},
        "full_solve": fmean(each.right == samples for each in answered),
        "length_mean": fmean(response.tokens for response in responses),
        "truncated": fmean(response.finish_reason == "length" for response in responses),
        "distinct_answers": fmean(len(each.votes) for each in voted) if voted else None,
        "distinct_solutions": fmean(each.solutions for each in answered),
        "reflection": {
            category: fmean(count[category] for count in counts) for category in BEHAVIOURS
        },
        **_of_calls(responses),
    }


def _of_calls(responses: Sequence[Response]) -> dict[str, float]:
    """Returns the figures of the responses' tool calls. Returns {} if there are no calls, because a
    task without tools has no such figures."""
    calls = [call for response in responses for call in response.calls]
    if not calls:
        return {}
    return {
        "tool_calls": len(calls) / len(responses),
        "tool_calls_failed": fmean(call["failed"] for call in calls),
    }


def problem_row(answered: Answered, ks: Sequence[int]) -> dict[str, Any]:
    """Returns the figures of one prompt. The entry `majority` is the most frequent answer. If
    several answers have the highest frequency, `majority` is the answer that appeared first."""
    samples, votes = len(answered.responses), answered.votes
    row: dict[str, Any] = {
        "samples": samples,
        "right": answered.right,
        "failures": sum(response.status != "ok" for response in answered.responses),
        **{f"pass@{k}": pass_at_k(answered.right, samples, k) for k in ks},
    }
    if answered.classes is not None:
        row |= {f"maj@{k}": majority_at_k(votes, samples, k) for k in ks if k > 1}
        most = max(range(len(votes)), key=lambda each: votes[each][0], default=None)
        row["distinct_answers"] = len(votes)
        row["majority"] = (
            None if most is None else answered.responses[answered.classes.index(most)].answer
        )
    return row | {
        "distinct_solutions": answered.solutions,
        "length_mean": fmean(response.tokens for response in answered.responses),
        "truncated": sum(response.finish_reason == "length" for response in answered.responses),
        **_of_calls(answered.responses),
    }


def _estimate(values: Sequence[float], problems: Sequence[int]) -> dict[str, float]:
    mean, low, high = wilson_interval(values, problems)
    return {"value": mean, "low": low, "high": high}


def table(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns a table of the tasks' results as text, with 95 % intervals in brackets."""
    rows: dict[str, dict[str, str]] = {"problems": {}, "responses a problem": {}}
    for task, record in records.items():
        rows["problems"][task] = str(record["problems"])
        rows["responses a problem"][task] = str(record["decoding"]["samples"])
        for name, each in record["results"].items():
            rows.setdefault(name, {})[task] = (
                f"{each['value']:.3f} [{each['low']:.3f}, {each['high']:.3f}]"
            )
    for key, name, form in _BESIDE:
        for task, record in records.items():
            if record.get(key) is not None:
                rows.setdefault(name, {})[task] = format(record[key], form)
    for task, record in records.items():
        for category, mean in record["reflection"].items():
            rows.setdefault(f"{category} words a response", {})[task] = f"{mean:.2f}"
        if record["failures"]:
            rows.setdefault("responses not verified", {})[task] = str(record["failures"])
    width = max(map(len, rows))
    widths = {
        task: max(len(task), *(len(cells.get(task, "-")) for cells in rows.values()))
        for task in records
    }
    lines = [" " * width + "".join(f"  {task:>{widths[task]}}" for task in records)]
    for name, cells in rows.items():
        lines.append(
            f"{name:<{width}}"
            + "".join(f"  {cells.get(task, '-'):>{widths[task]}}" for task in records)
        )
    return "\n".join(lines)
