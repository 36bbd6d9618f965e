"""Takes the step of a case on every rank of its layout, in processes that stay for the next
case."""

from __future__ import annotations

import importlib
import os
import tempfile
from dataclasses import replace
from multiprocessing.pool import Pool
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
from torch import Tensor

from invariance.case import Case
from megatron_stare.cluster.trainer_group import plan_rules
from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.megatron.export.export import export_gradients
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.ops.plan import plan_mini_batches
from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import Threshold, TopK

NEAR = 1e-5  # of a threshold: close enough for rounding to decide
TIMEOUT_S = 300

# columns [M] of the whole batch in canonical order, see SCORES; 0 without loss
Scores = tuple[Tensor, ...]
SCORES = ("old_log_prob", "entropy", "sum_p2", "sum_p2_log_p")  # the sums where they are computed


def take(pool: Pool, case: Case, folder: str, scores: Scores | None) -> dict[str, Any]:
    """Takes the step on all ranks, and joins what they found as if one had found it.

    Args:
        pool: at least as many processes as ranks; every rank waits for the others, so each gets one
            of its own.
        folder: of the model.
        scores: those of the one-process run, to measure with as well; None: this is that run.

    Raises:
        UserError: the layout cannot be.
    """
    config = case.config(folder)
    ranks = range(config.parallel.world_size)
    with tempfile.TemporaryDirectory() as meeting:
        jobs = [(config, case, rank, f"file://{meeting}/ranks", scores) for rank in ranks]
        return _merge(pool.starmap_async(one_rank, jobs, chunksize=1).get(timeout=TIMEOUT_S))


def one_rank(
    config: Config, case: Case, rank: int, init: str, scores: Scores | None
) -> dict[str, Any]:
    """One step on this rank."""
    module, _, name = case.trainer.rpartition(".")
    worker: Trainer = getattr(importlib.import_module(module), name)(
        resolve_run(config), rank, init
    )
    try:
        return _step(worker, config, case, scores)
    finally:
        worker.close()


def _step(worker: Trainer, config: Config, case: Case, scores: Scores | None) -> dict[str, Any]:
    method = config.algorithm.method
    batch = method.judge(case.batch())
    plan = plan_mini_batches(
        batch.lengths.tolist(), batch.branch_groups.tolist(), plan_rules(resolve_run(config))
    )
    worker.compute_log_probs(batch.share(plan.branches_of(worker.data_rank())), plan)
    found: dict[str, Any] = {"given": {}, "selected": {}, "near": {}, "scores": None}
    measured = worker.step.measured
    state = method.initial_state()
    if measured is not None:
        own = measured.tokens
        if scores is None:
            everywhere = len(batch.loss_mask)
            found["scores"] = tuple(
                score.new_zeros(everywhere).index_copy_(0, own.index, score)
                for name in SCORES
                if (score := getattr(own, name)) is not None
            )
        else:
            columns = dict(zip(SCORES, (score[own.index] for score in scores), strict=False))
            given = replace(own, log_prob=columns["old_log_prob"], **columns)
            worker.step.measured = replace(measured, tokens=_moved(given, case))
            worker.measure(state)
            found["given"], _ = _selections(worker)
        worker.step.measured = replace(measured, tokens=_moved(own, case))
    worker.measure(state)
    if worker.step.measured is not None:
        found["selected"], found["near"] = _selections(worker)
        found["given"] = found["given"] or found["selected"]
    found["before"] = worker.export() if scores is None else {}
    result, policy = worker.update(), worker.policy
    found["gradients"] = export_gradients(policy.model, policy.shape, policy.layout)
    found["weights"] = worker.export()
    found["metrics"] = result[0] if result else None
    return found


def _moved(tokens: TokenBatch, case: Case) -> TokenBatch:
    """With the log-probs of an older policy, the same for a token wherever it lies."""
    noise = torch.rand(
        int(case.batch().response_lengths.sum()), generator=torch.Generator().manual_seed(0)
    )
    return replace(
        tokens, old_log_prob=tokens.old_log_prob + case.off_policy * (noise - 0.5)[tokens.index]
    )


def _selections(worker: Trainer) -> tuple[dict[str, set[int]], dict[str, set[int]]]:
    """By request: the canonical numbers of this rank's selected tokens, and of those near the
    threshold."""
    assert worker.step.measured is not None
    tokens, statistics = worker.step.measured.tokens, worker.step.measured.statistics
    selected, near = {}, {}
    for name, request in worker.method.requests(tokens, statistics).items():
        threshold = statistics.get(name)
        if isinstance(request, TopK) and isinstance(threshold, Threshold):
            chosen = threshold.select(request.key, request.index, request.mask)
            close = request.mask & ((request.key - threshold.value).abs() <= NEAR)
            selected[name] = set(request.index[chosen].tolist())
            near[name] = set(request.index[close].tolist())
    if not selected:  # a method whose sets rest on no order, such as those below a fixed bound
        codes = worker.method.selected(tokens, statistics)
        selected = {
            f"set {code}": set(tokens.index[codes == code].tolist()) for code in (1, -1, 2, -2)
        }
    return selected, near


def _merge(parts: list[dict[str, Any]]) -> dict[str, Any]:
    whole: dict[str, Any] = {
        "given": {},
        "selected": {},
        "near": {},
        "gradients": {},
        "before": {},
        "weights": {},
    }
    for part in parts:
        for key in ("given", "selected", "near"):
            for name, tokens in part[key].items():
                whole[key][name] = whole[key].get(name, set()) | tokens
        for key in ("gradients", "before", "weights"):
            whole[key] |= part[key]
    for key in ("metrics", "scores"):  # each of one rank alone, where there is one
        whole[key] = next((part[key] for part in parts if part[key] is not None), None)
    return whole
