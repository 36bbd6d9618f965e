"""Operations and seconds by worked numbers; a model of each published architecture counted tensor
by tensor."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
from support.runs import ROOT

from megatron_stare.config.load import validate
from megatron_stare.config.resolved import ResolvedRun
from megatron_stare.models import read_shape
from megatron_stare.models.shape import ModelShape
from megatron_stare.planning.gpus import HOST_LINK, NETWORK, Coefficients, Gpu
from megatron_stare.planning.partial_flow import partial_flow
from megatron_stare.planning.phase_times import (
    Lengths,
    Step,
    body_flops,
    body_matrices,
    flow_of,
    forward_flops,
    parameters,
    request_time,
    rollout_seconds,
    step_time,
)
from megatron_stare.planning.run_plan import Plan
from megatron_stare.rollout.engines.replicas import ServedMemory
from megatron_stare.weights.files.check import expected

ARCHITECTURES = ROOT / "assets" / "architectures"
TINY = ModelShape(
    family="llama", layers=2, hidden=4, heads=2, kv_heads=1, head_dim=2, ffn=8, vocab_size=16,
    max_positions=4096, rope_theta=1e4, norm_eps=1e-6, tied=False, qkv_bias=False, qk_norm=False,
)  # fmt: skip
LAYER = 4 * 4 + 2 * 4 * 2 + 4 * 4 + 3 * 4 * 8  # queries, keys and values, output, feed-forward
GPU = Gpu("worked", 10**9, flops=1e6, bandwidth=1e4, link=1e5, source="of this test")
OF = Coefficients(
    log_prob_mfu=0.5, update_mfu=0.25, prefill_mfu=0.5, decode_efficiency=0.5, link_efficiency=0.5,
    sync_bytes_s=1000, fixed_s=3,
)  # fmt: skip
HELD = {"parameters": 100, "gradients": 200, "main parameters": 200, "moments": 400}


def run_of(shape: ModelShape = TINY, **settings: Any) -> ResolvedRun:
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": "unread", "dtype": "bfloat16"},
        "batch": {"prompts": 4, "samples_per_prompt": 2, "micro_batch_tokens": 20},
        "rollout": {"max_new_tokens": 12, "engine": "sglang"},
    }
    algorithm: Any = settings.pop("algorithm", "grpo")
    for key, value in settings.items():
        section, _, name = key.partition("__")
        sections.setdefault(section, {})[name] = value
    return ResolvedRun(validate({**sections, "algorithm": algorithm}, "this test"), shape)


def step(run: ResolvedRun) -> Step:
    return step_time(run, GPU, OF, Lengths(4, 6), HELD, None)


@pytest.mark.parametrize("name", sorted(folder.name for folder in ARCHITECTURES.iterdir()))
def test_matrices_are_those_of_the_model(name: str) -> None:
    shape = read_shape(ARCHITECTURES / name)
    assert parameters(shape) == sum(
        math.prod(sizes) for sizes in expected(shape).values() if len(sizes) > 1
    )


def test_a_token_goes_through_its_own_experts() -> None:
    mixture = replace(TINY, experts=4, experts_per_token=2, expert_ffn=5)
    routed = LAYER - 3 * 4 * 8 + 3 * 4 * 10 + 4 * 4  # two experts, and the router
    assert body_matrices(mixture) == 2 * routed
    with_shared = replace(mixture, dense_layers=1, shared_ffn=7)
    assert body_matrices(with_shared) == LAYER + routed + 3 * 4 * 7


def test_operations_of_a_forward() -> None:
    body = (
        2 * 2 * LAYER * 10 + 2 * (2 * 2 * 2 * 2) * sum(range(1, 11)) * 10 / 11
    )  # causal pairs, less the diagonal's half
    assert body_flops(TINY, 4, 6) == body
    assert forward_flops(TINY, 4, 6) == body + 2 * 4 * 16 * 6


def test_phases_of_one_rank() -> None:
    forward = 8 * forward_flops(TINY, 4, 6)
    found = step(run_of())
    assert found.phases["log_probs"] == pytest.approx(forward / 1e6 / 0.5)
    assert found.phases["update"] == pytest.approx(3 * forward / 1e6 / 0.25)
    assert found.phases["sync"] == pytest.approx(2 * (2 * LAYER + 2 * 64) / 1000)
    assert found.seconds == pytest.approx(sum(found.phases.values()) + 3)
    assert found.gpus == 2 and found.tokens == 80  # a server beside the trainer
    assert found.tokens_s_gpu == pytest.approx(80 / found.seconds / 2)
    assert found.mfu(GPU) == pytest.approx(4 * forward / (found.seconds * 2 * 1e6))


def test_what_does_not_grow_with_products() -> None:
    """80 tokens of two layers of 4 channels in bfloat16; twelve token steps of two layers."""
    base = step(run_of()).phases
    of = replace(OF, log_prob_moves=7, update_moves=11, decode_layer_s=0.25)
    found = step_time(run_of(), GPU, of, Lengths(4, 6), HELD, None).phases
    once = 80 * 2 * 4 * 2 / 1e4
    assert found["log_probs"] - base["log_probs"] == pytest.approx(7 * once)
    assert found["update"] - base["update"] == pytest.approx(11 * once)
    assert found["rollout"] - base["rollout"] == pytest.approx(12 * 2 * 0.25)
    piped = run_of(parallel__pipeline=2, parallel__tensor=2, batch__mini_batch_prompts=2)
    with_it, without = (
        step_time(piped, GPU, each, Lengths(4, 6), HELD, None).phases for each in (of, OF)
    )
    assert with_it["log_probs"] - without["log_probs"] == pytest.approx(7 * once / 4 * (1 + 1 / 4))
    assert with_it["update"] - without["update"] == pytest.approx(11 * once / 4 * (1 + 1 / 2))


def test_recomputation_passes_and_epochs() -> None:
    base, forward = step(run_of()).phases, 8 * forward_flops(TINY, 4, 6)
    full = step(run_of(model__recompute="full")).phases
    assert full["update"] - base["update"] == pytest.approx(8 * body_flops(TINY, 4, 6) / 1e6 / 0.25)
    twice = step(run_of(batch__epochs=2)).phases
    assert (
        twice["update"] == pytest.approx(2 * base["update"])
        and twice["log_probs"] == base["log_probs"]
    )
    beside = step(run_of(algorithm={"name": "grpo", "reference_kl": {"coef": 0.1}})).phases
    assert beside["log_probs"] - base["log_probs"] == pytest.approx(forward / 1e6 / 0.5)


def test_a_pipeline_idles_while_it_fills_and_drains() -> None:
    """80 tokens in micro-batches of 20: 4 of them, and an update of half the batch has 2."""
    forward = 8 * forward_flops(TINY, 4, 6)
    found = step(run_of(parallel__pipeline=2, batch__mini_batch_prompts=2)).phases
    assert found["log_probs"] == pytest.approx(forward / 2 / 1e6 / 0.5 * (1 + 1 / 4))
    assert found["update"] == pytest.approx(3 * forward / 2 / 1e6 / 0.25 * (1 + 1 / 2))


def test_ranks_of_every_kind_together() -> None:
    """Two micro-batches a replica; a stage's one layer exchanges the tokens of its replica."""
    forward = 8 * forward_flops(TINY, 4, 6)
    found = step(run_of(parallel__tensor=2, parallel__pipeline=2, parallel__data=2)).phases
    sent = 4 * 80 * 4 * 2 * 2 / 2
    assert found["log_probs"] == pytest.approx(
        forward / 8 / 1e6 / 0.5 * (1 + 1 / 2) + sent / 2 / 2 / (1e5 * 0.5)
    )


