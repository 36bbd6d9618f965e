"""Requests to SGLang servers, their answers as read, and the checksums that they must report."""

import base64
import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_stare.models import read_shape
from megatron_stare.models.qwen3_moe import FAMILY as QWEN3_MOE
from megatron_stare.records.batch import SamplingParams
from megatron_stare.rollout.engines.engine import GenerateRequest
from megatron_stare.rollout.engines.sglang.cpu_platform import murmur_hash32
from megatron_stare.rollout.engines.sglang.fingerprint import Fingerprint, differences
from megatron_stare.rollout.engines.sglang.protocol import (
    SGLangError,
    check_stop,
    check_version,
    generate_body,
    read_prompt_log_probs,
    result_of,
    sampling_seed,
    version_runs,
)
from megatron_stare.rollout.engines.sglang.server_layout import ServerLayout

SHAPE = read_shape(Path(__file__).parents[2] / "assets" / "tiny-adder")
STOP = 1
PARAMS = SamplingParams(temperature=0.7, max_new_tokens=8, seed=3, step=5, stop_token_ids=(STOP,))
REQUEST = GenerateRequest("4:2", (3, 4, 5), prompt_cursor=4, sample_index=2)
RECORDED = json.loads((Path(__file__).parent / "sglang_exchanges.json").read_text())


def answer(ids, reason="stop", spans=None, **meta):
    return {
        "output_ids": ids,
        "meta_info": {
            "finish_reason": {"type": reason},
            "prompt_tokens": 3,
            "output_token_logprobs": [[-0.5, i, None] for i in ids],
            "weight_versions": [{"version": "7", "start": 0, "end": len(ids)}]
            if spans is None
            else spans,
        }
        | meta,
    }


def read(reply):
    return result_of(reply, REQUEST, (STOP,), "http://server")


def test_every_field_of_the_server_is_sent():
    """Recorded from the real server: the fields its sampling parameters have."""
    sent = generate_body(REQUEST, PARAMS, "r")["sampling_params"].keys()
    assert set(RECORDED["sampling_fields"]) - sent <= set(RECORDED["sampling_fields_not_sent"])
    assert sent <= set(RECORDED["sampling_fields"])


def test_nothing_that_is_sent_cuts_the_support():
    fields = generate_body(REQUEST, PARAMS, "r")["sampling_params"]
    assert fields["temperature"] == 0.7
    assert (fields["top_k"], fields["top_p"], fields["min_p"], fields["repetition_penalty"]) == (
        -1,
        1.0,
        0.0,
        1.0,
    )
    # an evaluation's
    assert (
        generate_body(REQUEST, replace(PARAMS, top_p=0.9), "r")["sampling_params"]["top_p"] == 0.9
    )
    assert fields["stop_token_ids"] == [STOP]
    assert (
        generate_body(REQUEST, replace(PARAMS, greedy=True), "r")["sampling_params"]["top_k"] == 1
    )


ROUTED = replace(SHAPE, experts=8, experts_per_token=2, layers=3)


def in_base64(experts):
    """Encodes experts as `tokenizer_manager.py` does where a server has no tokenizer."""
    return base64.b64encode(np.asarray(experts, dtype=np.int32).tobytes()).decode()


def routed(reply):
    return result_of(reply, REQUEST, (STOP,), "http://server", ROUTED)


def test_experts_are_asked_for_only_where_they_are_replayed():
    assert "return_routed_experts" not in generate_body(REQUEST, PARAMS, "r")
    body = generate_body(REQUEST, replace(PARAMS, return_experts=True), "r")
    assert body["return_routed_experts"] is True
    assert body["routed_experts_start_len"] == 0  # the prompt's too


def test_experts_of_every_token_but_the_last_are_read():
    experts = np.arange(4 * 3 * 2).reshape(4, 3, 2) % 8
    found = routed(answer([9, STOP], routed_experts=in_base64(experts))).experts
    assert torch.equal(found, torch.from_numpy(experts).to(torch.uint8))
    # was not asked for
    assert read(answer([9, STOP], routed_experts=in_base64(experts))).experts is None


@pytest.mark.parametrize(
    ("reported", "message"),
    [
        (None, "named no experts"),
        ("%%", "cannot be read"),
        # those of the response alone would be fewer
        (in_base64(np.zeros((3, 3, 2))), "experts of 3 tokens instead of 4"),
        (in_base64(np.zeros((5, 3, 2))), "experts of 5 tokens instead of 4"),
        (in_base64(np.zeros(4 * 3 * 2 + 1)), "not 2 in each of 3 layers"),
        (in_base64(np.full((4, 3, 2), 8)), "numbers 8 to 8 of 8 experts"),
    ],
)
def test_experts_that_are_not_the_models_are_refused(reported, message):
    with pytest.raises(SGLangError, match=message):
        routed(answer([9, STOP], routed_experts=reported))


