"""Builds requests to SGLang servers and parses the servers' answers. The module follows the
observed behaviour of the supported SGLang releases. Pure: no I/O.

This module turns the engine's requests into bodies of HTTP requests. The client (client.py) sends
these bodies to the server. `result_of` parses the server's answers.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_stare.errors import ConfigError, UserError
from megatron_stare.models.shape import ModelShape
from megatron_stare.records.batch import FinishReason, SamplingParams
from megatron_stare.records.trajectory import VersionRuns, routing_column
from megatron_stare.rollout.engines.engine import GenerateRequest, GenerateResult
from megatron_stare.rollout.engines.sampling import absorb, row_keys

# releases before 0.5.21 lack the weight-update session
SUPPORTED_VERSIONS = ("0.5.21", "0.5.22", "0.5.23")
# an entry of output_token_logprobs is (nats, token id, text or null)
_LOG_PROB, _ID = itemgetter(0), itemgetter(1)
KV_CACHE = "fp8_e4m3"  # the 8-bit dtype of sglang.kv_cache_dtype
FP8 = "fp8"  # the value of sglang.quantization, and SGLang's name of the method
_UNROUNDED = ("auto", "bf16", "bfloat16")  # key/value caches without limits of their own
NO_VERSION = "none"  # version at the start of a server: weights of no training step


class SGLangError(UserError):
    """Raised if a server refused a request or violated the protocol."""


def check_version(version: str, where: str) -> None:
    """Raises SGLangError if the server runs a release that this project does not support."""
    if version not in SUPPORTED_VERSIONS:
        raise SGLangError(
            f"the server runs SGLang {version}; supported are {', '.join(SUPPORTED_VERSIONS)}",
            where=where,
            fix="bash scripts/setup_sglang.sh builds an environment with a supported one",
        )


def check_hashes(version: str, where: str) -> None:
    """Raises SGLangError if the server does not run the newest supported release of SGLang. For all
    other releases, the server's hashes of 8-bit weights were never compared with the trainer's
    hashes."""
    if version != SUPPORTED_VERSIONS[-1]:
        raise SGLangError(
            f"the server runs SGLang {version}, whose hashes of 8-bit weights were never compared",
            where=where,
            fix=f"use {SUPPORTED_VERSIONS[-1]}, or sglang.quantization=null",
        )


def check_flags(info: Mapping[str, Any], flags: Mapping[str, str], where: str) -> None:
    """Raises ConfigError if a server was started without a flag that the run needs.

    Args:
        info: the server's /server_info.
        flags: needed flags, each with the setting that needs the flag. A CPU server does not need
            --enable-memory-saver, because a CPU server never releases its memory.
    """
    for flag, setting in flags.items():
        if not info.get(flag) and not (flag == "enable_memory_saver" and info["device"] == "cpu"):
            raise ConfigError(
                f"the server at {where} was started without --{flag.replace('_', '-')}",
                where=setting,
                fix=f"start it with that flag, or set {setting}=false",
            )


def check_precision(
    arguments: Mapping[str, Any],
    where: str,
    kv_cache_dtype: str | None = None,
    quantization: str | None = None,
) -> None:
    """Raises ConfigError if the server's quantization differs from `quantization`, or if the
    server's key/value cache does not have the dtype `kv_cache_dtype`. With an unexpected
    quantization or cache dtype, the run could not distinguish rounding errors from wrong weights.

    Args:
        arguments: maps the names of the server's arguments to their values. The names may contain
            dashes or underscores.
        kv_cache_dtype, quantization: the settings `sglang.kv_cache_dtype` and
            `sglang.quantization`, which determine the limits of the log-prob difference. If a
            setting is None, the server must use at least 16 bits.
    """
    weights, cache = (
        str(arguments.get(name) or arguments.get(name.replace("_", "-")) or "")
        for name in ("quantization", "kv_cache_dtype")
    )
    if weights != (quantization or ""):
        held = f"quantized by {weights}" if weights else "not quantized"
        raise ConfigError(
            f"the server's weights are {held}, and sglang.quantization is"
            f" {quantization or 'null'}, which determines the limits of agreement",
            where=where,
            fix=(
                f"set sglang.quantization={FP8}, without the flag for servers of the run"
                if weights == FP8
                else f"the only quantization that is supported is {FP8}"
                if weights
                else f"start it as docs/sglang.md says for {FP8}, or set it to null"
            ),
        )
    if cache in _UNROUNDED:
        cache = ""
    if cache != (kv_cache_dtype or ""):
        held = f"of dtype {cache}" if cache else "in the dtype of its activations"
        raise ConfigError(
            f"the server's key/value cache is {held}, and sglang.kv_cache_dtype is"
            f" {kv_cache_dtype or 'null'}, which determines the limits of agreement",
            where=where,
            fix=(
                f"set sglang.kv_cache_dtype={cache}, without the flag for servers of the run"
                if cache == KV_CACHE
                else f"the only 8-bit cache that is supported is {KV_CACHE}"
                if cache
                else f"start it with --kv-cache-dtype={kv_cache_dtype}, or set it to null"
            ),
        )


def check_speculation(arguments: Mapping[str, Any], device: str, where: str) -> None:
    """Raises ConfigError if speculative decoding makes a server return tokens that are not samples
    from the model. Also raises ConfigError for every speculative algorithm except NGRAM, because a
    weight sync to a server with a draft model was never tried.

    The run itself cannot detect tokens that are not samples from the model. For each token that a
    server returns, the run compares two log-probs: the log-prob that the server reports, and the
    log-prob that the trainer computes. The server always reports the log-prob that the model gives
    the returned token, whatever rule chose the token. The two log-probs therefore agree even if
    speculative decoding chose the token by a wrong rule. On CPUs, SGLang verifies drafts by taking
    the likeliest token, whatever the temperature is (eagle_utils.py, 0.5.23). On CUDA, speculative
    decoding returns exact samples if both acceptance thresholds are 1.

    Args:
        arguments: maps the names of the server's arguments to their values. The names may contain
            dashes or underscores.
        device: the server's device type.
    """
    given = {name.replace("-", "_"): value for name, value in arguments.items()}
    algorithm = given.get("speculative_algorithm")
    if not algorithm:
        return
    if str(algorithm).upper() != "NGRAM":
        raise ConfigError(
            f"speculative decoding by {algorithm} is refused: its draft model has weights, and a"
            " weight sync beside a draft model was never tried",
            where=where,
            fix="leave it out, or use NGRAM, whose drafts come from the text",
        )
    if device != "cuda":
        raise ConfigError(
            f"speculative decoding on {device} is refused: SGLang takes the likeliest token there,"
            " whatever the temperature is",
            where=where,
            fix="leave it out",
        )
    for name in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
        if (found := str(given.get(name, 1.0))) not in ("1", "1.0"):
            raise ConfigError(
                f"{name.replace('_', '-')} {found} is refused: below 1, drafts are accepted"
                " more often than the model samples them",
                where=where,
                fix="leave it out",
            )


def sampling_seed(params: SamplingParams, request: GenerateRequest) -> int:
    """Returns a 31-bit seed that depends only on (seed, step, prompt cursor, sample index, branch).

    SGLang's sampling noise depends on the seed and on the token's position in the sequence. Tokens
    of two branches can have the same position, so each branch has its own seed.
    """
    step = params.step if request.noise_step is None else request.noise_step
    keys = row_keys(params.seed, step, [request.prompt_cursor], [request.sample_index])
    if request.branch:
        keys = absorb(keys, request.branch)
    return int(keys[0] >> np.uint64(33))


def sampling_fields(
    params: SamplingParams,
    seed: int,
    max_new_tokens: int | None = None,
    stop_token_ids: Sequence[int] = (),
) -> dict[str, Any]:
    """Returns the sampling parameters of a request, with a value for every parameter that affects
    the response. The server therefore never uses a default value of its SGLang release or of the
    model folder.

    The sampling distribution is truncated only in evaluation, and only by top-p. In training, a
    truncated sampling distribution would differ from the trainer's distribution. Top-k is set only
    for greedy decoding. Min-p, penalties, bias and grammars are never used.

    Args:
        stop_token_ids: stop tokens in addition to the stop tokens of `params`.
    """
    return {
        "temperature": params.temperature,
        "top_k": 1 if params.greedy else -1,
        "top_p": params.top_p,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "max_new_tokens": min(max_new_tokens or params.max_new_tokens, params.max_new_tokens),
        "n": 1,
        "stop": None,
        "stop_token_ids": [*params.stop_token_ids, *stop_token_ids],
        "stop_regex": None,
        "ignore_eos": False,
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "json_schema": None,
        "regex": None,
        "ebnf": None,
        "structural_tag": None,
        "logit_bias": None,
        "sampling_seed": seed,
        "custom_params": None,
    }


def generate_body(request: GenerateRequest, params: SamplingParams, rid: str) -> dict[str, Any]:
    """Returns the body of POST /generate for one response. `rid` must be unique on the server."""
    body = {
        "rid": rid,
        "input_ids": list(request.input_ids),
        "sampling_params": sampling_fields(
            params, sampling_seed(params, request), request.max_new_tokens, request.stop_token_ids
        ),
        "return_logprob": True,
        "logprob_start_len": -1,  # log-probs of the response alone
        "top_logprobs_num": 0,
        "stream": False,
    }
    if params.return_experts:
        body |= {"return_routed_experts": True, "routed_experts_start_len": 0}
    return body


def prompt_body(tokens: Sequence[int], rid: str) -> dict[str, Any]:
    """Returns the body of POST /generate that requests the log-probs, at temperature 1, of all
    `tokens` except the first."""
    fields = SamplingParams(
        temperature=1.0, max_new_tokens=1, seed=0, step=0, stop_token_ids=(), greedy=True
    )
    return {
        "rid": rid,
        "input_ids": list(tokens),
        "sampling_params": sampling_fields(fields, 0),
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 0,
        "stream": False,
    }


def read_prompt_log_probs(
    answer: Mapping[str, Any], tokens: Sequence[int], where: str
) -> list[float]:
    """Parses a server's answer to POST /generate. The request's body must come from `prompt_body`.
    Returns the log-prob, in nats, of every token except the first."""
    entries = answer["meta_info"].get("input_token_logprobs") or []
    found = [entry for entry in entries if entry[0] is not None]  # the first token has none
    # for the vocabulary's last id the server returns the right log-prob, but the id 0
    named = [entry[1] for entry in found]
    if len(named) != len(tokens) - 1 or any(
        n not in (t, 0) for n, t in zip(named, tokens[1:], strict=True)
    ):
        raise SGLangError(
            f"log-probs were asked for of {list(tokens)}, but the server gave {entries}"[:500],
            where=where,
        )
    return [float(entry[0]) for entry in found]


def result_of(
    answer: Mapping[str, Any],
    request: GenerateRequest,
    stop_token_ids: Collection[int],
    where: str,
    routed: ModelShape | None = None,
) -> GenerateResult:
    """Parses an answer of POST /generate.

    Args:
        stop_token_ids: tokens that end every response, in addition to the stop tokens of `request`.
        routed: shape of the model, if routed experts were requested.

    Raises:
        SGLangError: lists of the answer differ in length, a log-prob is missing, or a token lacks
            its weight version or its requested experts.
    """
    meta = answer["meta_info"]
    ids = _column(answer["output_ids"], np.int32)
    sampled = meta.get("output_token_logprobs") or []
    if not torch.equal(_column(sampled, np.int32, _ID), ids):
        raise SGLangError(
            f"the server returned {len(ids)} tokens, but log-probs of {len(sampled)} other tokens",
            where=f"{where}, request {request.rid}",
        )
    return GenerateResult(
        rid=request.rid,
        output_ids=ids,
        output_log_probs=_column(sampled, np.float32, _LOG_PROB),
        versions=version_runs(meta, len(ids), f"{where}, request {request.rid}"),
        finish_reason=_finish_reason(
            meta["finish_reason"], ids, {*stop_token_ids, *request.stop_token_ids}
        ),
        prompt_tokens=int(meta["prompt_tokens"]),
        experts=(
            None
            if routed is None
            else _experts(
                meta,
                routed,
                len(request.input_ids) + len(ids) - 1,
                f"{where}, request {request.rid}",
            )
        ),
    )


def _experts(meta: Mapping[str, Any], shape: ModelShape, tokens: int, where: str) -> Tensor:
    """Reads the experts to which the first `tokens` tokens of a sequence were routed. The last
    token of a response has no experts, because the server's model never took this token as
    input."""
    if not isinstance(encoded := meta.get("routed_experts"), str):
        raise SGLangError(
            "the server named no experts",
            where=where,
            fix="start it with --enable-return-routed-experts, or set moe.routing_replay=false",
        )
    try:
        found = np.frombuffer(base64.b64decode(encoded, validate=True), dtype="<i4")
        column = routing_column(found, shape.layers, shape.experts_per_token, shape.experts)
    except ValueError as error:
        raise SGLangError(f"the server's experts cannot be read: {error}", where=where) from error
    if len(column) != tokens:
        raise SGLangError(
            f"the server named the experts of {len(column)} tokens instead of {tokens}", where=where
        )
    return column


def _column(
    values: Sequence[Any], dtype: type[np.generic], of: Callable[[Any], Any] | None = None
) -> Tensor:
    """Converts the n `values` to a tensor [n]. The function first makes a numpy array, because
    numpy converts Python numbers ten times faster than torch does.

    Args:
        of: function that is applied to each value before the conversion; None: no function.
    """
    return torch.from_numpy(
        np.fromiter(values if of is None else map(of, values), dtype, len(values))
    )


def version_runs(meta: Mapping[str, Any], tokens: int, where: str) -> VersionRuns:
    """Returns the versions of the weights with which the server sampled an answer's tokens.
    `tokens` is the number of tokens in the answer. The answer's meta_info gives the weight version
    of each span of tokens."""
    runs: list[tuple[int, int]] = []
    end = 0
    for span in meta.get("weight_versions") or []:
        if span["start"] != end or span["end"] < end or not str(span["version"]).isdigit():
            break
        if span["end"] > end:
            runs.append((int(span["version"]), span["end"] - end))
        end = span["end"]
    if end != tokens:
        raise SGLangError(
            f"{tokens} tokens, but weight versions {meta.get('weight_versions')} (now"
            f" {meta.get('weight_version')})",
            where=where,
            fix="only this project may update the server's weights",
        )
    return tuple(runs)


def _finish_reason(
    reported: Mapping[str, Any], ids: Tensor, stop_token_ids: Collection[int]
) -> FinishReason:
    kind = reported["type"]
    if kind == "length" and len(ids) and int(ids[-1]) in stop_token_ids:
        return "stop"  # the last token is a stop token, but the server checks the length first
    if kind not in ("stop", "length", "abort"):
        raise SGLangError(f"the server reports an unknown finish reason {dict(reported)}")
    return kind


def check_stop(answer: dict[str, Any], token: int, where: str) -> None:
    """Checks that the answer consists of `token` alone, that `token` has a log-prob, and that the
    server reports `token` as the stop reason. Raises SGLangError if a check fails."""
    meta, ids = answer["meta_info"], list(answer["output_ids"])
    reason = meta["finish_reason"]
    sampled = [entry[1] for entry in meta.get("output_token_logprobs") or []]
    if (
        ids == [token] == sampled
        and reason.get("type") == "stop"
        and reason.get("matched") == token
    ):
        return
    raise SGLangError(
        f"stop token {token} was forced, but the server returned tokens {ids}, log-probs of"
        f" {sampled} and the finish reason {reason}",
        where=where,
        fix=(
            "a response must end with its stop token and that token's log-prob; use a supported"
            " release of SGLang"
        ),
    )
