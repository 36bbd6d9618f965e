"""The canary's tokens: real text where the tokenizer can spell it."""

from __future__ import annotations

from pathlib import Path

from support.char_tokenizer import char_tokenizer, ids
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from megatron_stare.driver.agreement_watch import CANARY, canary_sequences
from megatron_stare.rollout.engines.model_folder import load_tokenizer

ROOT = Path(__file__).parents[2]
LINES = CANARY.read_text().splitlines()
ADDER = load_tokenizer(str(ROOT / "assets" / "tiny-adder"))


def test_it_is_text_that_the_tokenizer_gives_back() -> None:
    """Two lines can be made of the tiny model's fifteen characters, and neither holds an unknown
    one."""
    found = canary_sequences(ADDER, 16, 4, 48)
    assert [len(sequence) for sequence in found] == [48, 36, 24, 12]
    assert canary_sequences(ADDER, 16, 4, 48) == found
    spelled = ["".join(ADDER.decode(sequence).split()) for sequence in found]
    sums = [line for line in LINES if set(line) <= set("0123456789+=;")]
    assert len(sums) == 2
    twice = ["".join(sums), "".join(reversed(sums))]
    assert all(any(text in (line * 2) for line in twice) for text in spelled)
    assert found[0][:8] != found[1][:8]  # each from another line on


def test_no_special_token_and_no_id_outside_the_model() -> None:
    """A server dies of an id outside; some tokenizers put a token before every text."""
    spells = char_tokenizer()
    (found,) = canary_sequences(spells, 42, 1, 20)
    sums = next(line for line in LINES if "=" in line and line[0].isdigit())
    assert tuple(found) == ids(sums)[:20]
    (cut,) = canary_sequences(spells, 12, 1, 20)  # the model has not all that its tokenizer has
    assert len(cut) == 20 and max(cut) < 12 and tuple(cut) != ids(sums)[:20]


def test_where_there_is_no_text_ids_are_random_and_the_same_in_every_run() -> None:
    wordless = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=wordless, unk_token="<unk>")
    found = canary_sequences(tokenizer, 37, 4, 32)
    assert [len(sequence) for sequence in found] == [32, 24, 16, 8]
    assert found == canary_sequences(tokenizer, 37, 4, 32)
    assert max(map(max, found)) < 37 and len({*found[0]}) > 8
    assert canary_sequences(tokenizer, 37, 0, 32) == []
