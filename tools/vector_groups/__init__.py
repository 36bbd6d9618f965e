"""Groups that a file of worked numbers may hold: one function each, which computes the group with
what training uses.

A function reads its inputs from `Fields` and expects its answers there; fields that it does not
read count as failures.
"""

from __future__ import annotations

from collections.abc import Callable

from vector_groups import advantages, losses, selection, stare

GROUPS: dict[str, Callable[..., None]] = {
    each.__name__: each
    for each in (
        stare.entropy_sensitivity,
        stare.stare_weights,
        stare.stare_topk_count,
        stare.stare_loss,
        stare.stare_controller_adaptive,
        selection.stapo,
        advantages.gtpo,
        advantages.grpo_s,
        advantages.grop,
        advantages.grpo_advantage,
        advantages.dapo_overlong,
        advantages.dapo_group_filter,
        losses.loss_aggregation,
        selection.cov_selection,
        selection.twenty_entropy,
        losses.gspo,
        losses.cispo,
        losses.adaptive_entropy_skywork,
        losses.tis_mis,
    )
}
