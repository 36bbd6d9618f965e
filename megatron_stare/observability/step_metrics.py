"""A step's figures: what the trainer reports, and what the driver sees of rewards, responses, time and memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from megatron_stare.observability.process_memory import tree_pss_bytes
from megatron_stare.observability.signals import hacking_signals
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.records.trajectory import Trajectory

MEMORY_EVERY_S = 10.0  # reading every process's page tables takes milliseconds


class Stopwatch:
    """Times the phases of one step, and shows them as they run.

    Args:
        shown: opens a phase on the display, by name.
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
        """Seconds since the step began."""
        return time.perf_counter() - self._start


class _MemoryProbe:
    """The process tree's Pss, read now and then; the last reading in between."""

    def __init__(self) -> None:
        self._read_at = -MEMORY_EVERY_S
        self._bytes: int | None = None

    def gigabytes(self) -> float | None:
        if time.monotonic() - self._read_at >= MEMORY_EVERY_S:
            self._bytes, self._read_at = tree_pss_bytes(), time.monotonic()
        return None if self._bytes is None else self._bytes / 1e9


_memory = _MemoryProbe()


def step_metrics(
    batch: RolloutBatch, samples: Sequence[Trajectory], trainer: Mapping[str, float], watch: Stopwatch
) -> dict[str, float]:
    """Every metric of the step, by name."""
    verified = batch.verified
    lengths = batch.response_lengths.to(torch.float64)
    rewards = batch.rewards[verified]
    seconds = watch.total()
    metrics = {
        "reward/mean": float(rewards.mean()) if len(rewards) else float("nan"),
        "reward/timeouts": float(sum(s.reward_status == "timeout" for s in samples)),
        "reward/crashes": float(sum(s.reward_status == "crash" for s in samples)),
        "group/degenerate": degenerate_share(batch),
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "response/truncated": float(batch.truncated.to(torch.float64).mean()),
        **hacking_signals(samples),
        **trainer,
        **{f"time/{phase}_s": spent for phase, spent in watch.seconds.items()},
        "time/step_s": seconds,
        "perf/tokens_per_s": float(lengths.sum()) / seconds,
    }
    if (memory := _memory.gigabytes()) is not None:
        metrics["memory/tree_pss_gb"] = memory
    return metrics


def degenerate_share(batch: RolloutBatch) -> float:
    """Share of prompt groups whose rewards are all equal, and so teach nothing."""
    groups = int(batch.groups.max()) + 1
    flat = 0
    for group in range(groups):
        rewards = batch.rewards[(batch.groups == group) & batch.verified]
        flat += int(rewards.unique().numel() <= 1)
    return flat / groups
