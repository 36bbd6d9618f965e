"""The engine on real SGLang servers: what it samples, what weight updates prove, and what is left
behind."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import aiohttp
import psutil
import pytest
import torch
from support import sglang_servers as servers
from support.leftovers import Traces
from support.models import FAMILIES, MIXTURES, save_model
from support.runs import environment
from transformers import AutoModelForCausalLM

from megatron_stare.errors import DataError
from megatron_stare.models import read_shape
from megatron_stare.records.batch import SamplingParams
from megatron_stare.rollout.engines.engine import GenerateRequest, GenerateResult, WeightUpdateError
from megatron_stare.rollout.engines.sglang.client import SGLangClient, everywhere
from megatron_stare.rollout.engines.sglang.protocol import SGLangError, generate_body, result_of
from megatron_stare.rollout.engines.sglang.replica import SGLangReplica, make_sync
from megatron_stare.rollout.engines.sglang.server_engine import CacheRoom
from megatron_stare.rollout.engines.sglang.tensor_sync import TensorSync
from megatron_stare.rollout.engines.sglang.update import WeightUpdate
from megatron_stare.rollout.engines.state import EngineState, EngineStateError

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(servers.MISSING is not None, reason=str(servers.MISSING)),
]

SHAPE = read_shape(servers.MODEL)
STOP = 1
A, B = 5, 9
OPEN = {"/health", "/health_generate", "/ready", "/metrics"}  # what SGLang leaves open, for probes
PARAMS = SamplingParams(temperature=0.8, max_new_tokens=24, seed=1, step=1, stop_token_ids=(STOP,))


@pytest.fixture(scope="module")
def engines():
    with servers.several(2) as running:
        yield running


@pytest.fixture
def engine(engines):
    return engines[0]


def ids_of(result):
    return result.output_ids.tolist()


def requests(count, prompt=(3, 14, 4, 14, 5, 15)):
    return [
        GenerateRequest(f"{i}:0", prompt[: 2 + i % 5], prompt_cursor=i, sample_index=0)
        for i in range(count)
    ]


def test_log_probs_are_those_of_transformers(engine):
    """And the weights can only have come through the update: servers start with random ones."""
    servers.sync(engine, 3, servers.weights())
    results = engine.generate(requests(64), PARAMS)
    model = AutoModelForCausalLM.from_pretrained(servers.MODEL, dtype=torch.float32)
    worst = 0.0
    for request, result in zip(requests(64), results, strict=True):
        ids = torch.tensor([[*request.input_ids, *ids_of(result)]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(request.input_ids) - 1 : -1] / PARAMS.temperature
        want = torch.log_softmax(logits, -1).gather(-1, ids[0, len(request.input_ids) :, None])[
            :, 0
        ]
        worst = max(worst, float((want - result.output_log_probs).abs().max()))
        assert result.versions == ((3, len(result.output_ids)),)
        assert (result.finish_reason == "stop") == (ids_of(result)[-1] == STOP)
        assert STOP not in ids_of(result)[:-1]
    assert worst < 1e-4
    assert sum(r.finish_reason == "stop" for r in results) > 32  # the model knows how to end


def test_prompt_log_probs_are_those_of_transformers(engine):
    servers.sync(engine, 4, servers.weights())
    model = AutoModelForCausalLM.from_pretrained(servers.MODEL, dtype=torch.float32)
    assert_log_probs_are_those_of(model, engine)


def assert_log_probs_are_those_of(model, engine):
    sequences = [(3, 14, 4, 15, 7), (3, 4, 5)]
    for tokens, found in zip(sequences, engine.prompt_log_probs(sequences), strict=True):
        ids = torch.tensor([tokens])
        with torch.no_grad():
            log_probs = torch.log_softmax(model(ids).logits[0, :-1], -1)
        torch.testing.assert_close(
            torch.tensor(found), log_probs.gather(-1, ids[0, 1:, None])[:, 0], atol=1e-5, rtol=0
        )


@pytest.mark.slow
# it wants YaRN on CPUs
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "deepseek_v3_short"])
def test_models_of_every_family_arrive_whole(tmp_path, family):
    """Every tensor compared by SGLang's name and checksum, then what it computes, but for latent
    attention, which its attention for CPUs lacks."""
    widths = {"intermediate_size": 64} | (
        {"moe_intermediate_size": 32} if family in MIXTURES else {}
    )
    # with a latent as wide as a head the server answers, if not rightly, and so starts
    if family == "deepseek_v3":
        widths |= {"kv_lora_rank": 8, "v_head_dim": 8}
    model = save_model(tmp_path, family, **widths)
    with servers.running(tmp_path) as engine:
        servers.sync(
            engine, 1, servers.weights(tmp_path), count=1 if family == "deepseek_v3" else 3
        )
        assert engine.model_info().state is EngineState.HEALTHY
        if not family.startswith("deepseek"):
            assert_log_probs_are_those_of(model, engine)


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in MIXTURES if not name.startswith("deepseek")])
def test_a_server_names_the_experts_of_every_token_but_the_last(tmp_path, family):
    """Experts are those that transformers sends the same tokens to. This holds too where the prompt
    is in the server's cache, and where the request continues another's response."""
    model = save_model(
        tmp_path,
        family,
        intermediate_size=64,
        moe_intermediate_size=32,
        max_position_embeddings=128,
    )
    asked = replace(PARAMS, return_experts=True)
    with servers.running(tmp_path, routing_replay=True) as engine:
        servers.sync(engine, 1, servers.weights(tmp_path))
        first, second = (
            GenerateRequest(rid, (3, 14, 4, 15, 7), 0, i) for i, rid in enumerate(("a", "b"))
        )
        (one,), (two,) = engine.generate([first], asked), engine.generate([second], asked)
        going_on = GenerateRequest(
            "c", (*first.input_ids, *one.output_ids.tolist(), 9, 8), 0, 0, start=7
        )
        (three,) = engine.generate([going_on], asked)
        for request, result in ((first, one), (second, two), (going_on, three)):
            tokens = torch.tensor([*request.input_ids, *result.output_ids.tolist()])
            assert result.experts.dtype == torch.uint8
            routed = [
                number
                for number, layer in enumerate(model.model.layers)
                if hasattr(layer.mlp, "gate")
            ]
            assert torch.equal(
                result.experts[:, routed].sort(-1).values, experts_of(model, tokens[:-1])
            )
        assert engine.generate([first], PARAMS)[0].experts is None


def experts_of(model, tokens):
    """[t, L, K] in ascending order, of the layers that have experts."""
    found = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda *given: found.append(given[2][2]))
        for layer in model.model.layers
        if hasattr(layer.mlp, "gate")
    ]
    with torch.no_grad():
        model(tokens[None])
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1).sort(-1).values.to(torch.uint8)


def test_a_server_ends_a_response_at_the_tokens_of_its_request(engine):
    """Beside those of all; the token itself comes with its log-prob, as a stop token does."""
    servers.sync(engine, 6, servers.weights())
    greedy = replace(PARAMS, greedy=True)
    wanted = requests(8)
    free = engine.generate(wanted, greedy)
    counts = Counter(token for result in free for token in set(ids_of(result)[:-1]))
    (token, shared), *_ = counts.most_common()
    assert shared >= 4
    # thousands are no more to a server than one: ids beyond the vocabulary are never said
    found = engine.generate(
        [replace(r, stop_token_ids=(token, *range(1000, 9000))) for r in wanted], greedy
    )
    for one, whole in zip(found, free, strict=True):
        said = ids_of(whole)
        end = said.index(token) + 1 if token in said else len(said)
        assert ids_of(one) == said[:end] and len(one.output_log_probs) == end
        assert one.finish_reason == ("stop" if token in said else whole.finish_reason)
        torch.testing.assert_close(
            one.output_log_probs, whole.output_log_probs[:end], atol=1e-4, rtol=0
        )


def test_what_would_kill_a_server_is_refused_before_it_is_sent(engine):
    servers.sync(engine, 5, servers.weights())
    for ids, message in (
        ((3, 16), "outside the model's vocabulary"),
        ((), "no tokens"),
        ((3,) * 110, "context holds 126"),
    ):
        with pytest.raises(DataError, match=message):
            engine.generate([GenerateRequest("0:0", ids, 0, 0)], PARAMS)
    assert engine.generate(requests(2), PARAMS)


@pytest.mark.parametrize("method", ["tensor", "disk", "distributed"])
def test_every_sync_method_brings_all_weights_to_all_servers(engines, method):
    with servers.attached(*engines) as (loop, clients):
        sync = make_sync(method, clients, str(servers.MODEL), timeout_s=120)
        for version, token in ((11, A), (12, B)):
            update = WeightUpdate(clients, sync, version, SHAPE, torch.float32)
            loop.run_until_complete(whole(update, servers.says_only(token)))
            answers = loop.run_until_complete(
                everywhere(
                    *(
                        c.generate(generate_body(requests(1)[0], PARAMS, f"{method}{version}"))
                        for c in clients
                    )
                )
            )
            for client, answer in zip(clients, answers, strict=True):
                result = result_of(answer, requests(1)[0], (STOP,), client.url)
                assert ids_of(result) == [token] * PARAMS.max_new_tokens
                assert result.versions == ((version, PARAMS.max_new_tokens),)
        loop.run_until_complete(sync.close())


async def whole(update, tensors):
    await update.begin()
    for bucket in servers.buckets(tensors):
        await update.send(bucket)
    return await update.end()


def test_versions_match_tokens_over_swaps_in_the_middle_of_responses(engines):
    """One version can only say A, the other only B: a token's version is what it says, or the spans
    are wrong. On a busy machine, all responses may end before the first swap; then new ones are
    asked for."""
    params = replace(PARAMS, max_new_tokens=100)

    async def story(clients, first):
        says = {first: A, first + 1: B, first + 2: A}
        sync = make_sync("tensor", clients, str(servers.MODEL), timeout_s=120)
        await whole(WeightUpdate(clients, sync, first, SHAPE, torch.float32), servers.says_only(A))
        wanted = requests(12)
        under_way = [
            asyncio.create_task(
                clients[i % 2].generate(generate_body(request, params, f"swapped-{first}-{i}"))
            )
            for i, request in enumerate(wanted)
        ]
        for version in (first + 1, first + 2):
            await everywhere(
                *(first_tokens(client, params, f"before-{version}") for client in clients)
            )
            update = WeightUpdate(clients, sync, version, SHAPE, torch.float32, "retract")
            await whole(update, servers.says_only(says[version]))
        answers = await asyncio.gather(*under_way)
        results = [
            result_of(answer, request, (STOP,), "")
            for answer, request in zip(answers, wanted, strict=True)
        ]
        for result in results:
            assert ids_of(result) == [
                says[version] for version, tokens in result.versions for _ in range(tokens)
            ]
            assert list(result.versions) == sorted(result.versions)
            assert len(result.output_ids) == 100
        return max(len(result.versions) for result in results)

    with servers.attached(*engines) as (loop, clients):
        for first in range(20, 35, 3):
            if loop.run_until_complete(story(clients, first)) > 1:
                break
        else:
            pytest.fail("no swap fell into a response")


async def first_tokens(client, params, rid):
    """Returns when the server has sampled some tokens of a response that is asked for now."""
    await client.generate(generate_body(requests(1)[0], replace(params, max_new_tokens=8), rid))


def test_one_element_changed_in_one_server_is_caught(engine):
    tensors = servers.weights()

    class OneElementOff(TensorSync):
        async def send(self, bucket, handles=()):
            await super().send(bucket)
            for name, tensor in bucket:
                if name == "model.layers.1.mlp.up_proj.weight":
                    other = tensor.clone()
                    other[5, 7] += 1e-3
                    one_server._where, one_server._layouts = self._where, self._layouts
                    await one_server.send([(name, other)])

    one_server = TensorSync(engine._sync._clients)
    honest, engine._sync = engine._sync, OneElementOff(engine._sync._clients)
    try:
        with pytest.raises(
            WeightUpdateError, match=r"layers\.1\.mlp\.gate_up_proj\.weight has other values"
        ) as error:
            servers.sync(engine, 30, tensors)
    finally:
        engine._sync = honest
    assert engine.process.url in str(error.value)
    assert engine.model_info().state is EngineState.DIRTY
    with pytest.raises(EngineStateError, match="complete weight sync"):
        engine.generate(requests(1), PARAMS)
    servers.sync(engine, 31, tensors)
    assert engine.generate(requests(1), PARAMS)[0].versions[0][0] == 31


@pytest.mark.parametrize("lost", ["model.norm.weight", "model.layers.0.self_attn.k_proj.weight"])
def test_a_tensor_that_was_not_sent_is_missed(engine, lost):
    tensors = {name: tensor for name, tensor in servers.weights().items() if name != lost}
    with pytest.raises(WeightUpdateError, match="was not sent"):
        servers.sync(engine, 40, tensors)
    assert engine.model_info().state is EngineState.DIRTY


def test_a_tensor_that_the_model_does_not_have_is_noticed(engine):
    with pytest.raises(
        WeightUpdateError, match=r"model\.layers\.9\.extra\.weight does not exist there"
    ):
        servers.sync(
            engine, 41, servers.weights() | {"model.layers.9.extra.weight": torch.zeros(3)}
        )


def test_memory_is_released_and_comes_back_without_weights(engine):
    servers.sync(engine, 45, servers.says_only(A))
    assert engine.memory_mb() > 0
    engine.release_memory()
    with pytest.raises(EngineStateError, match="resume its memory"):
        engine.generate(requests(1), PARAMS)
    engine.resume_memory(("weights",))
    assert engine.model_info().state is EngineState.DIRTY
    servers.sync(engine, 46, servers.says_only(B))
    with pytest.raises(EngineStateError, match="the cache is released"):
        engine.generate(requests(1), PARAMS)
    engine.resume_memory(("cache",))
    engine.release_memory(("cache",))  # and alone, as for a checkpoint
    engine.resume_memory(("cache",))
    (result,) = engine.generate(requests(1), PARAMS)
    assert ids_of(result) == [B] * PARAMS.max_new_tokens
    assert result.versions == ((46, PARAMS.max_new_tokens),)


def test_nobody_without_the_key_is_served(engine):
    async def ask():
        stranger = SGLangClient(engine.process.url, None, 30)
        try:
            await stranger.generate(generate_body(requests(1)[0], PARAMS, "stranger"))
        finally:
            await stranger.close()

    with pytest.raises(SGLangError, match="401"):
        asyncio.run(ask())


@pytest.mark.slow
def test_off_loopback_no_endpoint_is_open_without_the_key():
    """All that the server itself lists, by every method, and all that its source has and it does
    not list; who has the key is let in under the same address."""
    source = next(
        Path(servers.PYTHON)
        .parents[1]
        .glob("lib/*/site-packages/sglang/srt/entrypoints/http_server.py")
    )
    written = re.findall(r'@app\.(get|post|put|delete)\(\s*"([^"]+)"', source.read_text())
    # the one way in that no key guards: a socket for the transcription of speech, which no model
    # here does
    assert re.findall(r'@app\.websocket\("([^"]+)"', source.read_text()) == ["/v1/realtime"]
    address = next(
        a.address
        for addresses in psutil.net_if_addrs().values()
        for a in addresses
        if a.family == socket.AF_INET and not a.address.startswith("127.")
    )

    async def ask(engine):
        port = engine.process.url.rpartition(":")[2]
        url = f"http://{address}:{port}"
        key = {"Authorization": f"Bearer {engine.process.api_key}"}
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{url}/openapi.json", headers=key) as answer:
                known = (await answer.json())["paths"]
            answers = {}
            ways = {(path, method) for path, methods in known.items() for method in methods}
            assert {path for _, path in written} - {path for path, _ in ways} >= {
                "/tokenize",
                "/detokenize",
            }
            ways |= {(path, method) for method, path in written}
            for path, method in sorted(ways):
                for name, headers in (("none", {}), ("wrong", {"Authorization": "Bearer wrong"})):
                    async with session.request(
                        method, url + path, headers=headers, json={}
                    ) as answer:
                        answers[path, method, name] = answer.status
            async with session.get(f"{url}/model_info", headers=key) as answer:
                assert answer.status == 200
        return answers

    with servers.running(host="0.0.0.0") as engine:
        answers = asyncio.run(ask(engine))
        servers.sync(engine, 60, servers.weights())  # it is whole still
    changing = [
        path
        for path, *_ in answers
        if any(word in path for word in ("weight", "memory", "generation"))
    ]
    assert {
        "/update_weights_from_tensor",
        "/update_weights_from_disk",
        "/init_weights_update_group",
    } <= set(changing)
    assert {path for (path, *_), status in answers.items() if status not in (401, 403)} <= OPEN


def outputs(results):
    return [ids_of(result) for result in results]


def test_seeds_are_accepted_and_dropped_by_a_plain_server(engine):
    """Nothing is promised there: the same requests give other responses."""
    servers.sync(engine, 50, servers.weights())
    assert outputs(engine.generate(requests(32), PARAMS)) != outputs(
        engine.generate(requests(32), PARAMS)
    )


def test_seeds_are_honoured_where_asked_for():
    """The same request twice, alone, and in another batch in another order."""
    wanted = requests(32)
    with servers.running(seeds=True) as engine:
        servers.sync(engine, 1, servers.weights())
        together = engine.generate(wanted, PARAMS)
        assert outputs(engine.generate(wanted, PARAMS)) == outputs(together)
        assert outputs(engine.generate(wanted[::-1], PARAMS))[::-1] == outputs(together)
        for i in (3, 17):
            assert ids_of(engine.generate([wanted[i]], PARAMS)[0]) == ids_of(together[i])
        other = engine.generate(wanted, replace(PARAMS, step=2))
        assert outputs(other) != outputs(together)
        assert len({tuple(ids) for ids in outputs(together)}) > 8
        servers.sync(engine, 2, servers.weights())
        assert outputs(engine.generate(wanted, PARAMS)) == outputs(together)


@pytest.mark.slow
def test_a_server_is_given_what_its_cache_holds_and_would_queue_the_rest():
    """By the server's own count, beside one of as many requests as it decodes together."""
    params = replace(PARAMS, max_new_tokens=100)

    def most_with_a_queue(engine, client, loop):
        engine.submit(requests(24), params)
        most, done = 0, []
        while len(done) < 24:
            told = loop.run_until_complete(client.get("/v1/loads"))
            (load,) = told["loads"]
            if load["num_waiting_reqs"]:  # those that it was just given, too
                most = max(most, load["num_running_reqs"] + load["num_waiting_reqs"])
            done += engine.collect(0.02)
        assert all(
            isinstance(each, GenerateResult) and len(each.output_ids) == 100 for each in done
        )
        return most

    with servers.running(cache_tokens=600) as engine, servers.attached(engine) as (loop, (client,)):
        servers.sync(engine, 1, servers.says_only(A))
        assert engine._room.size == 600 // (16 / 4 + 100 / 2)
        engine._room = CacheRoom(600, 256, 106.0)  # as long as they are
        assert most_with_a_queue(engine, client, loop) <= 5
        engine._room = CacheRoom(10**9, 256, 106.0)
        assert most_with_a_queue(engine, client, loop) > 8  # which lie where their limits pass


@pytest.mark.slow
def test_servers_end_with_a_killed_starter():
    traces = Traces()
    code = (
        "import sys\nfrom support.sglang_servers import running\n"
        "with running(): print('up', flush=True); sys.stdin.read()"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", code],
        env=traces.environment(environment()),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert starter.stdout.readline() == "up\n"
    assert traces.look() == 1
    starter.kill()
    starter.communicate()
    assert traces.left() == []


@pytest.mark.slow
def test_a_server_that_does_not_start_says_so_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(
        '{"model_type": "qwen2", "architectures": ["NoSuchModel"]}'
    )
    with pytest.raises(SGLangError, match="its last words"):
        SGLangReplica(servers.config(tmp_path / "model"), 0).engine()
    assert not list(tmp_path.glob("megatron-stare-*"))
