"""Real SGLang servers of two tensor-parallel ranks each: what their ranks hold, by every way of
syncing weights."""

from __future__ import annotations

import os
import signal

import psutil
import pytest
import torch
from support import sglang_servers as servers
from support.models import FAMILIES, MIXTURES, save_model
from transformers import AutoModelForCausalLM

from megatron_stare.models import read_shape
from megatron_stare.rollout.engines.engine import WeightUpdateError
from megatron_stare.rollout.engines.sglang.protocol import SGLangError
from megatron_stare.rollout.engines.sglang.replica import make_sync
from megatron_stare.rollout.engines.sglang.tensor_sync import TensorSync, packed
from megatron_stare.rollout.engines.sglang.update import WeightUpdate
from megatron_stare.rollout.engines.state import EngineState

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.skipif(servers.MISSING is not None, reason=str(servers.MISSING)),
]
SHAPE = read_shape(servers.MODEL)
SEQUENCES = [(3, 14, 4, 15, 7), (3, 4, 5)]


@pytest.fixture(scope="module")
def engines():
    with servers.several(2, tensor_parallel=2) as running:
        yield running


async def whole(update, tensors):
    await update.begin()
    for bucket in servers.buckets(tensors):
        await update.send(bucket)
    return await update.end()


def expected_log_probs(path, tokens):
    model, ids = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        torch.tensor([tokens]),
    )
    with torch.no_grad():
        return torch.log_softmax(model(ids).logits[0, :-1], -1).gather(-1, ids[0, 1:, None])[:, 0]


@pytest.mark.parametrize("method", ["tensor", "disk", "distributed"])
def test_every_sync_method_reaches_every_rank_of_all_servers(engines, method):
    """Weights reach both servers at once, proven rank by rank, and then by what one server
    computes."""
    with servers.attached(*engines) as (loop, clients):
        sync = make_sync(method, clients, str(servers.MODEL), timeout_s=300)
        for version, tensors in ((11, servers.says_only(5)), (12, servers.weights())):
            loop.run_until_complete(
                whole(WeightUpdate(clients, sync, version, SHAPE, torch.float32), tensors)
            )
            infos = [loop.run_until_complete(client.model_info()) for client in clients]
            assert [info["weight_version"] for info in infos] == [str(version)] * 2
        loop.run_until_complete(sync.close())
    servers.sync(engines[1], 13, servers.weights())
    for tokens, found in zip(SEQUENCES, engines[1].prompt_log_probs(SEQUENCES), strict=True):
        want = expected_log_probs(servers.MODEL, tokens)
        torch.testing.assert_close(torch.tensor(found), want, atol=1e-5, rtol=0)


class OneElementOff(TensorSync):
    """One element of one tensor arrives otherwise in one rank of one server."""

    name = "model.layers.1.mlp.down_proj.weight"

    def __init__(self, clients, server, rank, element):
        super().__init__(clients)
        self.server, self.rank, self.element = server, rank, element

    async def send(self, bucket, handles=()):
        await super().send(bucket)
        for name, tensor in bucket:
            if name == self.name:
                other = tensor.clone()
                other[self.element] += 1e-3
                payloads = [packed([(name, tensor)]), packed([(name, tensor)])]
                payloads[self.rank] = packed([(name, other)])
                body = {
                    "serialized_named_tensors": payloads,
                    "load_format": None,
                    "flush_cache": False,
                }
                await self._clients[self.server].post("/update_weights_from_tensor", body)


def test_one_element_changed_in_one_rank_of_one_server_is_named(engines):
    with servers.attached(*engines) as (loop, clients):
        update = WeightUpdate(
            clients,
            OneElementOff(clients, server=1, rank=1, element=(5, 200)),
            20,
            SHAPE,
            torch.float32,
        )
        with pytest.raises(WeightUpdateError) as error:
            loop.run_until_complete(whole(update, servers.weights()))
    said = (
        f"server does not hold the weights that were sent: {OneElementOff.name} has other values on"
        " rank 1"
    )
    assert said in str(error.value) and "more" not in str(error.value)
    assert engines[1].process.url in str(error.value) and engines[0].process.url not in str(
        error.value
    )


