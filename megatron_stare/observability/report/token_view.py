"""Sampled responses with their tokens in colour: what `token_view.html.jinja` and `token_view.js`
show.

Comes from rollout files; goes to any page that includes the macro. The numbers travel as they stand
in the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_stare.run_dir.rollout_files import SampledResponse, read_rollouts, rollout_files

FILES = 3  # of a run: the first, one in the middle, the last
MOST_TOKENS = 40_000  # of a page and run; some 25 bytes each


@dataclass(frozen=True)
class TokenView:
    """Responses to choose from, and what is to be said about those that are not there."""

    responses: Sequence[dict[str, Any]]
    about: str

    @property
    def data(self) -> dict[str, Any]:
        """Data that the script reads."""
        return {"responses": self.responses}


def token_view(responses: Sequence[SampledResponse], about: str = "") -> TokenView:
    """The view of those responses that have the numbers of their tokens, up to MOST_TOKENS
    tokens."""
    known = [response for response in responses if response.tokens]
    shown: list[dict[str, Any]] = []
    tokens = 0
    for response in known:
        tokens += len(response.tokens)
        if shown and tokens > MOST_TOKENS:
            break
        shown.append(_entry(response))
    left = len(known) - len(shown)
    more = (
        [f"{left} responses are left out, for there is room for {MOST_TOKENS:,} tokens."]
        if left
        else []
    )
    return TokenView(shown, " ".join(filter(None, [about, *more])))


def view_of_run(directory: Path) -> TokenView | None:
    """View of a run's rollouts whose tokens have numbers, from its first, middle and last rollout
    file.

    None where no such rollout is found.
    """
    files = rollout_files(directory / "rollouts")
    read = [
        found for file in _some(files) if (found := [r for r in read_rollouts(file) if r.tokens])
    ]
    if not read:
        return None
    steps = ", ".join(str(found[0].step) for found in read)
    about = (
        f"Of steps {steps}; {len(files)} files are in rollouts." if len(files) > len(read) else ""
    )
    return token_view([response for found in reversed(read) for response in found], about)


def _some(files: Sequence[Path]) -> list[Path]:
    if len(files) <= FILES:
        return list(files)
    return [files[0], files[len(files) // 2], files[-1]]


def _entry(response: SampledResponse) -> dict[str, Any]:
    reward = "not verified" if response.reward is None else f"reward {response.reward:g}"
    record = response.record
    return {
        "title": (
            f"step {response.step}, prompt {record.get('cursor')}, sample {record.get('sample')}:"
            f" {reward}"
        ),
        "prompt": response.prompt,
        "answer": response.answer,
        **record["by_token"],
    }
