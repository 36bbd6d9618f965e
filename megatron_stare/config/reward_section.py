"""The section `reward`."""

from __future__ import annotations

from pydantic import Field

from megatron_stare.config.performance_section import Section


class RewardConfig(Section):
    """How answers are verified, in worker processes."""

    verifier: str = Field(
        "math",
        description="'math', 'stare', 'dapo', 'dapo_boxed', 'exact', 'numeric', 'choice', 'format', "
        "'arithmetic', 'signs', a function my_pkg.my_module.verify or my_file.py:verify, a server's URL, "
        "or a sum 'math + 0.1 * format'; see docs/verifiers.md",
    )
    known_answers: str | None = Field(
        None,
        description='file of {"response": ..., "answer": ..., "reward": ...} a line that `verifier` must judge so '
        "before the first step; null: none beside the verifier's own",
    )
    workers: int = Field(1, ge=1, description="verifier processes")
    timeout_s: float = Field(10.0, gt=0, description="wall-clock limit of one answer, seconds")
    max_failure_rate: float = Field(
        0.05, ge=0, le=1, description="share of a batch that may time out or crash before the run stops"
    )
