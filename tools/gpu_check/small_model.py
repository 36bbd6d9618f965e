"""A small model for servers and runs: on a GPU the shape of Qwen2.5-0.5B with random weights in
bfloat16, on a CPU assets/tiny-adder as it ships."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_stare.process.shipped import SHIPPED

TINY = SHIPPED / "assets" / "tiny-adder"
SHAPE = SHIPPED / "assets" / "architectures" / "qwen2.5-0.5b" / "config.json"


@contextlib.contextmanager
def small_model(cpu: bool) -> Iterator[Path]:
    """Folder of the model for as long as the context is open. The tokenizer is tiny-adder's; on a
    GPU every other id of the vocabulary has a text of its own."""
    if cpu:
        yield TINY
        return
    with tempfile.TemporaryDirectory() as scratch:
        write_model(Path(scratch), json.loads(SHAPE.read_text()))
        yield Path(scratch)


def write_model(folder: Path, shape: dict[str, object]) -> None:
    """Writes a model with random weights and its tokenizer. Args: shape: as in its config.json."""
    ends = {"eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0}
    (folder / "config.json").write_text(json.dumps(shape | ends))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder), dtype=torch.bfloat16
    )
    model.save_pretrained(folder)
    shutil.copy(TINY / "tokenizer_config.json", folder)
    tokenizer = json.loads((TINY / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    # the last id is <|endoftext|>, which transformers adds to every tokenizer of a Qwen2
    words |= {f"<{id_}>": id_ for id_ in range(len(words), model.config.vocab_size - 1)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
