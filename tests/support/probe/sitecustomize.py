"""Python runs this at the start of every process that has this folder on its PYTHONPATH. It writes
down which vector maths of torch came first in the process, see test_vector_maths.py.

One JSON object a process that computes, in a file of its own in the folder that FIRST_MATHS names:
the functions of the first call's stack and its elements; and the files of the stack of the first
call of several elements.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import os
import sys
import traceback
from types import ModuleType
from typing import Any

FOLDER = os.environ.get("FIRST_MATHS")
# what MKL may get to see, directly or from inside
MKL = "acos asin atan cos erf erfc erfinv exp log log10 log2 sin sqrt tan tanh trunc"
COMPOSED = (
    "pow rpow rsqrt softmax log_softmax logsumexp silu gelu sigmoid norm std var"
    " scaled_dot_product_attention"
)
NAMES = {*MKL.split(), *COMPOSED.split()}


def watch(torch: ModuleType) -> None:
    """Sees every call into torch of this thread from now on, until the process has computed
    something of its own."""
    from torch.overrides import TorchFunctionMode

    first: dict[str, Any] = {}
    written: list[int] = []

    def look(tensor: Any) -> None:
        stack = traceback.extract_stack()
        elements = tensor.numel() if torch.is_tensor(tensor) else 1
        if not first:
            first.update(functions=[frame.name for frame in stack], elements=elements)
        if elements == 1:  # too few for a second thread
            return
        written.append(os.getpid())
        with open(os.path.join(FOLDER, f"{os.getpid()}.json"), "w") as file:
            json.dump({**first, "files": [frame.filename for frame in stack]}, file)

    class Watch(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if os.getpid() not in written and getattr(func, "__name__", "").strip("_") in NAMES:
                look(args[0] if args else None)
            return func(*args, **(kwargs or {}))

    Watch().__enter__()


class AfterTorch(importlib.abc.MetaPathFinder):
    """Starts the watch as soon as torch is imported, and imports it for nobody."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_watch(module: ModuleType) -> None:
            execute(module)
            watch(module)

        spec.loader.exec_module = execute_and_watch
        return spec


if FOLDER:
    sys.meta_path.insert(0, AfterTorch())
