"""Reflection is counted by whole words of the user's choice."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from megatron_stare.config.load import load_config
from megatron_stare.errors import ConfigError
from megatron_stare.observability.reflections import reflections


@dataclass
class Said:
    text: str


def count(*texts: str, words: list[str]) -> dict[str, float]:
    return reflections([Said(text) for text in texts], words)  # type: ignore[misc]


def test_the_mean_of_a_response() -> None:
    assert count("+8 41 wait -8 25 wait +8", "+8", "wait", words=["wait"]) == {"response/reflections": 1.0}
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
