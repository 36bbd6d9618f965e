"""What a GPU holds in each phase, for many layouts of one model: planning/memory_check.py's sums, of ranks put together
from parts that were built once."""

from __future__ import annotations

from megatron_stare.config.resolved import ResolvedRun
from megatron_stare.megatron.dry.planned_parts import Parts, build_parts, stage_bytes
from megatron_stare.planning.activation_memory import ActivationMemory
from megatron_stare.planning.flops import balanced
from megatron_stare.planning.memory_check import Fit
from megatron_stare.rollout.engines.replicas import ServedMemory


class PlannedFit(Fit):
    """Holds layouts of a run, with the servers that it has, against GPUs of so many bytes."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._parts: dict[tuple[int, int], Parts] = {}
        self._stages: dict[tuple[int | bool | None, ...], list[dict[str, int]]] = {}
        self._served: list[ServedMemory | None] = []

    def stages(self, run: ResolvedRun) -> list[dict[str, int]]:
        config, parallel = run.config, run.config.parallel
        cut, key = (parallel.tensor, parallel.expert), self._key(run)
        if key not in self._stages:
            if cut not in self._parts:
                self._parts[cut] = build_parts(run.shape, config.model, *cut)
            self._stages[key] = [
                stage_bytes(self._parts[cut], run.shape, config.model, parallel, config.optimizer, stage)
                for stage in range(parallel.pipeline)
            ]
        return self._stages[key]

    def _key(self, run: ResolvedRun) -> tuple[int | bool | None, ...]:
        """All that parameters, gradients and optimizer state depend on."""
        parallel = run.config.parallel
        stages = (parallel.pipeline, parallel.virtual_pipeline, parallel.first_stage_layers)
        return parallel.tensor, parallel.expert, *stages, parallel.replicas, run.config.optimizer.distributed

    def served(self, run: ResolvedRun) -> ServedMemory | None:
        if not self._served:
            self._served.append(super().served(run))
        return self._served[0]

    def activations(
        self, run: ResolvedRun, tokens: int, longest: int, rows: int
    ) -> tuple[ActivationMemory | None, float]:
        """Experts' as if each got an equal share of the tokens; copies of tokens on their way to them left out."""
        return super().activations(ResolvedRun(run.config, balanced(run.shape)), tokens, longest, rows)

    def build(self, run: ResolvedRun) -> None:
        """Takes a layout's own ranks, built whole, for it from now on."""
        self._stages[self._key(run)] = super().stages(run)