def test_seeds_differ_wherever_the_key_differs():
    variants = [
        (PARAMS, REQUEST),
        (replace(PARAMS, seed=4), REQUEST),
        (replace(PARAMS, step=6), REQUEST),
        (PARAMS, replace(REQUEST, prompt_cursor=5)),
        (PARAMS, replace(REQUEST, sample_index=3)),
    ]
    seeds = [sampling_seed(params, request) for params, request in variants]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert seeds[0] == sampling_seed(PARAMS, replace(REQUEST, rid="other", input_ids=(9,)))
    later = replace(PARAMS, step=9)  # continued in another step than it was begun in
    assert sampling_seed(PARAMS, REQUEST) == sampling_seed(
        later, replace(REQUEST, noise_step=PARAMS.step)
    )


@pytest.mark.parametrize("name", sorted(RECORDED["generate"]))
def test_recorded_answers_are_read(name):
    exchange = RECORDED["generate"][name]
    params = exchange["body"]["sampling_params"]
    request = GenerateRequest("0:0", tuple(exchange["body"]["input_ids"]), 0, 0)
    found = result_of(exchange["answer"], request, params["stop_token_ids"], "http://server")
    assert found.completion_tokens == exchange["answer"]["meta_info"]["completion_tokens"]
    assert found.finish_reason == exchange["means"]
    reported = exchange["answer"]["meta_info"]["output_token_logprobs"] or []
    assert (
        found.output_ids.tolist()
        == exchange["answer"]["output_ids"]
        == [entry[1] for entry in reported]
    )
    torch.testing.assert_close(
        found.output_log_probs, torch.tensor([entry[0] for entry in reported]), atol=0, rtol=0
    )
    assert sum(tokens for _, tokens in found.versions) == len(found.output_ids)
    assert max(found.output_log_probs.tolist(), default=0.0) <= 0.0


def test_recorded_prompt_log_probs_are_read():
    body, reply = RECORDED["score"]["body"], RECORDED["score"]["answer"]
    found = read_prompt_log_probs(reply, body["input_ids"], "http://server")
    assert len(found) == len(body["input_ids"]) - 1
    assert max(found) <= 0.0
    with pytest.raises(SGLangError, match="log-probs were asked for"):
        read_prompt_log_probs(reply, [3, 15, 5], "http://server")


def test_versions_are_those_of_the_spans():
    spans = [{"version": "7", "start": 0, "end": 2}, {"version": "8", "start": 2, "end": 3}]
    assert read(answer([4, 5, STOP], spans=spans)).versions == ((7, 2), (8, 1))
    assert version_runs({"weight_versions": None}, 0, "") == ()
    empty = [{"version": "6", "start": 0, "end": 0}, {"version": "7", "start": 0, "end": 2}]
    assert read(answer([4, STOP], spans=empty)).versions == ((7, 2),)


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [{"version": "7", "start": 0, "end": 1}],
        [{"version": "7", "start": 1, "end": 3}],
        [{"version": "none", "start": 0, "end": 2}],
        [{"version": "7", "start": 0, "end": 3}],
    ],
)
def test_a_token_without_its_version_is_refused(spans):
    with pytest.raises(SGLangError, match="2 tokens, but weight versions"):
        read(answer([4, STOP], spans=spans))


def test_log_probs_must_be_those_of_the_tokens():
    with pytest.raises(SGLangError, match="log-probs of"):
        read(answer([4, STOP], output_token_logprobs=[[-0.5, 4, None]]))


def test_a_log_prob_that_is_no_number_stays_none():
    """A server's JSON has null for it; the comparison with the trainer counts it."""
    found = read(answer([4, STOP], output_token_logprobs=[[None, 4, None], [-0.1, STOP, None]]))
    assert found.output_log_probs[0].isnan()
    assert found.output_log_probs[1] == torch.tensor(-0.1)


def test_a_stop_token_in_the_last_place_is_a_stop():
    assert read(answer([4, STOP], reason="length")).finish_reason == "stop"
    assert read(answer([4, 5], reason="length")).finish_reason == "length"
    assert read(answer([], reason="abort")).finish_reason == "abort"


@pytest.mark.parametrize(
    "broken",
    [
        answer([STOP], reason="length"),
        answer([4, STOP]) | {},
        answer([STOP], output_token_logprobs=[]),
        answer([STOP], finish_reason={"type": "stop", "matched": 9}),
    ],
)
def test_a_server_that_loses_the_stop_token_is_refused(broken):
    check_stop(
        answer([STOP], finish_reason={"type": "stop", "matched": STOP}), STOP, "http://server"
    )
    with pytest.raises(SGLangError, match="stop token 1 was forced"):
        check_stop(broken, STOP, "http://server")


