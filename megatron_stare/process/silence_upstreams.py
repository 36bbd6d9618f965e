"""Silences harmless messages that upstream packages print when they are imported and in normal use.
No other module silences messages."""

from __future__ import annotations

import logging
import os
import warnings

# deprecations between megatron-core and torch, matched by the message's start, because torch
# attributes them to the caller
DEPRECATIONS = (
    r"`torch\.distributed\.\w+` is deprecated",
    r"`load_state_dict` is deprecated",
    r"Please use DTensor instead and we are deprecating ShardedTensor",
)
# torch's warnings in every process when megatron-core 0.19 reads a checkpoint's non-tensors through
# an older interface
OF_A_RESUME = (
    (
        r"torch\.distributed is disabled, unavailable or uninitialized, assuming the intent is to"
        r" load in a single process"
    ),
    r"The argument order of load has been changed",
)
# By logging module: notes of megatron-core 0.19, and of torch when megatron-core imports it, about
# interfaces that are used here on purpose (docs/decisions.md gives the reasons).
LOGGED = {
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    "megatron.core.distributed.distributed_data_parallel": (
        "DistributedDataParallel: full_param_layout not provided"
    ),
    "megatron.core.dist_checkpointing.strategies.torch": "MCore's async save is deprecated",
    # torch with CUDA, on a machine without CUDA
    "torch.utils.cpp_extension": "No CUDA runtime is found",
}


def quiet_upstreams() -> None:
    """Silences messages of upstream libraries in this process. Call this function before the
    process imports any upstream library. Forked processes inherit the filters.

    When megatron-core is imported, it warns about missing CUDA libraries. Later, megatron-core also
    warns when it runs an operation that would be faster if a missing CUDA library were installed.
    The transformers library shows progress bars even for files that load instantly.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
    for message in DEPRECATIONS:
        warnings.filterwarnings("ignore", message, category=FutureWarning)
    for message in OF_A_RESUME:
        warnings.filterwarnings("ignore", message, category=UserWarning)
    for module, start in LOGGED.items():
        logging.getLogger(module).addFilter(_Without(start))


class _Without(logging.Filter):
    """Drops messages that start with a given text."""

    def __init__(self, start: str) -> None:
        super().__init__()
        self._start = start

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self._start)

    def __eq__(self, other: object) -> bool:  # so that the same filter is not added twice
        return isinstance(other, _Without) and other._start == self._start

    def __hash__(self) -> int:
        return hash(self._start)
