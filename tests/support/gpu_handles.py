"""Opens handles of GPU memory by SGLang's own unpickler, in a process that is told which GPUs it
sees.

As a program, by the Python of SGLang's environment,

    python tests/support/gpu_handles.py payload UUID...

writes the number of the GPU it opens the handle on, or the error.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import torch
from torch.multiprocessing import reductions

# before SGLang asks for torchvision
from megatron_stare.rollout.engines.sglang.serve import NOT_KEPT

DEVICE = 6  # among the arguments of torch's rebuild_cuda_tensor


class OnGPU(torch.Tensor):
    """Says that it lies on a GPU."""

    is_cuda = True


@contextmanager
def gpus(uuids: Sequence[str]) -> Iterator[None]:
    """This process sees these GPUs."""
    seen = [SimpleNamespace(uuid=uuid) for uuid in uuids]
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "device_count", return_value=len(seen)),
        mock.patch.object(torch.cuda, "get_device_properties", side_effect=seen.__getitem__),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
        mock.patch.object(torch.cuda, "synchronize"),
        mock.patch.object(torch.cuda, "_lazy_init"),
    ):
        yield


@contextmanager
def shared_from(device: int) -> Iterator[None]:
    """torch shares tensors as handles of this GPU's memory."""
    arguments = (
        torch.Tensor,
        torch.Size([3]),
        (1,),
        0,
        torch.storage.UntypedStorage,
        torch.float32,
        device,
        b"handle",
    )
    reduced = reductions.rebuild_cuda_tensor, arguments
    with mock.patch.object(reductions, "reduce_tensor", return_value=reduced):
        yield


def opened_by_sglang(python: str, payload: str, uuids: Sequence[str]) -> str:
    """On which GPU a server that sees these would open the handle, or the last line of its
    error."""
    kept = {name: value for name, value in os.environ.items() if name not in NOT_KEPT}
    done = subprocess.run(
        [python, __file__, payload, *uuids], capture_output=True, text=True, env=kept
    )
    return (done.stdout or done.stderr).strip().splitlines()[-1]


def main() -> None:
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

    payload, *uuids = sys.argv[1:]
    monkey_patch_torch_reductions()
    reductions._rebuild_cuda_tensor_original = lambda *arguments: arguments[DEVICE]
    with gpus(uuids):
        ((_, device),) = MultiprocessingSerializer.deserialize(payload)
    print(device)


if __name__ == "__main__":
    main()
