"""Makes the plan of a run, as text or as JSON. The plan contains the predicted memory, the
predicted times of a step, and a list of similar layouts that fit into the GPUs' memory.

This module imports torch and Megatron. The module command.py adds the arguments of the command
`plan`, and imports torch and Megatron only when this command runs.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from typing import Any

from megatron_stare.config.load import with_absolute_paths
from megatron_stare.config.resolved import ResolvedRun, resolve_run
from megatron_stare.config.rules import check_layout, check_recompute
from megatron_stare.config.schema import Config, ParallelConfig
from megatron_stare.errors import ConfigError, UserError
from megatron_stare.planning.forecast import capacity_of, step_of
from megatron_stare.planning.gpus import SOURCES, Fitted, Gpu
from megatron_stare.planning.layout_search import Candidate, check_nodes, search
from megatron_stare.planning.memory import ITEMS, Budget, PlannedFit
from megatron_stare.planning.phase_times import ASSUMPTIONS, Lengths, Step
from megatron_stare.planning.placement import Demand
from megatron_stare.planning.preflight import check_lengths, not_checked
from megatron_stare.rollout.engines.replicas import ServedMemory, replica_count, replica_gpus

WIDTH = 50  # characters of a bar that stands for a GPU's memory
_SHORT = {
    "tensor": "TP",
    "pipeline": "PP",
    "virtual_pipeline": "VPP",
    "context": "CP",
    "expert": "EP",
    "data": "DP",
}
_MARKS = dict(zip(ITEMS, "PGORFALBWKC", strict=True))
DAY = 86400.0
SHOWN = 8  # layouts to print


def text(plan: Plan) -> str:
    """Returns the whole plan as text."""
    return "\n\n".join(
        [_head(plan), _memory(plan), _time(plan), _verdict(plan), _nearest(plan), _assumed(plan)]
    )


def layout(parallel: ParallelConfig) -> str:
    """Describes a layout by its parallel sizes, such as `TP 8, PP 4`. Sizes of 1 are left out. If
    all parallel sizes are 1, the description is `one rank`."""
    cuts = [
        f"{short} {getattr(parallel, name)}"
        for name, short in _SHORT.items()
        if getattr(parallel, name) > 1
    ]
    return ", ".join(cuts) or "one rank"


def bar(budget: Budget, phase: str) -> str:
    """Draws the memory of a phase as a bar of letters. Each item in the memory has its own letter,
    such as G for gradients. The number of times that an item's letter appears in the bar is
    proportional to the item's bytes. The space between the brackets `[` and `]` stands for the
    GPU's memory. If the phase needs more memory than the GPU has, the bar continues to the right of
    `]`."""
    marks, reached = "", 0.0
    for item, nbytes in budget.phases[phase].items():
        reached += nbytes / budget.capacity * WIDTH
        marks += _MARKS[item] * (round(reached) - len(marks))
    return f"[{marks[:WIDTH]:{WIDTH}}]{marks[WIDTH : 2 * WIDTH]}"


def _head(plan: Plan) -> str:
    config, site = plan.run.config, plan.site
    servers = (
        "on the same GPUs"
        if config.sglang.colocated
        else f"{plan.step.gpus - config.parallel.world_size} GPUs"
    )
    ranks = layout(config.parallel)
    if config.parallel.world_size > 1:
        ranks += f", {config.parallel.world_size} ranks"
    return (
        f"{config.model.path} ({plan.run.shape.family}) on {plan.nodes} x {site.node_size}"
        f" {site.gpu.name}: {ranks}; servers: {servers}"
    )


def _memory(plan: Plan) -> str:
    stage, *_ = plan.peak
    lines = [
        f"memory of rank {plan.rank(stage)}, the fullest (stage {stage})",
        plan.budgets[stage].table(),
        "",
    ]
    for number, each in enumerate(plan.budgets):
        phase = max(each.phases, key=each.total)
        size = f"{each.total(phase) / 1e9:6.1f} of {each.capacity / 1e9:.1f} GB"
        lines.append(f"stage {number:2} {bar(each, phase)} {size}, {phase}")
    shown = {
        item for each in plan.budgets for item in each.phases[max(each.phases, key=each.total)]
    }
    lines.append(
        "; ".join(f"{_MARKS[item]} {name}" for item, name in ITEMS.items() if item in shown)
    )
    return "\n".join(lines)


def _time(plan: Plan) -> str:
    step, config = plan.step, plan.run.config
    lines = [
        f"seconds of a step, for prompts of {plan.lengths.prompt:.0f} and responses of"
        f" {plan.lengths.response:.0f} tokens on average"
    ]
    lines += [f"  {phase:13}{seconds:9.4g}" for phase, seconds in step.phases.items()]
    lines.append(f"  {'other':13}{plan.fitted.coefficients.fixed_s:9.4g}")
    ahead = ", rollout in parallel with training" if config.rollout.staleness else ""
    lines.append(f"  {'step':13}{step.seconds:9.4g}{ahead}")
    if flow := step.partial:
        tokens = config.partial.tokens or 0
        lines.append(
            f"partial rollouts: {flow.rounds:.1f} rounds of {tokens:,} tokens a step; in each round"
            f" {flow.growing:,.0f} responses grow; a step takes over {flow.continued:,.0f}"
            f" unfinished responses with {flow.carried:,.0f} tokens from the step before"
        )
    if plan.growing_cache is not None and plan.served:
        sizes = (
            f"{plan.growing_cache / 1e9:.1f} GB on a server's rank, which has"
            f" {plan.served.cache / 1e9:.1f} GB for them"
        )
        lines.append(f"keys and values of all responses that grow in a round: {sizes}")
    background = " in the background" if config.checkpoint.background else ""
    lines.append(f"  {'a checkpoint':13}{step.checkpoint:9.4g}{background}")
    lines.append(
        f"{step.tokens_s_gpu:,.0f} tokens/s a GPU; MFU of the whole step"
        f" {step.mfu(plan.site.gpu):.1%}; {config.run.steps:,} steps take {days(plan):.3g} days"
    )
    return "\n".join(lines)


def _verdict(plan: Plan) -> str:
    stage, phase, size = plan.peak
    verdict = "does not fit" if plan.faults else "fits"
    peak = f"peak {size / 1e9:.1f} GB of {plan.budgets[0].capacity / 1e9:.1f}"
    return "\n".join(
        [f"{verdict}: {peak}, in {phase} on stage {stage} (rank {plan.rank(stage)})", *plan.faults]
    )


def _nearest(plan: Plan) -> str:
    lines = [
        f"nearest layouts that fit; {plan.fitting} of {plan.searched} tried layouts fit"
        f" ({plan.took:.1f} s)"
    ]
    for each, step in plan.nearest:
        settings = " ".join(
            f"{name}={str(value).lower() if isinstance(value, bool) else value}"
            for name, value in each.settings(plan.run.config).items()
        )
        lines.append(
            f"  {each.peak / 1e9:6.1f} GB {step.seconds:8.4g} s {step.tokens_s_gpu:8,.0f} tokens/s "
            f" {settings}"
        )
    return "\n".join(lines)


def _assumed(plan: Plan) -> str:
    of = asdict(plan.fitted.coefficients)
    lines = [f"assumed: {line}" for line in ASSUMPTIONS]
    if plan.run.shape.experts:
        lines.append(
            "assumed: every expert gets an equal share of the tokens; the copies of tokens that are"
            " sent to experts are not counted"
        )
    if plan.fitted.run:
        lines.append(
            f"fitted to {plan.fitted.run}: "
            + ", ".join(f"{name} {value:.3g}" for name, value in of.items())
        )
    else:
        lines += [f"assumed: {name} {value:.3g} ({SOURCES[name]})" for name, value in of.items()]
    lines += not_checked(plan.run.config)
    lines.append("activations are counted for unfused layers on a CPU; fused kernels keep less")
    return "\n".join(lines)


@dataclass(frozen=True)
class Site:
    """The machines of a run.

    `nodes`: number of nodes, or None for as many nodes as the run needs.
    """

    gpu: Gpu
    nodes: int | None = None
    node_size: int = 8


@dataclass(frozen=True)
class Plan:
    """The plan of a run.

    `budgets`: memory budgets, one for the first rank of each pipeline stage.
    `served`: memory of one rank of a server, or None if the run starts no servers on GPUs.
    `searched`, `fitting`: number of layouts that were tried, and number of tried layouts that fit
        into the GPUs' memory.
    `nearest`: at most SHOWN other layouts that fit into the GPUs' memory. The list begins with the
        layout that differs least from the run's own layout. Each layout comes with the predicted
        times of a step.
    `took`: seconds that planning took.
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
        """The pipeline stage and phase that need most memory on a GPU, and the number of bytes that
        they need."""
        sizes = [
            (s, phase, found.total(phase))
            for s, found in enumerate(self.budgets)
            for phase in found.phases
        ]
        return max(sizes, key=lambda each: each[2])

    @property
    def growing_cache(self) -> float | None:
        """Bytes of KV cache that a server's rank would need in order to hold all responses of a
        round of partial rollouts at the same time.

        If the KV cache of a server's rank is smaller than `growing_cache`, the servers decode only
        some of the responses at a time. `growing_cache` is None if partial rollouts are off or no
        servers run on GPUs.
        """
        if self.served is None or (flow := self.step.partial) is None:
            return None
        tokens = flow.held + flow.growing * self.lengths.prompt
        config = self.run.config
        caches = replica_count(config) * config.sglang.attention_data_parallel
        return tokens / caches * self.served.token

    def rank(self, stage: int) -> int:
        """Returns the first rank of a pipeline stage."""
        parallel = self.run.config.parallel
        return stage * parallel.world_size // parallel.pipeline


