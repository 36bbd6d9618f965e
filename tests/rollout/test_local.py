"""The in-process engine against plain transformers, and its weight-update session."""

import copy
import random
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.models import FAMILIES, save_model
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from megatron_stare.errors import ConfigError, DataError, NonFiniteError
from megatron_stare.records.batch import SamplingParams
from megatron_stare.rollout.engines import decode
from megatron_stare.rollout.engines.engine import GenerateRequest, WeightUpdateError
from megatron_stare.rollout.engines.local import LocalEngine
from megatron_stare.rollout.engines.model_folder import stop_token_ids
from megatron_stare.rollout.engines.replicas import resolve_engine
from megatron_stare.rollout.engines.sampling import choose_tokens
from megatron_stare.rollout.engines.state import EngineState, EngineStateError
from megatron_stare.weights.sync.stream import tensor_checksum

VOCAB, STOP, CONTEXT = 20, 1, 64
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "eos_token_id": STOP,
}
CONFIGS = {
    "qwen2-tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3-untied": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False),
    "qwen2-window": Qwen2Config(
        **SIZES,
        tie_word_embeddings=True,
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=1,
    ),
    "qwen3-moe": Qwen3MoeConfig(
        **SIZES,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        tie_word_embeddings=False,
    ),
}
PARAMS = SamplingParams(temperature=0.8, max_new_tokens=16, seed=11, step=4, stop_token_ids=(STOP,))


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Models this small gain nothing from threads, and lose much to their spinning where cores are
    shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def reference_model(config, seed=0):
    """A random model whose logits are spread widely enough for sampling to be worth testing."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.25)
    return model


def sync(engine, model, version=1):
    """Sends what transformers itself would write into a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        weights = load_file(Path(folder) / "model.safetensors")
    engine.begin_weight_update(version)
    engine.update_weights(list(weights.items()))
    return engine.end_weight_update()


@pytest.fixture(params=CONFIGS, scope="module")
def pair(request, tmp_path_factory):
    """An engine and the transformers model whose weights it holds."""
    folder = tmp_path_factory.mktemp(request.param)
    config = CONFIGS[request.param]
    config.save_pretrained(folder)
    model, engine = reference_model(config), LocalEngine(str(folder), max_batch=64)
    sync(engine, model)
    return engine, model


@pytest.fixture
def tied(tmp_path):
    """A DIRTY engine and a model that fits it."""
    CONFIGS["qwen2-tied"].save_pretrained(tmp_path)
    return LocalEngine(str(tmp_path)), reference_model(CONFIGS["qwen2-tied"])


def requests(prompts=6, samples=4, lengths=(3, 9)):
    rnd = random.Random(prompts)
    drawn = [
        tuple(rnd.randrange(2, VOCAB) for _ in range(rnd.randint(*lengths))) for _ in range(prompts)
    ]
    return [
        GenerateRequest(f"{c}:{i}", ids, c, i)
        for c, ids in enumerate(drawn)
        for i in range(samples)
    ]


def ids_of(result):
    return result.output_ids.tolist()


def tokens_of(results):
    return {r.rid: ids_of(r) for r in results}


