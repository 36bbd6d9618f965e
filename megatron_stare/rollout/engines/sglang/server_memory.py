"""What a server that a run starts keeps on a GPU."""

from __future__ import annotations

import math
from collections import Counter

from megatron_stare.config.schema import Config
from megatron_stare.models.shape import ModelShape
from megatron_stare.rollout.engines.served_memory import ServedMemory
from megatron_stare.rollout.engines.sglang.server_layout import ServerLayout
from megatron_stare.rollout.engines.sglang.sync import DTYPES
from megatron_stare.weights.files.check import expected

ASSUMED_FRACTION = 0.9  # of a GPU, where the share is left to SGLang


def server_memory(config: Config, shape: ModelShape, capacity: int) -> ServedMemory:
    """Of a rank on a GPU of so many bytes: its part of the weights, and the cache that it may have, which is what the
    share of the GPU leaves, or the tokens asked for where these are fewer."""
    asked, size = config.sglang, DTYPES[config.sglang.dtype or config.model.dtype].itemsize
    layout = ServerLayout("cuda", asked.tensor_parallel, asked.expert_parallel, asked.attention_data_parallel)
    by_cut: Counter[int] = Counter()
    for name, sizes in expected(shape).items():
        by_cut[layout.cut_over(name, shape)] += math.prod(sizes) * size
    weights = sum(whole // ranks for ranks, whole in by_cut.items())
    heads = max(-(-shape.kv_heads // layout.group), 1)  # heads that are fewer than ranks lie on several
    token = 2 * shape.layers * heads * shape.head_dim * size
    room = max(int((asked.memory_fraction or ASSUMED_FRACTION) * capacity) - weights, 0)
    if asked.cache_tokens is not None and asked.cache_tokens * token <= room:
        return ServedMemory(weights, asked.cache_tokens * token, token, "sglang.cache_tokens", token)
    return ServedMemory(weights, room, token, "sglang.memory_fraction", capacity, before=weights, digits=2)
