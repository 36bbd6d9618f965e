"""Describes the machine a result was measured on, and says how much of its memory a process
takes."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

from megatron_stare.process.vector_maths import settle

settle()  # every benchmark imports this file


def machine() -> dict[str, Any]:
    """Processor, cores, memory, accelerator and versions; no host name and no path."""
    models = [
        line
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpu": models[0].split(":")[1].strip() if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "megatron_core": version("megatron-core"),
    }


def process_memory(what: str, pid: int | None = None) -> float:
    """VmRSS, resident, VmHWM, its peak, or RssAnon, the part of it without files, of a process,
    bytes; 0 when it is gone. Linux."""
    try:
        lines = Path(f"/proc/{pid or 'self'}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next(
        (1024.0 * int(line.split()[1]) for line in lines if line.startswith(f"{what}:")), 0.0
    )


def forget_peak() -> None:
    """This process's VmHWM is counted from here."""
    Path("/proc/self/clear_refs").write_text("5")