def test_only_releases_of_the_known_protocol_are_used():
    check_version("0.5.23", "http://server")
    with pytest.raises(SGLangError, match=r"runs SGLang 0\.5\.5"):
        check_version("0.5.5", "http://server")


@pytest.mark.parametrize(
    ("name", "stacked", "index"),
    [
        ("model.layers.3.self_attn.k_proj.bias", "model.layers.3.self_attn.qkv_proj.bias", 1),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_up_proj.weight", 1),
        ("model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.down_proj.weight", 0),
        (
            "model.layers.2.mlp.experts.5.up_proj.weight",
            "model.layers.2.mlp.experts.w13_weight",
            11,
        ),
        (
            "model.layers.2.mlp.experts.5.down_proj.weight",
            "model.layers.2.mlp.experts.w2_weight",
            5,
        ),
        ("model.layers.2.mlp.gate.weight", "model.layers.2.mlp.gate.weight", 0),
        ("model.norm.weight", "model.norm.weight", 0),
    ],
)
def test_tensors_go_where_sglang_stacks_them(name, stacked, index):
    place = QWEN3_MOE.served(name, SHAPE)
    assert (place.name, place.index) == (stacked, index)


def test_stacked_tensors_are_hashed_in_order_however_they_come():
    q, k, v = (torch.randn(n, 3, generator=torch.Generator().manual_seed(n)) for n in (4, 2, 2))
    want = hashlib.sha256(torch.cat([q, k, v]).numpy().tobytes()).hexdigest()[:16]
    layer = "model.layers.0.self_attn"
    for order in ("qkv", "vkq", "kvq"):
        fingerprint = Fingerprint(SHAPE, torch.float32, ServerLayout())
        for letter in order:
            fingerprint.add(f"{layer}.{letter}_proj.weight", {"q": q, "k": k, "v": v}[letter])
        assert fingerprint.checksums() == [{f"{layer}.qkv_proj.weight": want}]
    partial = Fingerprint(SHAPE, torch.float32, ServerLayout())
    partial.add(f"{layer}.q_proj.weight", q)
    assert partial.checksums() == [{}]


def test_the_vocabulary_is_padded_as_sglang_pads_it():
    embedding = torch.randn(37, 3, generator=torch.Generator().manual_seed(0))
    fingerprint = Fingerprint(SHAPE, torch.float32, ServerLayout())
    fingerprint.add("model.embed_tokens.weight", embedding)
    padded = torch.cat([embedding, torch.zeros(27, 3)])
    want = hashlib.sha256(padded.numpy().tobytes()).hexdigest()[:16]
    assert fingerprint.checksums() == [{"model.embed_tokens.weight": want}]


def test_every_kind_of_difference_is_named():
    assert differences([{"a": "1", "b": "2"}], [{"a": "1", "b": "2"}]) == []
    assert differences([{"a": "1", "x": "2"}], [{"a": "3", "y": "2"}]) == [
        "y was not sent",
        "x does not exist there",
        "a has other values",
    ]
    assert differences([{"a": "1"}, {"a": "1"}], [{"a": "1"}, {"a": "3"}]) == [
        "a has other values on rank 1"
    ]
    assert differences([{"a": "1"}], [{"a": "1"}, {"a": "1"}]) == [
        "2 ranks report what they hold, of 1"
    ]


def murmur3(data: bytes) -> int:
    """The published algorithm (32 bits, seed 0, a multiple of four bytes), in Python's integers."""
    mask, state = 0xFFFFFFFF, 0

    def rotated(bits, by):
        return ((bits << by) | (bits >> (32 - by))) & mask

    for i in range(0, len(data), 4):
        block = int.from_bytes(data[i : i + 4], "little")
        state ^= rotated(block * 0xCC9E2D51 & mask, 15) * 0x1B873593 & mask
        state = (rotated(state, 13) * 5 + 0xE6546B64) & mask
    state ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ (state >> shift)) * factor & mask
    return state ^ (state >> 16)


def test_the_noise_of_a_cpu_server_is_the_published_hash():
    assert murmur3(b"test") == 0xBA6BD213  # as published
    seeds, positions, columns = [0, 1, 2**31 - 1, 2**63 + 5], [0, 7, 2**31, 12], [0, 1, 151_935]
    found = murmur_hash32(
        torch.tensor(seeds, dtype=torch.uint64),
        torch.tensor(positions),
        torch.tensor(columns, dtype=torch.int32),
    )
    assert found.dtype == torch.uint32
    for i, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        for j, column in enumerate(columns):
            data = (
                seed.to_bytes(8, "little")
                + position.to_bytes(4, "little")
                + column.to_bytes(4, "little")
            )
            assert int(found[i, j]) == murmur3(data)
