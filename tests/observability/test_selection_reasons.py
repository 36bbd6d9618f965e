"""Why tokens were selected is said from stored numbers, for every kind of set and gate."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megatron_stare.observability.report.selection_reasons import selection_reasons

C2: dict[str, Any] = {"name": "stare", "variant": "C2", "share": 0.1}
ROW = {
    "entropy/mean": 0.1,
    "entropy/target": 0.12,
    "stare/gate": 1.0,
    "stare/amplify": 2.0,
    "stare/attenuate": 0.3,
    "stare/selected_plus": 1300.0,
    "stare/threshold_plus": 0.4,
    "stare/selected_minus": 110.0,
    "stare/threshold_minus": 0.75,
}


def test_an_open_gate_says_rule_threshold_and_weights() -> None:
    found = selection_reasons(C2, ROW)
    assert found.lines == (
        (
            "stare put 1,300 tokens with positive advantage into L+: the 10 % with the highest"
            " surprisal (surprisal ≥ 0.400 nats)."
        ),
        (
            "stare put 110 tokens with negative advantage into L−: the 10 % with the highest"
            " surprisal (surprisal ≥ 0.750 nats)."
        ),
        "The gate was open (entropy 0.100 nats, target 0.120): L+ × 2.00, L− × 0.300.",
    )
    assert found.sets == {
        "+": "surprisal ≥ 0.400, gate open: × 2.00",
        "-": "surprisal ≥ 0.750, gate open: × 0.300",
    }


def test_a_closed_gate_weighs_nothing() -> None:
    found = selection_reasons(C2, ROW | {"stare/gate": 0.0, "entropy/mean": 0.2})
    assert (
        found.lines[-1]
        == "The gate was closed (entropy 0.200 nats, target 0.120): the selected tokens were not"
        " reweighted."
    )
    assert found.sets == {
        "+": "surprisal ≥ 0.400, gate closed",
        "-": "surprisal ≥ 0.750, gate closed",
    }


def test_common_tokens_lie_below_their_bound_and_take_the_other_weight() -> None:
    row = {
        key: value for key, value in ROW.items() if not key.startswith(("stare/sel", "stare/thr"))
    }
    # O2: U+ is attenuated
    row |= {"stare/threshold_common_plus": 0.2, "stare/selected_common_plus": 9.0}
    # O3: U- is amplified
    row |= {"stare/threshold_common_minus": 0.1, "stare/selected_common_minus": 8.0}
    complement = selection_reasons({**C2, "variant": "C3", "common": "complement"}, row)
    assert (
        complement.lines[0]
        == "stare put 9 tokens with positive advantage into U+: all that are not rare (surprisal"
        " ≤ 0.200 nats)."
    )
    assert complement.sets == {
        "p": "surprisal ≤ 0.200, gate open: × 0.300",
        "m": "surprisal ≤ 0.100, gate open: × 2.00",
    }
    bottom = selection_reasons({**C2, "common": "bottom"}, row)
    assert "the 10 % with the lowest surprisal (surprisal ≤ 0.200 nats)" in bottom.lines[0]


def test_a_fixed_bound_a_gate_by_token_and_several_updates() -> None:
    row = ROW | {"stare/open": 0.25, "update/count": 4.0}
    del row["stare/gate"]
    lines = selection_reasons({**C2, "rare_below": 0.2, "gate": "token"}, row).lines
    assert "those with a probability below 0.2 (surprisal ≥" in lines[0]
    assert (
        lines[2] == "Every token has a gate, and 25% of the tokens have an open gate. Weights where"
        " the gate is open: L+ × 2.00, L− × 0.300."
    )
    assert lines[3].startswith("The thresholds are means over the step's updates")
    assert len(selection_reasons(C2, ROW | {"update/count": 1.0}).lines) == 3


@pytest.mark.parametrize(
    ("algorithm", "row", "said"),
    [
        ("grpo", {"entropy/mean": 0.1}, "grpo selects no tokens."),
        (
            C2,
            ROW
            | {f"stare/selected_{name}": 0.0 for name in ("plus", "minus")}
            | {f"stare/threshold_{name}": math.inf for name in ("plus", "minus")},
            "stare selected no tokens in this step.",
        ),
        (
            {"name": "stapo"},
            {"stapo/entropy_threshold": 0.5},
            "Metrics of stapo in this step: stapo/entropy_threshold 0.500.",
        ),
        (C2, None, "This step's metrics are not recorded, so the selection of stare is"),
        (None, None, "This step's metrics are not recorded, so the selection of the method is"),
    ],
)
def test_other_methods_and_steps_without_metrics(algorithm: Any, row: Any, said: str) -> None:
    (line,) = selection_reasons(algorithm, row).lines
    assert line.startswith(said)
