"""How far the step of a layout is from that of one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from invariance.step import NEAR

RELATIVE = 1e-5
# of the largest of all tensors' values: below it, those of a tensor are nothing beside the others
FLOOR = 1e-3
# of a weight: two steps may each round it by half a unit of float32's last place
ROUNDING = 2.0**-23


@dataclass
class Difference:
    """largest: by what was compared, the largest difference, relative, and where.

    selected: tokens in all selections.
    excused: selected otherwise, but within NEAR of a threshold.
    faults: what differs more than it may.
    """

    largest: dict[str, float] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)
    selected: int = 0
    excused: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def compare(whole: dict[str, Any], cut: dict[str, Any]) -> Difference:
    """The step `cut` against the one-process step `whole`."""
    found = Difference()
    _selections(whole, cut, found)
    _metrics(whole["metrics"], cut["metrics"], found)
    _tensors("gradients", whole, cut, _largest(whole["gradients"]), found)
    _tensors("weights", whole, cut, moved(whole["before"], whole["weights"]), found)
    return found


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, float]:
    """By tensor, what differences of the weights after a step of SGD are relative to: how far the
    step moved them, and with them the gradient's rounding; and so much that RELATIVE of it allows
    for the rounding of the sum."""
    steps = _largest({name: after[name] - before[name] for name in after})
    return {
        name: step + float(after[name].abs().max()) * ROUNDING / RELATIVE
        for name, step in steps.items()
    }


def _largest(tensors: dict[str, Tensor]) -> dict[str, float]:
    """By tensor its largest absolute value, or FLOOR of the largest of all."""
    values = {name: float(x.abs().max()) for name, x in tensors.items()}
    floor = FLOOR * max(values.values())
    return {name: max(value, floor) for name, value in values.items()}


def _selections(whole: dict[str, Any], cut: dict[str, Any], found: Difference) -> None:
    for name, wanted in whole["selected"].items():
        found.selected += len(wanted)
        if cut["given"].get(name, set()) != wanted:
            found.faults.append(f"{name}: given equal scores, other tokens are selected")
        excused = whole["near"].get(name, set()) | cut["near"].get(name, set())
        strangers = cut["selected"].get(name, set()) ^ wanted
        found.excused += sorted(strangers & excused)
        if strangers - excused:
            found.faults.append(f"{name}: selected otherwise: tokens {sorted(strangers - excused)}")
    if found.excused:
        found.where["selections"] = (
            f"within {NEAR} of a threshold and selected otherwise: {found.excused}"
        )


def _metrics(whole: dict[str, float], cut: dict[str, float], found: Difference) -> None:
    for key in ("loss/policy", "optimizer/grad_norm"):
        want, got = whole[key], cut[key]
        # a loss of weighted advantages is a small difference of large sums: relative to the
        # gradient it comes with
        scale = max(abs(want), whole["optimizer/grad_norm"])
        found.largest[key] = abs(got - want) / scale if got != want else 0.0
        found.where[key] = f"{got:.8g} against {want:.8g}"
        if not found.largest[key] <= RELATIVE:
            found.faults.append(f"{key}: {got} against {want}")


def _tensors(
    key: str, whole: dict[str, Any], cut: dict[str, Any], scale: dict[str, float], found: Difference
) -> None:
    wanted: dict[str, Tensor] = whole[key]
    if wanted.keys() != cut[key].keys():
        found.faults.append(f"{key}: other tensors: {sorted(wanted.keys() ^ cut[key].keys())}")
        return
    worst = ("", 0.0)
    for name, want in wanted.items():
        difference = float((cut[key][name] - want).abs().max())
        relative = difference / scale[name] if scale[name] > 0 else difference
        if not relative <= RELATIVE:
            found.faults.append(f"{key} of {name}: {relative:.2e} above {RELATIVE:.0e}")
        if not relative <= worst[1]:
            worst = (name, relative)
    found.largest[key], found.where[key] = worst[1], worst[0]
