"""Writes the table of published runs in docs/planning.md from the model of time; --check says
whether it is as it is.

    python tools/make_plan_docs.py

The coefficients are the assumed ones: none is fitted to these rows.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # predictions are made without any device

from megatron_stare.config.load import validate
from megatron_stare.config.resolved import ResolvedRun, resolve_run
from megatron_stare.planning.gpus import Coefficients, find_gpu
from megatron_stare.planning.memory import PlannedFit
from megatron_stare.planning.phase_times import Lengths, Step, forward_flops, step_time
from megatron_stare.process.shipped import SHIPPED

PAGE = Path(__file__).parent.parent / "docs" / "planning.md"
START, END = "<!-- made by tools/make_plan_docs.py -->\n", "<!-- to here -->\n"


def main() -> int:
    page = PAGE.read_text()
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    made = f"{before}{START}{SOURCE}.\n\n{table()}\n{END}{after}"
    if "--check" in sys.argv[1:]:
        return int(made != page)
    PAGE.write_text(made)
    return 0


@dataclass(frozen=True)
class Published:
    """A run's row in NeMo-RL 0.5's performance summary, and the settings of its recipe.

    response: mean tokens, the row's; prompt: the tokens that are left of its tokens a second.
    recompute: of activations, as the recipe has it.
    """

    name: str
    model: str
    gpus: int
    layout: dict[str, int]
    engines: int
    engine_ranks: int
    ahead: bool
    recompute: str
    response: float
    seconds: float
    tokens_s_gpu: float

    @property
    def prompt(self) -> float:
        """Mean tokens: what the rate holds beyond the responses."""
        return max(self.tokens_s_gpu * self.gpus * self.seconds / SEQUENCES - self.response, 0.0)


SEQUENCES, UPDATE, LONGEST = 2048, 512, 4096  # of a step and of an optimizer step; tokens
ROWS = (
    Published(
        "Qwen3-32B",
        "qwen3-32b",
        32,
        {"tensor": 4, "pipeline": 4, "data": 2},
        8,
        4,
        False,
        "none",
        3251,
        376,
        571,
    ),
    Published(
        "Llama-3.1-8B",
        "llama-3.1-8b",
        16,
        {"pipeline": 2, "data": 8},
        16,
        1,
        False,
        "full",
        1019,
        92.8,
        1581,
    ),
    Published(
        "Llama-3.1-8B, rollouts one step ahead",
        "llama-3.1-8b",
        16,
        {"data": 8},
        8,
        1,
        True,
        "full",
        1123,
        64.8,
        2478,
    ),
)
CLAIMED = 0.3  # of the published time
SOURCE = (
    "The published times are from NeMo-RL 0.5's docs/about/performance-summary.md, for H100 and"
    " bfloat16. The predicted times use assumed rates, not calibrated ones. The prompt lengths of"
    " the published runs are derived from the published tokens/s"
)

PARTS = (
    f"Each step of the published runs trains on {SEQUENCES} sequences, with a forward pass of the"
    " policy, a forward pass of the reference policy, and an update. The update costs as much as 3"
    " forward passes, or 4 if it recomputes all activations. The last five columns of the next"
    " table are predicted seconds per step."
)
HEAD = (
    "| | trainer GPUs | prompt + response tokens | TFLOP of a sequence's forward pass |"
    " recomputed activations | rollout | log-probs | update | sync | other |",
    "|---|---|---|---|---|---|---|---|---|---|",
)
AHEAD = (
    "The predicted time of a step is the sum of its phases' seconds. If rollouts run one step"
    " ahead of training, they overlap with log-probs and update. Only the longer of these two"
    " times is then added."
)


def predicted(row: Published) -> tuple[ResolvedRun, Step]:
    """The row's step by this project's model of time."""
    samples = 32
    config = validate(
        {
            "model": {
                "path": str(SHIPPED / "assets/architectures" / row.model),
                "dtype": "bfloat16",
                "recompute": row.recompute,
            },
            "parallel": {**row.layout, "sequence": row.layout.get("tensor", 1) > 1},
            "batch": {
                "prompts": SEQUENCES // samples,
                "samples_per_prompt": samples,
                "mini_batch_prompts": UPDATE // samples,
                "micro_batch_tokens": LONGEST,
            },
            "rollout": {
                "engine": "sglang",
                "engines": row.engines,
                "max_prompt_tokens": 256,
                "max_new_tokens": LONGEST - 256,
                "staleness": 1 if row.ahead else None,
            },
            "sglang": {"tensor_parallel": row.engine_ranks, "colocated": not row.ahead},
            "optimizer": {"distributed": True},
            "algorithm": {"name": "grpo", "reference_kl": {"coef": 0.01}},
        },
        row.name,
    )
    run = resolve_run(config)
    gpu = find_gpu("h100-80g")
    fit = PlannedFit(gpu.memory)
    fullest = max(fit.stages(run), key=lambda each: sum(each.values()))
    return run, step_time(
        run, gpu, Coefficients(), Lengths(row.prompt, row.response), fullest, fit.served(run)
    )


def table() -> str:
    """Markdown: a row a run, then a row with the arithmetic of each, then causes."""
    lines = [
        "| | GPUs | published s | predicted s | | published tokens/s/GPU | predicted | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    arithmetic, causes = [], []
    for row in ROWS:
        run, step = predicted(row)
        times, rates = (row.seconds, step.seconds), (row.tokens_s_gpu, step.tokens_s_gpu)
        lines.append(
            f"| {row.name} | {row.gpus} | {times[0]:g} | {times[1]:.1f} | {_off(*times)} |"
            f" {rates[0]:,.0f} | {rates[1]:,.0f} | {_off(*rates)} |"
        )
        arithmetic.append(_arithmetic(row, run, step))
        causes += _cause(row, step)
    return "\n".join([*lines, "", PARTS, "", *HEAD, *arithmetic, "", AHEAD, *causes])


def _off(published: float, said: float) -> str:
    return f"{said / published - 1:+.0%}"


def _cause(row: Published, step: Step) -> list[str]:
    """Cause, in words, of a row that is further off than the model claims to be; else []."""
    if abs(step.seconds / row.seconds - 1) <= CLAIMED:
        return []
    _, kept = predicted(replace(row, recompute="none"))
    return [
        "",
        f'The prediction for "{row.name}" is off by more than {CLAIMED:.0%}. NVIDIA did not publish'
        " whether its run recomputed activations, but NVIDIA's current recipe recomputes them."
        f" Without recomputation, the predicted step takes {kept.seconds:.1f} s"
        f" ({_off(row.seconds, kept.seconds)} from the published time).",
    ]


def _arithmetic(row: Published, run: ResolvedRun, step: Step) -> str:
    """The sum behind a row, in numbers."""
    phases = step.phases
    cells = (
        row.name,
        run.config.parallel.world_size,
        f"{row.prompt:.0f} + {row.response:.0f}",
        f"{forward_flops(run.shape, row.prompt, row.response) / 1e12:.1f}",
        "all" if row.recompute == "full" else "none",
        *(f"{phases[name]:.1f}" for name in ("rollout", "log_probs", "update", "sync")),
        f"{Coefficients().fixed_s:.1f}",
    )
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    sys.exit(main())