@pytest.mark.parametrize("lengths", [(7, 7), (3, 9)], ids=["equal", "mixed"])
def test_log_probs_are_those_of_a_full_forward_pass(pair, lengths):
    engine, model = pair
    wanted = requests(lengths=lengths)
    for request, result in zip(wanted, engine.generate(wanted, PARAMS), strict=True):
        ids = torch.tensor([[*request.input_ids, *ids_of(result)]])
        with torch.no_grad():
            log_probs = torch.log_softmax(
                model(ids).logits[0, len(request.input_ids) - 1 : -1] / PARAMS.temperature, -1
            )
        expected = log_probs.gather(-1, result.output_ids.long()[:, None])[:, 0]
        torch.testing.assert_close(result.output_log_probs, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_takes_its_checkpoint_and_says_what_transformers_does(tmp_path, family):
    model = save_model(tmp_path, family)
    engine = LocalEngine(str(tmp_path), max_batch=64)
    checksums = sync(engine, model)
    assert checksums == {
        name: tensor_checksum(t) for name, t in load_file(tmp_path / "model.safetensors").items()
    }
    wanted = requests(prompts=3, samples=2)
    for request, result in zip(
        wanted, engine.generate(wanted, replace(PARAMS, greedy=True)), strict=True
    ):
        ids = torch.tensor([[*request.input_ids, *result.output_ids]])
        with torch.no_grad():
            log_probs = torch.log_softmax(model(ids).logits[0, len(request.input_ids) - 1 : -1], -1)
        assert result.output_ids.tolist() == log_probs.argmax(-1).tolist()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_engine_computes_in_the_dtype_it_is_made_with(tmp_path, dtype):
    """Its log-probs are those of transformers in that dtype, up to the shapes of products, and not
    those of float32."""
    exact = save_model(tmp_path, "qwen2").to(getattr(torch, dtype)).float()
    model = copy.deepcopy(exact).to(getattr(torch, dtype))
    engine = LocalEngine(str(tmp_path), dtype=dtype)
    named = [(name, p.detach()) for name, p in model.named_parameters()]
    engine.begin_weight_update(1)
    engine.update_weights(named)
    assert engine.end_weight_update() == {name: tensor_checksum(tensor) for name, tensor in named}
    wanted = requests(prompts=3, samples=2)
    # nats; the weights of this model make logits near 10
    near = {"bfloat16": 0.25, "float16": 0.03}[dtype]
    differences = []
    for request, result in zip(
        wanted, engine.generate(wanted, replace(PARAMS, temperature=1.0)), strict=True
    ):
        ids = torch.tensor([[*request.input_ids, *result.output_ids]])
        start, targets = len(request.input_ids) - 1, result.output_ids.long()[:, None]
        with torch.no_grad():
            rounded, unrounded = (
                torch.log_softmax(each(ids).logits[0, start:-1].float(), -1).gather(-1, targets)[
                    :, 0
                ]
                for each in (model, exact)
            )
        assert result.output_log_probs.dtype == torch.float32
        torch.testing.assert_close(result.output_log_probs, rounded, atol=near, rtol=0)
        differences.append((result.output_log_probs - unrounded).abs().max())
    assert max(differences) > 1e-4


def test_greedy_is_transformers_greedy(pair):
    engine, model = pair
    wanted = requests(prompts=8, samples=1)
    for request, result in zip(
        wanted, engine.generate(wanted, replace(PARAMS, greedy=True)), strict=True
    ):
        want = model.generate(
            torch.tensor([request.input_ids]),
            attention_mask=torch.ones(1, len(request.input_ids), dtype=torch.int64),
            generation_config=GenerationConfig(
                do_sample=False,
                max_new_tokens=PARAMS.max_new_tokens,
                eos_token_id=STOP,
                pad_token_id=0,
            ),
        )
        assert ids_of(result) == want[0, len(request.input_ids) :].tolist()


def test_the_companions_of_a_request_do_not_matter(pair):
    engine, _ = pair
    wanted = requests()
    together = tokens_of(engine.generate(wanted, PARAMS))
    # the samples of a group differ
    assert len({tuple(t) for t in together.values()}) > len(wanted) // 2
    alone = {r.rid: ids_of(engine.generate([r], PARAMS)[0]) for r in wanted}
    assert alone == together
    shuffled = random.Random(1).sample(wanted, len(wanted))
    results = engine.generate(shuffled, PARAMS)
    assert [r.rid for r in results] == [r.rid for r in shuffled]
    assert tokens_of(results) == together


def test_requests_are_decoded_with_their_own_parameters(pair):
    """Whatever the order in which requests of two kinds of sampling wait."""
    engine, _ = pair
    kinds = [PARAMS, replace(PARAMS, seed=PARAMS.seed + 1), PARAMS, replace(PARAMS, greedy=True)]
    wanted = requests(prompts=len(kinds), samples=1)
    alone = {}
    for request, kind in zip(wanted, kinds, strict=True):
        alone |= tokens_of(engine.generate([request], kind))
    assert len(alone) == len(kinds)
    for request, kind in zip(wanted, kinds, strict=True):
        engine.submit([request], kind)
    together = {}
    while found := engine.collect(0.0):
        together |= tokens_of(found)
    assert together == alone


def test_max_batch_and_dropping_rows_do_not_matter(pair, monkeypatch):
    engine, _ = pair
    wanted, kept = requests(prompts=8), {}
    for threshold in (0.0, 0.5, 1.01):  # never, sometimes, at every finished row
        monkeypatch.setattr(decode, "_COMPACT_BELOW", threshold)
        kept[threshold] = tokens_of(engine.generate(wanted, PARAMS))
    lengths = {len(ids) for ids in kept[0.0].values()}
    assert len(lengths) > 4  # rows did end at different steps
    monkeypatch.setattr(engine, "_max_batch", 5)
    assert kept[0.0] == kept[0.5] == kept[1.01] == tokens_of(engine.generate(wanted, PARAMS))


def test_seed_and_step_change_the_draw(pair):
    engine, _ = pair
    wanted = requests()
    drawn = [
        tokens_of(engine.generate(wanted, replace(PARAMS, seed=s, step=t)))
        for s, t in [(11, 4), (12, 4), (11, 5)]
    ]
    assert drawn[0] != drawn[1] != drawn[2] != drawn[0]


def test_responses_end_at_a_stop_token_or_at_the_limit(pair):
    engine, _ = pair
    results = engine.generate(requests(prompts=10), replace(PARAMS, stop_token_ids=(STOP, 5)))
    assert {r.finish_reason for r in results} == {"stop", "length"}
    for r in results:
        assert not {STOP, 5} & set(ids_of(r)[:-1])
        assert (ids_of(r)[-1] in (STOP, 5)) == (r.finish_reason == "stop")
        assert r.finish_reason == "stop" or r.completion_tokens == PARAMS.max_new_tokens
        assert len(r.output_log_probs) == r.completion_tokens
        assert r.versions == ((1, r.completion_tokens),)


def test_without_stop_tokens_every_response_fills_the_limit(pair):
    engine, _ = pair
    # past the first room of the cache
    long = replace(PARAMS, stop_token_ids=(), max_new_tokens=CONTEXT - 9)
    wanted = requests(prompts=2, samples=2)
    results = engine.generate(wanted, long)
    assert {(r.completion_tokens, r.finish_reason) for r in results} == {(CONTEXT - 9, "length")}
    assert tokens_of(results) == {r.rid: ids_of(engine.generate([r], long)[0]) for r in wanted}
    assert engine.generate([], PARAMS) == []


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ((3, VOCAB), "outside the model's vocabulary"),
        ((-1,), "token id -1"),
        ((), "no tokens"),
        ((2,) * 60, "context"),
    ],
)
def test_a_prompt_the_model_cannot_take_is_refused(pair, ids, message):
    engine, _ = pair
    with pytest.raises(DataError, match=message):
        engine.generate(
            [GenerateRequest("0:0", (2,), 0, 0), GenerateRequest("1:0", ids, 1, 0)], PARAMS
        )


