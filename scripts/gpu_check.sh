#!/usr/bin/env bash
# What only a GPU can show, one check a command; docs/gpu.md says what each measures and holds.
#   bash scripts/gpu_check.sh                     all checks, in order; a check that has a result is skipped
#   bash scripts/gpu_check.sh trainer --again     one check, again
#   bash scripts/gpu_check.sh --cpu               every check's code in a small version on a CPU; writes nothing
#   bash scripts/gpu_check.sh --wheels            wheels that a bare machine with PyTorch lacks, to be copied there
# PYTHON names the interpreter; default: python3. Wheels that lie unpacked in .gpu_wheels are found.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
export PYTHONPATH="$ROOT:$ROOT/.gpu_wheels${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" tools/gpu_check "$@"
