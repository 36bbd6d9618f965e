"""Traces single steps of a rank with torch.profiler, and marks its passes with NVTX."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function


@contextlib.contextmanager
def marked(name: str) -> Iterator[None]:
    """Names a pass in a trace, and on CUDA as an NVTX range that `nsys profile` shows."""
    with contextlib.ExitStack() as marks:
        marks.enter_context(record_function(name))
        if torch.cuda.is_available():
            marks.enter_context(torch.cuda.nvtx.range(name))
        yield


class StepProfile:
    """Records this process's operators from now until `write`, and on CUDA its kernels."""

    def __init__(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()

    def write(self, file: Path) -> None:
        """Ends the recording and writes a Chrome trace, compressed if the name ends in .gz.

        Raises:
            OSError: the file cannot be written; the recording has ended.
        """
        self._profile.stop()
        file.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(file))
