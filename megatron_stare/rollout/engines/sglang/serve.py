"""Runs SGLang's launcher in a server's process. The server ends when the process that started the
server ends.

Started in SGLang's environment:

    python -m megatron_stare.rollout.engines.sglang.serve <arguments of sglang.launch_server>

The API key is passed in an environment variable, so other users of the machine do not see the key.
The process that starts the server keeps the server's standard input open and never writes to it.
The server exits when its standard input closes for any reason.
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
# Variables of the trainer's process that servers must not inherit: paths of its Python environment,
# and a choice of CPU kernels that servers lack.
NOT_KEPT = ("PYTHONPATH", "VIRTUAL_ENV", "SGLANG_USE_CPU_ENGINE")
SHARED_MEMORY = Path("/dev/shm")
SCRATCH_VARIABLE = "TMPDIR"  # the server's own folder, removed with it


def _let_torchvision_import() -> None:
    """Defines the operators that `import torchvision` needs. Does nothing if torchvision's own
    library loads, because the library then defines the operators itself.

    The library in torchvision's CPU wheel can require CUDA libraries, and does not load if the CUDA
    libraries are missing. If torchvision's library loads, its static initialiser defines the
    operators. The initialiser would crash the process if the operators already existed. This
    function therefore tries to import torchvision before it defines any operator.
    """
    import torch

    try:
        import torchvision  # noqa: F401
    except (ImportError, OSError, RuntimeError):
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]  # so that the next import starts afresh
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)  # an operator is removed with the library that defined it


_KEPT: list[object] = []
# at import and not in main(), because SGLang's spawned processes import this module again
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
    except SystemExit as end:  # uvicorn exits this way if the port is taken
        _leave(end.code if isinstance(end.code, int) else 1)
    except BaseException:
        traceback.print_exc()
        _leave(1)
    _leave(0)


def _leave(code: int) -> NoReturn:
    """Ends this process at once. The guard process (see `_guard`) then ends the process group. A
    normal exit of the interpreter would never finish, because the exit waits for SGLang's ranks and
    the ranks wait for requests."""
    # Remove it now: after the ranks are gone its owner is unknown, and they may end before the
    # guard runs.
    remove_shared_memory(os.getpgid(0))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _guard(scratch: str) -> None:
    """Forks a guard process outside this process group. The parent process is the process that
    started the server. The guard kills this process group as soon as one of three events occurs:
    this process ends, the parent process ends, or the parent process closes the server's standard
    input. Without the guard, some of SGLang's processes would survive if this process were killed
    together with the parent process. Ray, for example, kills an actor together with the processes
    that the actor started. After killing the process group, the guard waits until the parent
    process ends or closes the server's standard input. Finally, the guard removes the server's own
    folder `scratch`. The server's log is in this folder."""
    group = os.getpgid(0)
    # `ends` closes when this process ends, because its children do not inherit it
    lives, ends = os.pipe()
    if os.fork():
        os.close(lives)
        return
    os.setsid()
    os.close(ends)
    # Nothing is ever written to either pipe, so a readable pipe has been closed.
    select.select([0, lives], [], [])
    remove_shared_memory(group)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    select.select([0], [], [])
    shutil.rmtree(scratch, ignore_errors=True)
    os._exit(0)


def remove_shared_memory(group: int) -> None:
    """Removes the shared-memory files of all processes in the process group `group`. A rank that is
    killed does not remove its own shared-memory files. SGLang's file names are
    sgl_shm_<kind>_<process>_<random>, where <process> is the id of the process that made the file.
    Call this function while the processes of `group` still exist, because the process group of a
    process cannot be determined after the process has disappeared."""
    for file in SHARED_MEMORY.glob("sgl_shm_*_*_*"):
        with contextlib.suppress(OSError, ValueError):
            if os.getpgid(int(file.name.split("_")[-2])) == group:
                file.unlink()


if __name__ == "__main__":
    main()
