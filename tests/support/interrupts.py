"""Sets what a child does with SIGINT, before it starts (Popen's preexec_fn).

Programs started in the background, or by some CI systems, ignore SIGINT, and what they start
inherits that.
"""

from __future__ import annotations

import signal


def interruptible() -> None:
    """Ctrl-C ends it, whatever this process does."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def uninterruptible() -> None:
    """Ctrl-C is ignored, as by a program that a shell starts in the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