def test_servers_share_responses_and_their_ranks_share_a_server() -> None:
    alone = run_of().config
    four = run_of(rollout__engines=2, sglang__tensor_parallel=2).config
    lengths = Lengths(4, 6)
    one, split = (rollout_seconds(each, TINY, GPU, OF, lengths, None) for each in (alone, four))
    weights, cache = 12 * 2 * (2 * LAYER + 2 * 64) / 1e4 / 0.5, 8 * (4 + 6 / 2) * 6 * 16 / 1e4 / 0.5
    prefill = 4 * body_flops(TINY, 4, 0) / (1e6 * 0.5)
    assert one == pytest.approx(weights + cache + prefill)
    assert split == pytest.approx((weights + cache / 2) / 2 + prefill / 4)
    assert step(run_of(rollout__engines=2, sglang__tensor_parallel=2)).gpus == 5
    more = rollout_seconds(run_of(batch__generate_prompts=12).config, TINY, GPU, OF, lengths, None)
    assert more == pytest.approx(weights + 3 * cache + 3 * prefill)  # all of a round are sampled


def test_a_checkpoint_holds_parameters_masters_and_moments() -> None:
    elements = (2 * LAYER + 2 * 64) / OF.checkpoint_bytes_s
    assert step(run_of()).checkpoint == pytest.approx(elements * (2 + 4 + 4 + 4))
    assert step(run_of(model__dtype="float32")).checkpoint == pytest.approx(elements * (4 + 4 + 4))


