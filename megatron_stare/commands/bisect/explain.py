"""Explains why a run's recorded metrics differ from the metrics of a re-run of the same steps. The
functions are pure, and their inputs are the metrics of the steps.

The recorded metrics of the run are called the record. The unchanged re-run repeats the steps with
the configuration of the run. Each changed re-run repeats the steps with one change, which simulates
a possible cause (causes.py). `explain` compares every re-run with the record, step by step. The
number of matching steps of a re-run is the number of steps before the first step that differs from
the record. `explain` then searches in this order:

1. If the unchanged re-run reproduces the record, `explain` checks whether the record contradicts
the configuration. If the record contradicts the configuration, `explain` reports the cause of the
contradiction. If the record does not contradict the configuration, `explain` continues with number
4.

2. If the unchanged re-run does not reproduce the record, `explain` selects the changed re-run with
the largest number of matching steps. If the selected re-run has more matching steps than the
unchanged re-run, the change of the selected re-run explains the record.

3. If the selected re-run does not have more matching steps than the unchanged re-run, `explain`
compares every re-run with the record again, but only in entropy, agreement and reward. The change
that a re-run simulates explains the record if two conditions are met. First, the unchanged re-run
is far from the record in entropy, agreement or reward. Second, the changed re-run is close to the
record in entropy, agreement and reward.

4. If no cause has been found so far, `explain` looks at the re-runs whose change is marked as
harmless. A harmless change alters only the size of the micro-batches or the number of data ranks.
In correct code, a harmless change alters the metrics of the first step only by rounding errors.
`explain` therefore compares the first steps of two re-runs: the re-run with the harmless change and
the unchanged re-run. If the two steps differ by more than rounding errors, the code has a fault.
`explain` then names the harmless change, because the fault becomes visible with this change.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from types import MappingProxyType

from megatron_stare.commands.bisect.causes import Change, LeftOut
from megatron_stare.observability.metrics.conditions import NORMAL

Row = Mapping[str, float]

# compared figures, each with its candidate metrics; the first one that the run logs is used.
# Agreement is compared by its logarithm.
FIGURES = {
    "entropy": ("entropy/mean",),
    "agreement": ("agreement/mean", "rollout/logprob_diff_mean"),
    "reward": ("reward/mean",),
}
# two steps only count as equal if both rows have these metrics
FINGERPRINT = ("entropy/mean", "reward/mean", "loss/policy", "optimizer/grad_norm")
NOT_COMPARED = ("time/", "perf/", "memory/", "plan/", "guard/", "engine/", "step")

FAR = 3.0  # standard errors above which two series of a figure differ
NEAR_SHARE = 0.2  # share of the unchanged steps' distance from the record that counts as none
OF_MEDIAN = 1.2533  # standard error of a median over that of a mean
LEAST_AGREEMENT = 1e-9  # nats, assumed for equal log-probs
# least noise of a figure: as a share of its median, or in decades for agreement
LEAST_NOISE = 1e-3
LEAST_DECADES = 0.1
# Largest effect of rounding on the first step with a harmless change: relative, and absolute near
# 0. In 16 bits another summation order changes a sum by a hundredth and more.
ROUNDING = {"float32": (1e-3, 1e-5), "bfloat16": (0.1, 1e-2), "float16": (0.05, 2e-3)}


@dataclass(frozen=True)
class Remade:
    """Repeated steps.

    `rows`: the metrics of each step. The list is empty if the re-run failed.
    `failed`: the reason why the re-run failed, or "" if the re-run succeeded.
    """

    change: Change | None  # None: nothing was changed
    rows: Sequence[Row] = ()
    failed: str = ""

    @property
    def name(self) -> str:
        return self.change.name if self.change is not None else "unchanged"


@dataclass(frozen=True)
class Line:
    """Result of one re-run.

    `equal`: the number of steps before the first step whose metrics differ from the record.
    `medians`: the medians of entropy, agreement and reward over the steps. A median is NaN if no
        step has a finite value.
    `moved`: for entropy, agreement and reward, the distance between this re-run and the unchanged
        re-run, in standard errors.
    `missed`: for entropy, agreement and reward, the distance between this re-run and the record, in
        standard errors.
    `breaks`: names of metrics of the first step. A metric is in `breaks` if its values in this
        re-run and in the unchanged re-run differ by more than a rounding error. If the change is
        not marked as harmless, `breaks` is empty.
    `failed`: the reason why the re-run failed, or "" if the re-run succeeded.
    """

    name: str
    cause: str
    says: str
    equal: int = 0
    medians: Mapping[str, float] = field(default_factory=dict)
    moved: Mapping[str, float] = field(default_factory=dict)
    missed: Mapping[str, float] = field(default_factory=dict)
    breaks: tuple[str, ...] = ()
    failed: str = ""


@dataclass(frozen=True)
class Explanation:
    """Result of a bisection.

    `reproduced`: true if the unchanged re-run reproduces the record. If the run can be repeated bit
        for bit, the metrics of all steps must be equal to the record. For a run that cannot be
        repeated bit for bit, differences of at most FAR standard errors in entropy, agreement and
        reward are allowed.
    `cause`, `change`: the names of the cause and of the change that explain the record, or "" if
        nothing explains the record.
    `why`: explanation of the result in words.
    `lines`: results of the re-runs. The result of the unchanged re-run comes first.
    `record`: the medians of entropy, agreement and reward over the recorded steps of the run.
    """

    reproduced: bool
    cause: str
    change: str
    why: str
    steps: int
    lines: Sequence[Line]
    left_out: Sequence[LeftOut]
    record: Mapping[str, float]


def explain(
    before: Sequence[Row],
    record: Sequence[Row],
    remade: Sequence[Remade],
    left_out: Sequence[LeftOut] = (),
    *,
    exact: bool,
    dtype: str = "float32",
    contradicted: Mapping[str, str] = MappingProxyType({}),
) -> Explanation:
    """Searches for a cause that explains the recorded metrics. If no cause is found,
    `Explanation.cause` is "".

    Args:
        before: metrics of earlier steps of the run, used with `record` to estimate noise.
        record: metrics of the steps in question.
        remade: the re-runs of the same steps. The unchanged re-run comes first.
        left_out: causes for which no change applies to this run.
        exact: true if unchanged steps must reproduce the record bit for bit.
        dtype: the dtype of the trained model.
        contradicted: contradictions between record and configuration, by cause.
    """
    noise = {figure: _noise(figure, [*before, *record]) for figure in FIGURES}
    unchanged = remade[0]
    lines = [_line(each, unchanged, record, noise, dtype) for each in remade]
    base, others = lines[0], [line for line in lines[1:] if not line.failed]
    medians = {figure: _median(figure, record) for figure in FIGURES}
    steps = len(record)

    def said(reproduced: bool, named: Line | None, why: str) -> Explanation:
        cause, change = (named.cause, named.name) if named is not None else ("", "")
        return Explanation(reproduced, cause, change, why, steps, lines, left_out, medians)

    if base.failed:
        return said(False, None, f"the unchanged steps could not be repeated: {base.failed}")
    departs = [figure for figure, far in base.missed.items() if not abs(far) <= FAR]
    reproduced = base.equal == steps or (not exact and not departs)
    broken = next((line for line in others if line.breaks), None)
    if reproduced:
        for cause, what in contradicted.items():
            why = f"{what}, which the configuration does not allow; the present code does the same"
            return replace(said(True, None, why), cause=cause)
        if broken is not None:
            why = f"{broken.says}: this must not change the steps, but {_changed(broken)}"
            return said(True, broken, why)
        how = "bit for bit" if base.equal == steps else "within its own noise"
        return said(
            True,
            None,
            f"the run did what its configuration says: the repeated steps match the record {how}",
        )
    nearest = max(others, key=lambda line: line.equal, default=None)
    if nearest is not None and nearest.equal > base.equal:
        how = (
            f"with it, {nearest.equal} of {steps} steps match the record bit for bit, without it"
            f" {base.equal}"
        )
        return said(
            False,
            nearest,
            "the run did not do what its configuration says; this change matches the record"
            f" better: {nearest.says} ({how})",
        )
    explaining = [line for line in others if _explains(line, base, departs)]
    if departs and explaining:
        best = min(explaining, key=lambda line: sum(abs(far) for far in line.missed.values()))
        figures = " and ".join(departs)
        return said(
            False,
            best,
            "the run did not do what its configuration says; this change brings back the record's"
            f" {figures}: {best.says}",
        )
    if broken is not None:
        why = f"{broken.says}: this must not change the steps, but {_changed(broken)}"
        return said(False, broken, why)
    figures = f" ({' and '.join(departs)} differ beyond the run's noise)" if departs else ""
    return said(
        False,
        None,
        f"the record cannot be reproduced{figures}, and none of the changes explains it: a cause"
        " outside of them is likely, such as other code, versions or hardware",
    )


def _changed(line: Line) -> str:
    return f"{', '.join(line.breaks)} changed"


def _explains(line: Line, base: Line, departs: Sequence[str]) -> bool:
    """Tells whether entropy, agreement and reward of a changed re-run are close to the record of
    the run. The arguments `line` and `base` are the results of the changed and of the unchanged
    re-run. `departs` contains the name 'entropy', 'agreement' or 'reward' if the unchanged re-run
    differs from the record in this quantity by more than FAR standard errors."""
    if not line.missed.keys() >= set(departs):  # the re-run has no finite value to compare
        return False
    for figure, far in line.missed.items():
        allowed = max(FAR, NEAR_SHARE * abs(base.missed[figure])) if figure in departs else FAR
        if not abs(far) <= allowed:
            return False
    return True


def _line(
    made: Remade, unchanged: Remade, record: Sequence[Row], noise: Mapping[str, float], dtype: str
) -> Line:
    cause = made.change.cause if made.change is not None else ""
    says = made.change.says if made.change is not None else "nothing is changed"
    if made.failed or len(made.rows) != len(record):
        return Line(
            made.name,
            cause,
            says,
            failed=made.failed or f"it made {len(made.rows)} of {len(record)} steps",
        )
    harmless = made.change is not None and made.change.harmless and not unchanged.failed
    return Line(
        made.name,
        cause,
        says,
        equal=equal_steps(made.rows, record),
        medians={figure: _median(figure, made.rows) for figure in FIGURES},
        moved={} if unchanged.failed else _distances(made.rows, unchanged.rows, noise),
        missed=_distances(made.rows, record, noise),
        breaks=_broken(made.rows[0], unchanged.rows[0], dtype) if harmless else (),
    )


def equal_steps(one: Sequence[Row], other: Sequence[Row]) -> int:
    """Compares two series of steps, step by step, and returns the number of steps before the first
    difference. Two steps are equal if both steps have all metrics in `FINGERPRINT`, and if all
    metrics that the two steps share have equal values. The metrics in `NOT_COMPARED`, such as
    times, are ignored."""
    for number, (a, b) in enumerate(zip(one, other, strict=False)):
        if not all(name in a and name in b for name in FINGERPRINT):
            return number
        shared = [name for name in a.keys() & b.keys() if not name.startswith(NOT_COMPARED)]
        if not all(_same(a[name], b[name]) for name in shared):
            return number
    return min(len(one), len(other))


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def _broken(first: Row, sound: Row, dtype: str) -> tuple[str, ...]:
    """Compares the metrics that `FINGERPRINT` lists, in the first steps of two re-runs. Returns the
    names of the metrics whose values differ by more than rounding errors. The argument `first`
    contains the metrics of the changed re-run's first step, and `sound` contains the metrics of the
    unchanged re-run's first step."""
    share, least = ROUNDING[dtype]
    return tuple(
        name
        for name in FINGERPRINT
        if not abs(first.get(name, math.nan) - sound.get(name, math.nan))
        <= max(share * abs(sound.get(name, math.nan)), least)
    )


