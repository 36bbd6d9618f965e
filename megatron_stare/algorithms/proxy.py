"""How good a method's selection is as a proxy for the critical surprisal (STARE, arXiv 2606.19236,
appendix B.2).

STARE takes the tokens of highest surprisal of the whole batch for those past the critical surprisal
s* of their own position, which needs the distribution. Known here are both (sensitivity.py), so
that one is held against the other:

    precision   the share of L+ with s > s*, of U+ with s <= s*, and so for L- and U-
    A Phi       the sum over the set; negative over a right L+: its tokens raise the entropy at the
                rate -A Phi
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
            f"above {'' if of[0] == 'L' else '1 less '}forecast/rare_share, which it is by chance;"
            f" NaN where {of} is empty",
        )
        for name, of in _SETS.items()
    ),
    *(
        Metric(
            f"forecast/a_phi_{name}",
            "nats",
            f"sum of A Phi over {of}, per unit of a step in the logits, A before any weight",
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
    """Statistics of the whole batch that `proxy_metrics` reads.

    Args:
        batch: with sum_p2 and sum_p2_log_p.
        sets: those that the method selects.
        selected: [N] int8, `Method.selected`.

    Raises:
        ValueError: the batch is without the sums over the vocabulary.
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
    """`forecast/precision_*` and `forecast/a_phi_*` of every set, 0-dim; a precision of no tokens
    is NaN. Sums of A Phi are per unit of a step in the logits, nats, and so carry 1 / T^2
    (sensitivity.py)."""
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
