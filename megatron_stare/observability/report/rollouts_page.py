"""The page of sampled responses: one self-contained HTML file that lists, filters and shows them token by token.

Comes from the files of one run directory, or of two side by side; goes to rollouts.html. As the report it loads nothing
from anywhere. What it shows of a response is the report's own view of tokens (`token_view.*`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_stare.errors import DataError
from megatron_stare.observability.report.html_files import TEMPLATES, write_page
from megatron_stare.observability.report.stored_responses import Stored, packed, pairs, stored_responses
from megatron_stare.run_dir.run_files import read_runs

MOST_RUNS = 2


def write_rollouts(run_dirs: Sequence[Path], out: Path) -> Path:
    """Writes the sampled responses of a run, or of two with what they said to the same prompts side by side.

    Returns:
        `out`.

    Raises:
        DataError: a directory holds nothing a run writes, there are no responses in any, more than two runs are given,
            a file of theirs is damaged, or `out` cannot be written.
    """
    if not 1 <= len(run_dirs) <= MOST_RUNS:
        raise DataError(f"{len(run_dirs)} runs are given, and one or two can be shown", fix="name one run, or two")
    runs = read_runs(run_dirs)
    stored = [stored_responses(run) for run in runs]
    if not any(map(len, stored)):
        raise DataError(
            "no sampled responses are stored",
            where=", ".join(map(str, run_dirs)),
            fix="run.rollouts_every says how often a run stores some, run.rollouts_kept how many",
        )
    page = TEMPLATES.get_template("rollouts.html.jinja").render(
        runs=runs,
        heading="Sampled responses",
        remarks=[remark for each in stored for remark in _left_out(each, len(stored) > 1)],
        stored=stored,
        index=packed({"runs": [_index(each) for each in stored], "pairs": pairs(stored)}),
    )
    return write_page(page, Path(out), "the page")


def _index(stored: Stored) -> dict[str, object]:
    return {
        "name": stored.name,
        "rows": stored.rows,
        "prompts": list(stored.prompts),
        "tasks": list(stored.tasks),
        "reasons": stored.reasons,
    }


def _left_out(stored: Stored, named: bool) -> list[str]:
    responses, numbers = stored.left_out
    of = f"{stored.name}: " if named else ""
    said = [f"{of}{responses:,} responses are left out, an even choice, to keep the page small."] if responses else []
    more = f"{of}{numbers:,} responses stand here without the numbers of their tokens, to keep the page small."
    return [*said, more] if numbers else said
