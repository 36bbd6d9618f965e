"""Rounds weights to 8 bits for SGLang servers with `sglang.quantization: fp8`. Pure.

The 8-bit weights have the format of DeepSeek-V3 (arXiv 2412.19437, section 3.3). SGLang loads this
format as the quantization method fp8 with `weight_block_size` [128, 128]. A matrix W [out, in] is
cut into blocks of 128 x 128. A block b has the scale s_b = max |W_b| / 448 in float32, and its
elements are stored as W_b / s_b in float8_e4m3fn, whose largest number is 448. Embeddings, output
layer, routers, norms and biases are not rounded to 8 bits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megatron_stare.errors import ConfigError
from megatron_stare.models import FAMILIES, family_of
from megatron_stare.models.shape import ModelShape
from megatron_stare.rollout.engines.sglang.protocol import FP8
from megatron_stare.rollout.engines.sglang.server_layout import ServerLayout
from megatron_stare.weights.files.check import expected

BLOCK = 128
DTYPE = torch.float8_e4m3fn
LARGEST = torch.finfo(DTYPE).max  # 448
SCALE = "_scale_inv"  # SGLang's ending for the name of a matrix's scales
# replaces settings of the model folder's config.json in the server
MODEL_OVERRIDES = json.dumps(
    {
        "quantization_config": {
            "quant_method": FP8,
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        }
    }
)
_ELEMENTS = 2**24  # rounded at a time, which bounds the memory of float32 copies


def rounds(name: str, shape: ModelShape) -> bool:
    """Returns True if servers store the Hugging Face tensor `name` in 8 bits."""
    module, _, kind = name.rpartition(".")
    return kind == "weight" and module.rpartition(".")[2] in family_of(shape).quantized


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds a matrix to 8 bits.

    Args:
        weight: [out, in] in any floating-point dtype. Both sizes are multiples of 128.

    Returns:
        The elements [out, in] in float8_e4m3fn, and the scales [out / 128, in / 128] in float32.
    """
    rows, columns = weight.shape[0] // BLOCK, weight.shape[1] // BLOCK
    blocks = weight.detach().reshape(rows, BLOCK, columns, BLOCK)
    scales = blocks.abs().amax((1, 3)).float() / LARGEST
    scales = scales.masked_fill(scales == 0, 1.0)  # a block of zeros
    elements = torch.empty(blocks.shape, dtype=DTYPE, device=weight.device)
    step = max(_ELEMENTS // (BLOCK * weight.shape[1]), 1)
    for first in range(0, rows, step):
        part = slice(first, first + step)
        # a quotient can exceed 448 by rounding, and would then become NaN
        divided = (blocks[part].float() / scales[part, None, :, None]).clamp_(-LARGEST, LARGEST)
        elements[part] = divided.to(DTYPE)
    return elements.view(weight.shape), scales


def rounded(weight: Tensor) -> Tensor:
    """Returns the bfloat16 matrix [out, in] that a server hashes after the server has received
    `quantized(weight)`. To hash 8-bit weights, SGLang first multiplies the 8-bit elements by their
    scales in float32, and rounds the products to bfloat16 (weight_checker_comparator.py, 0.5.23).
    This function computes the same rounded products, but no hash."""
    elements, scales = quantized(weight)
    blocks = elements.view(len(scales), BLOCK, -1, BLOCK)
    found = torch.empty(blocks.shape, dtype=torch.bfloat16, device=weight.device)
    step = max(_ELEMENTS // (BLOCK * weight.shape[1]), 1)
    for first in range(0, len(scales), step):
        part = slice(first, first + step)
        found[part] = (blocks[part].float() * scales[part, None, :, None]).bfloat16()
    return found.view(weight.shape)


def as_sent(
    bucket: Iterable[tuple[str, Tensor]], shape: ModelShape
) -> Sequence[tuple[str, Tensor]]:
    """Rounds the matrices of a bucket. Returns the tensors that a server with 8-bit weights
    receives for the bucket. The scales come first, then the tensors that are not rounded, then the
    8-bit elements of the rounded matrices. If the tensors are concatenated in this order, every
    tensor's byte offset is a multiple of the tensor's element size."""
    scales, others, elements = [], [], []
    for name, tensor in bucket:
        if rounds(name, shape):
            held, scale = quantized(tensor)
            elements.append((name, held))
            scales.append((name + SCALE, scale))
        else:
            others.append((name, tensor))
    return [*scales, *others, *elements]


def check_quantization(shape: ModelShape, layout: ServerLayout, dtype: str) -> None:
    """Raises ConfigError if servers of this layout cannot store the model's matrices in 8 bits."""
    where = "sglang.quantization"
    if layout.device == "cpu":
        raise ConfigError(
            "SGLang computes with 8-bit weights on a CPU only with AMX, which rearranges them, so"
            " that they could not be compared with the trainer's",
            where=where,
            fix="set it to null, or use servers on GPUs",
        )
    if dtype != "bfloat16":
        raise ConfigError(
            f"servers with 8-bit weights must have activations in bfloat16, not {dtype}",
            where=where,
            fix="set sglang.dtype=bfloat16",
        )
    if not family_of(shape).quantized:
        can = ", ".join(name for name, family in sorted(FAMILIES.items()) if family.quantized)
        raise ConfigError(
            f"8-bit weights of {shape.family} were never compared with the trainer's",
            where=where,
            fix=f"set it to null; it works for {can}",
        )
    for name, size in expected(shape).items():
        if not rounds(name, shape):
            continue
        for part in layout.parts(name, torch.empty(size, device="meta"), shape, 0):
            if part.shape[0] % BLOCK or part.shape[1] % BLOCK:
                raise ConfigError(
                    f"{name} is {list(part.shape)} on each rank of a server, and 8-bit weights are"
                    f" stored in blocks of {BLOCK} x {BLOCK}",
                    where=where,
                    fix="use fewer ranks (sglang.tensor_parallel), or set it to null",
                )
