"""One NCCL group of the trainer's PyTorch on the first GPU and the servers' on the second, made as
`sglang.sync=distributed` makes it: a server takes two broadcasts of the whole model, proven by
checksums. Over gloo on a CPU.

The versions of NCCL on both sides stand beside the figures: NCCL refuses a group of two.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from server_cycle import synced
from servers import libraries, served, weights_of
from small_model import small_model
from verdict import Bound

from megatron_stare.config.process_settings import shared_environment
from megatron_stare.rollout.engines.sglang.replica import SGLangReplica

GPU_ONLY: tuple[str, ...] = ()
BOUNDS: dict[str, Bound] = {
    "tensors that were not proven": ("<=", 0.0),
    "tensors": (">=", 10.0),
}


def run(cpu: bool) -> dict[str, Any]:
    seen = os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1"
    second = {} if cpu else {"environment": {"CUDA_VISIBLE_DEVICES": seen.split(",")[1]}}
    with small_model(cpu) as model:
        config = served(model, cpu, sync="distributed", **second)
        # NCCL's settings of the server, before this rank's first CUDA call, as a trainer gets them
        os.environ.update(shared_environment(config))
        versions, weights = libraries(config), weights_of(model)
        print(versions, flush=True)  # should the group be refused
        if not cpu:
            torch.cuda.set_device(0)
            weights = {name: each.cuda() for name, each in weights.items()}
        replica = SGLangReplica(config, 0)
        try:
            engine = replica.engine()
            unproven, joined = synced(engine, 1, weights)
            again, seconds = synced(engine, 2, weights)
            engine.close()
        finally:
            replica.close()
    nbytes = sum(each.nbytes for each in weights.values())
    return {
        "figures": {
            "tensors that were not proven": float(unproven + again),
            "tensors": float(len(weights)),
            "seconds of the first update, the group's making included": joined,
            "seconds of the second": seconds,
            "GB/s of the second": nbytes / seconds / 1e9,
        },
        "libraries": versions,
    }
