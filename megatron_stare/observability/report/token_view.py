"""Prepares sampled responses with coloured tokens for `token_view.html.jinja` and `token_view.js`.

Reads rollout files. Any page that includes the macro of `token_view.html.jinja` can show the
prepared responses. The per-token values on the page are exactly the values in the rollout file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_stare.run_dir.rollout_files import SampledResponse, read_rollouts, rollout_files

FILES = 3  # per run: the first, a middle one, the last
MOST_TOKENS = 40_000  # per page and run; about 25 bytes each


@dataclass(frozen=True)
class TokenView:
    """The responses that a reader of the page can choose from, and a text about the responses that
    are left out."""

    responses: Sequence[dict[str, Any]]
    about: str

    @property
    def data(self) -> dict[str, Any]:
        """The data for the script."""
        return {"responses": self.responses}


def token_view(responses: Sequence[SampledResponse], about: str = "") -> TokenView:
    """Makes a view of the responses whose per-token values were recorded. All responses in the view
    together have at most MOST_TOKENS tokens. The only exception is a first response that alone
    exceeds MOST_TOKENS tokens: the view then contains only this response."""
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
        [
            f"{left} {'response is' if left == 1 else 'responses are'} left out, to show at most"
            f" {MOST_TOKENS:,} tokens."
        ]
        if left
        else []
    )
    return TokenView(shown, " ".join(filter(None, [about, *more])))


def view_of_run(directory: Path) -> TokenView | None:
    """Makes a view of responses from the run's first, middle and last rollout file.

    Returns None if the first, middle and last rollout file contain no response with per-token
    values.
    """
    files = rollout_files(directory / "rollouts")
    read = [
        found for file in _some(files) if (found := [r for r in read_rollouts(file) if r.tokens])
    ]
    if not read:
        return None
    steps = ", ".join(str(found[0].step) for found in read)
    of_steps = f"step{'s' if len(read) > 1 else ''} {steps}"
    about = (
        f"From {of_steps}. The run's folder rollouts has {len(files)} files."
        if len(files) > len(read)
        else ""
    )
    return token_view([response for found in reversed(read) for response in found], about)


def _some(files: Sequence[Path]) -> list[Path]:
    if len(files) <= FILES:
        return list(files)
    return [files[0], files[len(files) // 2], files[-1]]


def _entry(response: SampledResponse) -> dict[str, Any]:
    record = response.record
    reward = ": not verified" if response.reward is None else f": reward {response.reward:g}"
    if record.get("reward_status") == "pending":  # a row of supervised fine-tuning
        reward = ""
    return {
        "title": (
            f"step {response.step}, prompt {record.get('cursor')}, sample {record.get('sample')}"
            f"{reward}"
        ),
        "prompt": response.prompt,
        "answer": response.answer,
        **record["by_token"],
    }