def test_a_response_is_continued_where_only_the_rest_of_it_fits(pair):
    """The context is held against what may still come, not against what might have come at
    first."""
    engine, _ = pair
    params = replace(PARAMS, stop_token_ids=(), max_new_tokens=CONTEXT - 2)
    (whole,) = engine.generate([GenerateRequest("0:0", (2, 3), 0, 0)], params)
    begun = ids_of(whole)[:-1]
    rest = GenerateRequest("0:0", (2, 3, *begun), 0, 0, start=len(begun), max_new_tokens=1)
    (last,) = engine.generate([rest], params)
    assert ids_of(last) == ids_of(whole)[-1:]


def test_bad_sampling_and_repeated_rids_are_refused(pair):
    engine, _ = pair
    request = GenerateRequest("0:0", (2,), 0, 0)
    with pytest.raises(DataError, match="same rid"):
        engine.generate([request, request], PARAMS)
    with pytest.raises(ConfigError, match="temperature of 0"):
        engine.generate([request], replace(PARAMS, temperature=0.0))
    with pytest.raises(ConfigError, match="no response has 0 tokens"):
        engine.generate([request], replace(PARAMS, max_new_tokens=0))


def test_a_new_engine_is_dirty_and_a_sync_heals_it(tied):
    engine, model = tied
    info = engine.model_info()
    assert (info.state, info.weight_version) == (EngineState.DIRTY, None)
    assert (info.vocab_size, info.context_length, info.stop_token_ids) == (VOCAB, CONTEXT, (STOP,))
    with pytest.raises(EngineStateError, match="DIRTY"):
        engine.generate(requests(), PARAMS)
    checksums = sync(engine, model, version=7)
    assert checksums == {name: tensor_checksum(p) for name, p in model.named_parameters()}
    assert "lm_head.weight" not in checksums
    assert (engine.model_info().state, engine.model_info().weight_version) == (
        EngineState.HEALTHY,
        7,
    )
    assert engine.generate(requests(), PARAMS)[0].versions[0][0] == 7


