"""A server on the trainer's GPU through what a step asks of it, by the engine of a run: weights in,
proven by checksums, the canary; memory given back and taken again; other weights, proof, canary and
a token.

By `disk` through an engine that is attached to the server; then once by `tensor`, which on a GPU
hands over memory between the PyTorch of the trainer and that of the servers, through the engine
that started it. On a GPU, then a second server, which stores matrices in 8 bits, by `tensor`. The
canary's log-probs are held against transformers in float32, by the limits of a run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from clock import exact_products
from servers import device_used, libraries, served, weights_of
from small_model import small_model
from torch import Tensor
from transformers import AutoModelForCausalLM
from verdict import Bound

from megatron_stare.driver.agreement_watch import LONGEST, canary_sequences
from megatron_stare.errors import UserError
from megatron_stare.megatron.backend.cpu_backend import device
from megatron_stare.records.batch import SamplingParams
from megatron_stare.rollout.agreement.limits import BOUNDS as LIMITS
from megatron_stare.rollout.agreement.limits import CANARY_ROOM, LARGEST
from megatron_stare.rollout.engines.engine import GenerateRequest
from megatron_stare.rollout.engines.model_folder import load_tokenizer
from megatron_stare.rollout.engines.sglang.replica import SGLangReplica
from megatron_stare.rollout.engines.sglang.server_checks import API_KEY_VARIABLE
from megatron_stare.rollout.engines.sglang.server_engine import SGLangEngine

OTHER = "canary over its limit, of the other weights"
TENSOR = "by tensor: canary over its limit"
EIGHT = "8-bit weights: canary over its limit"
NOT_PROVEN = "8-bit weights: tensors that were not proven"
GPU_ONLY = ("device memory given back, GB", EIGHT, NOT_PROVEN)
BOUNDS: dict[str, Bound] = {
    "tensors that were not proven": ("<=", 0.0),
    # of the limit that a run ends at; between the two sets of weights it must show
    "canary over its limit": ("<=", 1.0),
    OTHER: (">=", 1.0),
    "tokens answered by the second weights": (">=", 1.0),
    TENSOR: ("<=", 1.0),
    EIGHT: ("<=", 1.0),
    NOT_PROVEN: ("<=", 0.0),
    "device memory given back, GB": (">=", 5.0),
}
BUCKET = 256 * 10**6  # bytes
EMBEDDING = "model.embed_tokens.weight"


def run(cpu: bool) -> dict[str, Any]:
    exact_products()
    figures: dict[str, float] = {}
    with small_model(cpu) as model, ExitStack() as stack:
        config = served(model, cpu, colocated=True, sync="tensor")
        first = weights_of(model)
        second = first | {EMBEDDING: first[EMBEDDING].roll(1, 0)}
        longest = min(LONGEST, sum(config.expected_lengths))
        canary = canary_sequences(
            load_tokenizer(str(model)), len(first[EMBEDDING]), config.sglang.canary_prompts, longest
        )
        wanted = [log_probs(model, weights, canary) for weights in (first, second)]
        replica = SGLangReplica(config, 0)
        stack.callback(replica.close)
        owner = replica.engine()
        stack.callback(owner.close)
        assert owner.process is not None
        with attached(model, cpu, owner) as engine:
            unproven, _ = synced(engine, 1, first)
            away = [apart(engine.prompt_log_probs(canary), each, cpu) for each in wanted]
            figures["canary over its limit"], figures[OTHER] = away
            held = device_used()
            engine.release_memory()
            left = device_used()
            figures["device memory given back, GB"] = (held - left) / 1e9
            engine.resume_memory(("weights",))
            again, figures["seconds of a sync by disk"] = synced(engine, 2, second)
            engine.resume_memory(("cache",))
            figures["device memory taken again, GB"] = (device_used() - left) / 1e9
            away = [apart(engine.prompt_log_probs(canary), each, cpu) for each in wanted]
            figures["canary over its limit"] = max(figures["canary over its limit"], away[1])
            figures[OTHER] = min(figures[OTHER], away[0])
            request = GenerateRequest("one", tuple(canary[0][:8]), 0, 0)
            params = SamplingParams(1.0, 1, seed=1, step=2, stop_token_ids=())
            (answer,) = engine.generate([request], params)
            figures["tokens answered by the second weights"] = float(
                sum(length for version, length in answer.versions if version == 2)
            )
        refused = None
        try:
            last, figures["seconds of a sync by tensor"] = synced(owner, 3, first)
            figures[TENSOR] = apart(owner.prompt_log_probs(canary), wanted[0], cpu)
        except UserError as error:  # the other figures stand
            last, refused = 0, str(error)
        owner.close()
        refused_in_8_bits = None
        if not cpu:
            try:
                figures |= eight_bits(model, first, canary, wanted[0])
            except UserError as error:
                refused_in_8_bits = str(error)
        figures["tensors that were not proven"] = float(unproven + again + last)
        figures["tensors"] = float(len(first))
        return {
            "figures": figures,
            "by tensor, refused": refused,
            "in 8 bits, refused": refused_in_8_bits,
            "libraries": libraries(config),
        }


def eight_bits(
    model: Path,
    weights: Mapping[str, Tensor],
    canary: Sequence[tuple[int, ...]],
    wanted: Sequence[Tensor],
) -> dict[str, float]:
    """Figures of a server that stores matrices in 8 bits. Kernels are compiled when they are
    needed, not all at the start, which would take minutes."""
    config = served(
        model,
        False,
        colocated=True,
        sync="tensor",
        quantization="fp8",
        environment={"SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0"},
    )
    replica = SGLangReplica(config, 0)
    with closing(replica), closing(replica.engine()) as engine:
        unproven, seconds = synced(engine, 1, weights)
        found = engine.prompt_log_probs(canary)
    return {
        NOT_PROVEN: float(unproven),
        EIGHT: apart(found, wanted, False, "fp8"),
        "8-bit weights: seconds of a sync": seconds,
    }


@contextmanager
def attached(model: Path, cpu: bool, owner: SGLangEngine) -> Iterator[SGLangEngine]:
    """A second engine over the same server, to which weights go by disk."""
    assert owner.process is not None
    os.environ[API_KEY_VARIABLE] = owner.process.api_key
    try:
        config = served(model, cpu, colocated=True, sync="disk")
        there = config.sglang.model_copy(update={"urls": [owner.process.url]})
        engine = SGLangReplica(config.model_copy(update={"sglang": there}), 0).engine()
        try:
            yield engine
        finally:
            engine.close()
    finally:
        del os.environ[API_KEY_VARIABLE]


def synced(engine: SGLangEngine, version: int, weights: Mapping[str, Tensor]) -> tuple[int, float]:
    """Brings weights to the server. Returns how many were not proven, and the seconds.

    Raises:
        UserError: the server holds other values, or did not take them.
    """
    start = time.perf_counter()
    engine.begin_weight_update(version)
    for bucket in buckets(weights):
        engine.update_weights(bucket)
    proven = engine.end_weight_update()
    seconds = time.perf_counter() - start
    return sum(not proven.get(name) for name in weights), seconds


def buckets(weights: Mapping[str, Tensor]) -> Iterator[list[tuple[str, Tensor]]]:
    """The tensors in buckets of at least BUCKET bytes, the last one of the rest."""
    bucket: list[tuple[str, Tensor]] = []
    for name, tensor in weights.items():
        bucket.append((name, tensor))
        if sum(each.nbytes for _, each in bucket) >= BUCKET:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def log_probs(
    model: Path, weights: Mapping[str, Tensor], sequences: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Log-probs in float32, by transformers, of all tokens but the first of every sequence."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    policy.load_state_dict({name: each.float() for name, each in weights.items()}, strict=False)
    policy.to(device()).eval()
    found = []
    with torch.no_grad():
        for sequence in sequences:
            tokens = torch.tensor(sequence, device=device())
            log_p = policy(tokens[None]).logits[0, :-1].log_softmax(1)
            found.append(log_p.gather(1, tokens[1:, None]).squeeze(1).cpu())
    return found


def apart(
    found: Sequence[Sequence[float]],
    wanted: Sequence[Tensor],
    cpu: bool,
    dtype: str = "bfloat16",
) -> float:
    """The canary's difference over its limit: in float32 of the token that differs most,
    otherwise the mean."""
    differences = torch.cat(
        [(torch.tensor(a) - b).abs() for a, b in zip(found, wanted, strict=True)]
    )
    if cpu:
        return float(differences.max()) / LARGEST["float32"]
    return float(differences.mean()) / (CANARY_ROOM * LIMITS[dtype]["mean"])
