"""Tokenizers of published models, from tests/support/tokenizers."""

from __future__ import annotations

import functools
import hashlib
import lzma
import re
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

FILES = Path(__file__).parent / "tokenizers"
NAMES = ("qwen2.5", "qwen3")


@functools.cache
def tokenizer(name: str) -> Any:
    """Returns a published model's tokenizer, one of NAMES."""
    with tempfile.TemporaryDirectory() as folder:
        unpack(name, Path(folder))
        return AutoTokenizer.from_pretrained(folder)


def unpack(name: str, folder: Path) -> None:
    """Writes a tokenizer's files into a folder, such as that of a model.

    Raises:
        ValueError: a file's hash is not that of the published file.
    """
    hashes = dict(
        re.findall(r"^\| `(\S+)` \| (\w{64}) \|$", (FILES / "README.md").read_text(), re.M)
    )
    for file in ("tokenizer.json", "tokenizer_config.json"):
        packed = FILES / name / f"{file}.xz"
        content = (
            lzma.decompress(packed.read_bytes())
            if packed.exists()
            else (FILES / name / file).read_bytes()
        )
        if hashlib.sha256(content).hexdigest() != hashes[f"{name}/{file}"]:
            raise ValueError(f"{FILES / name}: {file} is not the published one")
        (folder / file).write_bytes(content)