def test_buckets_in_bfloat16_arrive_whole(tied):
    engine, model = tied
    named = [(name, p.bfloat16()) for name, p in model.named_parameters()]
    engine.begin_weight_update(2)
    for i in range(0, len(named), 5):
        engine.update_weights(named[i : i + 5])
        assert engine.model_info().state is EngineState.UPDATING
        with pytest.raises(EngineStateError, match="UPDATING"):
            engine.generate(requests(), PARAMS)
    assert engine.end_weight_update() == {name: tensor_checksum(p) for name, p in named}


def test_a_missing_tensor_leaves_the_engine_dirty_until_a_complete_sync(tied):
    engine, model = tied
    sync(engine, model, version=1)
    engine.begin_weight_update(2)
    engine.update_weights(list(model.named_parameters())[:-1])
    with pytest.raises(
        WeightUpdateError, match=r"not sent in the update to version 2: model\.norm\.weight"
    ):
        engine.end_weight_update()
    assert (engine.model_info().state, engine.model_info().weight_version) == (
        EngineState.DIRTY,
        None,
    )
    with pytest.raises(EngineStateError, match="complete weight sync"):
        engine.generate(requests(), PARAMS)
    sync(engine, reference_model(CONFIGS["qwen2-tied"], seed=5), version=3)
    assert {v for r in engine.generate(requests(), PARAMS) for v, _ in r.versions} == {3}


@pytest.mark.parametrize(
    ("bucket", "message"),
    [
        ([("model.norm.weights", torch.zeros(32))], "no parameter 'model.norm.weights'"),
        ([("lm_head.weight", torch.zeros(VOCAB, 32))], "tied"),
        ([("model.norm.weight", torch.zeros(31))], "the model has"),
        ([("model.norm.weight", torch.zeros(32))] * 2, "twice"),
    ],
)
def test_a_wrong_tensor_ends_the_session_dirty(tied, bucket, message):
    engine, model = tied
    sync(engine, model)
    engine.begin_weight_update(2)
    with pytest.raises(WeightUpdateError, match=message):
        engine.update_weights(bucket)
    assert engine.model_info().state is EngineState.DIRTY
    with pytest.raises(EngineStateError, match="begin a new one"):
        engine.end_weight_update()
    sync(engine, model, version=3)
    assert engine.model_info().weight_version == 3


def test_sessions_neither_nest_nor_appear_from_nowhere(tied):
    engine, _ = tied
    with pytest.raises(EngineStateError, match="no weight update is open"):
        engine.update_weights([])
    engine.begin_weight_update(1)
    with pytest.raises(EngineStateError, match="from UPDATING to UPDATING"):
        engine.begin_weight_update(2)


def test_a_closed_engine_is_dead(tied):
    engine, model = tied
    sync(engine, model)
    engine.close()
    engine.close()
    assert engine.model_info().state is EngineState.DEAD
    for call in (
        lambda: engine.generate(requests(), PARAMS),
        lambda: engine.begin_weight_update(1),
    ):
        with pytest.raises(EngineStateError, match="DEAD"):
            call()


def test_weights_that_are_not_finite_are_reported(tied):
    engine, model = tied
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    sync(engine, model)
    with pytest.raises(NonFiniteError, match="not finite"):
        engine.generate(requests(), PARAMS)


def test_an_engine_leaves_the_process_as_it_found_it(tmp_path):
    CONFIGS["qwen2-tied"].save_pretrained(tmp_path)
    state = torch.get_rng_state()
    LocalEngine(str(tmp_path))
    assert torch.get_num_threads() == 1
    assert torch.equal(torch.get_rng_state(), state)
    LocalEngine(str(tmp_path), threads=2)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)


def test_stop_ids_are_the_union_of_all_that_name_one(tmp_path):
    class Tokenizer:
        eos_token_id = 9

    CONFIGS["qwen2-tied"].save_pretrained(tmp_path)
    assert stop_token_ids(str(tmp_path), Tokenizer()) == (STOP, 9)
    GenerationConfig(eos_token_id=[7, STOP]).save_pretrained(tmp_path)
    assert stop_token_ids(str(tmp_path), Tokenizer()) == (STOP, 7, 9)
    assert LocalEngine(str(tmp_path)).model_info().stop_token_ids == (STOP, 7)


