"""The engine over servers that misbehave in ways a real one cannot be made to (sglang_fake.py)."""

from __future__ import annotations

import asyncio
import gc
import json
from pathlib import Path

import pytest
import torch
from support.sglang_fake import STOP, FakeServer

from megatron_stare.config.schema import Config
from megatron_stare.errors import ConfigError, DataError
from megatron_stare.records.batch import SamplingParams
from megatron_stare.rollout.engines.engine import GenerateRequest, WeightUpdateError
from megatron_stare.rollout.engines.sglang.protocol import SGLangError, result_of
from megatron_stare.rollout.engines.sglang.replica import server_flags
from megatron_stare.rollout.engines.sglang.server_engine import SGLangEngine
from megatron_stare.rollout.engines.sglang.tensor_sync import TensorSync
from megatron_stare.rollout.engines.state import EngineState, EngineStateError

MODEL = str(Path(__file__).parents[2] / "assets" / "tiny-adder")
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=4, seed=1, step=1, stop_token_ids=(STOP,))
RECORDED = json.loads((Path(__file__).parent / "sglang_exchanges.json").read_text())
BUCKET = [("model.norm.weight", torch.ones(3)), ("model.embed_tokens.weight", torch.ones(4, 3))]
UPDATE = [
    "/server_info",
    "/pause_generation",
    "/begin_weight_update",
    "/update_weights_from_tensor",
    "/end_weight_update",
    "/flush_cache",
    "/weights_checker",
    "/update_weight_version",
    "/continue_generation",
]


@pytest.fixture
def fake():
    return FakeServer("one")


def over(fake, loop, **settings):
    client = fake.client()
    return SGLangEngine(client, TensorSync([client]), MODEL, "float32", 2, loop, **settings)


@pytest.fixture
def engine(fake):
    made = over(fake, asyncio.new_event_loop())
    fake.calls.clear()
    yield made
    made.close()


def sync(engine, version=1):
    engine.begin_weight_update(version)
    engine.update_weights(BUCKET)
    return engine.end_weight_update()


def requests(count):
    return [GenerateRequest(f"{i}:0", (3, 4), i, 0) for i in range(count)]


def shape(value):
    """An answer's JSON with its values left out; of lists the first entry."""
    if isinstance(value, dict):
        return {name: shape(v) for name, v in value.items()}
    return [shape(v) for v in value[:1]] if isinstance(value, list) else type(value)


def test_the_fake_answers_as_the_real_server_did(engine, fake):
    """Field by field; the fake may leave out what nobody reads."""
    sync(engine)
    engine.generate(requests(1), PARAMS)
    engine.release_memory()
    engine.resume_memory()
    real = RECORDED["answers"] | {"/generate": RECORDED["generate"]["stop"]["answer"]}
    told = dict(fake.answers)
    assert real.keys() <= told.keys() | {"/abort_request"}
    for path in told.keys() - {"/weights_checker"}:
        assert contains(shape(real[path]), shape(told[path])), path
    (rank,), (real_rank,) = told["/weights_checker"]["ranks"], real["/weights_checker"]["ranks"]
    assert contains(shape(real_rank["parallelism_info"]), shape(rank["parallelism_info"]))
    assert {len(c) for c in rank["checksums"].values()} == {
        len(c) for c in real_rank["checksums"].values()
    }
    sync(engine, 2)
    assert engine.prompt_log_probs([(3, 4, 5)]) == [[-0.25, -0.25]]
    assert contains(shape(RECORDED["score"]["answer"]), shape(fake.answers["/generate"]))


def contains(real, told):
    if isinstance(told, dict):
        return isinstance(real, dict) and all(
            k in real and contains(real[k], v) for k, v in told.items()
        )
    if isinstance(told, list):
        return isinstance(real, list) and all(
            contains(r, t) for r, t in zip(real, told, strict=True)
        )
    return real is told


def test_an_update_goes_through_its_stages_in_order(engine, fake):
    assert engine.model_info().state is EngineState.DIRTY
    assert sync(engine).keys() == dict(BUCKET).keys()
    assert fake.calls == UPDATE
    assert engine.model_info().weight_version == 1


