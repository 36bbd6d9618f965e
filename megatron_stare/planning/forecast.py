"""Finds the kind of GPU of a run and the GPU's memory, and predicts the times of a step on this
GPU."""

from __future__ import annotations

import shutil
import subprocess

from megatron_stare.config.resolved import ResolvedRun
from megatron_stare.config.schema import Config
from megatron_stare.errors import ConfigError
from megatron_stare.planning.gpus import CPU, Coefficients, Gpu, find_gpu, named
from megatron_stare.planning.memory import PlannedFit
from megatron_stare.planning.phase_times import Lengths, Step, step_time

TOOL_S = 60.0


def gpu_of(config: Config) -> Gpu:
    """Returns the kind of GPU of a run.

    Raises:
        ConfigError: the kind of GPU is unknown, or the run uses a cluster and this machine has no
            GPU.
    """
    if config.plan.gpu:
        return find_gpu(config.plan.gpu, "plan.gpu")
    if name := name_here():
        return named(name)
    if config.runtime.ray_address:
        raise ConfigError(
            "this machine has no GPU, and the cluster's GPUs are not known here",
            fix="set plan.gpu",
        )
    return CPU


def name_here() -> str | None:
    """Returns the nvidia-smi name of this machine's first GPU, or None without a GPU. Does not
    initialise CUDA."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    asked = [tool, "--query-gpu=name", "--format=csv,noheader"]
    said = subprocess.run(asked, capture_output=True, text=True, timeout=TOOL_S, check=False)
    return next(iter(said.stdout.splitlines()), None) if said.returncode == 0 else None


def capacity_of(config: Config, gpu: Gpu) -> int:
    """Returns the number of bytes that the run can use on each GPU."""
    return round(config.memory.device_gb * 1e9) if config.memory.device_gb else gpu.memory


def step_of(
    run: ResolvedRun, gpu: Gpu, of: Coefficients, lengths: Lengths, fit: PlannedFit
) -> Step:
    """Predicts the duration of a training step, and the duration of each phase of the step."""
    fullest = max(fit.stages(run), key=lambda each: sum(each.values()))
    return step_time(run, gpu, of, lengths, fullest, fit.served(run))