def test_a_model_without_stop_ids_or_config_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"no config\.json"):
        LocalEngine(str(tmp_path))
    Qwen2Config(**{**SIZES, "eos_token_id": None}).save_pretrained(tmp_path)
    with pytest.raises(DataError, match="end-of-sequence"):
        stop_token_ids(str(tmp_path), None)


def test_engines_are_found_by_name():
    assert resolve_engine("local") is LocalEngine
    with pytest.raises(ConfigError, match="did you mean 'local'"):
        resolve_engine("locl")
    with pytest.raises(ConfigError, match="not a subclass"):
        resolve_engine("collections.OrderedDict")


def test_a_response_in_two_parts_is_the_response_at_one_go(pair):
    """The noise belongs to the place in the response, so what is asked for later is drawn as if it
    had been at once."""
    engine, _ = pair
    wanted = requests(prompts=6, samples=2)
    whole = tokens_of(engine.generate(wanted, PARAMS))
    first = engine.generate([replace(r, max_new_tokens=5) for r in wanted], PARAMS)
    assert {len(r.output_ids) for r in first if r.finish_reason == "length"} == {5}
    going_on = [
        (w, ids_of(r)) for w, r in zip(wanted, first, strict=True) if r.finish_reason == "length"
    ]
    assert len(going_on) > 4
    rest = engine.generate(
        [
            replace(w, input_ids=(*w.input_ids, *ids), start=5, max_new_tokens=11)
            for w, ids in going_on
        ],
        PARAMS,
    )
    for (request, ids), result in zip(going_on, rest, strict=True):
        assert ids + ids_of(result) == whole[request.rid]


def test_rows_with_limits_of_their_own_end_there_and_change_nobody(pair):
    engine, _ = pair
    wanted = requests(prompts=5, samples=2)
    free = tokens_of(engine.generate(wanted, PARAMS))
    limited = [replace(r, max_new_tokens=3 + i % 7) for i, r in enumerate(wanted)]
    for request, result in zip(limited, engine.generate(limited, PARAMS), strict=True):
        assert ids_of(result) == free[request.rid][: request.max_new_tokens]
        assert (result.finish_reason == "stop") == (ids_of(result)[-1] == STOP)


def test_top_p_draws_from_the_fewest_tokens_that_reach_it():
    """By hand: 0.5 and 0.3 reach 0.7 together, 0.5 alone does not; of equally likely tokens the
    lower id is in."""
    logits = torch.tensor([[0.3, 0.5, 0.15, 0.05], [0.25, 0.25, 0.25, 0.25]]).log()
    noise = torch.linspace(0, 0.999, 200, dtype=torch.float64)
    for row, top_p, expected in (
        (0, 0.7, {0, 1}),
        (0, 0.5, {1}),
        (0, 0.81, {0, 1, 2}),
        (1, 0.5, {0, 1}),
        (0, 1.0, {0, 1, 2, 3}),
    ):
        tokens, log_probs = choose_tokens(logits[row].expand(200, 4), 1.0, noise, top_p)
        assert set(tokens.tolist()) == expected, (row, top_p)
        # log-probs are those of the whole distribution, which is what the trainer computes
        torch.testing.assert_close(log_probs, logits[row][tokens])
    tokens, _ = choose_tokens(logits[0].expand(200, 4), 1.0, noise, 0.7)
    # renormalised
    assert float((tokens == 1).double().mean()) == pytest.approx(0.5 / 0.8, abs=0.01)


def test_what_is_submitted_is_answered_once_and_forgotten_when_told(pair):
    engine, _ = pair
    wanted = requests(prompts=4, samples=1)
    engine.submit(wanted[:2], PARAMS)
    engine.submit(wanted[2:], replace(PARAMS, greedy=True))  # another call: decoded by itself
    assert {r.rid for r in engine.collect(0)} == {r.rid for r in wanted[:2]}
    greedy = engine.collect(0)
    assert tokens_of(greedy) == tokens_of(engine.generate(wanted[2:], replace(PARAMS, greedy=True)))
    assert engine.collect(0) == []
    engine.submit(wanted, PARAMS)
    engine.abort()
    assert engine.collect(0) == []