@pytest.mark.parametrize("stage", UPDATE)
def test_a_failure_anywhere_leaves_the_engine_dirty_until_a_full_sync(engine, fake, stage):
    sync(engine)
    fake.broken = {stage}
    with pytest.raises(SGLangError, match=stage):
        sync(engine, 2)
    assert engine.model_info().state is EngineState.DIRTY
    with pytest.raises(EngineStateError, match="complete weight sync"):
        engine.generate(requests(1), PARAMS)
    fake.broken = set()
    sync(engine, 3)
    assert engine.generate(requests(4), PARAMS)[3].versions == ((3, 2),)


def test_servers_with_wrong_weights_are_not_resumed(engine, fake):
    fake.lose = "model.norm.weight"
    with pytest.raises(
        WeightUpdateError, match=r"http://one: .* model\.norm\.weight has other values"
    ):
        sync(engine)
    assert "/continue_generation" not in fake.calls and "/update_weight_version" not in fake.calls


def test_a_server_of_two_ranks_takes_a_payload_a_rank(fake):
    """And one rank's error is named with the rank, at the server's address."""
    fake.ranks = 2
    engine = over(fake, asyncio.new_event_loop())
    sync(engine)
    assert len(fake.bodies["/update_weights_from_tensor"]["serialized_named_tensors"]) == 2
    fake.lose, fake.lose_on = "model.norm.weight", 1
    with pytest.raises(
        WeightUpdateError, match=r"http://one: .* model\.norm\.weight has other values on rank 1\n"
    ):
        sync(engine, 2)
    engine.close()


def test_a_server_whose_cut_is_not_known_is_refused(engine, fake, monkeypatch):
    told = fake._info({})
    monkeypatch.setattr(fake, "_info", lambda _: told | {"pp_size": 2})
    with pytest.raises(SGLangError, match="cuts the model over 2 pipeline stages"):
        sync(engine)


def prove_every(engine, count, first=1):
    """Updates as the pool makes them; the states after each."""
    states = []
    for number in range(first, first + 2 * count):
        engine.begin_weight_update(number, prove=(number - first) % count == 0)
        engine.update_weights(BUCKET)
        received = engine.end_weight_update()
        proven = (number - first) % count == 0
        assert received.keys() == dict(BUCKET).keys() and all(
            bool(sum_) == proven for sum_ in received.values()
        )
        states.append(engine.model_info().state)
    return states


def test_between_proofs_a_server_is_asked_for_no_checksums(engine, fake):
    assert prove_every(engine, 5) == ([EngineState.HEALTHY] + [EngineState.UNPROVED] * 4) * 2
    assert fake.calls.count("/weights_checker") == 2
    # UNPROVED weights are used
    assert engine.generate(requests(2), PARAMS)[0].versions == ((10, 2),)


def test_at_prove_every_five_corruption_in_one_rank_is_caught_at_the_next_proof(fake):
    fake.ranks = 2
    engine = over(fake, asyncio.new_event_loop())
    sync(engine)
    fake.lose, fake.lose_on = "model.embed_tokens.weight", 0
    for version in range(2, 6):
        engine.begin_weight_update(version, prove=False)
        engine.update_weights(BUCKET)
        engine.end_weight_update()
        assert engine.model_info().state is EngineState.UNPROVED
    with pytest.raises(WeightUpdateError, match=r"embed_tokens\.weight has other values on rank 0"):
        sync(engine, 6)
    assert engine.model_info().state is EngineState.DIRTY
    engine.close()


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (BUCKET[:1], r"model\.embed_tokens\.weight was not sent"),
        (
            [*BUCKET, ("model.extra.weight", torch.ones(2))],
            r"model\.extra\.weight does not exist there",
        ),
        (
            [BUCKET[0], (BUCKET[1][0], torch.ones(5, 3))],
            r"embed_tokens\.weight was sent as \[5, 3\], not \[4, 3\]",
        ),
    ],
)
def test_names_and_counts_are_compared_without_a_proof(engine, fake, sent, message):
    sync(engine)
    engine.begin_weight_update(2, prove=False)
    engine.update_weights(sent)
    with pytest.raises(WeightUpdateError, match=message):
        engine.end_weight_update()
    assert engine.model_info().state is EngineState.DIRTY
    assert fake.calls.count("/continue_generation") == 1


