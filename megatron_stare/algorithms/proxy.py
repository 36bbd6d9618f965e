"""Measures how well a method's selection finds the tokens above the critical surprisal (STARE,
arXiv 2606.19236, appendix B.2).

STARE selects the tokens of highest surprisal in the whole batch. STARE's selection approximates the
set of tokens whose surprisal s is above the critical surprisal s* of their position. The module
sensitivity.py computes the critical surprisal of a position from the policy's distribution at this
position. The metrics report two measures for each set of tokens:

    precision   share of L+ with s > s*, of U+ with s <= s*; likewise for L- and U-
    A Phi       sum over the set; negative if L+ is selected correctly, since the tokens of L+
                then raise the entropy at the rate -A Phi
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_stare.algorithms.sensitivity import is_rare, sensitivity_of
from megatron_stare.algorithms.token_sets import TokenSet
from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import Count, Request, Statistics, Sum, scalar
from megatron_stare.records.metric import Metric

_SETS = {"plus": "L+", "minus": "L-", "common_plus": "U+", "common_minus": "U-"}

METRICS = (
    *(
        Metric(
            f"forecast/precision_{name}",
            "share",
            f"tokens of {of} that lie {'beyond' if of[0] == 'L' else 'up to'} the critical"
            " surprisal of their position",
            f"above {'' if of[0] == 'L' else '1 - '}forecast/rare_share, its value by chance;"
            f" NaN if {of} is empty",
        )
        for name, of in _SETS.items()
    ),
    *(
        Metric(
            f"forecast/a_phi_{name}",
            "nats",
            f"sum of A Phi over {of}, per unit step in the logits, with A before reweighting",
            (
                "below 0: the set raises the entropy, as it should"
                if of == "L+"
                else "below 0: the set raises the entropy"
            ),
        )
        for name, of in _SETS.items()
    ),
)


def proxy_requests(
    batch: TokenBatch, sets: Sequence[TokenSet], selected: Tensor
) -> Mapping[str, Request]:
    """Returns requests for the whole-batch statistics that `proxy_metrics` reads.

    Args:
        batch: the tokens, with their `sum_p2` and `sum_p2_log_p`.
        sets: the token sets that the method selects.
        selected: [N] int8, `Method.selected`.

    Raises:
        ValueError: the batch lacks the sums over the vocabulary.
    """
    phi = sensitivity_of(batch)
    asked: dict[str, Request] = {}
    for each in sets:
        members = batch.loss_mask & (selected == each.code)
        asked[f"proxy/{each.name}"] = Count(members)
        asked[f"proxy/{each.name}_right"] = Count(
            members & (is_rare(phi) if each.rare else ~is_rare(phi))
        )
        asked[f"proxy/{each.name}_a_phi"] = Sum(batch.advantage * phi, members)
    return asked


def proxy_metrics(
    statistics: Statistics, sets: Sequence[TokenSet], temperature: float
) -> dict[str, Tensor]:
    """Returns the 0-dim metrics `forecast/precision_*` and `forecast/a_phi_*` of every set. The
    precision of an empty set is NaN. The unit of the metrics `forecast/a_phi_*` is nats per unit
    step. A unit step is not a training step: a unit step adds the vector A (one_hot(a) - p) to each
    token's logits. At the sampling temperature T, the metrics `forecast/a_phi_*` have a factor 1 /
    T^2 (see sensitivity.py)."""
    found = {}
    for each in sets:
        number = scalar(statistics, f"proxy/{each.name}")
        right = scalar(statistics, f"proxy/{each.name}_right")
        found[f"forecast/precision_{each.name}"] = torch.where(
            number > 0, right / number, float("nan")
        )
        found[f"forecast/a_phi_{each.name}"] = (
            scalar(statistics, f"proxy/{each.name}_a_phi") / temperature**2
        )
    return found
