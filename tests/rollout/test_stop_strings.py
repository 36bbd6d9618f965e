"""Stop strings: a turn ends with the token that completes one, is otherwise the turn it would have
been, and no engine has to know of text."""

from __future__ import annotations

import asyncio
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.replicas import TOKENIZER, Replicas, judged
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megatron_stare.config.schema import Config
from megatron_stare.environments.environment import Environment, Response
from megatron_stare.environments.single_turn import SingleTurn
from megatron_stare.errors import DataError
from megatron_stare.records.batch import Prompt, SamplingParams
from megatron_stare.records.trajectory import NOT_SAMPLED, Trajectory
from megatron_stare.rollout.engines.engine import GenerateRequest
from megatron_stare.rollout.engines.local import LocalEngine
from megatron_stare.rollout.engines.sglang.protocol import generate_body, result_of
from megatron_stare.rollout.fleet.engine_pool import EnginePool
from megatron_stare.rollout.sources.kept import from_bytes, to_bytes
from megatron_stare.rollout.sources.rollout_source import Rollouts
from megatron_stare.rollout.sources.turns import check_result, completed, may_complete
from megatron_stare.rollout.sources.under_way import UnderWay

MODEL = Path(__file__).parents[2] / "assets" / "tiny-adder"
STOP = 1
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=24, seed=3, step=1, stop_token_ids=(STOP,))
CONFIG = Config.model_validate({"model": {"path": str(MODEL)}, "rollout": {"max_new_tokens": 24}})


def engine(version: int = 0, kind: type[LocalEngine] = LocalEngine) -> LocalEngine:
    made = kind(str(MODEL), 5)
    made.begin_weight_update(version)
    made.update_weights(list(load_file(MODEL / "model.safetensors").items()))
    made.end_weight_update()
    return made


def prompts(count: int = 6) -> list[Prompt]:
    texts = [f"{10 + 7 * i}+{99 - i}+{20 + i}=" for i in range(count)]
    return [
        Prompt(40 + i, str(i), t, str(i), tuple(TOKENIZER(t).input_ids))
        for i, t in enumerate(texts)
    ]


class UpTo(Environment):
    """Turns up to a stop string, until one ends otherwise; nothing is said in between."""

    stop: Any = "="
    most: int | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.turns: dict[tuple[str, int], list[Any]] = {}

    async def run(self, prompt: Prompt, generate: Any) -> Trajectory:
        response, turns = Response(prompt), []
        while not turns or turns[-1].stop is not None:
            turns.append(
                response.sampled(await generate(response.context, self.most, stop=self.stop))
            )
        made = response.trajectory()
        self.turns[prompt.id, int(made.tokens.sum())] = turns
        return made


def made_by(
    environment: Environment, samples: int = 3, kind: type[LocalEngine] = LocalEngine
) -> list[Trajectory]:
    return Rollouts(EnginePool(Replicas([engine(kind=kind)])), environment, judged).make(
        prompts(), samples, PARAMS
    )


@pytest.mark.parametrize("stop", ["=", "1=", ";9", ["9", "4="], "+3", "x"])
def test_turns_up_to_a_stop_string_are_the_response_that_would_have_been(stop: Any) -> None:
    """Also where tokens seem to end one and do not, as every = with the stop string 1=."""
    environment = UpTo(CONFIG, TOKENIZER)
    environment.stop = stop
    stops = [stop] if isinstance(stop, str) else stop
    ended = 0
    for one, whole in zip(
        made_by(environment), made_by(SingleTurn(CONFIG, TOKENIZER)), strict=True
    ):
        assert torch.equal(one.tokens, whole.tokens)  # noise is keyed on the place in the response
        torch.testing.assert_close(one.log_probs, whole.log_probs, rtol=0, atol=1e-5)
        assert (one.text, one.finish_reason) == (whole.text, whole.finish_reason)
        turns = environment.turns[one.prompt.id, int(one.tokens.sum())]
        for turn in turns:
            *before, last = (
                TOKENIZER.decode(turn.tokens[:n].tolist()) for n in range(len(turn.tokens) + 1)
            )
            assert not any(each in text for each in stops for text in before)
            if turn.stop is not None:
                assert turn.stop in stops and turn.text == last and turn.text.endswith(turn.stop)
                assert turn.finish_reason == "stop"
                ended += 1
        assert len(turns) == 1 or sum(len(turn.tokens) for turn in turns) == len(one)
    assert ended == 0 if stop == "x" else ended > 3


