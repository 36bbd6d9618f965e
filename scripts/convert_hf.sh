#!/usr/bin/env bash
# Converts a Hugging Face folder to a distributed checkpoint that loads in any layout, or a checkpoint or run back.
#   MODEL=models/Qwen2.5-32B TARGET=models/Qwen2.5-32B-dist bash scripts/convert_hf.sh
#   MODEL=runs/my-run TARGET=my-policy bash scripts/convert_hf.sh
#   MODEL       source: Hugging Face folder, distributed checkpoint or run directory
#   TARGET      folder to write; must not exist
#   PROCESSES   processes that read, convert and write (8)
#   DTYPE       dtype of the result, bfloat16 or float32 (unchanged)
#   SHARD_GB    largest safetensors file, 10^9 bytes (4)
#   COMPANIONS  Hugging Face folder with config.json and tokenizer, where the checkpoint has none
#   CHECK       1: reads both sides again and compares every tensor bit for bit (1)
#   PYTHON      Python of this project's environment (.venv/bin/python of this project)
#   DRY_RUN     1: prints the command and converts nothing (0)
set -euo pipefail
# shellcheck source=scripts/launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
variables_alone "$@"
DRY_RUN="${DRY_RUN:-0}" CHECK="${CHECK:-1}"
one_of DRY_RUN 0 1
one_of CHECK 0 1
[ -n "${MODEL:-}" ] || fail "MODEL is not set" "set MODEL to the folder to convert"
[ -n "${TARGET:-}" ] || fail "TARGET is not set" "set TARGET to the folder to write"
find_project_python
convert=("$PYTHON" -m megatron_stare.cli convert "$MODEL" "$TARGET" --processes "${PROCESSES:-8}")
[ -z "${DTYPE:-}" ] || convert+=(--dtype "$DTYPE")
[ -z "${SHARD_GB:-}" ] || convert+=(--shard-gb "$SHARD_GB")
[ -z "${COMPANIONS:-}" ] || convert+=(--model "$COMPANIONS")
[ "$CHECK" = 0 ] || convert+=(--check)
show_and_run "${convert[@]}"
