"""The methods that `sglang.sync` names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_stare.errors import unknown_name
from megatron_stare.rollout.engines.sglang.broadcast import BroadcastSync
from megatron_stare.rollout.engines.sglang.client import SGLangClient
from megatron_stare.rollout.engines.sglang.disk_sync import DiskSync
from megatron_stare.rollout.engines.sglang.place import Place
from megatron_stare.rollout.engines.sglang.sync import WeightSync
from megatron_stare.rollout.engines.sglang.tensor_sync import TensorSync


def make_sync(
    method: str,
    clients: Sequence[SGLangClient],
    model_path: str,
    timeout_s: float,
    *,
    folder: Path | None = None,
    sender: int = 0,
    places: Sequence[Place] | None = None,
) -> WeightSync:
    """One end of a method.

    Args:
        folder, sender: see DiskSync.
        places: of the servers, in the order of the clients; see TensorSync and BroadcastSync.
    """
    made: dict[str, Callable[[], WeightSync]] = {
        "tensor": lambda: TensorSync(clients, places),
        "disk": lambda: DiskSync(clients, model_path, folder, sender),
        "distributed": lambda: BroadcastSync(clients, timeout_s, places),
    }
    if method not in made:
        raise unknown_name(method, made, "sglang.sync")
    return made[method]()