def test_a_length_limit_and_a_stop_token_come_first_where_they_do() -> None:
    environment = UpTo(CONFIG, TOKENIZER)
    environment.stop, environment.most = ["===", "5"], 8
    made_by(environment)
    turns = [turn for each in environment.turns.values() for turn in each]
    assert {(turn.finish_reason, turn.stop) for turn in turns} >= {
        ("length", None),
        ("stop", "5"),
        ("stop", None),
    }
    for turn in turns:
        assert len(turn.tokens) <= 8 and (turn.stop == "5") == ("5" in turn.text)
        assert (turn.finish_reason == "stop") == (
            turn.stop is not None or int(turn.tokens[-1]) == STOP
        )


def test_a_turn_may_reach_its_limit_where_a_stop_string_might_have_ended() -> None:
    """The last token it has room for is an =, and the stop string is more than that."""
    (whole,) = made_by(SingleTurn(CONFIG, TOKENIZER), 1)[:1]
    said = TOKENIZER.decode(whole.tokens.tolist())
    environment = UpTo(CONFIG, TOKENIZER)
    environment.stop, environment.most = "x=", said.index("=") + 1
    made_by(environment, 1)
    (turn,) = environment.turns["0", int(whole.tokens[: environment.most].sum())]
    assert (turn.text, turn.finish_reason, turn.stop) == (said[: environment.most], "length", None)


@pytest.mark.parametrize("tokens", [1, 3, 4])
@pytest.mark.parametrize("stop", ["=", "1=", ";9"])
def test_a_response_cut_between_and_within_such_turns_is_the_same(tokens: int, stop: str) -> None:
    environment = UpTo(CONFIG, TOKENIZER)
    environment.stop = stop
    whole = made_by(environment)
    local = engine()
    rollouts = Rollouts(EnginePool(Replicas([local])), environment, judged)
    groups = [[UnderWay(prompt, index, PARAMS.step) for index in range(3)] for prompt in prompts()]
    rounds = 0
    while unfinished := [each for group in groups for each in group if each.trajectory is None]:
        asyncio.run(rollouts.carry_on(unfinished, PARAMS, tokens=tokens))
        rounds += 1
        # a round's tokens are used up, whatever the turns they are in: else the oldest token were
        # older than promised
        assert all(each.tokens == rounds * tokens for each in unfinished if each.trajectory is None)
        groups = from_bytes(to_bytes(groups))
    for one, other in zip(
        whole, (each.trajectory for group in groups for each in group), strict=True
    ):
        assert other is not None and torch.equal(one.tokens, other.tokens)
        assert (one.text, one.finish_reason) == (other.text, other.finish_reason)


def test_rows_of_one_batch_end_each_by_its_own_tokens() -> None:
    ids = prompts(1)[0].token_ids
    ends = tuple(TOKENIZER("=", add_special_tokens=False).input_ids)
    wanted = [
        GenerateRequest(str(i), ids, 40, i, stop_token_ids=ends if i % 2 else ()) for i in range(8)
    ]
    local = engine()
    free = local.generate([replace(request, stop_token_ids=()) for request in wanted], PARAMS)
    found = local.generate(wanted, PARAMS)
    for i, (one, other) in enumerate(zip(found, free, strict=True)):
        said = other.output_ids.tolist()
        assert ends[0] in said[:-1]
        assert one.output_ids.tolist() == (said[: said.index(ends[0]) + 1] if i % 2 else said)
        assert i % 2 == 0 or one.finish_reason == "stop"


def test_an_engine_that_does_not_heed_the_requests_tokens_is_refused() -> None:
    class Deaf(LocalEngine):
        def submit(self, requests: Any, params: SamplingParams) -> None:
            super().submit([replace(request, stop_token_ids=()) for request in requests], params)

    with pytest.raises(
        DataError, match=r"goes on after the tokens \[\d+\].*\n.*heed the request's stop_token_ids"
    ):
        made_by(UpTo(CONFIG, TOKENIZER), kind=Deaf)


def test_a_server_is_told_of_them_and_believed() -> None:
    request = GenerateRequest("0:0:0", (7, 8), 0, 0, max_new_tokens=2, stop_token_ids=(9, 11))
    fields = generate_body(request, PARAMS, "r")["sampling_params"]
    assert (fields["stop_token_ids"], fields["stop"]) == ([STOP, 9, 11], None)
    answer = {
        "output_ids": [4, 11],
        "meta_info": {
            "finish_reason": {"type": "length", "length": 2},
            "prompt_tokens": 2,
            "weight_versions": [{"version": "3", "start": 0, "end": 2}],
            "output_token_logprobs": [[-0.5, 4, None], [-0.5, 11, None]],
        },
    }
    result = result_of(answer, request, (STOP,), "here")
    assert result.finish_reason == "stop"  # the server looks at the length first
    check_result(result, (STOP, *request.stop_token_ids))
    assert (
        result_of(answer, replace(request, stop_token_ids=(9,)), (STOP,), "here").finish_reason
        == "length"
    )


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        ("", "does not end in an ASCII character"),
        ("=é", "does not end in an ASCII"),
        (["=", "a<eos>b"], "contains the special token '<eos>'"),
    ],
)
def test_a_stop_string_that_cannot_be_one_is_refused(stop: Any, message: str) -> None:
    environment = UpTo(CONFIG, TOKENIZER)
    environment.stop = stop
    with pytest.raises(DataError, match=message) as error:
        made_by(environment)
    assert "rollout.environment, prompt" in str(error.value)


