"""Decodes one batch of requests with a transformers model. After the prefill, each step samples one
token per row, until all rows are finished.

LocalEngine checks the requests and then calls `decode_batch`. This module also registers `attend`,
an attention function for CPUs, in transformers under the name ATTENTION.

Shape legend: B = rows at the start; b = rows that are still in the batch; P = tokens of the longest
prompt; R = tokens of the longest response. Legend for attention: n heads; g groups of heads that
share keys and values; r heads per group; L tokens in the cache; d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from megatron_stare.records.batch import FinishReason, SamplingParams
from megatron_stare.rollout.engines.engine import GenerateRequest
from megatron_stare.rollout.engines.sampling import choose_tokens, row_keys, uniforms

ATTENTION = "megatron_stare_decode"  # name under which transformers knows `attend`
# finished rows are dropped only if the share of live rows is below this, because that copies the
# cache
_COMPACT_BELOW = 0.5


@dataclass(frozen=True)
class Decoded:
    ids: Tensor  # [n] int32
    log_probs: Tensor  # [n] float32, nats
    finish_reason: FinishReason


@dataclass
class _Prompts:
    """Left-padded prompts of the rows. `mask` is None if no prompt is padded, because attention
    without a mask is cheaper."""

    ids: Tensor  # [B, P]
    positions: Tensor  # [B, P]
    mask: Tensor | None  # [B, P] bool


def decode_batch(
    model: Any, requests: Sequence[GenerateRequest], params: SamplingParams
) -> list[Decoded]:
    """Decodes the responses to all `requests` as one batch. A response has at most
    `params.max_new_tokens` tokens. A request can set a lower limit for its own response.

    Each row of the batch decodes the response to one request. A row's sampling noise depends only
    on `params` and the row's request. If a row has the same distribution in two batches, both
    batches sample the same token for this row, whatever the other rows are. The distribution of a
    row can differ by about 1e-7 between two batches with different numbers of rows. The number of
    rows determines the shapes of the matrix products, and the shapes affect the float rounding.
    """
    steps = [params.step if r.noise_step is None else r.noise_step for r in requests]
    keys = row_keys(
        params.seed, steps, [r.prompt_cursor for r in requests], [r.sample_index for r in requests]
    )
    starts = np.array([r.start for r in requests])
    limits = torch.tensor(
        [min(r.max_new_tokens or params.max_new_tokens, params.max_new_tokens) for r in requests]
    )
    longest = int(limits.max())
    ids = torch.zeros(len(requests), longest, dtype=torch.int32)  # [B, R]
    log_probs = torch.zeros(len(requests), longest)  # [B, R]
    lengths = limits.clone()  # [B]
    stopped = torch.zeros(len(requests), dtype=torch.bool)  # [B]

    rows = torch.arange(len(requests))  # [b] index of each row's request
    logits, cache, positions, mask = _prefill(model, requests, longest)
    ending, kind = _ending(requests, params.stop_token_ids, logits.shape[-1])
    for step in range(longest):
        noise = None if params.greedy else uniforms(keys, starts + step)[rows]
        tokens, token_log_probs = choose_tokens(logits, params.temperature, noise, params.top_p)
        # Finished rows that are still in the batch write beyond their length.
        ids[rows, step], log_probs[rows, step] = tokens.to(torch.int32), token_log_probs
        ends = ending[kind[rows], tokens] & ~stopped[rows] & (step < limits[rows])
        lengths[rows[ends]] = step + 1
        stopped[rows[ends]] = True
        live = (~stopped[rows] & (step + 1 < limits[rows])).nonzero()[:, 0]
        if not live.numel():
            break
        if live.numel() < _COMPACT_BELOW * rows.numel():
            rows, tokens = rows[live], tokens[live]
            positions, mask = positions[live], None if mask is None else mask[live]
            cache.batch_select_indices(live)
        positions = positions + 1
        seen = None if mask is None else mask[:, : cache.get_seq_length() + 1]
        logits = _forward(model, tokens[:, None], positions, seen, cache)
    return [
        Decoded(ids[i, :n].clone(), log_probs[i, :n].clone(), "stop" if ended else "length")
        for i, (n, ended) in enumerate(zip(lengths.tolist(), stopped.tolist(), strict=True))
    ]


def _ending(
    requests: Sequence[GenerateRequest], stop_token_ids: Sequence[int], vocabulary: int
) -> tuple[Tensor, Tensor]:
    """Returns two tensors. The first tensor, [k, V] bool, has one row for each of the k distinct
    sets of stop tokens in the requests, and one column for each token of the vocabulary. An entry
    is True if the column's token is in the row's set of stop tokens or in `stop_token_ids`. The
    second tensor, [B], has one entry per request: the row index, in the first tensor, of the
    request's set of stop tokens."""
    sets = {
        ids: number for number, ids in enumerate(dict.fromkeys(r.stop_token_ids for r in requests))
    }
    ending = torch.zeros(len(sets), vocabulary, dtype=torch.bool)
    for ids, number in sets.items():
        ending[number, [i for i in {*ids, *stop_token_ids} if i < vocabulary]] = True
    return ending, torch.tensor([sets[r.stop_token_ids] for r in requests])