def test_links() -> None:
    forward = 8 * forward_flops(TINY, 4, 6)
    # four times all hidden states of two layers in bfloat16, half of them away
    sent = 4 * 80 * 4 * 2 * 2 / 2
    found = step(run_of(parallel__tensor=2)).phases
    assert found["log_probs"] == pytest.approx(forward / 2 / 1e6 / 0.5 + sent / (1e5 * 0.5))
    assert found["update"] == pytest.approx(3 * forward / 2 / 1e6 / 0.25 + 3 * sent / (1e5 * 0.5))
    found = step(
        run_of(parallel__data=2, batch__mini_batch_prompts=2, optimizer__distributed=True)
    ).phases
    assert found["update"] == pytest.approx(
        3 * forward / 2 / 1e6 / 0.25 + 2 * (200 + 100) / (NETWORK * 0.5), rel=1e-12
    )


def test_decoding_reads_weights_by_step_and_cache_by_token() -> None:
    """8 responses of 6 tokens, of which 2 fit a time: 18 steps for those that wait, 12 to the
    longest's end."""
    served = ServedMemory(weights=1, cache=2 * 10 * 16, token=16, setting="", unit=1)
    run = run_of()
    weights = 2 * (2 * LAYER + 2 * 64)
    cache = 8 * (4 + 6 / 2) * 6 * 2 * 2 * 2 * 2
    prefill = 4 * body_flops(TINY, 4, 0) / (1e6 * 0.5)
    waiting = rollout_seconds(run.config, TINY, GPU, OF, Lengths(4, 6), served)
    assert waiting == pytest.approx(
        (((8 - 2) * 6 / 2 + 12) * weights + cache) / 1e4 / 0.5 + prefill
    )
    wide = rollout_seconds(run.config, TINY, GPU, OF, Lengths(4, 6), None)
    assert wide == pytest.approx((12 * weights + cache) / 1e4 / 0.5 + prefill)
    decoded = 8 * (forward_flops(TINY, 4, 6) - body_flops(TINY, 4, 0))
    slow = rollout_seconds(run.config, TINY, replace(GPU, bandwidth=1e12), OF, Lengths(4, 6), None)
    assert slow == pytest.approx(decoded / (1e6 * 0.5) + prefill)  # arithmetic bounds it


def test_ranks_that_repeat_a_head_read_it_all_and_attention_groups_share_requests() -> None:
    """Both ranks of a server hold the model's one head. In two groups of one, each reads the cache
    of half of the responses."""
    lengths = Lengths(4, 6)
    served = ServedMemory(weights=1, cache=8 * 10 * 16, token=16, setting="", unit=1)
    weights, cache = 12 * 2 * (2 * LAYER + 2 * 64) / 1e4 / 0.5, 8 * (4 + 6 / 2) * 6 * 16 / 1e4 / 0.5
    prefill = 4 * body_flops(TINY, 4, 0) / (1e6 * 0.5)
    for groups in (1, 2):
        run = run_of(sglang__tensor_parallel=2, sglang__attention_data_parallel=groups)
        found = rollout_seconds(run.config, TINY, GPU, OF, lengths, served)
        assert found == pytest.approx(weights / 2 + cache / groups + prefill / 2)
        request = request_time(run.config, TINY, GPU, OF, lengths, served)
        token_step = weights / 12 / 2 + cache / 6 / groups
        assert request.longest_s - request.first_s == pytest.approx((12 - 6) * token_step)


def test_every_attention_group_has_a_cache() -> None:
    """A rank of Qwen3-30B-A3B on 8 GPUs holds 32 responses; 8 groups have room for all 96."""
    shape, lengths = read_shape(ARCHITECTURES / "qwen3-30b-a3b"), Lengths(256, 31_000)
    beside = []
    for groups in (1, 8):
        config = run_of(
            rollout__max_batch=256, rollout__max_new_tokens=31_000, batch__prompts=48,
            batch__samples_per_prompt=2, batch__micro_batch_tokens=32_768,
            sglang__tensor_parallel=8, sglang__attention_data_parallel=groups,
        ).config  # fmt: skip
        tokens = ServedMemory(weights=1, cache=32 * 31_256, token=1, setting="", unit=1)
        beside.append(request_time(config, shape, GPU, OF, lengths, tokens).beside)
    assert beside == [31, 95]


