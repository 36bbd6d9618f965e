"""Where the numbers of a run come from: the time, the host, the release and, in a checkout, the commit."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from pathlib import Path

from megatron_stare import __version__

_TIMEOUT_S = 5.0  # git on a disk that hangs must not keep a run


def origin() -> dict[str, str]:
    """`date` (local time with its offset, ISO 8601), `host`, `version`, and `commit` where this package is a checkout
    under git, with `+changes` where tracked files differ from it."""
    found = {"date": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "host": socket.gethostname(), "version": __version__}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        top = _git("rev-parse", "--show-toplevel")
        if Path(top) == Path(__file__).parents[2]:  # and not a repository that an installed package lies in
            changed = _git("status", "--porcelain", "--untracked-files=no")
            found["commit"] = _git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")
    return found


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S
    ).stdout.strip()
