"""Stands in for the kernels that multiply by 8-bit weights, on CPUs without AMX.

Python imports this module first if the folder is on PYTHONPATH. All else of a server stays SGLang's
own: configuration, parameters, loading, hashes. The product is that of SGLang's GPU kernels:
activations are rounded in groups of 128 columns (`per_token_group_quant_fp8`), and elements and
scales of weights multiply in float32.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from typing import Any

FP8 = "sglang.srt.layers.quantization.fp8"


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != FP8:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def run_and_replace(module: Any) -> None:
            run(module)
            _replace(module)

        spec.loader.exec_module = run_and_replace  # type: ignore[method-assign]
        return spec


def _replace(module: Any) -> None:
    import torch
    from torch import Tensor
    from torch.nn.functional import linear, silu

    def rounded(x: Tensor) -> Tensor:
        groups = x.float().unflatten(-1, (-1, 128))
        scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-10) / 448
        held = (groups / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        return (held.float() * scale).flatten(-2)

    def whole(weight: Tensor, scales: Tensor) -> Tensor:
        return module_utils.block_quant_dequant(weight, scales, [128, 128], torch.float32)

    def apply(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        found = linear(rounded(x), whole(layer.weight, layer.weight_scale_inv)).to(x.dtype)
        return found if bias is None else found + bias

    def experts(self: Any, layer: Any, dispatch_output: Any) -> Any:
        from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

        x, (weights, chosen, *_) = dispatch_output.hidden_states, dispatch_output.topk_output
        up = whole(layer.w13_weight, layer.w13_weight_scale_inv)
        down = whole(layer.w2_weight, layer.w2_weight_scale_inv)
        found = torch.zeros_like(x, dtype=torch.float32)
        for expert in range(len(up)):
            token, slot = (chosen == expert).nonzero(as_tuple=True)
            gate, value = linear(rounded(x[token]), up[expert]).chunk(2, -1)
            made = linear(rounded((silu(gate) * value).to(x.dtype)), down[expert])
            found.index_add_(0, token, made * weights[token, slot, None].float())
        return StandardCombineInput(hidden_states=found.to(x.dtype))

    from sglang.srt.layers.quantization import fp8_utils as module_utils

    for method, product in ((module.Fp8LinearMethod, apply), (module.Fp8MoEMethod, experts)):
        method.process_weights_after_loading_block_quant = lambda self, layer: None
        method.apply = product


sys.meta_path.insert(0, _Finder())
