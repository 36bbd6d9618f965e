"""Sampled responses and their tokens are read back as they were written."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_stare.errors import DataError
from megatron_stare.observability.report.token_view import MOST_TOKENS, token_view, view_of_run
from megatron_stare.records.batch import Prompt
from megatron_stare.records.token_numbers import TokenNumbers
from megatron_stare.records.trajectory import Trajectory, sampled_trajectory
from megatron_stare.rollout.engines.model_folder import token_texts
from megatron_stare.run_dir.json_lines import write_atomically
from megatron_stare.run_dir.rollout_files import (
    read_rollouts,
    rollout_file,
    rollout_files,
    rollout_rows,
)

PIECES = ("4", "2", "\n", "ok", "<eos>")


def trajectory(sample: int = 0, *, numbers: bool = True) -> Trajectory:
    """Five tokens, the third of which an environment wrote."""
    made = sampled_trajectory(Prompt(7, "p", "6*7=", "42"), sample, range(5), [-1.0] * 5)
    made.text, made.reward, made.reward_status = "42\nok", 1.0, "ok"
    made.loss_mask = torch.tensor([True, True, False, True, True])
    if numbers:
        nan = math.nan
        made.pieces = PIECES
        made.numbers = TokenNumbers(
            sample=torch.full((5,), 3),
            position=torch.arange(5),
            # rounding may leave a log-prob above 0
            log_prob=torch.tensor([-0.1234567, 1e-7, nan, -2.0, -3e-6]),
            entropy=torch.tensor([0.5, 0.25, nan, 1.0, 0.125]),
            advantage=torch.tensor([-1.5, -1.5, nan, -1.5, -1.5]),
            weight=torch.tensor([1.0, 1.0, nan, 0.3, 0.0]),
            selected=torch.tensor([2, 0, 0, -1, -2], dtype=torch.int8),
            rare=torch.tensor([0, 1, 0, 1, -1], dtype=torch.int8),
        )
    return made


def test_numbers_are_read_back_as_they_were(tmp_path: Path) -> None:
    write_atomically(
        tmp_path / "a.jsonl", rollout_rows(10, [trajectory(), trajectory(1, numbers=False)], 9)
    )
    with_numbers, without = read_rollouts(tmp_path / "a.jsonl")
    assert (with_numbers.step, with_numbers.prompt, with_numbers.answer, with_numbers.reward) == (
        10,
        "6*7=",
        "42",
        1.0,
    )
    assert without.tokens == () and without.response == "42\nok"
    tokens = with_numbers.tokens
    assert tuple(t.text for t in tokens) == PIECES
    assert (
        "".join(t.selected for t in tokens) == "p. -m"
        and "".join(t.rare for t in tokens) == "cr r?"
    )
    columns = {
        name: [getattr(t, name) for t in tokens]
        for name in ("surprisal", "entropy", "advantage", "weight")
    }
    assert all(math.isnan(column.pop(2)) for column in columns.values())
    assert columns == {
        "surprisal": [0.12346, 0.0, 2.0, 3e-6],  # five significant digits, never below 0
        "entropy": [0.5, 0.25, 1.0, 0.125],
        "advantage": [-1.5] * 4,
        "weight": [1.0, 1.0, pytest.approx(0.3), 0.0],
    }
    assert with_numbers.record["by_token"]["weight"] == [[1.0, 2], [None, 1], [0.3, 1], [0.0, 1]]


def test_they_are_compact(tmp_path: Path) -> None:
    """Under 30 bytes a token, its text included, for a method that weighs most tokens alike."""
    n = 2000
    made = sampled_trajectory(Prompt(0, "p", "", ""), 0, range(n), [-1.0] * n)
    made.pieces = ["ab "] * n
    noise = torch.rand(n, generator=torch.Generator().manual_seed(1))
    flags = torch.zeros(n, dtype=torch.int8)
    made.numbers = TokenNumbers(
        flags.long(), flags.long(), -noise, noise, flags + 0.5, flags + 1.0, flags, flags
    )
    write_atomically(tmp_path / "a.jsonl", rollout_rows(1, [made], 1))
    assert (tmp_path / "a.jsonl").stat().st_size < 30 * n


@pytest.mark.parametrize(
    "damage",
    [
        lambda row: row["by_token"]["text"].pop(),
        lambda row: row["by_token"]["weight"].pop(),
        lambda row: row["by_token"].pop("rare"),
        lambda row: row.pop("prompt"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, damage: object) -> None:
    rows = json.loads(json.dumps(rollout_rows(10, [trajectory(), trajectory(1)], 9)))
    damage(rows[1])  # type: ignore[operator]
    write_atomically(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match=r"a\.jsonl:2"):
        read_rollouts(tmp_path / "a.jsonl")


def test_the_view_shows_the_first_the_last_and_one_between_and_says_so(tmp_path: Path) -> None:
    assert view_of_run(tmp_path) is None
    for step in (10, 20, 30, 40):
        write_atomically(
            rollout_file(tmp_path / "rollouts", step), rollout_rows(step, [trajectory()], 1)
        )
    assert rollout_files(tmp_path / "rollouts")[0].name == "step_000010.jsonl"
    view = view_of_run(tmp_path)
    assert view is not None
    assert view.about == "From steps 10, 30, 40. The run's folder rollouts has 4 files."
    assert [each["title"] for each in view.responses] == [
        f"step {s}, prompt 7, sample 0: reward 1" for s in (40, 30, 10)
    ]
    stored = read_rollouts(rollout_file(tmp_path / "rollouts", 40))[0].record["by_token"]
    assert all(view.responses[0][name] == column for name, column in stored.items())


def test_the_view_leaves_out_what_there_is_no_room_for_and_says_so(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a.jsonl", rollout_rows(10, [trajectory(i) for i in range(3)], 9))
    responses = [*read_rollouts(tmp_path / "a.jsonl")] * (MOST_TOKENS // 15 + 1)
    view = token_view(responses)
    assert len(view.responses) * 5 == MOST_TOKENS
    left = len(responses) - MOST_TOKENS // 5
    said = "1 response is" if left == 1 else f"{left} responses are"
    assert view.about == f"{said} left out, to show at most 40,000 tokens."


def test_reading_them_needs_no_torch() -> None:
    code = "import sys, megatron_stare.run_dir.rollout_files; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, and one that ends a sequence."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE({c: i for i, c in enumerate(alphabet)} | {"<eos>": 256}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def test_a_character_of_several_tokens_stands_at_the_last_of_them() -> None:
    fast = bytes_tokenizer()
    ids = [*fast("a é🙂\nb").input_ids, 256]
    texts = token_texts(ids, fast)
    assert texts == ["a", " ", "", "é", "", "", "", "🙂", "\n", "b", "<eos>"]
    assert token_texts(ids[:6], fast)[:5] == ["a", " ", "", "é", ""]
    # cut within a character: nothing is lost
    assert "".join(token_texts(ids[:6], fast)) == fast.decode(ids[:6])
    assert token_texts([], fast) == []


@given(st.lists(st.integers(0, 12), max_size=80))
def test_no_text_is_lost_whatever_the_bytes(numbers: list[int]) -> None:
    fast = bytes_tokenizer()
    pieces = [*fast("a é🙂\ufffd").input_ids, 256, 300]  # the last is no token, and has no text
    ids = [pieces[number] for number in numbers]
    assert "".join(token_texts(ids, fast)) == fast.decode(ids)


@pytest.mark.parametrize("kind", ["lone bytes", "U+FFFD", "no text"])
def test_a_loop_without_a_character_is_read_in_linear_time(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = bytes_tokenizer()
    loop = {
        "lone bytes": fast("é").input_ids[1:],
        "U+FFFD": fast("\ufffd").input_ids,
        "no text": [300],
    }[kind]
    ids = [*fast("ab").input_ids, *(loop * 4_000)[:4_000], *fast("cd").input_ids]
    whole, decoded, decode = fast.decode(ids), 0, fast.decode

    def counting(part: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(part)
        return decode(part)

    monkeypatch.setattr(fast, "decode", counting)
    texts = token_texts(ids, fast)
    assert "".join(texts) == whole
    assert texts[:2] == ["a", "b"] and texts[-1] == "d"
    assert decoded < 20 * len(ids)
