"""Model folders of the sizes of real ones, which take no disk: their weights are holes in files."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from pathlib import Path

from megatron_stare.models import read_shape
from megatron_stare.weights.files.check import expected


def hollow_model(architecture: Path, folder: Path) -> Path:
    """A Hugging Face folder of this config.json, whose bfloat16 tensors have the right names and
    sizes."""
    folder.mkdir(parents=True)
    shutil.copy(architecture / "config.json", folder)
    header, end = {}, 0
    for name, shape in expected(read_shape(folder)).items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        os.truncate(file.fileno(), 8 + len(text) + end)
    return folder
