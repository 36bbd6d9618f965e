"""Converts a Hugging Face folder to a distributed checkpoint; the same as `megatron-stare convert
HF_DIR TARGET`.

python tools/convert_hf_to_megatron.py HF_DIR TARGET --processes 2 --check
"""

from __future__ import annotations

import sys

from megatron_stare.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
