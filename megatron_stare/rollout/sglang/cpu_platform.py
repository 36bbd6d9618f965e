"""SGLang's platform plug-in for CPUs without kernel packages. Loaded by the server through the entry-point group
`sglang.srt.platforms`, in the environment SGLang is installed in; the trainer never imports this.
"""

from __future__ import annotations

import torch

ATTENTION = "torch_native"  # the one attention backend that needs no kernels


def activate() -> str | None:
    """The platform class's name on a machine without CUDA; None where SGLang's own platforms serve."""
    if torch.cuda.is_available():
        return None
    from sglang.srt.arg_groups.choices import (
        add_deterministic_attention_backend_choices,
        add_radix_supported_deterministic_attention_backend_choices,
    )

    # SGLang honours sampling seeds only with deterministic inference, and knows no CPU backend for that. Noise is keyed
    # on the request with any backend; what this backend does not promise is the same rounding in every batch.
    add_deterministic_attention_backend_choices([ATTENTION])
    add_radix_supported_deterministic_attention_backend_choices([ATTENTION])
    return "megatron_stare.rollout.sglang.cpu_platform_class.CpuPlatform"
