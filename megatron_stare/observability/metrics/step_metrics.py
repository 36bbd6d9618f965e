"""Computes a step's metrics. Puts the metrics of rewards, responses, time and memory into one dict
with the metrics that the trainer reports."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron_stare.observability.metrics.reward_hacking import hacking_signals
from megatron_stare.process.memory import tree_pss_bytes
from megatron_stare.records.metric import Metric
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.records.trajectory import Trajectory

METRICS = (
    Metric(
        "reward/mean",
        "reward",
        "mean over verified responses, before length penalties",
        "rises; NaN: no answer was verified",
    ),
    Metric(
        "reward/timeouts",
        "responses",
        "responses whose verifier took longer than reward.timeout_s",
        "0; any is an alert, many stop the run (reward.max_failure_rate)",
    ),
    Metric(
        "reward/crashes",
        "responses",
        "responses whose verifier raised an error or crashed its process",
        "0; any is an alert, many stop the run (reward.max_failure_rate)",
    ),
    Metric(
        "environment/given_up",
        "responses",
        "responses whose environment had begun a call with unknown outcome that cannot be repeated;"
        " they carry no loss",
        "0, or a few in the step after a run was killed",
    ),
    Metric(
        "tools/calls",
        "calls",
        "mean calls of tools in a response, malformed ones included",
        "rises if tools help and falls if they do not",
    ),
    Metric(
        "tools/used",
        "share",
        "responses that call a tool",
        "rises if tools help and falls if they do not",
    ),
    Metric(
        "tools/failed",
        "share",
        "calls that were answered by an error; a program's own error counts",
        "falls; near 1: see `calls` in the sampled responses",
    ),
    Metric(
        "tools/malformed", "share", "calls that could not be read", "falls to near 0 in few steps"
    ),
    Metric(
        "tools/seconds",
        "s",
        "mean time of a call",
        "far below the environment's call_seconds",
    ),
    Metric(
        "tools/tokens",
        "tokens",
        "mean tokens of tools' answers in a response; they carry no loss",
        "far below rollout.max_new_tokens",
    ),
    Metric("tools/turns", "turns", "mean turns of a response", "below the environment's max_turns"),
    Metric(
        "tools/calls_of_<tool>",
        "calls",
        "mean calls of this tool in a response; of `unknown`: of tools that do not exist",
        "as tools/calls",
    ),
    Metric(
        "tools/failures_of_<tool>",
        "share",
        "as tools/failed, among this tool's calls",
        "as tools/failed",
    ),
    Metric("tools/seconds_of_<tool>", "s", "mean time of a call of this tool", "as tools/seconds"),
    Metric(
        "group/degenerate",
        "share",
        "prompt groups whose rewards are all equal, so that they teach nothing",
        "below 0.9 (alert above); data too easy or too hard: batch.generate_prompts",
    ),
    Metric(
        "response/length_mean",
        "tokens",
        "mean length of the responses, observations of an environment included",
        "steady or slowly rising",
    ),
    Metric("response/length_max", "tokens", "longest response", "below rollout.max_new_tokens"),
    Metric(
        "response/branches",
        "branches",
        "of a response, mean; only if a response has several",
        "any; a context is computed for each",
    ),
    Metric(
        "response/truncated",
        "share",
        "responses cut off at rollout.max_new_tokens",
        "below 0.2 (alert above)",
    ),
    Metric(
        "time/rollout_s",
        "s",
        "sampling and verifying; with rollout.staleness, only the wait for them",
        "the largest part of a step with long responses",
    ),
    Metric(
        "time/log_probs_s",
        "s",
        "log-prob pass; missing if there is none",
        "about a third of time/update_s with one update a batch, more with performance.keep_graph",
    ),
    Metric(
        "time/update_s",
        "s",
        "all updates of the step: forward, backward, optimizer",
        "steady for the same number of tokens",
    ),
    Metric("time/sync_s", "s", "sending weights to the engines, and the canary", "steady"),
    Metric(
        "time/step_s",
        "s",
        "the whole step, without evaluations and checkpoints",
        "near the sum of its phases",
    ),
    Metric(
        "perf/tokens_per_s", "tokens/s", "response tokens of the batch over time/step_s", "steady"
    ),
    Metric(
        "memory/tree_pss_gb",
        "GB",
        "10^9 bytes: main memory of all the run's processes on the driver's node (Pss), read every"
        " 10 s",
        "level after some steps; a steady rise is a leak",
    ),
)


MEMORY_EVERY_S = 10.0  # reading every process's page tables takes milliseconds


class Stopwatch:
    """Measures the time of each phase of a step, and shows the current phase on the display.

    Args:
        shown: function that shows a phase on the display, given the name of the phase.
    """

    def __init__(self, shown: Callable[[str], contextlib.AbstractContextManager[None]]) -> None:
        self._shown = shown
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        with self._shown(phase):
            yield
        self.seconds[phase] = time.perf_counter() - start

    def total(self) -> float:
        """Returns the seconds since the step began."""
        return time.perf_counter() - self._start


class _MemoryProbe:
    """Measures the memory of the run's processes on this node, as proportional set size (Pss), at
    most once every `MEMORY_EVERY_S` seconds. Within `MEMORY_EVERY_S` seconds after a measurement,
    every call returns the result of this measurement."""

    def __init__(self) -> None:
        self._read_at = -MEMORY_EVERY_S
        self._bytes: int | None = None

    def gigabytes(self, pids_here: Callable[[], Iterable[int]]) -> float | None:
        if time.monotonic() - self._read_at >= MEMORY_EVERY_S:
            # the raylet of a cluster that was joined is left out, because other runs use it too
            self._bytes = tree_pss_bytes(extra_pids=pids_here())
            self._read_at = time.monotonic()
        return None if self._bytes is None else self._bytes / 1e9


_memory = _MemoryProbe()


def step_metrics(
    batch: RolloutBatch,
    samples: Sequence[Trajectory],
    trainer: Mapping[str, float],
    watch: Stopwatch,
    *,
    sampled: bool = True,
    pids_here: Callable[[], Iterable[int]] = tuple,
) -> dict[str, float]:
    """Returns every metric of the step, by name.

    Args:
        pids_here: returns the pids of the run's workers on this node.
        sampled: False if no engine sampled the responses, so that there are no rewards.
    """
    lengths = batch.response_lengths.to(torch.float64)
    seconds = watch.total()
    metrics = {
        **(reward_metrics(batch, samples) if sampled else {}),
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        **(
            {}
            if batch.branched is None
            else {"response/branches": batch.branched.size / batch.size}
        ),
        **trainer,
        **{f"time/{phase}_s": spent for phase, spent in watch.seconds.items()},
        "time/step_s": seconds,
        "perf/tokens_per_s": float(lengths.sum()) / seconds,
    }
    if (memory := _memory.gigabytes(pids_here)) is not None:
        metrics["memory/tree_pss_gb"] = memory
    return metrics


def reward_metrics(batch: RolloutBatch, samples: Sequence[Trajectory]) -> dict[str, float]:
    """Returns the metrics of rewards and all other metrics that exist only for sampled
    responses."""
    rewards = batch.rewards[batch.verified]
    return {
        "reward/mean": float(rewards.mean()) if len(rewards) else float("nan"),
        "reward/timeouts": float(sum(s.reward_status == "timeout" for s in samples)),
        "reward/crashes": float(sum(s.reward_status == "crash" for s in samples)),
        "environment/given_up": float(sum(s.reward_status == "given_up" for s in samples)),
        "group/degenerate": degenerate_share(batch),
        "response/truncated": float(batch.truncated.to(torch.float64).mean()),
        **hacking_signals(samples),
        **tool_metrics(samples),
    }


def tool_metrics(samples: Sequence[Trajectory]) -> dict[str, float]:
    """Returns the metrics of tool use if any response has called a tool or has several turns.
    Otherwise returns {}."""
    calls = [call for sample in samples for call in sample.calls]
    if not calls and all(sample.turns == 1 for sample in samples):
        return {}
    # the policy may make up any number of names
    by_tool: dict[str, list[Mapping[str, Any]]] = {}
    for call in calls:
        if call["name"] is not None:
            name = call["name"] if call.get("known", True) else "unknown"
            by_tool.setdefault(name, []).append(call)

    def mean(key: str, of: Sequence[Mapping[str, Any]]) -> float:
        return sum(call[key] for call in of) / len(of) if of else float("nan")

    of_tools: dict[str, float] = {}
    for name, own in sorted(by_tool.items()):
        of_tools[f"tools/calls_of_{name}"] = len(own) / len(samples)
        of_tools[f"tools/failures_of_{name}"] = mean("failed", own)
        of_tools[f"tools/seconds_of_{name}"] = mean("seconds", own)
    unread = sum(call["name"] is None for call in calls)
    return {
        "tools/calls": len(calls) / len(samples),
        "tools/used": sum(bool(sample.calls) for sample in samples) / len(samples),
        "tools/failed": mean("failed", calls),
        "tools/malformed": unread / len(calls) if calls else float("nan"),
        "tools/seconds": mean("seconds", calls),
        "tools/tokens": sum(call["tokens"] for call in calls) / len(samples),
        "tools/turns": sum(sample.turns for sample in samples) / len(samples),
        **of_tools,
    }


def degenerate_share(batch: RolloutBatch) -> float:
    """Returns the share of prompt groups in which all rewards are equal. A group with equal rewards
    gives no learning signal."""
    groups = int(batch.groups.max()) + 1
    rewards, of = batch.rewards[batch.verified], batch.groups[batch.verified]
    least = rewards.new_full((groups,), torch.inf).scatter_reduce_(0, of, rewards, "amin")
    most = rewards.new_full((groups,), -torch.inf).scatter_reduce_(0, of, rewards, "amax")
    return int((most <= least).sum()) / groups
