"""tools/check_vectors.py: passes on right numbers, other numbers and shapes too, and on nothing
else."""

from __future__ import annotations

import copy
import importlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
VECTORS: dict[str, Any] = json.loads((ROOT / "tests/algorithms/algorithm_vectors.json").read_text())
GROUPS = [name for name in VECTORS if name != "meta"]

# what the groups are computed from; perturbing these may or may not change an answer
INPUT_NAMES = """
    pi log_prob old_log_prob response_mask mask advantage advantage_per_sequence ratio W M scope
    variant n clip_low clip_high dual_clip_c H_tgt W0 M0 alpha W_max M_min prob entropy tau_p v4_q
    reward lengths alpha1 alpha2 beta1 beta2 token_ratio clip correct gamma1 length L_max L_cache
    factor acc loss kl_cov_ratio kl_cov_coef clip_cov_lb clip_cov_ub per_token_loss eps_high target
    delta max min init step_entropy H train_log_prob rollout_log_prob bounds
"""
INPUTS = set(INPUT_NAMES.split())
ANSWERS_TOO = {
    "entropy_sensitivity": {"H"},
    "cispo": {"ratio"},
    "gspo": {"loss"},
}


# as a script has it: its own folder first
sys.path.insert(0, str(ROOT / "tools"))
TOOL = importlib.import_module("check_vectors")


def run(tmp_path: Path, file: Any) -> int:
    path = tmp_path / "vectors.json"
    path.write_text(file if isinstance(file, str) else json.dumps(file))
    return TOOL.main([str(path)])


