"""The canary: texts that never change, whose log-probs every server and the trainer compute after each weight sync."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

TEXT = Path(__file__).with_name("canary.txt")
LONGEST = 64  # tokens of its longest sequence
_SEED = 20261121


def canary_sequences(tokenizer: Any, vocab_size: int, sequences: int, longest: int) -> list[list[int]]:
    """The same in every run of a model, of different lengths up to `longest` tokens.

    Lines of the shipped text, each sequence from another line on, as far as the tokenizer can spell them: what it gives
    back must be the line again. Random ids where it can spell none.

    Args:
        vocab_size: of the model; a server dies of a larger id.
    """
    lengths = torch.linspace(longest, max(2, longest // 4), sequences).long().tolist()
    lines = [ids for line in TEXT.read_text().splitlines() if (ids := _spelled(tokenizer, line, vocab_size))]
    if not lines:
        generator = torch.Generator().manual_seed(_SEED)
        return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]
    found = []
    for number, length in enumerate(lengths):
        sequence: list[int] = []
        while len(sequence) < length:
            sequence += lines[number % len(lines)]
            number += 1
        found.append(sequence[:length])
    return found


def _spelled(tokenizer: Any, line: str, vocab_size: int) -> list[int]:
    """The ids of a line without special tokens; none where the tokenizer has not all of its characters."""
    ids = tokenizer(line, add_special_tokens=False).input_ids
    text = tokenizer.decode(ids)
    same = "".join(text.split()) == "".join(line.split())  # some tokenizers put spaces between tokens
    return ids if same and ids and max(ids) < vocab_size else []
