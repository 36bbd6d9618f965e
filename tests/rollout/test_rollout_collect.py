"""From prompts to requests, and from results to trajectories."""

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from megatron_stare.batch import Prompt
from megatron_stare.errors import DataError, WeightVersionError
from megatron_stare.records.trajectory import NOT_SAMPLED
from megatron_stare.rollout.collect import check_versions, requests_for, samples_from, split_over_engines
from megatron_stare.rollout.engine import GenerateResult

PAD, EOS, NEWLINE = 0, 1, 12
PROMPTS = [Prompt(cursor=c, id=f"p{c}", text="1+1=", answer="2", token_ids=(3, 4)) for c in (5, 3)]


@pytest.fixture(scope="module")
def tokenizer():
    """Digits 0..9 are ids 2..11; the newline stops a response but is not special."""
    vocab = {"<pad>": PAD, "<eos>": EOS, **{str(d): d + 2 for d in range(10)}, "\n": NEWLINE}
    backend = Tokenizer(WordLevel(vocab, unk_token="<pad>"))
    backend.pre_tokenizer = Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


def result(rid, ids, reason="stop", version=2, **changes):
    fields = {"output_log_probs": [-0.5] * len(ids), "weight_versions": [version] * len(ids)} | changes
    return GenerateResult(rid, ids, finish_reason=reason, prompt_tokens=2, **fields)


def test_a_prompt_becomes_its_group_of_requests():
    requests = requests_for(PROMPTS, 3)
    assert [(r.prompt_cursor, r.sample_index) for r in requests] == [(5, 0), (5, 1), (5, 2), (3, 0), (3, 1), (3, 2)]
    assert {r.input_ids for r in requests} == {(3, 4)}
    assert len({r.rid for r in requests}) == 6


@pytest.mark.parametrize(("count", "engines"), [(8, 1), (8, 3), (7, 3), (2, 5), (0, 2)])
def test_shards_are_contiguous_and_balanced(count, engines):
    requests = requests_for(PROMPTS[:1], count)
    shards = split_over_engines(requests, engines)
    assert len(shards) == engines
    assert [r for shard in shards for r in shard] == requests
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_no_engine_is_no_split():
    with pytest.raises(ValueError, match="0 engines"):
        split_over_engines([], 0)


def test_results_in_any_order_become_samples_in_canonical_order(tokenizer):
    results = [
        result("5:1", [4, EOS]),
        result("3:0", [6, 7], reason="length"),
        result("5:0", [5, 5, NEWLINE]),
        result("3:1", [8, PAD, 9, EOS]),
        result("3:2", [], reason="abort"),
    ]
    samples = samples_from(PROMPTS, results, tokenizer, (EOS, NEWLINE))
    assert [(s.prompt.id, s.sample_index) for s in samples] == [("p3", 0), ("p3", 1), ("p3", 2), ("p5", 0), ("p5", 1)]
    assert [s.text.replace(" ", "") for s in samples] == ["45", "67", "", "33", "2"]
    assert [s.truncated for s in samples] == [True, False, False, False, False]
    assert samples[3].tokens.tolist() == [5, 5, NEWLINE]  # the stop token is trained on, only the text goes without it
    assert samples[3].log_probs.tolist() == [-0.5] * 3 and samples[3].loss_mask.all()
    assert samples[3].versions == ((2, 3),) and samples[2].versions == ()


def test_requests_and_samples_round_trip(tokenizer):
    requests = requests_for([Prompt(-4, "eval", "", "", (3,)), *PROMPTS], 2)
    samples = samples_from(
        [Prompt(-4, "eval", "", "", (3,)), *PROMPTS], [result(r.rid, [2, EOS]) for r in requests], tokenizer, {EOS}
    )
    assert {(s.prompt.cursor, s.sample_index) for s in samples} == {(r.prompt_cursor, r.sample_index) for r in requests}


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (result("9:0", [2, EOS]), "not made"),
        (result("5:0", [2, 3]), "no stop token"),
        (result("5:0", []), "no stop token"),
        (result("5:0", [2, EOS], output_log_probs=[-1.0]), "2 tokens, 1 log-probs and 2 weight versions"),
    ],
)
def test_a_result_that_breaks_the_contract_is_refused(tokenizer, broken, message):
    with pytest.raises(DataError, match=message):
        samples_from(PROMPTS, [broken], tokenizer, (EOS,))


def test_every_token_must_be_of_the_expected_version(tokenizer):
    def sampled(*results):
        return samples_from(PROMPTS, results, tokenizer, (EOS,))

    check_versions(sampled(result("5:0", [2, EOS]), result("5:1", [], reason="abort")), 2)
    mixed = sampled(result("5:0", [2, EOS]), result("5:1", [2, 3, EOS], weight_versions=[1, 2, 2]))
    with pytest.raises(
        WeightVersionError, match=r"holds version 2, .* version 1: 1 tokens, version 2: 4 tokens"
    ) as error:
        check_versions(mixed, 2)
    assert "sync the weights" in str(error.value)
    with pytest.raises(WeightVersionError):
        check_versions(sampled(result("5:0", [2, EOS])), 3)
    (turns,) = sampled(result("5:0", [2, 3, 4, EOS]))
    turns.versions = ((2, 1), (NOT_SAMPLED, 2), (2, 1))
    check_versions([turns], 2)  # what an environment wrote is of no version
