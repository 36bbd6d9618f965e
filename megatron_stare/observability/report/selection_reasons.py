"""Explains in words which tokens a training method selected in a step, and why. The explanation
uses the settings of the training method and the logged metrics of the step.

Turns config.yaml and a row of metrics.jsonl into text for the page of sampled responses. The text
shows the thresholds that the step logged. No threshold is recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_stare.observability.metrics.scales import short

# STARE's sets: name in metrics, display name, letter in a rollout file, sign of the advantage,
# state that weights the set
_SETS = (
    ("plus", "L+", "+", "positive", "amplify"),
    ("minus", "L−", "-", "negative", "attenuate"),
    ("common_plus", "U+", "p", "positive", "attenuate"),
    ("common_minus", "U−", "m", "negative", "amplify"),
)
# prefixes of the metrics that other methods log about their selections
_OF_METHODS = ("stapo/", "forks/", "clip_cov/", "kl_cov/")


@dataclass(frozen=True)
class Reasons:
    """Explanations of a selection.

    `lines`: sentences about the step.
    `sets`: maps the letter of each set of selected tokens to the reason why a token is in the set.
        The field `selected` of a rollout file contains the letters of the sets.
    """

    lines: tuple[str, ...] = ()
    sets: Mapping[str, str] | None = None


def selection_reasons(algorithm: Any, row: Mapping[str, float] | None) -> Reasons:
    """Explains which tokens one step selected, and why.

    Args:
        algorithm: the section `algorithm` of config.yaml, or only the method's name.
        row: the step's metrics; None if the run has no metrics of this step.
    """
    settings: Mapping[str, Any] = (
        algorithm if isinstance(algorithm, Mapping) else {"name": algorithm}
    )
    name = str(settings.get("name") or "the method")
    if row is None:
        return Reasons(
            (f"This step's metrics are not recorded, so the selection of {name} is unexplained.",)
        )
    found = [each for each in _SETS if math.isfinite(_of(row, f"stare/threshold_{each[0]}"))]
    lines = [_rule(name, settings, row, each) for each in found]
    weighed = _gate(settings, row, found)
    lines += [weighed] if weighed else []
    others = [f"{key} {short(value)}" for key, value in row.items() if key.startswith(_OF_METHODS)]
    lines += [f"Metrics of {name} in this step: {', '.join(others)}."] if others else []
    if not lines:
        selects = any(key.startswith("stare/selected_") for key in row)
        what = "selected no tokens in this step" if selects else "selects no tokens"
        return Reasons((f"{name} {what}.",))
    if found and _of(row, "update/count") > 1:
        lines.append(
            "The thresholds are means over the step's updates: each update selects from its own"
            " tokens."
        )
    return Reasons(tuple(lines), {each[2]: _because(row, each) for each in found})


def _rule(
    name: str, settings: Mapping[str, Any], row: Mapping[str, float], of: tuple[str, ...]
) -> str:
    metric, letter, _, sign, _ = of
    rare, bound = letter.startswith("L"), short(row[f"stare/threshold_{metric}"])
    number = _of(row, f"stare/selected_{metric}")
    below, share = settings.get("rare_below"), settings.get("share")
    if below is not None:
        who = f"those with a probability {'below' if rare else 'of at least'} {below:g}"
    elif rare or settings.get("common") == "bottom":
        part = f"the {100 * share:.3g} %" if isinstance(share, float) else "the share"
        who = f"{part} with the {'highest' if rare else 'lowest'} surprisal"
    else:
        who = "all that are not rare"
    count = f"{number:,.0f} tokens" if math.isfinite(number) else "tokens"
    return (
        f"{name} put {count} with {sign} advantage into {letter}: {who} (surprisal"
        f" {'≥' if rare else '≤'} {bound} nats)."
    )


def _gate(
    settings: Mapping[str, Any], row: Mapping[str, float], found: Sequence[tuple[str, ...]]
) -> str:
    factors = {each[1]: _of(row, f"stare/{each[4]}") for each in found}
    weights = ", ".join(f"{letter} × {short(factor)}" for letter, factor in factors.items())
    entropy, target = _of(row, "entropy/mean"), _of(row, "entropy/target")
    against = (
        f" (entropy {short(entropy)} nats, target {short(target)})" if math.isfinite(target) else ""
    )
    if math.isfinite(share := _of(row, "stare/open")):
        return (
            f"Every {settings.get('gate', 'token')} has a gate, and {share:.0%} of the tokens have"
            f" an open gate. Weights where the gate is open: {weights}."
        )
    gate = _of(row, "stare/gate")
    if not found or not math.isfinite(gate):
        return ""
    if gate >= 0.5:
        return f"The gate was open{against}: {weights}."
    return f"The gate was closed{against}: the selected tokens were not reweighted."


def _because(row: Mapping[str, float], of: tuple[str, ...]) -> str:
    metric, letter, _, _, weight = of
    bound = short(row[f"stare/threshold_{metric}"])
    said = f"surprisal {'≥' if letter.startswith('L') else '≤'} {bound}"
    if not math.isfinite(gate := _of(row, "stare/gate")):
        return said
    return (
        f"{said}, gate open: × {short(_of(row, f'stare/{weight}'))}"
        if gate >= 0.5
        else f"{said}, gate closed"
    )


def _of(row: Mapping[str, float], key: str) -> float:
    return row.get(key, math.nan)
