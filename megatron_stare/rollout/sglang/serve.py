"""What a launched server's process runs, in the environment SGLang is installed in: SGLang's own launcher, ended with
the process that started it.

    python -m megatron_stare.rollout.sglang.serve <arguments of sglang.launch_server>

The API key comes in the environment, where other users do not see it. Standard input is held open by the starter and
never written to: its end, whatever ended the starter, is the order to go.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
from pathlib import Path

API_KEY_VARIABLE = "MEGATRON_STARE_SGLANG_KEY"
# of the trainer's process, and not for servers: paths of its own environment, and a choice of CPU kernels that are not
# there
NOT_KEPT = ("PYTHONPATH", "VIRTUAL_ENV", "SGLANG_USE_CPU_ENGINE")
SHARED_MEMORY = Path("/dev/shm")
SCRATCH_VARIABLE = "TMPDIR"  # a folder of the server's own, removed with it

# The CPU wheel of torchvision does not load without CUDA's; transformers imports it, and asks for these schemas only.
# Here and not in main(): SGLang's processes are spawned, and import this module again.
with contextlib.suppress(RuntimeError):  # they exist where torchvision loads by itself
    import torch

    _torchvision = torch.library.Library("torchvision", "DEF")
    _torchvision.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _torchvision.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def main() -> None:
    scratch = os.environ[SCRATCH_VARIABLE]
    threading.Thread(target=_end_with_starter, args=(os.dup(0), scratch), daemon=True).start()
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # SGLang's own processes must not hold the pipe
    key = os.environ.pop(API_KEY_VARIABLE, "")
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    run_server(prepare_server_args([*sys.argv[1:], *(["--api-key", key] if key else [])]))


def _end_with_starter(pipe: int, scratch: str) -> None:
    """Waits for the end of the pipe, then ends this process's whole group."""
    while os.read(pipe, 1):
        pass
    shutil.rmtree(scratch, ignore_errors=True)
    remove_shared_memory(os.getpgid(0))
    os.killpg(os.getpgid(0), signal.SIGKILL)


def remove_shared_memory(group: int) -> None:
    """Removes what the ranks of a server, a process group that is still there, share in memory: killed, they leave it
    behind. SGLang's names for it are sgl_shm_<kind>_<process>_<random>."""
    for file in SHARED_MEMORY.glob("sgl_shm_*_*_*"):
        with contextlib.suppress(OSError, ValueError):
            if os.getpgid(int(file.name.split("_")[-2])) == group:
                file.unlink()


if __name__ == "__main__":
    main()
