"""Needs of a check, and the bounds that its figures must keep. Imports nothing that a bare machine
lacks."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

Bound = tuple[str, float]  # ("<=" or ">=", value)


SECOND_GPU = "a second GPU"
# what names the Python of the servers' environment; the first is the product's own
SGLANG_VARIABLES = ("MEGATRON_STARE_SGLANG_PYTHON", "SGLANG_PYTHON")
SGLANG = Path(__file__).parents[2] / ".venv-sglang" / "bin" / "python"


def lacking(needs: Sequence[str]) -> list[str]:
    """Which of the modules, or `cuda`, SECOND_GPU, `nccl 2.30` or newer, or `sglang`, this machine
    does not have."""
    return [name for name in ("torch", *needs) if not _there(name)]


def sglang_python() -> str | None:
    """The Python of an environment with SGLang: as a variable names it, or of the checkout; None
    where there is none."""
    for python in (*(os.environ.get(name) for name in SGLANG_VARIABLES), str(SGLANG)):
        if python is None or not Path(python).is_file():
            continue
        code = "import importlib.util as u, sys; sys.exit(u.find_spec('sglang') is None)"
        if subprocess.run([python, "-c", code], check=False).returncode == 0:
            return python
    return None


def _there(name: str) -> bool:
    if name == "sglang":
        return sglang_python() is not None
    if name in ("cuda", SECOND_GPU) or name.startswith("nccl "):
        return importlib.util.find_spec("torch") is not None and _device_has(name)
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, OSError, RuntimeError):  # the package around it, or a library of its own
        return False


def _device_has(name: str) -> bool:
    import torch

    if not torch.cuda.is_available() or name == "cuda":
        return torch.cuda.is_available()
    if name == SECOND_GPU:
        return torch.cuda.device_count() > 1
    from megatron_stare.process.versions import nccl_release

    wanted, release = name.removeprefix("nccl "), nccl_release()
    return release is not None and _numbers(release) >= _numbers(wanted)


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


def verdict_of(figures: Mapping[str, float], bounds: Mapping[str, Bound]) -> tuple[str, list[str]]:
    """`pass` where every bound has its figure, which is a number and within it; else `fail` and
    what is broken."""
    broken = []
    for name, (sign, value) in bounds.items():
        figure = figures.get(name, math.nan)
        if not (figure <= value if sign == "<=" else figure >= value):
            broken.append(f"{name} is {figure:.4g}, wanted {sign} {value:g}")
    return ("fail" if broken or not bounds else "pass"), broken