def _value(figure: str, row: Row) -> float:
    value = next((row[name] for name in FIGURES[figure] if name in row), math.nan)
    return (
        math.log10(max(value, LEAST_AGREEMENT))
        if figure == "agreement" and value == value
        else value
    )


def _values(figure: str, rows: Sequence[Row]) -> list[float]:
    return [value for row in rows if math.isfinite(value := _value(figure, row))]


def _median(figure: str, rows: Sequence[Row]) -> float:
    values = _values(figure, rows)
    if not values:
        return math.nan
    return 10 ** median(values) if figure == "agreement" else median(values)


def _noise(figure: str, rows: Sequence[Row]) -> float:
    """Estimates the standard deviation of the noise in entropy, agreement or reward. The argument
    `figure` names the quantity. The estimate uses the differences between successive steps, so that
    a trend does not count as noise."""
    values = _values(figure, rows)
    steps = [b - a for a, b in itertools.pairwise(values)]
    if not steps:
        return math.nan
    least = LEAST_DECADES if figure == "agreement" else LEAST_NOISE * abs(median(values))
    return max(NORMAL * median(map(abs, steps)) / math.sqrt(2), least, 1e-12)


def _distances(
    one: Sequence[Row], other: Sequence[Row], noise: Mapping[str, float]
) -> dict[str, float]:
    """Compares two series of steps, step by step, in entropy, agreement and reward. Returns a dict
    that maps the name of each quantity to a number of standard errors. The number is the median of
    the differences between the two series, divided by the standard error of this median. A quantity
    has no entry in the dict if no step has finite values in both series, or if the noise of the
    quantity is unknown."""
    found = {}
    for figure in FIGURES:
        pairs = [(_value(figure, a), _value(figure, b)) for a, b in zip(one, other, strict=False)]
        apart = [a - b for a, b in pairs if math.isfinite(a - b)]
        if apart and noise[figure] > 0:
            found[figure] = median(apart) / (OF_MEDIAN * noise[figure] * math.sqrt(2 / len(apart)))
    return found
