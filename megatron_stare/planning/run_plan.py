"""The plan of a run: whether it fits, what a step takes, and what near it would fit."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from megatron_stare.config.layout_rules import check_layout, check_recompute
from megatron_stare.config.load import with_absolute_paths
from megatron_stare.config.resolved import ResolvedRun, resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.errors import ConfigError
from megatron_stare.planning.coefficients import SOURCES, Coefficients, Fitted
from megatron_stare.planning.fit import PlannedFit
from megatron_stare.planning.gpus import Gpu
from megatron_stare.planning.layout_search import Candidate, check_nodes, search
from megatron_stare.planning.memory_budget import Budget
from megatron_stare.planning.phase_times import ASSUMPTIONS, Lengths, Step, step_time
from megatron_stare.planning.placement import Demand
from megatron_stare.planning.preflight import check_lengths, not_checked
from megatron_stare.rollout.engines.replicas import ServedMemory, replica_count, replica_gpus

DAY = 86400.0
SHOWN = 8  # layouts


@dataclass(frozen=True)
class Site:
    """Where a run is to be; `nodes` None: on as many as it needs."""

    gpu: Gpu
    nodes: int | None = None
    node_size: int = 8


@dataclass(frozen=True)
class Plan:
    """All that was found.

    budgets: of the first rank of each pipeline stage.
    served: a server rank's memory, where a run starts servers on GPUs.
    nearest: that fit, of `searched` layouts.
    took: seconds.
    """

    run: ResolvedRun
    site: Site
    nodes: int
    lengths: Lengths
    fitted: Fitted
    budgets: list[Budget]
    faults: list[str]
    step: Step
    served: ServedMemory | None
    searched: int
    fitting: int
    nearest: list[tuple[Candidate, Step]]
    took: float

    @property
    def peak(self) -> tuple[int, str, int]:
        """Stage, phase and bytes where most is held."""
        sizes = [(s, phase, found.total(phase)) for s, found in enumerate(self.budgets) for phase in found.phases]
        return max(sizes, key=lambda each: each[2])

    @property
    def growing_cache(self) -> float | None:
        """Bytes of keys and values, on a server's rank, of all responses that grow in a round of partial rollouts,
        with their prompts; more than its cache take turns. None: there are no such rounds, or no such server."""
        if self.served is None or (flow := self.step.partial) is None:
            return None
        tokens = flow.held + flow.growing * self.lengths.prompt
        return tokens / replica_count(self.run.config) * self.served.token

    def rank(self, stage: int) -> int:
        """The first of a stage."""
        parallel = self.run.config.parallel
        return stage * parallel.world_size // parallel.pipeline


def make_plan(config: Config, site: Site, lengths: Lengths, fitted: Fitted) -> Plan:
    """Raises UserError for a model that cannot be read, or a layout that does not run or cannot be placed."""
    started = time.monotonic()
    run = resolve_run(with_absolute_paths(config), published=True)
    if lengths.prompt + lengths.response > run.shape.max_positions:
        raise ConfigError(
            f"{lengths.prompt + lengths.response:.0f} tokens are more than the model's {run.shape.max_positions}",
            where="--response-tokens",
        )
    run = ResolvedRun(_over_nodes(run.config, site), run.shape)
    config = run.config
    check_layout(config.parallel, run.shape)
    check_recompute(config.model, config.parallel, run.shape)
    check_lengths(config, run.shape)
    nodes = site.nodes or -(-Demand.of(config).gpus // site.node_size)
    check_nodes(config, nodes, site.node_size)
    fit = PlannedFit(capacity_of(config, site.gpu))
    fit.build(run)
    searched, found = search(run, config.parallel.world_size, nodes, site.node_size, fit)
    nearest = [
        (each, step_of(each.run, site.gpu, fitted.coefficients, lengths, fit)) for each in _different(found)[:SHOWN]
    ]
    return Plan(
        run=run,
        site=site,
        nodes=nodes,
        lengths=lengths,
        fitted=fitted,
        budgets=fit.budgets(run),
        faults=fit.faults(run),
        step=step_of(run, site.gpu, fitted.coefficients, lengths, fit),
        served=fit.served(run),
        searched=searched,
        fitting=len(found),
        nearest=nearest,
        took=time.monotonic() - started,
    )


def as_json(plan: Plan) -> dict[str, Any]:
    """What --json writes; bytes and seconds."""
    stage, phase, size = plan.peak
    return {
        "model": plan.run.config.model.path,
        "family": plan.run.shape.family,
        "gpu": asdict(plan.site.gpu),
        "nodes": plan.nodes,
        "gpus": plan.step.gpus,
        "engines": replica_count(plan.run.config),
        "layout": plan.run.config.parallel.model_dump(),
        "fits": not plan.faults,
        "faults": plan.faults,
        "peak": {"stage": stage, "rank": plan.rank(stage), "phase": phase, "bytes": size},
        "capacity": plan.budgets[0].capacity,
        "stages": [{"rank": plan.rank(number), "phases": each.phases} for number, each in enumerate(plan.budgets)],
        "step": asdict(plan.step) | {"tokens_s_gpu": plan.step.tokens_s_gpu, "mfu": plan.step.mfu(plan.site.gpu)},
        "growing_cache": plan.growing_cache,
        "days": days(plan),
        "steps": plan.run.config.run.steps,
        "lengths": asdict(plan.lengths),
        "coefficients": asdict(plan.fitted.coefficients),
        "fitted_to": plan.fitted.run,
        "sources": SOURCES,
        "assumptions": list(ASSUMPTIONS),
        "not_checked": not_checked(plan.run.config),
        "searched": plan.searched,
        "fitting": plan.fitting,
        "nearest": [
            {
                "settings": each.settings(plan.run.config),
                "distance": each.distance,
                "peak": each.peak,
                "seconds": step.seconds,
                "tokens_s_gpu": step.tokens_s_gpu,
            }
            for each, step in plan.nearest
        ],
        "took": plan.took,
    }


def days(plan: Plan) -> float:
    """Until the run's last step, with its checkpoints, where training waits for these."""
    config = plan.run.config
    every = config.run.checkpoint_every
    saved = config.run.steps / every if every and not config.checkpoint.background else 0
    return (config.run.steps * plan.step.seconds + saved * plan.step.checkpoint) / DAY