def test_at_prove_every_five_it_is_caught_at_the_next_proof(engines):
    """Proofs come as the pool asks for them: the first update's is the fifth before the one that
    finds the fault."""
    engine, tensors = engines[1], servers.weights()
    servers.sync(engine, 30, tensors)
    honest, engine._sync = (
        engine._sync,
        OneElementOff(engine._sync._clients, server=0, rank=0, element=(5, 3)),
    )
    try:
        for version in range(31, 35):
            engine.begin_weight_update(version, prove=False)
            for bucket in servers.buckets(tensors):
                engine.update_weights(bucket)
            engine.end_weight_update()
            assert engine.model_info().state is EngineState.UNPROVED
        with pytest.raises(
            WeightUpdateError, match=rf"{OneElementOff.name} has other values on rank 0\n"
        ):
            servers.sync(engine, 35, tensors)
    finally:
        engine._sync = honest
    assert engine.model_info().state is EngineState.DIRTY
    servers.sync(engine, 36, tensors)


@pytest.mark.parametrize("node", [0, 1])
def test_a_server_on_two_nodes_is_proven_on_both_and_ends_as_a_whole(node):
    """Two processes of this machine, with a rank each. One of them is killed: the call that waits
    for both says which, and nothing is left of the other."""
    with servers.running(device="cpu", tensor_parallel=2, nodes=2, sync="distributed") as engine:
        servers.sync(engine, 1, servers.weights())
        honest, engine._sync = (
            engine._sync,
            OneElementOff(engine._sync._clients, server=0, rank=1, element=(5, 200)),
        )
        with pytest.raises(
            WeightUpdateError, match=f"{OneElementOff.name} has other values on rank 1\n"
        ):
            servers.sync(engine, 2, servers.weights())
        engine._sync = honest
        servers.sync(engine, 3, servers.weights())
        (found,) = engine.prompt_log_probs(SEQUENCES[:1])
        wanted = expected_log_probs(servers.MODEL, SEQUENCES[0])
        torch.testing.assert_close(torch.tensor(found), wanted, atol=1e-5, rtol=0)
        (part,) = engine.process._parts._workers
        groups = [engine.process.process_group, part._process.process_group]
        os.killpg(groups[node], signal.SIGKILL)
        with pytest.raises(
            SGLangError,
            match=rf"on 127\.0\.0\.1 \(node rank {node}\) ended with -9; its last words:",
        ):
            engine.prompt_log_probs(SEQUENCES)
    assert not any(psutil.pid_exists(group) for group in groups)


def test_groups_of_ranks_with_requests_of_their_own(tmp_path):
    """Two groups of a rank each, which share feed-forward layers; requests go to either."""
    save_model(tmp_path, "qwen3", intermediate_size=64)
    layout = {"tensor_parallel": 2, "attention_data_parallel": 2}
    with servers.running(tmp_path, device="cpu", sync="distributed", **layout) as engine:
        servers.sync(engine, 1, servers.weights(tmp_path))
        assert engine.model_info().state is EngineState.HEALTHY
        asked = [(3, 4 + n, 5, 6)[: 3 + n % 2] for n in range(6)]
        for tokens, found in zip(asked, engine.prompt_log_probs(asked), strict=True):
            wanted = expected_log_probs(tmp_path, tokens)
            torch.testing.assert_close(torch.tensor(found), wanted, atol=1e-4, rtol=0)


# the first has one key head, the other wants YaRN on CPUs
@pytest.mark.parametrize(
    "family", [n for n in FAMILIES if n not in ("llama_tied_llama3", "deepseek_v3_short")]
)
def test_ranks_of_every_family_hold_what_is_expected(tmp_path, family):
    widths = {"intermediate_size": 64} | (
        {"moe_intermediate_size": 64} if family in MIXTURES else {}
    )
    # with a latent as wide as a head the server answers, if not rightly, and so starts
    if family == "deepseek_v3":
        widths |= {"kv_lora_rank": 8, "v_head_dim": 8}
    save_model(tmp_path, family, **widths)
    with servers.running(tmp_path, tensor_parallel=2) as engine:
        servers.sync(
            engine, 1, servers.weights(tmp_path), count=1 if family == "deepseek_v3" else 3
        )
        assert engine.model_info().state is EngineState.HEALTHY
        if not family.startswith("deepseek"):  # SGLang's attention for CPUs lacks latent attention
            (found,) = engine.prompt_log_probs(SEQUENCES[:1])
            wanted = expected_log_probs(tmp_path, SEQUENCES[0])
            torch.testing.assert_close(torch.tensor(found), wanted, atol=1e-4, rtol=0)
