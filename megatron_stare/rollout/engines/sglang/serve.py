"""Runs SGLang's launcher in a server's process, and ends it with the process that started it.

Called in the environment SGLang is installed in:

    python -m megatron_stare.rollout.engines.sglang.serve <arguments of sglang.launch_server>

The API key comes in the environment, where other users do not see it. Standard input is held open
by the starter and never written to: its end, whatever ended the starter, is the order to go.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import traceback
from pathlib import Path
from typing import NoReturn

API_KEY_VARIABLE = "MEGATRON_STARE_SGLANG_KEY"
# Variables of the trainer's process that servers must not inherit: paths of its environment, and a
# choice of CPU kernels that servers do not have.
NOT_KEPT = ("PYTHONPATH", "VIRTUAL_ENV", "SGLANG_USE_CPU_ENGINE")
SHARED_MEMORY = Path("/dev/shm")
SCRATCH_VARIABLE = "TMPDIR"  # a folder of the server's own, removed with it


def _let_torchvision_import() -> None:
    """Defines the operators that `import torchvision` asks for, where its own library does not
    load.

    A CPU wheel's library may want CUDA's. Where it loads, it defines the same operators itself, in
    a static initialiser that ends the process if they are there already; so its import is tried
    first.
    """
    import torch

    try:
        import torchvision  # noqa: F401
    except (ImportError, OSError, RuntimeError):
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]  # so that the next import begins anew
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)  # an operator goes with the library that defined it


_KEPT: list[object] = []
# here and not in main(): SGLang's spawned processes import this module again
_let_torchvision_import()


def main() -> None:
    _guard(os.environ[SCRATCH_VARIABLE])
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # SGLang's own processes must not hold the pipe
    key = os.environ.pop(API_KEY_VARIABLE, "")
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    try:
        run_server(prepare_server_args([*sys.argv[1:], *(["--api-key", key] if key else [])]))
    except SystemExit as end:  # how uvicorn ends where the port is taken
        _leave(end.code if isinstance(end.code, int) else 1)
    except BaseException:
        traceback.print_exc()
        _leave(1)
    _leave(0)


def _leave(code: int) -> NoReturn:
    """Ends this process, and with it its group (see `_guard`); the interpreter would wait for
    SGLang's ranks, which wait for requests."""
    # Removed now: once the ranks are gone nobody knows whose memory it was, and they may go before
    # the guard looks.
    remove_shared_memory(os.getpgid(0))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _guard(scratch: str) -> None:
    """Has this process's whole group ended once its starter is gone, by a process outside of it:
    where this one is killed as well, as Ray does to what an actor started, some of SGLang's would
    stay. The group ends with this one, too; its log then stays for the starter to read, who goes
    later."""
    group = os.getpgid(0)
    lives, ends = os.pipe()  # this end closes with this process: what it starts does not inherit it
    if os.fork():
        os.close(lives)
        return
    os.setsid()
    os.close(ends)
    # Nothing is ever written to either pipe: a readable one has ended.
    select.select([0, lives], [], [])
    remove_shared_memory(group)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    select.select([0], [], [])
    shutil.rmtree(scratch, ignore_errors=True)
    os._exit(0)


def remove_shared_memory(group: int) -> None:
    """Removes what the ranks of a server, a process group that is still there, share in memory:
    killed, they leave it behind. SGLang's names for it are sgl_shm_<kind>_<process>_<random>."""
    for file in SHARED_MEMORY.glob("sgl_shm_*_*_*"):
        with contextlib.suppress(OSError, ValueError):
            if os.getpgid(int(file.name.split("_")[-2])) == group:
                file.unlink()


if __name__ == "__main__":
    main()