def _prefill(
    model: Any, requests: Sequence[GenerateRequest], max_new_tokens: int
) -> tuple[Tensor, Any, Tensor, Tensor | None]:
    """Runs each distinct prompt once. Every sample of a prompt gets a copy of the prompt's
    key/value cache.

    Returns:
        The logits [B, V] of the first token, the cache, the position [B, 1] of the last prompt
        token, and the mask [B, P + R] of the whole decode. The mask is None if no prompt is padded.
    """
    distinct = {prompt: i for i, prompt in enumerate(dict.fromkeys(r.input_ids for r in requests))}
    prompts = _pad(list(distinct))
    cache = growing_cache(model.config)
    logits = _forward(model, prompts.ids, prompts.positions, prompts.mask, cache)
    source = torch.tensor([distinct[r.input_ids] for r in requests])
    cache.batch_select_indices(source)
    mask = prompts.mask
    if mask is not None:
        mask = torch.nn.functional.pad(mask[source], (0, max_new_tokens), value=True)
    return logits[source], cache, prompts.positions[source, -1:], mask


def _pad(prompts: Sequence[tuple[int, ...]]) -> _Prompts:
    lengths = torch.tensor([len(p) for p in prompts])
    longest = int(lengths.max())
    ids = torch.tensor([(0,) * (longest - len(p)) + p for p in prompts])
    positions = torch.arange(longest) - (longest - lengths)[:, None]
    padded = positions < 0
    return _Prompts(ids, positions.clamp_min(0), ~padded if padded.any() else None)


def _forward(model: Any, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
    """Returns the logits [b, V] at the last position."""
    return model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits[:, -1]


def growing_cache(config: object) -> DynamicCache:
    """Makes an empty key/value cache for a model with this config. This cache writes new keys and
    values in place, while transformers' own cache copies all its contents at every token.
    Sliding-window layers and other special layers still use transformers' own cache."""
    cache = DynamicCache(config=config)
    cache.layers = [
        GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    return cache


class GrowingLayer(DynamicLayer):
    """Cache layer whose keys and values [B, heads, length, head_dim] are views of larger buffers.
    The buffers double in size when they are full."""

    keys: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()
        self._key_room: Tensor | None = None
        self._value_room: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._key_room, self.keys = _append(self._key_room, self.keys, key_states)
        self._value_room, self.values = _append(self._value_room, self.values, value_states)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        # keys and values are now copies, not views of the buffers
        self._key_room = self._value_room = None


def _append(room: Tensor | None, held: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Appends keys or values to the earlier keys or values in a buffer. Allocates a new buffer if
    there is no buffer yet, or if the buffer is too small. Returns the buffer and a view of the
    buffer's filled part. The view contains the tensor `held`, followed by the tensor `new`.

    Args:
        room: the buffer; None: there is no buffer.
        held: the earlier keys or values. If there is a buffer, `held` is a view of its filled part.
        new: the keys or values to append.
    """
    length = held.shape[-2] if held.numel() else 0
    total = length + new.shape[-2]
    if room is None or room.shape[-2] < total:
        batch, heads, _, width = new.shape
        room = torch.empty(
            batch, heads, max(2 * length, total + 32), width, dtype=new.dtype, device=new.device
        )
        if length:
            room[:, :, :length] = held
    room[:, :, length:total] = new
    return room, room[:, :, :total]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Computes attention. In each row, one new token attends to all cached tokens of the row.

    torch's attention kernel for CPUs starts a matrix product for every head of every row. With a
    single query per row, starting a matrix product takes longer than computing the product.
    `attend` therefore replaces torch's kernel by two batched matrix products for all rows together.
    `attend` computes the batched products only if the tensors are float32 tensors on a CPU, each
    row has exactly one new token, and neither dropout nor a special argument such as `softcap` is
    used. For any other input, `attend` calls transformers' function for "sdpa". The parameters
    follow transformers' interface for attention functions.

    Args:
        query: [b, n, 1, d].
        key: [b, g, L, d].
        value: [b, g, L, v]; v is d except in models with latent attention.
        attention_mask: [b, 1, 1, L] bool.

    Returns:
        [b, 1, n, v].
    """
    special = any(
        others.get(name) is not None for name in ("softcap", "position_bias", "cache", "s_aux")
    )
    ours = query.shape[2] == 1 and query.device.type == "cpu" and query.dtype == torch.float32
    if special or dropout or not ours:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
        )
    rows, heads, _, width = query.shape
    groups = key.shape[1]
    queries = query.reshape(rows, groups, heads // groups, width) * (
        width**-0.5 if scaling is None else scaling
    )
    scores = queries @ key.transpose(-1, -2)  # [b, g, r, L]
    if attention_mask is not None:
        scores.masked_fill_(~attention_mask, -torch.inf)
    return (scores.softmax(-1) @ value).reshape(rows, 1, heads, value.shape[-1]), None


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
