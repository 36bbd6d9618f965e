"""Proves at start that a server treats stop tokens as training needs them.

A response must end with the token that stopped it, with its log-prob: it is sampled, so it is trained on. Each stop
token is forced by a bias on its logit, so that the proof needs no weights in particular.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_stare.records.batch import SamplingParams
from megatron_stare.rollout.engines.engine import GenerateRequest
from megatron_stare.rollout.engines.sglang.client import SGLangClient
from megatron_stare.rollout.engines.sglang.protocol import SGLangError, generate_body

_FORCE = 1e4


async def probe_stop(client: SGLangClient, stop_token_ids: Sequence[int]) -> None:
    """Forces each of the stop tokens once. Waits for one short response each.

    Raises:
        SGLangError: a token does not stop, is not named as what stopped, or comes without its id or log-prob.
    """
    for token in stop_token_ids:
        request = GenerateRequest(f"probe-{token}", (token,), prompt_cursor=0, sample_index=0)
        params = SamplingParams(1.0, 4, seed=0, step=0, stop_token_ids=tuple(stop_token_ids), greedy=True)
        body = generate_body(request, params, request.rid)
        body["sampling_params"]["logit_bias"] = {str(token): _FORCE}
        check_stop(await client.generate(body), token, client.url)


def check_stop(answer: dict[str, Any], token: int, where: str) -> None:
    """Raises SGLangError unless the answer is `token` alone, named as what stopped it, with a log-prob."""
    meta, ids = answer["meta_info"], list(answer["output_ids"])
    reason = meta["finish_reason"]
    sampled = [entry[1] for entry in meta.get("output_token_logprobs") or []]
    if ids == [token] == sampled and reason.get("type") == "stop" and reason.get("matched") == token:
        return
    raise SGLangError(
        f"stop token {token} was forced, but the server returned tokens {ids}, log-probs of {sampled} and the finish "
        f"reason {reason}",
        where=where,
        fix="a response must end with its stop token and that token's log-prob; use a supported release of SGLang",
    )
