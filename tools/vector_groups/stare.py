"""The groups of STARE: entropy sensitivity, weights, loss and controller."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_stare.algorithms.sensitivity import critical_surprisal, second_moment, sensitivity
from megatron_stare.algorithms.stare import Stare
from megatron_stare.ops.vocab_parallel import log_prob_and_entropy
from megatron_stare.records.batch_statistics import threshold, top_k_count
from vector_groups.fields import NUMBER, CannotEvaluateError, Fields, other
from vector_groups.tokens import ask, first_and_rest, pad, total


def entropy_sensitivity(rows: list[Fields], file: Any) -> None:
    for row in rows:
        pi = row.tensor("pi")
        size = len(pi)
        log_prob, entropies = log_prob_and_entropy(
            pi.log().expand(size, size), torch.arange(size), vocab_size=size
        )
        entropy = entropies[0]
        s2 = second_moment(pi.square().sum(), torch.xlogy(pi.square(), pi).sum(), entropy)
        phi, s_star = sensitivity(log_prob, entropy, s2), critical_surprisal(entropy, s2)
        tokens = pad(torch.ones(1, size, dtype=torch.bool), log_prob=log_prob[None])
        row.expect("H", entropy)
        row.expect("S2", s2)
        row.expect("surprisal", tokens.batch.surprisal)
        row.expect("Phi", phi)
        row.expect("dH_deta_at_A_plus1", -phi)
        row.expect("finite_difference", -phi)
        row.expect("s_star", s_star)
        row.expect("p_star", (-s_star).exp())
        row.expect("E_pi_Phi", (pi * phi).sum())


def stare_state(gate: bool, amplify: float, attenuate: float) -> dict[str, Tensor]:
    values = {"gate": float(gate), "amplify": amplify, "attenuate": attenuate}
    return {name: torch.tensor(x, dtype=torch.float64) for name, x in values.items()}


def partition(scope: str, sequences: int) -> list[list[int]]:
    if scope == "global":
        return [list(range(sequences))]
    if scope == "one_sequence_per_micro_batch":
        return [[i] for i in range(sequences)]
    parts = re.findall(r"\[([\d,\s]*)\]", scope) if scope.startswith("micro_batches_") else []
    if not parts:
        raise CannotEvaluateError(f"scope {scope!r} is not known")
    return [[int(i) for i in part.split(",") if i.strip()] for part in parts]


def stare_weights(group: Fields, file: Any) -> None:
    mask, given = group.mask("response_mask"), {"log_prob": group.tensor("log_prob")}
    given["advantage"] = group.tensor("advantage_per_sequence")
    for case in group.items("cases"):
        method = Stare(variant=case["variant"], share=case["ratio"])
        state = stare_state(case["gate"], case["W"], case["M"])
        weights, selected = torch.ones(mask.shape, dtype=torch.float64), {"plus": 0, "minus": 0}
        for rows in partition(case["scope"], len(mask)):
            padded = pad(mask, rows, **given)
            statistics = ask(method, padded.batch)
            weights *= padded.spread(method.weights(padded.batch, statistics, state), fill=1.0)
            for each in method.selects:
                selected[each.name] += int(threshold(statistics, each.name).k)
        case.expect("weights", weights)
        case.expect("n_Lplus", selected["plus"])
        case.expect("n_Lminus", selected["minus"])


def stare_topk_count(rows: list[Fields], file: Any) -> None:
    for row in rows:
        row.expect("k", top_k_count(torch.tensor(row["n"]), row["ratio"]))


def stare_loss(group: Fields, file: Any) -> None:
    inputs = other(file, "stare_weights")
    mask = inputs.mask("response_mask")
    given = {
        "log_prob": inputs.tensor("log_prob"),
        "old_log_prob": group.tensor("old_log_prob"),
        "advantage": inputs.tensor("advantage_per_sequence"),
    }
    uses = group["uses"]
    variant = re.search(r"\b(O1|O4|C2)\b", uses)
    numbers = {
        name: re.search(rf"\b{name}\s*=?\s*({NUMBER})", uses) for name in ("ratio", "W", "M")
    }
    if variant is None or not all(numbers.values()):
        raise CannotEvaluateError(
            f"{group.path}.uses does not name variant, ratio, W and M: {uses!r}"
        )
    share, amplify, attenuate = (float(hit.group(1)) for hit in numbers.values() if hit)
    method = Stare(
        variant=variant.group(1),  # type: ignore[arg-type]
        share=share,
        clip_low=group["clip_low"],
        clip_high=group["clip_high"],
        dual_clip=group["dual_clip_c"],
    )
    state = stare_state(True, amplify, attenuate)
    padded = pad(mask, **given)
    surrogate = method.surrogate(padded.batch, padded.batch.advantage)
    group.expect("per_token_loss_before_weight", padded.spread(surrogate.loss))
    group.expect("loss_global_token_mean", total(method, padded.batch, state))
    legacy = replace(method, aggregation="micro_batch_mean")
    for key, _ in group.keys(r"loss_as_legacy_verl_micro_batches_\d+_\d+"):
        parts = (pad(mask, rows, **given).batch for rows in first_and_rest(mask))
        group.expect(key, sum(total(legacy, batch, state) for batch in parts))


def stare_controller_adaptive(group: Fields, file: Any) -> None:
    method = Stare(
        entropy_target=group["H_tgt"],
        adaptive=True,
        adapt_rate=group["alpha"],
        amplify_max=group["W_max"],
        attenuate_min=group["M_min"],
    )
    state = stare_state(True, group["W0"], group["M0"])
    for entry in group.items("trace"):
        entropy = math.nan if entry["H"] is None else float(entry["H"])
        state = method.control(state, {"entropy": torch.tensor(entropy, dtype=torch.float64)})
        entry.expect("gate", state["gate"])
        entry.expect("W_used", state["amplify"])
        entry.expect("M_used", state["attenuate"])