def test_the_first_update_is_proven_whatever_is_asked_for(engine, fake):
    """There is nothing yet that names could be held against."""
    fake.lose = "model.norm.weight"
    engine.begin_weight_update(1, prove=False)
    engine.update_weights(BUCKET)
    with pytest.raises(WeightUpdateError, match="has other values"):
        engine.end_weight_update()


def test_a_tensor_is_sent_once(engine):
    engine.begin_weight_update(1)
    engine.update_weights(BUCKET)
    with pytest.raises(WeightUpdateError, match=r"model\.norm\.weight' was sent twice"):
        engine.update_weights(BUCKET)
    assert engine.model_info().state is EngineState.DIRTY


def test_a_request_is_answered_once_and_at_most_two_are_under_way(engine, fake):
    sync(engine)
    fake.calls.clear()
    results = engine.generate(requests(10), PARAMS)
    assert [r.rid for r in results] == [f"{i}:0" for i in range(10)]
    assert fake.calls.count("/generate") == 10
    assert fake.most_under_way == engine.model_info().capacity == 2
    assert engine.collect(0) == []


def test_a_refused_request_ends_the_others(engine, fake):
    sync(engine)
    fake.broken = {"/generate"}
    with pytest.raises(SGLangError, match="/generate is broken"):
        engine.generate(requests(10), PARAMS)
    assert "/abort_request" in fake.calls
    fake.broken = set()
    assert engine.collect(0) == []  # none of the ten is answered later
    assert [r.rid for r in engine.generate(requests(3), PARAMS)] == ["0:0", "1:0", "2:0"]


def test_what_is_aborted_is_not_answered(engine, fake):
    sync(engine)
    engine.submit(requests(4), PARAMS)
    engine.abort()
    assert "/abort_request" in fake.calls
    assert engine.collect(0) == []


def test_ids_outside_the_vocabulary_never_leave(engine, fake):
    sync(engine)
    fake.calls.clear()
    with pytest.raises(DataError, match="outside the model's vocabulary of 16"):
        engine.generate([*requests(3), GenerateRequest("9:0", (16,), 9, 0)], PARAMS)
    assert fake.calls == []


def test_a_server_of_another_release_is_refused(fake):
    fake._info = lambda _: {"version": "0.5.5", "max_total_num_tokens": 100}
    loop = asyncio.new_event_loop()
    with pytest.raises(SGLangError, match=r"http://one: the server runs SGLang 0\.5\.5"):
        over(fake, loop)
    loop.close()


def test_released_memory_comes_back_without_weights(engine, fake):
    sync(engine)
    while_updating = fake.queries["/flush_cache"]
    fake.calls.clear()
    engine.release_memory()
    assert fake.calls == ["/pause_generation", "/flush_cache", "/release_memory_occupation"]
    # what was just ended may still be leaving; a sync's flush, beside requests that wait for it,
    # must not wait for them
    assert (while_updating, fake.queries["/flush_cache"]) == ("", "timeout=30")
    with pytest.raises(EngineStateError, match="resume its memory"):
        engine.generate(requests(1), PARAMS)
    with pytest.raises(EngineStateError, match="RELEASED"):
        engine.begin_weight_update(2)
    assert fake.bodies["/release_memory_occupation"] == {
        "tags": ["weights", "kv_cache", "cuda_graph"]
    }
    engine.resume_memory()
    assert fake.calls[-1] == "/resume_memory_occupation"
    with pytest.raises(EngineStateError, match="complete weight sync"):
        engine.generate(requests(1), PARAMS)
    sync(engine, 2)
    assert engine.generate(requests(1), PARAMS)[0].versions == ((2, 2),)


def test_weights_are_resumed_and_synced_before_the_cache(engine, fake):
    """A server that was never synced, as at a run's start. The fake dies of what the real one dies
    of."""
    engine.release_memory()
    with pytest.raises(EngineStateError, match="the weights come first"):
        engine.resume_memory(("cache",))
    engine.resume_memory(("weights",))
    assert fake.bodies["/resume_memory_occupation"] == {"tags": ["weights"]}
    with pytest.raises(EngineStateError, match="cannot resume weights: not released"):
        engine.resume_memory(("weights",))
    with pytest.raises(EngineStateError, match="cannot release cache: released already"):
        engine.release_memory()
    sync(engine)
    for computes in (
        lambda: engine.generate(requests(1), PARAMS),
        lambda: engine.prompt_log_probs([(3, 4)]),
    ):
        with pytest.raises(EngineStateError, match="the cache is released"):
            computes()
    engine.resume_memory(("cache",))
    assert fake.bodies["/resume_memory_occupation"] == {"tags": ["kv_cache", "cuda_graph"]}
    assert fake.released == set()
    assert engine.generate(requests(1), PARAMS)[0].versions == ((1, 2),)


