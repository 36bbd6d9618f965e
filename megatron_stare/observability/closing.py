"""What a finished run says in the terminal: its figures, and what lies where. Reads the run directory only."""

from __future__ import annotations

from pathlib import Path

from megatron_stare.observability.figures import verdict
from megatron_stare.observability.run_files import read_run

CONTENTS = {
    "report.html": "figures, curves, responses before and after",
    "metrics.jsonl": "every metric of every step",
    "tensorboard": "the same for TensorBoard",
    "eval.jsonl": "pass@1 on held-out problems",
    "rollouts": "sampled responses",
    "checkpoints": "to continue with --resume",
    "hf": "the policy, as transformers loads it",
    "config.yaml": "the resolved configuration",
}


def closing(run_dir: Path) -> str:
    """Several lines: the run's figures, then the files of its directory."""
    figures = verdict(read_run(run_dir))
    width = max(len(figure.label) for figure in figures)
    lines = [f"  {f.label:<{width}}  {f.value}  {f.note}".rstrip() for f in figures]
    files = [f"  {name:<{width}}  {what}" for name, what in CONTENTS.items() if (run_dir / name).exists()]
    return "\n".join(["", *lines, "", f"{run_dir}/", *files])