def test_a_rank_holds_what_grows_at_its_attention_group_alone() -> None:
    partial: dict[str, Any] = {
        "partial__tokens": 4,
        "algorithm": {"name": "grpo", "correction": {}},
    }
    unused: dict[str, Any] = dict.fromkeys(each.name for each in fields(Plan))
    served = ServedMemory(weights=1, cache=160, token=16, setting="", unit=1)
    sizes = []
    for groups in (1, 2):
        run = run_of(sglang__tensor_parallel=2, sglang__attention_data_parallel=groups, **partial)
        of_run = {"run": run, "lengths": Lengths(4, 6), "step": step(run), "served": served}
        sizes.append(Plan(**unused | of_run).growing_cache)
    flow = flow_of(run.config, Lengths(4, 6))
    assert flow is not None
    assert sizes == [(flow.held + flow.growing * 4) * 16 / groups for groups in (1, 2)]


def test_sampling_ahead_hides_the_shorter() -> None:
    apart = step(run_of())
    ahead = step(run_of(rollout__staleness=1))
    assert ahead.phases == apart.phases
    longer = max(apart.phases["rollout"], apart.phases["log_probs"] + apart.phases["update"])
    assert ahead.seconds == pytest.approx(longer + apart.phases["sync"] + 3)
    assert step(run_of(rollout__staleness=0)).seconds == apart.seconds


def test_what_leaves_a_shared_device_comes_back() -> None:
    """In a sync parameters, main parameters and moments leave; gradients are discarded. Before the
    log-prob pass the parameters come back, and before the update the rest."""
    state, nothing = 200 + 400, dict.fromkeys(HELD, 0)
    reference: Any = {"algorithm": {"name": "grpo", "reference_kl": {"coef": 0.1}}}
    settings: dict[str, Any]
    for settings, weights, optimizer in (
        ({}, 100, state),
        ({"memory__offload": "optimizer"}, 0, state),
        ({"memory__offload": "none"}, 0, 0),
        (reference, 2 * 100, state),
        ({"model__reference_offload": True, **reference}, 100, state),
        ({"performance__optimizer_offload": True, "optimizer__distributed": True}, 100, 0),
    ):
        run = run_of(sglang__colocated=True, **settings)
        base = step_time(run, GPU, OF, Lengths(4, 6), nothing, None).phases
        moved = {"sync": weights + optimizer, "log_probs": weights, "update": optimizer}
        wanted = {phase: base[phase] + nbytes / HOST_LINK for phase, nbytes in moved.items()}
        found = step(run).phases
        assert {phase: found[phase] for phase in moved} == pytest.approx(wanted, rel=1e-13)


def test_partial_rollouts_take_rounds_and_read_what_they_carry_over_again() -> None:
    """Two groups of two responses a step, four under way, by rounds of 8 tokens. The flow's numbers
    have tests of their own (test_partial_flow.py); here they are put into the sums."""
    run = run_of(
        partial__tokens=8, partial__prompts=4, batch__prompts=2, rollout__max_new_tokens=24,
        algorithm={"name": "grpo", "correction": {}},
    )  # fmt: skip
    lengths = Lengths(4, 8)
    flow = partial_flow(2, 2, 4, 8, 8.0, 24)
    found = rollout_seconds(run.config, TINY, GPU, OF, lengths, None)
    weights = flow.rounds * 8 * 2 * (2 * LAYER + 2 * 64)
    cache = 4 * (4 + 8 / 2) * 8 * 16
    again = flow.continued * body_flops(TINY, 4 + flow.carried / flow.continued, 0)
    prefill = (2 * body_flops(TINY, 4, 0) + again) / (1e6 * 0.5)
    assert found == pytest.approx((weights + cache) / 1e4 / 0.5 + prefill)
    # of those that grow one has room at a time: the others of a round wait, and its last grows by
    # all of it
    served = ServedMemory(weights=1, cache=16, token=16, setting="", unit=1)
    growth = 4 * 8 / (flow.rounds * flow.growing)
    steps = flow.rounds * ((flow.growing - 1) * growth + 8)
    waiting = rollout_seconds(run.config, TINY, GPU, OF, lengths, served)
    assert waiting == pytest.approx(
        (steps * 2 * (2 * LAYER + 2 * 64) + cache) / 1e4 / 0.5 + prefill
    )
    assert step(run).partial == partial_flow(2, 2, 4, 8, 6.0, 24) and step(run_of()).partial is None
