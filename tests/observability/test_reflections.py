"""Reflection is counted by whole words of the user's choice."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_stare.config.load import load_config
from megatron_stare.errors import ConfigError
from megatron_stare.observability.metrics.reflections import reflections, selected_reflections
from megatron_stare.records.words import CATEGORIES


@dataclass
class Said:
    """A trajectory, of which what the policy said is counted."""

    said: str


def count(*texts: str, words: list[str]) -> dict[str, float]:
    return reflections([Said(text) for text in texts], words)  # type: ignore[misc]


def test_the_mean_of_a_response() -> None:
    assert count("+8 41 wait -8 25 wait +8", "+8", "wait", words=["wait"]) == {
        "response/reflections": 1.0
    }
    assert count("", words=["wait"]) == {"response/reflections": 0.0}


@pytest.mark.parametrize(
    ("text", "words", "found"),
    [
        ("Wait, WAIT; (wait)", ["wait"], 3),
        ("await waiter wait_ waits", ["wait"], 0),
        ("let me wait a bit", ["wait", "let me"], 2),
        ("hold on, hold", ["hold", "hold on"], 2),  # the longer one, once
        ("a.b axb", ["a.b"], 1),  # words, not patterns
        ("wait wait", ["wait"], 2),
        ("Let\u2019s try", ["let's"], 1),
    ],
)
def test_whole_words_in_any_case(text: str, words: list[str], found: int) -> None:
    assert count(text, words=words)["response/reflections"] == found


def test_without_words_there_is_no_metric_and_no_text_is_read() -> None:
    assert reflections([None], []) == {}  # type: ignore[list-item]


def test_an_empty_word_is_refused() -> None:
    with pytest.raises(ConfigError, match="reflection_words"):
        load_config("configs/quickstart.yaml", ["observability.reflection_words=['']"])


def sampled(tokens: str, selected: str, outside: str = "") -> Any:
    """A response of these tokens, cut at |, with a letter each: + selected, . not; `outside`: x
    carries no loss."""
    pieces = tokens.split("|")
    marks = torch.tensor(
        [{"+": 1, "-": -1, "u": 2, ".": 0}[letter] for letter in selected], dtype=torch.int8
    )
    mask = torch.tensor([letter != "x" for letter in outside or "." * len(pieces)])
    assert len(pieces) == len(marks) == len(mask)
    return SimpleNamespace(pieces=pieces, numbers=SimpleNamespace(selected=marks), loss_mask=mask)


def test_the_six_categories_are_counted_among_the_selected_tokens() -> None:
    """Ten tokens carry loss, four of them are selected: 'but', one of the two of 'should be', 'x',
    and 'verif|ication' by its second."""
    one = sampled("x|, |but| it| should| be| y|. |Verif|ication", "+.+..-...+")
    found = selected_reflections([one, SimpleNamespace(numbers=None)])  # type: ignore[list-item]
    assert (
        found["reflection/selected_re_evaluation"] == 1 / 4
        and found["reflection/all_re_evaluation"] == 1 / 10
    )
    assert found["reflection/selected_self_correction"] == 1 / 4
    assert found["reflection/all_self_correction"] == 2 / 10
    assert (
        found["reflection/selected_verification"] == 1 / 4
        and found["reflection/all_verification"] == 2 / 10
    )
    assert found["reflection/selected_uncertainty"] == found["reflection/all_uncertainty"] == 0
    assert len(found) == 2 * len(CATEGORIES) == 12


def test_tokens_without_loss_and_empty_pieces_do_not_count() -> None:
    """Words of an environment are no reflection; a byte of a character that is not whole has no
    text of its own."""
    first = sampled("maybe| it| may||be| so", "+.+++.", "x.....")
    found = selected_reflections([first])
    # `may` and `be`, and not what is between them
    assert found["reflection/selected_uncertainty"] == 2 / 3
    assert found["reflection/all_uncertainty"] == 2 / 5
    both = selected_reflections([first, sampled("Hmm|, but", "u.")])
    assert both["reflection/selected_self_questioning"] == 1 / 4
    assert both["reflection/all_re_evaluation"] == 1 / 7


def test_nothing_selected_is_no_metric() -> None:
    assert selected_reflections([sampled("but| so", "..")]) == {}
    assert selected_reflections([sampled("but| so", "+.", "x.")]) == {}
    assert selected_reflections([]) == {}


def test_every_word_is_in_one_category() -> None:
    words = [word for each in CATEGORIES.values() for word in each]
    assert len(words) == len(set(words)) and all(word == word.lower() for word in words)
    for category, each in CATEGORIES.items():
        for word in each:
            found = selected_reflections([sampled(f"({word} ", "+")])
            hit = [name for name, share in found.items() if share and "selected" in name]
            assert hit == [f"reflection/selected_{category}"], word