def make_plan(config: Config, site: Site, lengths: Lengths, fitted: Fitted) -> Plan:
    """Makes the plan of a run. Raises UserError if the model cannot be read, if the layout is
    invalid, or if the layout cannot be placed."""
    started = time.monotonic()
    run = resolve_run(with_absolute_paths(config), published=True)
    if lengths.prompt + lengths.response > run.shape.max_positions:
        raise ConfigError(
            f"{lengths.prompt + lengths.response:.0f} tokens are more than the model's"
            f" {run.shape.max_positions}",
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
        (each, step_of(each.run, site.gpu, fitted.coefficients, lengths, fit))
        for each in _different(found)[:SHOWN]
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
    """Returns the output of `--json`, with sizes in bytes and times in seconds."""
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
        "stages": [
            {"rank": plan.rank(number), "phases": each.phases}
            for number, each in enumerate(plan.budgets)
        ],
        "step": (
            asdict(plan.step)
            | {
                "tokens_s_gpu": plan.step.tokens_s_gpu,
                "mfu": plan.step.mfu(plan.site.gpu),
            }
        ),
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


def for_launch(plan: Plan) -> str:
    """Returns the values that a launch script needs, with one name and value per line. The value
    `nodes` is the number of nodes. The value `grace_s` is the number of seconds that the run needs,
    at the end of its time limit, to finish its step and save its state. The lines that start with
    `layout` contain the settings parallel.data and rollout.engines.

    `grace_s` is twice the sum of the predicted step time and the predicted checkpoint time, rounded
    up to whole minutes, but at least 300 seconds. A step can last longer than predicted, because
    dynamic sampling can take several rounds. Raises UserError in two cases: a phase needs more
    memory than a GPU has, or the KV cache of a server is too small for the longest possible
    sequence.
    """
    if plan.faults:
        raise UserError(
            f"the run does not fit: {plan.faults[0]}",
            fix="`megatron-stare plan` shows its memory and the layouts that fit",
        )
    config = plan.run.config
    grace = max(300, 60 * math.ceil(2 * (plan.step.seconds + plan.step.checkpoint) / 60))
    lines = [f"nodes {plan.nodes}", f"grace_s {grace}"]
    lines += [f"layout parallel.data={config.parallel.data}"]
    lines += [f"layout rollout.engines={config.rollout.engines}"]
    return "\n".join(lines)


def days(plan: Plan) -> float:
    """Returns the predicted duration of the run in days. The duration includes the time of the
    checkpoints if training waits for the checkpoints."""
    config = plan.run.config
    every = config.run.checkpoint_every
    saved = config.run.steps / every if every and not config.checkpoint.background else 0
    return (config.run.steps * plan.step.seconds + saved * plan.step.checkpoint) / DAY


def _different(found: list[Candidate]) -> list[Candidate]:
    """Returns, for each combination of layout and recomputation, the candidate that is nearest to
    the run's own layout. The run's own layout is left out."""
    first: dict[str, Candidate] = {}
    for each in found:
        if each.distance:
            config = each.run.config
            first.setdefault(f"{config.parallel} {config.model.recompute}", each)
    return list(first.values())


def _over_nodes(config: Config, site: Site) -> Config:
    """Sets the data-parallel size so that the run uses all GPUs of the nodes. Also sets the number
    of engines if the engines are colocated with the trainer."""
    if site.nodes is None:
        return config
    colocated, engine = config.sglang.colocated, replica_gpus(config)
    ranks = site.nodes * site.node_size - (0 if colocated else engine * replica_count(config))
    one = config.parallel.world_size // config.parallel.data
    if ranks < one or ranks % one:
        raise ConfigError(
            f"{max(ranks, 0)} GPUs for the trainer cannot be cut into replicas of {one} ranks",
            where="--nodes",
            fix=(
                "parallel.tensor x parallel.pipeline x parallel.context has to divide"
                f" {max(ranks, 1)}"
            ),
        )
    changes: dict[str, Any] = {
        "parallel": config.parallel.model_copy(update={"data": ranks // one})
    }
    if colocated and engine:
        changes["rollout"] = config.rollout.model_copy(update={"engines": max(ranks // engine, 1)})
    return config.model_copy(update=changes)