def test_the_cache_alone_is_put_aside_and_the_weights_stay(engine, fake):
    """The cache is put aside while a checkpoint is begun: no sync is needed after, but the server
    was paused."""
    sync(engine)
    fake.calls.clear()
    engine.release_memory(("cache",))
    assert fake.released == {"kv_cache", "cuda_graph"}
    assert engine.model_info().weight_version == 1
    with pytest.raises(EngineStateError, match="the cache is released"):
        engine.generate(requests(1), PARAMS)
    engine.resume_memory(("cache",))
    assert fake.calls[-2:] == ["/resume_memory_occupation", "/continue_generation"]
    assert engine.generate(requests(1), PARAMS)[0].versions == ((1, 2),)
    engine.begin_weight_update(2)
    with pytest.raises(EngineStateError, match="UPDATING"):
        engine.release_memory(("cache",))


def test_a_busy_server_is_not_told_to_release(engine, fake):
    sync(engine)
    fake.broken = {"/flush_cache"}  # what the real one answers while a request is under way
    with pytest.raises(SGLangError, match="/flush_cache is broken"):
        engine.release_memory()
    assert "/release_memory_occupation" not in fake.calls


@pytest.mark.parametrize(
    ("sglang", "device", "message"),
    [
        ({"colocated": True}, "cuda", "http://one was started without --enable-memory-saver"),
        ({"seeds": True}, "cpu", "http://one was started without --enable-deterministic-inference"),
    ],
)
def test_a_server_that_cannot_do_what_is_asked_for_is_refused(fake, sglang, device, message):
    fake.device = device  # a CPU server has no memory saver, and need not have one
    asked = {"model": {"path": MODEL}, "rollout": {"engine": "sglang"}, "sglang": sglang}
    flags = server_flags(Config.model_validate(asked))
    loop = asyncio.new_event_loop()
    with pytest.raises(ConfigError, match=message):
        over(fake, loop, flags=flags)
    fake.device = "cpu"
    if device == "cuda":
        over(fake, loop, flags=flags)
    loop.close()


def test_a_server_off_loopback_that_asks_nobody_for_a_key_is_refused(fake, monkeypatch):
    loop = asyncio.new_event_loop()
    monkeypatch.setattr(fake, "open", True)
    with pytest.raises(ConfigError, match="asks nobody for a key"):
        over(fake, loop)
    fake.name = "localhost:30000"  # this machine's programs alone reach it
    over(fake, loop)
    loop.close()


def test_a_closed_engine_is_dead(engine):
    engine.close()
    engine.close()
    assert engine.model_info().state is EngineState.DEAD
    with pytest.raises(EngineStateError, match="DEAD"):
        engine.begin_weight_update(1)


def test_a_caller_in_an_event_loop_is_answered(engine, fake):
    """The pool is such a caller where the engine's worker is an object of the driver."""
    sync(engine)

    async def pump():
        engine.submit(requests(3), PARAMS)
        found = []
        while len(found) < 2:
            found += engine.collect(1.0)
        engine.abort()
        return found

    assert {tuple(result.output_ids.tolist()) for result in asyncio.run(pump())} == {(4, STOP)}
    assert engine.collect(1.0) == []


def test_the_collector_rests_while_an_answer_is_read_and_no_longer(engine, fake, monkeypatch):
    """Else it goes over all that the process holds, again and again, for lists that are gone at
    once."""
    looked = []

    def read(*given):
        looked.append(gc.isenabled())
        return result_of(*given)

    monkeypatch.setattr("megatron_stare.rollout.engines.sglang.server_engine.result_of", read)
    sync(engine)
    engine.generate(requests(2), PARAMS)
    monkeypatch.setattr(fake, "_generate", lambda _: {"output_ids": [1], "meta_info": {}})
    with pytest.raises(SGLangError, match="log-probs of 0 other tokens"):
        engine.generate(requests(1), PARAMS)
    assert looked == [False] * 3
    assert gc.isenabled()
