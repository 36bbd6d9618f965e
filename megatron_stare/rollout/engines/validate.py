"""What every engine checks before it samples: a bad input id kills a real server, and a long prompt is cut silently.

Called with the requests, the sampling parameters and the engine's own ModelInfo.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_stare.errors import ConfigError, DataError
from megatron_stare.records.batch import SamplingParams
from megatron_stare.rollout.engines.engine import GenerateRequest, ModelInfo


def check_params(params: SamplingParams) -> None:
    """Raises ConfigError where a sampling field is out of range."""
    if not params.temperature > 0:
        raise ConfigError(
            f"a temperature of {params.temperature} cannot divide the logits",
            where="rollout.temperature",
            fix="use a value above 0; for the likeliest token, decode greedily",
        )
    if not 0 < params.top_p <= 1:
        raise ConfigError(
            f"no tokens together have a probability of {params.top_p}", where="top_p", fix="above 0, to 1"
        )
    if params.max_new_tokens < 1:
        raise ConfigError(f"no response has {params.max_new_tokens} tokens", where="rollout.max_new_tokens")


def check_requests(requests: Sequence[GenerateRequest], params: SamplingParams, info: ModelInfo) -> None:
    """Raises DataError naming the first request that the model cannot take."""
    if len({r.rid for r in requests}) != len(requests):
        raise DataError("two requests of one call have the same rid", fix="give every sample of a prompt its own index")
    for request in requests:
        where = f"request {request.rid} (prompt {request.prompt_cursor})"
        if not request.input_ids:
            raise DataError("the prompt has no tokens", where=where, fix="drop empty prompts from the data")
        low, high = min(request.input_ids), max(request.input_ids)
        if low < 0 or high >= info.vocab_size:
            raise DataError(
                f"token id {low if low < 0 else high} is outside the model's vocabulary of {info.vocab_size}",
                where=where,
                fix="use the tokenizer that belongs to the model",
            )
        new = min(request.max_new_tokens or params.max_new_tokens, params.max_new_tokens)
        total = len(request.input_ids) + new
        if total > info.context_length:
            raise DataError(
                f"{len(request.input_ids)} prompt tokens and up to {new} new ones make {total}; "
                f"the model's context holds {info.context_length}",
                where=where,
                fix="lower rollout.max_new_tokens or rollout.max_prompt_tokens",
            )
