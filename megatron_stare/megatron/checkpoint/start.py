"""Where a policy starts: a Hugging Face folder, or a distributed checkpoint that was converted from one."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from megatron_stare.errors import DataError
from megatron_stare.megatron.backend.layout import Layout
from megatron_stare.megatron.checkpoint.checkpoint import load_weights
from megatron_stare.megatron.model.model import load_hf, named_parameters
from megatron_stare.models.shape import ModelShape
from megatron_stare.weights.files.hf_folder import HfFolder
from megatron_stare.weights.files.torch_dist import is_checkpoint


def load_start(model: list[nn.Module], path: str, shape: ModelShape, layout: Layout) -> None:
    """Fills every parameter from the folder at `path`, of either kind; a rank reads only what it holds.

    Raises:
        DataError: a tensor is missing or has the wrong shape, or holds numbers that are none in float16.
    """
    if is_checkpoint(Path(path)):
        load_weights(path, model)
    else:
        load_hf(model, HfFolder(path), shape, layout)
    for name, parameter in named_parameters(model):
        if parameter.dtype == torch.float16 and not bool(parameter.isfinite().all()):
            raise DataError(
                f"{name} is not finite in float16, whose largest number is 65,504",
                where=path,
                fix="train in bfloat16 or float32: model.dtype",
            )
