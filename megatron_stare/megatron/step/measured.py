"""Holds the tokens and statistics of a rollout batch on the last pipeline stage, after the log-prob
pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_stare.algorithms.method import Method, State
from megatron_stare.ops.statistics_executor import gather_statistics
from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import Max, Mean, Request, Statistics
from megatron_stare.records.metric import Metric

METRICS = (
    Metric(
        "entropy/mean",
        "nats",
        "mean entropy of the policy over the tokens that carry loss, before the first update",
        "at its target (alert: 10 steps outside a quarter of it); without a target no halving in"
        " under 40 steps (alert)",
    ),
    Metric(
        "surprisal/mean",
        "nats",
        "mean of -ln p of the tokens that carry loss",
        "near entropy/mean, which it estimates",
    ),
    Metric(
        "rollout/logprob_diff_mean",
        "nats",
        "mean |engine's log-prob - trainer's| over the tokens that carry loss",
        "float32 below 1e-5, bfloat16 some thousandths; more with older weights or replayed routes",
    ),
    Metric(
        "rollout/logprob_diff_max",
        "nats",
        "largest |engine's log-prob - trainer's| over the tokens that carry loss",
        "float32 below 1e-3 (alert above); in 16 bits tenths are normal",
    ),
)


# tensors [N] that a training pass logs if it replaces the log-prob pass
LOG_PROB, ENTROPY = "pass/log_prob", "pass/entropy"


@dataclass(frozen=True)
class Measured:
    """Contains the tokens [N] of one rank, the statistics of the whole rollout batch, and the
    training method's state during the updates.

    `next_state`: the training method's state at the beginning of the next step. At first,
        `next_state` equals `state`. `Method.observe` can change `next_state`. If the run has no
        separate log-prob pass, `complete` computes a new `next_state`.
    `forecast`: metrics of the entropy forecast.
    """

    tokens: TokenBatch
    statistics: Statistics = field(default_factory=dict)
    state: State = field(default_factory=dict)
    next_state: State = field(default_factory=dict)
    forecast: dict[str, Tensor] = field(default_factory=dict)

    def requests(self, *, sampled: bool = True) -> dict[str, Request]:
        """Returns a dict that maps the name of each metric of the rollout batch to a `Request`. The
        `Request` defines the statistic that gives the metric's value.

        Args:
            sampled: False if no engine sampled the tokens. The tokens then have no log-probs of an
                engine.
        """
        tokens = self.tokens
        asked: dict[str, Request] = {
            "entropy/mean": Mean(tokens.entropy, tokens.loss_mask),
            "surprisal/mean": Mean(tokens.surprisal, tokens.loss_mask),
        }
        if not sampled:
            return asked
        drift = (tokens.old_log_prob - tokens.rollout_log_prob).abs()
        return asked | {
            "rollout/logprob_diff_mean": Mean(drift, tokens.loss_mask),
            "rollout/logprob_diff_max": Max(drift, tokens.loss_mask),
        }


def measure_batch(
    method: Method, tokens: TokenBatch, state: State, group: ProcessGroup | None, *, lagged: bool
) -> Measured:
    """Computes the statistics of the rollout batch. All ranks of the last pipeline stage must call
    `measure_batch`.

    Args:
        state: the method's state of the previous step.
        group: group of the ranks that hold other tokens of the batch, or None if this rank holds
            all tokens.
        lagged: whether log-probs are still unknown. If so, this step keeps the previous state, and
            `complete` computes the next step's state.
    """
    statistics = gather_statistics(partial(method.requests, tokens), group)
    now = state if lagged else method.control(state, statistics)
    return Measured(tokens, statistics, now, now)


def complete(
    measured: Measured, logged: Mapping[str, Tensor], method: Method, group: ProcessGroup | None
) -> Measured:
    """Adds the log-probs and entropies of a training pass to `measured`, because the run has no
    separate log-prob pass. Also computes the state of the training method for the next step from
    the log-probs and entropies of the training pass. All ranks of the last pipeline stage must call
    `complete`."""
    log_prob, entropy = logged[LOG_PROB], logged[ENTROPY]
    tokens = replace(measured.tokens, log_prob=log_prob, old_log_prob=log_prob, entropy=entropy)
    after = measure_batch(method, tokens, measured.state, group, lagged=False)
    return replace(measured, tokens=tokens, next_state=after.state)
