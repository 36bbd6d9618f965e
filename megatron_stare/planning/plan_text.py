"""Shows a plan in a terminal. Apart from command.py, which the command line imports and which imports no torch."""

from __future__ import annotations

from dataclasses import asdict

from megatron_stare.config.schema import ParallelConfig
from megatron_stare.planning.coefficients import SOURCES
from megatron_stare.planning.memory import ITEMS, Budget
from megatron_stare.planning.phase_times import ASSUMPTIONS
from megatron_stare.planning.preflight import not_checked
from megatron_stare.planning.run_plan import Plan, days

WIDTH = 50  # characters of a GPU's memory
_SHORT = {"tensor": "TP", "pipeline": "PP", "virtual_pipeline": "VPP", "context": "CP", "expert": "EP", "data": "DP"}
_MARKS = dict(zip(ITEMS, "PGORFALBWKC", strict=True))


def text(plan: Plan) -> str:
    """All of it."""
    return "\n\n".join([_head(plan), _memory(plan), _time(plan), _verdict(plan), _nearest(plan), _assumed(plan)])


def layout(parallel: ParallelConfig) -> str:
    """Its cuts."""
    cuts = [f"{short} {getattr(parallel, name)}" for name, short in _SHORT.items() if getattr(parallel, name) > 1]
    return ", ".join(cuts) or "one rank"


def bar(budget: Budget, phase: str) -> str:
    """What a phase holds, a mark an item; over the GPU's memory it goes beyond the bar's end."""
    marks, reached = "", 0.0
    for item, nbytes in budget.phases[phase].items():
        reached += nbytes / budget.capacity * WIDTH
        marks += _MARKS[item] * (round(reached) - len(marks))
    return f"[{marks[:WIDTH]:{WIDTH}}]{marks[WIDTH : 2 * WIDTH]}"


def _head(plan: Plan) -> str:
    config, site = plan.run.config, plan.site
    servers = "on the same GPUs" if config.sglang.colocated else f"{plan.step.gpus - config.parallel.world_size} GPUs"
    return (
        f"{config.model.path} ({plan.run.shape.family}) on {plan.nodes} x {site.node_size} {site.gpu.name}: "
        f"{layout(config.parallel)}, {config.parallel.world_size} ranks; servers: {servers}"
    )


def _memory(plan: Plan) -> str:
    stage, *_ = plan.peak
    lines = [f"memory of rank {plan.rank(stage)}, the fullest (stage {stage})", plan.budgets[stage].table(), ""]
    for number, each in enumerate(plan.budgets):
        phase = max(each.phases, key=each.total)
        size = f"{each.total(phase) / 1e9:6.1f} of {each.capacity / 1e9:.1f} GB"
        lines.append(f"stage {number:2} {bar(each, phase)} {size}, {phase}")
    shown = {item for each in plan.budgets for item in each.phases[max(each.phases, key=each.total)]}
    lines.append("; ".join(f"{_MARKS[item]} {name}" for item, name in ITEMS.items() if item in shown))
    return "\n".join(lines)


def _time(plan: Plan) -> str:
    step, config = plan.step, plan.run.config
    lines = [f"seconds of a step, of {plan.lengths.prompt:.0f} prompt and {plan.lengths.response:.0f} response tokens"]
    lines += [f"  {phase:13}{seconds:9.4g}" for phase, seconds in step.phases.items()]
    lines.append(f"  {'beside them':13}{plan.fitted.coefficients.fixed_s:9.4g}")
    ahead = ", rollout beside training" if config.rollout.staleness else ""
    lines.append(f"  {'step':13}{step.seconds:9.4g}{ahead}")
    if flow := step.partial:
        tokens = config.partial.tokens or 0
        lines.append(
            f"{flow.rounds:.1f} rounds of {tokens:,} tokens a step, in each of which {flow.growing:,.0f} responses "
            f"grow; {flow.continued:,.0f} with {flow.carried:,.0f} tokens are carried over"
        )
    if plan.growing_cache is not None and plan.served:
        sizes = f"{plan.growing_cache / 1e9:.1f} GB, and a server's rank has {plan.served.cache / 1e9:.1f}"
        lines.append(f"keys and values of those that grow in a round: {sizes}")
    background = " beside training" if config.checkpoint.background else ""
    lines.append(f"  {'a checkpoint':13}{step.checkpoint:9.4g}{background}")
    lines.append(
        f"{step.tokens_s_gpu:,.0f} tokens/s a GPU; MFU {step.mfu(plan.site.gpu):.1%} of the whole step; "
        f"{days(plan):.3g} days to {config.run.steps:,} steps"
    )
    return "\n".join(lines)


def _verdict(plan: Plan) -> str:
    stage, phase, size = plan.peak
    verdict = "does not fit" if plan.faults else "fits"
    peak = f"peak {size / 1e9:.1f} GB of {plan.budgets[0].capacity / 1e9:.1f}"
    return "\n".join([f"{verdict}: {peak}, in {phase} on stage {stage} (rank {plan.rank(stage)})", *plan.faults])


def _nearest(plan: Plan) -> str:
    lines = [f"nearest that fit, {plan.fitting} of {plan.searched} layouts held against it ({plan.took:.1f} s)"]
    for each, step in plan.nearest:
        settings = " ".join(
            f"{name}={str(value).lower() if isinstance(value, bool) else value}"
            for name, value in each.settings(plan.run.config).items()
        )
        lines.append(
            f"  {each.peak / 1e9:6.1f} GB {step.seconds:8.4g} s {step.tokens_s_gpu:8,.0f} tokens/s  {settings}"
        )
    return "\n".join(lines)


def _assumed(plan: Plan) -> str:
    of = asdict(plan.fitted.coefficients)
    lines = [f"assumed: {line}" for line in ASSUMPTIONS]
    if plan.run.shape.experts:
        lines.append("assumed: experts get equal shares; copies of tokens on their way to them are not counted")
    if plan.fitted.run:
        lines.append(f"fitted to {plan.fitted.run}: " + ", ".join(f"{name} {value:.3g}" for name, value in of.items()))
    else:
        lines += [f"assumed: {name} {value:.3g} ({SOURCES[name]})" for name, value in of.items()]
    lines += not_checked(plan.run.config)
    lines.append("activations are those of unfused layers on a CPU: fused kernels keep less")
    return "\n".join(lines)
