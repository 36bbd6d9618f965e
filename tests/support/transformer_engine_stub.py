"""A stand-in for Transformer Engine: the classes that megatron-core's layer spec is made of, and
what their parameters are called.

Read in transformer-engine 2.20.2 (pytorch/module) and in megatron-core's
extensions/transformer_engine.py. Nothing here
computes: it proves names and shapes, never numbers. It must be there before megatron-core is
imported:

    python -m support.transformer_engine_stub MODULE ARGUMENTS
"""

from __future__ import annotations

import importlib.machinery
import runpy
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

VERSION = "2.20.2"


class _Module(nn.Module):
    """Has the extra state (scaling factors of FP8) that every module of Transformer Engine adds to
    its state dict."""

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None: ...


class _Projection(_Module):
    """Base of Linear, LayerNormLinear and GroupedLinear: it cuts their matrices."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp_size: int,
        parallel_mode: str | None,
        bias: bool,
        params_dtype: torch.dtype,
        device: Any,
        **_: Any,
    ) -> None:
        super().__init__()
        self.in_features = in_features // (tp_size if parallel_mode == "row" else 1)
        self.out_features = out_features // (tp_size if parallel_mode == "column" else 1)
        self.parallel_mode, self.use_bias, self.options = (
            parallel_mode,
            bias,
            {"dtype": params_dtype, "device": device},
        )

    def add_matrix(self, number: str = "") -> None:
        self.register_parameter(
            f"weight{number}",
            nn.Parameter(torch.empty(self.out_features, self.in_features, **self.options)),
        )
        if self.use_bias:
            self.register_parameter(
                f"bias{number}", nn.Parameter(torch.empty(self.out_features, **self.options))
            )


class Linear(_Projection):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.add_matrix()


class LayerNormLinear(_Projection):
    def __init__(self, *, normalization: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.layer_norm_weight = nn.Parameter(torch.empty(self.in_features, **self.options))
        if normalization == "LayerNorm":
            self.layer_norm_bias = nn.Parameter(torch.empty(self.in_features, **self.options))
        self.add_matrix()


class GroupedLinear(_Projection):
    def __init__(self, *, num_gemms: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.num_gemms = num_gemms
        self.fp8, self.fp8_calibration, self.fp8_meta = False, False, {"fp8_checkpoint": False}
        for number in range(num_gemms):
            self.add_matrix(str(number))

    def init_fp8_metadata(self, num_gemms: int) -> None: ...


class RMSNorm(_Module):
    """Takes its size under the name of today, or under the older one that megatron-core 0.16
    gives."""

    def __init__(
        self,
        *,
        normalized_shape: int | None = None,
        hidden_size: int | None = None,
        params_dtype: torch.dtype,
        device: Any,
        **_: Any,
    ) -> None:
        super().__init__()
        size = hidden_size if normalized_shape is None else normalized_shape
        assert size is not None
        self.weight = nn.Parameter(torch.empty(size, dtype=params_dtype, device=device))


class DotProductAttention(_Module):
    def __init__(self, **_: Any) -> None:
        super().__init__()


def _names(*names: str) -> dict[str, Any]:
    """Classes that are only named: in annotations, as bases, in imports."""
    return {name: type(name, (), {}) for name in names}


def install() -> None:
    """Puts the stub where `import transformer_engine` finds it."""
    classes = (Linear, LayerNormLinear, GroupedLinear, RMSNorm, DotProductAttention)
    contents: dict[str, dict[str, Any]] = {
        "transformer_engine": {"__version__": VERSION},
        "transformer_engine.common": {},
        "transformer_engine.common.recipe": _names("DelayedScaling"),
        "transformer_engine.pytorch": {one.__name__: one for one in classes},
        "transformer_engine.pytorch.distributed": _names(
            "CudaRNGStatesTracker", "activation_recompute_forward"
        ),
        "transformer_engine.pytorch.fp8": _names(
            "FP8GlobalStateManager", "fp8_autocast", "fp8_model_init"
        ),
        "transformer_engine.pytorch.ops": _names("FusibleOperation", "Sequential"),
        "transformer_engine.pytorch.router": _names(
            "fused_compute_score_for_moe_aux_loss",
            "fused_moe_aux_loss",
            "fused_topk_with_score_function",
        ),
        "transformer_engine.pytorch.tensor": _names("QuantizedTensor"),
    }
    for name, members in contents.items():
        module = ModuleType(name)
        module.__dict__.update(members, __path__=[])
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)


if __name__ == "__main__":
    install()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
