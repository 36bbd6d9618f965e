"""SGLang's own hash of CUDA tensors: its kernel, from the installed package, run by Triton's
interpreter on the CPU.

As a program, by the Python of SGLang's environment (-O: the function asserts that its tensor lies
on a GPU):

TRITON_INTERPRET=1 python -O tests/support/gpu_hash.py tensors.pt  # writes a JSON list of hashes
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

KERNEL = Path("kernels", "ops", "memory", "gpu_tensor_hash.py")


def kernel_hashes(python: str, tensors: Sequence[Tensor]) -> list[str]:
    """Hashes that a GPU server would report of each of the tensors."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tensors.pt"
        torch.save(list(tensors), file)
        environment = os.environ | {"TRITON_INTERPRET": "1"}
        done = subprocess.run(
            [python, "-O", __file__, str(file)],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
    return json.loads(done.stdout)


def main() -> None:
    # not imported: that takes long
    (package,) = importlib.util.find_spec("sglang").submodule_search_locations
    spec = importlib.util.spec_from_file_location("gpu_tensor_hash", Path(package) / KERNEL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tensors = torch.load(sys.argv[1], weights_only=True)
    print(json.dumps([f"{module.gpu_tensor_hash(tensor):016x}" for tensor in tensors]))


if __name__ == "__main__":
    main()
