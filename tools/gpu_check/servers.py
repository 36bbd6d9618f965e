"""Configurations of servers for the checks, and the libraries in the servers' environment."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import torch

from megatron_stare.config.schema import Config
from megatron_stare.models import read_shape
from megatron_stare.process.versions import nccl_release
from megatron_stare.rollout.engines.sglang.replica import check_servers, sglang_python
from megatron_stare.weights.files.hf_folder import HfFolder

START_S = 300.0
CALL_S = 120.0  # of a call of a server
_VERSIONS = """
import json, torch
from importlib.metadata import version
from megatron_stare.process.versions import nccl_release
print(json.dumps({"sglang": version("sglang"), "torch": torch.__version__, "nccl": nccl_release()}))
"""


def served(model: Path, cpu: bool, **sglang: Any) -> Config:
    """Configuration of a run with one server. Raises ConfigError for one that cannot start."""
    on_gpu = {} if cpu else {"memory_fraction": 0.3}  # the cache is not what is checked
    config = Config.model_validate(
        {
            "model": {"path": str(model), "dtype": "float32" if cpu else "bfloat16"},
            "rollout": {
                "engine": "sglang",
                "max_batch": 16,
                "max_prompt_tokens": 16,
                "max_new_tokens": 32,
                "threads": 2,
            },
            "runtime": {"timeout_s": CALL_S},
            "sglang": {
                "device": "cpu" if cpu else "cuda",
                "start_timeout_s": START_S,
                **on_gpu,
                **sglang,
            },
        }
    )
    check_servers(config, read_shape(model))
    return config


def libraries(config: Config) -> dict[str, dict[str, str | None]]:
    """Versions of PyTorch and NCCL here and in the servers' environment, and of SGLang there."""
    asked = [sglang_python(config), "-c", _VERSIONS]
    said = subprocess.run(asked, capture_output=True, text=True, check=True)
    return {
        "trainer": {"torch": torch.__version__, "nccl": nccl_release()},
        "servers": json.loads(said.stdout.splitlines()[-1]),
    }


def weights_of(model: Path) -> dict[str, torch.Tensor]:
    """A folder's tensors by Hugging Face name."""
    folder = HfFolder(str(model))
    return {name: folder.slice(name)[:] for name in folder.names()}


def device_used() -> int:
    """Bytes of this machine's first GPU that are taken by all processes; 0 without one."""
    if not torch.cuda.is_available():
        return 0
    free, whole = torch.cuda.mem_get_info(0)
    return whole - free