def test_the_page_about_environments_says_what_is_so() -> None:
    """Its policy writes a sum up to =, and its calculator what that comes to."""
    page = (Path(__file__).parents[2] / "docs/howto/environment.md").read_text()
    (code,) = re.findall(r"<!-- file: calculator.py -->\n```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    made = made_by(names["Calculator"](CONFIG, TOKENIZER))
    asked = [each for each in made if len(each.versions) > 1]
    assert len(asked) > 12
    for each in asked:
        (_, first), (version, said), *_ = each.versions
        written = TOKENIZER.decode(each.tokens[:first].tolist())
        assert version == NOT_SAMPLED and written.endswith("=") and written.count("=") == 1
        one, other = map(int, written.removesuffix("=").split(";")[-1].split("+")[-2:])
        assert TOKENIZER.decode(each.tokens[first : first + said].tolist()) == str(one + other)
        assert each.said.startswith(f"{written}\n")


CORPUS = [
    "<tool>naïve café</tool>\n",
    "él>ol</to ol>\n\n",
    "x = 3; y=4 </tool> ",
    "日本語> <tool>",
    "a b  c </ tool>é>",
] * 9


def byte_level() -> Any:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    )
    made.add_special_tokens([AddedToken("<eos>", special=True)])
    made.add_tokens([AddedToken("</tool>")])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>")


def with_leading_spaces() -> Any:
    made = Tokenizer(models.BPE(byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<eos>"], show_progress=False)
    made.train_from_iterator(CORPUS, trainer)
    made.add_tokens(fallback)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>")


def test_a_token_that_begins_within_a_character_may_complete_a_stop_string() -> None:
    """The second byte of é, which no text shows by itself, and the character behind it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate([*alphabet, "\u00a9>"])}
    made = Tokenizer(models.BPE(vocabulary, [("\u00a9", ">")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    ids = tokenizer("é>").input_ids
    assert len(ids) == 2 and ids[1] in may_complete(("é>",), tokenizer)
    stop = "日本語>"  # three tokens a character
    ids = tokenizer("x" + stop).input_ids
    assert len(ids) == 11 and ids[-1] in may_complete((stop,), tokenizer)
    assert completed(torch.tensor(ids), (stop,), tokenizer) == stop
    assert completed(torch.tensor(ids[:-1]), (stop,), tokenizer) is None


@pytest.mark.parametrize("make", [byte_level, with_leading_spaces])
@pytest.mark.parametrize(
    "stops", [("</tool>",), ("\n",), ("é>", "=4"), ("語>",), (" ",), ("ol> ", "x")]
)
def test_whatever_tokens_make_a_stop_string_the_last_of_them_is_one_that_may_complete_it(
    make: Any, stops: tuple[str, ...]
) -> None:
    """Over sequences of tokens drawn at random, those of the stop strings' own characters more
    often."""
    tokenizer = make()
    found = set(may_complete(stops, tokenizer))
    assert found and len(found) < len(tokenizer) / 2
    rng = random.Random(str(stops))
    wanted = {c for stop in stops for c in stop} | {"\ufffd"}
    every = sorted(set(tokenizer.get_vocab().values()))
    near = [i for i in every if wanted & set(tokenizer.decode([i]))]
    met = 0
    for _ in range(1500):
        ids = [
            rng.choice(near if rng.random() < 0.8 else every) for _ in range(rng.randrange(1, 7))
        ]
        if rng.random() < 0.5:
            ids += tokenizer(
                rng.choice(stops) + rng.choice(["", "\n", "tool>"]), add_special_tokens=False
            ).input_ids
        start = tokenizer("0", add_special_tokens=False).input_ids
        for n in range(1, len(ids) + 1):
            text = tokenizer.decode([*start, *ids[:n]], skip_special_tokens=True)
            if any(stop in text for stop in stops):
                assert ids[n - 1] in found, (ids[:n], text)
                met += 1
                break
    assert met > 100
