"""NCCL's flight recorder: which collectives each rank has begun and ended. Dumped on request, from outside.

torch's ProcessGroupNCCL keeps the newest TORCH_FR_BUFFER_SIZE collectives, and dumps them to the file
TORCH_FR_DUMP_TEMP_FILE + rank when something is written to the pipe TORCH_NCCL_DEBUG_INFO_PIPE_FILE + rank + ".pipe",
which a thread of its own reads (docs.pytorch.org: torch_nccl_environment_variables). Of gloo there is no such record.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

RECORDED = "2000"  # collectives
PIPES, DUMPS = "nccl_pipe_", "nccl_trace_rank_"
DUMP_S, LOOK_S = 10.0, 0.25  # that ranks are given to write theirs; they look at the pipe once a second


def environment(folder: Path) -> dict[str, str]:
    """Of ranks whose collectives are NCCL's, so that `dump` finds them. Costs some MB, and no measurable time."""
    return {
        "TORCH_FR_BUFFER_SIZE": RECORDED,
        "TORCH_FR_DUMP_TEMP_FILE": str(folder / DUMPS),
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(folder / PIPES),
    }


def dump(folder: Path) -> tuple[dict[str, bytes], str]:
    """What the ranks of this node have recorded, by file name, and in words what there is."""
    pipes = sorted(folder.glob(f"{PIPES}*.pipe"))
    if not pipes:
        return {}, "NCCL's flight recorder: no rank here has one (their collectives are gloo's)"
    begun = time.time()
    for pipe in pipes:
        with contextlib.suppress(OSError):  # nobody reads it: the rank is gone
            descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            os.write(descriptor, b"1")
            os.close(descriptor)
    deadline = time.monotonic() + DUMP_S
    dumps: list[Path] = []
    while time.monotonic() < deadline and len(dumps) < len(pipes):
        time.sleep(LOOK_S)
        dumps = [file for file in folder.glob(f"{DUMPS}*") if file.stat().st_mtime >= begun]
    return {file.name: file.read_bytes() for file in dumps}, (
        f"NCCL's flight recorder: {len(dumps)} of {len(pipes)} ranks have written theirs (folder nccl)"
    )