def answers(value: Any, group: str, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of the expected numbers of a group."""
    if isinstance(value, dict):
        for key, below in value.items():
            if key not in INPUTS - ANSWERS_TOO.get(group, set()):
                yield from answers(below, group, (*path, key))
    elif isinstance(value, list):
        for i, below in enumerate(value):
            yield from answers(below, group, (*path, i))
    elif isinstance(value, (int, float)):
        yield path


def changed(group: Any, path: tuple[Any, ...]) -> Any:
    group = copy.deepcopy(group)
    *parents, leaf = path
    node = group
    for part in parents:
        node = node[part]
    old = node[leaf]
    node[leaf] = (not old) if isinstance(old, bool) else old + 3e-6 * max(1.0, abs(old))
    return group


def test_the_shipped_vectors_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, VECTORS) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in GROUPS)
    assert f"{len(GROUPS)} of {len(GROUPS)} groups passed" in printed


@pytest.mark.parametrize("group", GROUPS)
def test_every_expected_number_counts(group: str) -> None:
    paths = list(answers(VECTORS[group], group))
    assert paths
    generator = np.random.default_rng(0)
    few = (
        paths
        if len(paths) <= 30
        else [paths[i] for i in generator.choice(len(paths), 30, replace=False)]
    )
    for path in few:
        found = TOOL.evaluate(group, {**VECTORS, group: changed(VECTORS[group], path)})
        assert found.where, path
    assert TOOL.evaluate(group, VECTORS).where == []


@pytest.mark.parametrize("group", GROUPS)
def test_what_is_not_understood_fails(group: str, tmp_path: Path) -> None:
    values = copy.deepcopy(VECTORS[group])
    (values[0] if isinstance(values, list) else values)["surprise"] = 1.0
    assert "not evaluated" in TOOL.evaluate(group, {**VECTORS, group: values}).where[-1]
    values = copy.deepcopy(VECTORS[group])
    path = next(answers(values, group))
    node = values
    for part in path[:-1]:
        node = node[part]
    if isinstance(node, list):
        node.append(0.0)
    else:
        del node[path[-1]]
    assert TOOL.evaluate(group, {**VECTORS, group: values}).where


def test_unknown_groups_and_broken_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, {"novelty": [1.0]}) == 1
    assert "no such group is known" in capsys.readouterr().out
    for broken in ("{", "[1]", "{}", '{"meta": {}}'):
        assert run(tmp_path, broken) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert TOOL.main([str(tmp_path / "nowhere.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert run(tmp_path, {"cispo": VECTORS["cispo"]}) == 1
    assert "group gspo" in capsys.readouterr().out


def test_help_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        TOOL.main(["--help"])
    printed = capsys.readouterr().out
    assert "Exit status" in printed
    assert "FILE.json" in printed


# ---- other numbers and other shapes, by plain float64 formulas


def top(x: np.ndarray, candidates: np.ndarray, k: int) -> np.ndarray:
    """0/1 flags of the k largest x among the candidates."""
    order = sorted(np.argwhere(candidates).tolist(), key=lambda at: -x[tuple(at)])
    flags = np.zeros(x.shape)
    for at in order[:k]:
        flags[tuple(at)] = 1
    return flags


def padded(
    generator: np.random.Generator, lengths: list[int], low: float, high: float
) -> np.ndarray:
    width = max(lengths)
    mask = np.arange(width) < np.array(lengths)[:, None]
    return np.where(mask, generator.uniform(low, high, mask.shape), 0.0)


def generated(seed: int) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 9, generator.integers(4, 8)).tolist()
    size, width = len(lengths), max(lengths)
    mask = np.arange(width) < np.array(lengths)[:, None]
    n = int(mask.sum())
    advantage = generator.normal(size=size)
    wide = advantage[:, None] * mask
    log_prob = padded(generator, lengths, -5, -0.01)
    old = log_prob + padded(generator, lengths, -0.6, 0.6)
    ratio = np.where(mask, np.exp(log_prob - old), 0.0)
    file: dict[str, Any] = {}

    pi = generator.dirichlet(np.ones(int(generator.integers(2, 12))))
    entropy = -(pi * np.log(pi)).sum()
    s2 = (pi**2 * (np.log(pi) + entropy)).sum()
    phi = pi * (np.log(pi) + entropy) - s2
    low, high = math.exp(-entropy), float(pi.max())  # the root of p (ln p + H) = S2 lies between
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (low, middle) if middle * (math.log(middle) + entropy) > s2 else (middle, high)
    file["entropy_sensitivity"] = [
        {
            "pi": pi,
            "H": entropy,
            "S2": s2,
            "surprisal": -np.log(pi),
            "Phi": phi,
            "dH_deta_at_A_plus1": -phi,
            "finite_difference": -phi,
            "s_star": -math.log(low),
            "p_star": low,
            "E_pi_Phi": 0.0,
        }
    ]

    share, amplify, attenuate = round(generator.uniform(0.1, 0.5), 2), 1.3, 0.7

    def weights(rows: list[int], variant: str) -> tuple[np.ndarray, int, int]:
        here = mask & np.isin(np.arange(size), rows)[:, None]
        out, counts = np.ones(mask.shape), [0, 0]
        for side, (sign, weight) in enumerate(((1, amplify), (-1, attenuate))):
            if variant == "O1" and sign < 0:
                continue
            candidates = here & (sign * wide > 0)
            m = int(candidates.sum())
            counts[side] = 0 if m == 0 else min(m, max(1, int(m * share + 0.999999)))
            out = np.where(top(-log_prob, candidates, counts[side]) > 0, weight, out)
        return out, counts[0], counts[1]

    everyone, first, rest = list(range(size)), [0], list(range(1, size))
    cases = []
    for scope, parts in (
        ("global", [everyone]),
        (f"micro_batches_{first}_{rest}".replace(" ", ""), [first, rest]),
    ):
        for variant in ("O1", "C2"):
            done = [weights(rows, variant) for rows in parts]
            cases.append(
                {
                    "variant": variant,
                    "ratio": share,
                    "gate": True,
                    "W": amplify,
                    "M": attenuate,
                    "scope": scope,
                    "weights": np.prod([w for w, _, _ in done], axis=0),
                    "n_Lplus": sum(a for _, a, _ in done),
                    "n_Lminus": sum(b for _, _, b in done),
                }
            )
    file["stare_weights"] = {
        "log_prob": log_prob,
        "advantage_per_sequence": advantage,
        "response_mask": mask,
        "cases": cases,
    }
    objective = np.minimum(ratio * wide, np.clip(ratio, 0.9, 1.3) * wide)
    objective = np.where(wide < 0, np.maximum(objective, 1.5 * wide), objective)
    file["stare_loss"] = {
        "uses": f"stare_weights inputs, C2, ratio {share}, W {amplify}, M {attenuate}, gate on",
        "old_log_prob": old,
        "clip_low": 0.1,
        "clip_high": 0.3,
        "dual_clip_c": 1.5,
        "per_token_loss_before_weight": -objective * mask,
        "loss_global_token_mean": (weights(everyone, "C2")[0] * -objective * mask).sum() / n,
        "loss_as_legacy_verl_micro_batches_0_123": sum(
            len(rows)
            / size
            * (weights(rows, "C2")[0] * -objective * mask)[rows].sum()
            / mask[rows].sum()
            for rows in (first, rest)
        ),
    }

    prob, spread = (
        np.where(mask, generator.uniform(0, 0.3, mask.shape), 0.0),
        padded(generator, lengths, 0, 2),
    )
    spread = np.round(spread, 4)
    candidates = mask & (wide > 0) & (prob < 0.2)
    v4 = {}
    for name in ("linear", "lower", "higher"):
        tau = np.quantile(spread[candidates], 0.6, method=name)
        v4[name] = {"tau_h": tau, "keep_mask": mask & ~(candidates & (spread < tau))}
    tau = np.quantile(spread[mask], 0.8)
    kept = v4["linear"]["keep_mask"]
    file["stapo"] = {
        "prob": prob,
        "entropy": spread,
        "advantage": advantage,
        "response_mask": mask,
        "tau_p": 0.2,
        "v4_q": 0.6,
        "v4_candidate_set": candidates,
        "v4": v4,
        "v1_q80_over_all_valid": {"tau_h": tau, "keep_mask": mask & ~(candidates & (spread < tau))},
        "loss_ratio1_v4_linear_renormalised": -(wide * kept).sum() / kept.sum(),
        "loss_ratio1_not_renormalised": -(wide * kept).sum() / n,
    }

    loss = padded(generator, lengths, -3, 3)
    file["loss_aggregation"] = {
        "loss": loss,
        "mask": mask,
        "token_mean": loss.sum() / n,
        "seq_mean_token_mean": (loss.sum(1) / mask.sum(1)).mean(),
        "seq_mean_token_sum": loss.sum(1).mean(),
        "dr_grpo_Lmax7": loss.sum() / (size * 7),
        "verl_seq_mean_token_sum_norm_L9": loss.sum() / 9,
        "verl_legacy_token_mean_microbatches_0_12": sum(
            len(rows) / size * loss[rows].sum() / mask[rows].sum() for rows in (first, rest)
        ),
    }

    k = max(1, int(n * 0.35 + 0.9999))
    keep = top(spread, mask, k)
    file["twenty_entropy"] = {
        "entropy": spread,
        "mask": mask,
        "ratio": 0.35,
        "per_token_loss": loss,
        "k": k,
        "keep": keep,
        "loss_paper_denominator_kept": (keep * loss).sum() / k,
        "loss_trl_denominator_all": (keep * loss).sum() / n,
        "trl_quantile_threshold_linear": np.quantile(spread[mask], 0.65),
    }

    covariance = np.where(mask, (wide - wide.sum() / n) * (log_prob - log_prob.sum() / n), 0.0)
    held = top(covariance, mask, max(1, int(0.15 * n)))
    file["cov_selection"] = {
        "advantage": wide,
        "log_prob": log_prob,
        "old_log_prob": old,
        "mask": mask,
        "mean_advantage": wide.sum() / n,
        "mean_log_prob": log_prob.sum() / n,
        "covariance": covariance,
        "kl_cov_ratio": 0.15,
        "kl_cov_k": max(1, int(0.15 * n)),
        "kl_cov_selected": held,
        "kl_cov_coef": 0.4,
        "kl_cov_loss_token_mean": (-wide * ratio + 0.4 * held * np.abs(log_prob - old)).sum() / n,
        "clip_cov_lb": 0.2,
        "clip_cov_ub": 1.5,
        "clip_cov_candidates": mask & (covariance > 0.2) & (covariance < 1.5),
        "clip_cov_budget_ratio_0p1": max(int(0.1 * n), 1),
    }

    whole = np.exp((log_prob - old).sum(1) / mask.sum(1))
    file["gspo"] = {
        "log_prob": log_prob,
        "old_log_prob": old,
        "mask": mask,
        "advantage": advantage,
        "seq_ratio": whole,
        "clip_low": 0.05,
        "clip_high": 0.02,
        "loss": -np.minimum(whole * advantage, np.clip(whole, 0.95, 1.02) * advantage).mean(),
    }
    weight = np.minimum(ratio, 1.15)
    file["cispo"] = {
        "eps_high": 0.15,
        "ratio": ratio,
        "weight": weight,
        "loss_token_mean": -(weight * wide * log_prob).sum() / n,
    }

    number = int(generator.integers(4, 7))
    # one alone would have no spread
    reward = np.r_[1.0, 1.0, 0.0, 0.0, generator.integers(0, 2, number - 4)]
    generator.shuffle(reward)
    spans = generator.integers(2, 6, number)
    here = np.arange(spans.max()) < spans[:, None]
    h = np.where(here, generator.uniform(0.05, 1.5, here.shape), 0.0)
    right, wrong = here & (reward[:, None] == 1), here & (reward[:, None] == 0)

    def shaped(h: np.ndarray, alpha1: float, alpha2: float) -> np.ndarray:
        out = np.zeros(h.shape)
        for t in range(h.shape[1]):
            a, b = right[:, t], wrong[:, t]
            out[a, t] = alpha1 + alpha2 * a.sum() * h[a, t] / h[a, t].sum()
            out[b, t] = -alpha1 - alpha2 * b.sum() / h[b, t] / (1 / h[b, t]).sum()
        return out

    def normal(x: np.ndarray, where: np.ndarray) -> np.ndarray:
        return np.where(where, (x - x[where].mean()) / x[where].std(), 0.0)

    plain = shaped(h, 0.8, 0.3)
    file["gtpo"] = {
        "reward": reward,
        "lengths": spans,
        "entropy": h,
        "alpha1": 0.8,
        "alpha2": 0.3,
        "shaped_no_clip": plain,
        "shaped_entropy_clipped_0p2_0p28": shaped(np.clip(h, 0.2, 0.28), 0.8, 0.3),
        "advantage_eq6_separate_population_std": normal(plain, right) + normal(plain, wrong),
        "advantage_joint_all_tokens_population_std": normal(plain, here),
        "mean_adv_on_correct_tokens_separate": 0.0,
        "mean_adv_on_wrong_tokens_separate": 0.0,
        "conservation_sum_pos_per_t_alpha_0p9_0p1": right.sum(0),
    }
    mean_h = h.sum(1) / spans
    good, bad = reward == 1, reward == 0
    shaped_s = np.where(
        good,
        0.9 + 0.2 * good.sum() * mean_h / mean_h[good].sum(),
        -0.9 - 0.2 * bad.sum() / mean_h / (1 / mean_h[bad]).sum(),
    )
    token_ratio = np.where(here, generator.uniform(0.6, 1.5, here.shape), 0.0)
    mean_ratio = token_ratio.sum(1) / spans
    advantage_s = (shaped_s - shaped_s.mean()) / shaped_s.std()
    file["grpo_s"] = {
        "seq_entropy": mean_h,
        "beta1": 0.9,
        "beta2": 0.2,
        "shaped": shaped_s,
        "advantage_over_group_population_std": advantage_s,
        "token_ratio": token_ratio,
        "seq_ratio_arithmetic_mean": mean_ratio,
        "clip": [0.1, 0.15],
        "objective": (
            np.minimum(
                mean_ratio * advantage_s, np.clip(mean_ratio, 0.9, 1.15) * advantage_s
            ).mean()
        ),
    }

    train = [generator.uniform(-3, -0.1, m) for m in (4, 1, 3)]
    rollout = [row + generator.normal(0, 0.7, len(row)) for row in train]
    raw = [np.exp(a - b) for a, b in zip(train, rollout, strict=True)]
    ones = [np.ones(len(r)) for r in raw]
    flat = np.minimum(np.concatenate(raw), 1.6)
    file["tis_mis"] = {
        "train_log_prob": train,
        "rollout_log_prob": rollout,
        "raw_ratio": raw,
        "bounds": [0.7, 1.6],
        "cases": {
            "token_mask": {"weights": raw, "loss_mask": [(r >= 0.7) & (r <= 1.6) for r in raw]},
            "sequence_clip": {
                "weights": [np.clip(r.prod(), 0.7, 1.6) * np.ones(len(r)) for r in raw],
                "loss_mask": ones,
            },
            "geometric_mask": {
                "weights": [np.exp(np.log(r).mean()) * np.ones(len(r)) for r in raw],
                "loss_mask": [
                    (0.7 <= np.exp(np.log(r).mean()) <= 1.6) * np.ones(len(r)) for r in raw
                ],
            },
            "token_truncate_batchnorm": {
                "weights": [np.minimum(r, 1.6) / flat.mean() for r in raw],
                "loss_mask": ones,
            },
            "token_truncate_rs_token_0.8_1.3": {
                "weights": [np.minimum(r, 1.6) for r in raw],
                "loss_mask": [(r >= 0.8) & (r <= 1.3) for r in raw],
            },
            "token_truncate_veto_0.6": {
                "weights": [np.minimum(r, 1.6) for r in raw],
                "loss_mask": [o * bool((r >= 0.6).all()) for o, r in zip(ones, raw, strict=True)],
            },
            "icepop_0.6_1.4": {"weights": [np.where((r >= 0.6) & (r <= 1.4), r, 0.0) for r in raw]},
        },
    }  # fmt: skip
    return json.loads(json.dumps(file, default=lambda x: x.tolist()))


@pytest.mark.parametrize("seed", range(6))
def test_other_numbers_and_shapes_pass(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run(tmp_path, generated(seed))
    assert status == 0, capsys.readouterr().out