def _different(found: list[Candidate]) -> list[Candidate]:
    """The nearest of each way to cut the model and to recompute; the run itself is none."""
    first: dict[str, Candidate] = {}
    for each in found:
        if each.distance:
            config = each.run.config
            first.setdefault(f"{config.parallel} {config.model.recompute}", each)
    return list(first.values())


def _over_nodes(config: Config, site: Site) -> Config:
    """The run with as many replicas, of trainer and, on its GPUs, of servers, as the nodes have GPUs for."""
    if site.nodes is None:
        return config
    colocated, engine = config.sglang.colocated, replica_gpus(config)
    ranks = site.nodes * site.node_size - (0 if colocated else engine * replica_count(config))
    one = config.parallel.world_size // config.parallel.data
    if ranks < one or ranks % one:
        raise ConfigError(
            f"{max(ranks, 0)} GPUs for the trainer cannot be cut into replicas of {one} ranks",
            where="--nodes",
            fix=f"parallel.tensor x parallel.pipeline x parallel.context has to divide {max(ranks, 1)}",
        )
    changes: dict[str, Any] = {"parallel": config.parallel.model_copy(update={"data": ranks // one})}
    if colocated and engine:
        changes["rollout"] = config.rollout.model_copy(update={"engines": max(ranks // engine, 1)})
    return config.model_copy(update=changes)


def capacity_of(config: Config, gpu: Gpu) -> int:
    """Bytes of a GPU that a run is held against."""
    return round(config.memory.device_gb * 1e9) if config.memory.device_gb else gpu.memory


def step_of(run: ResolvedRun, gpu: Gpu, of: Coefficients, lengths: Lengths, fit: PlannedFit) -> Step:
    """What a step of the run takes."""
    fullest = max(fit.stages(run), key=lambda each: sum(each.values()))
    return step_time(run, gpu, of, lengths, fullest, fit.served(run))
