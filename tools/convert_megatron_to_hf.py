"""Converts a distributed checkpoint to a Hugging Face folder; the same as `megatron-stare convert
CHECKPOINT TARGET`.

python tools/convert_megatron_to_hf.py runs/my-run/checkpoints/step_000100 TARGET --dtype bfloat16
--check
"""

from __future__ import annotations

import sys

from megatron_stare.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
