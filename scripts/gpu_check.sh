#!/usr/bin/env bash
# What only a GPU can show, one check a command; docs/gpu.md says what each measures and holds.
#   bash scripts/gpu_check.sh                     all checks, in order; those whose result is there are skipped
#   bash scripts/gpu_check.sh trainer --again     one of them, anew
#   bash scripts/gpu_check.sh --cpu               every check's code, small, on a CPU; writes nothing
#   bash scripts/gpu_check.sh --limit 120         a check that takes longer is ended, and too slow; default: 480 s
#   bash scripts/gpu_check.sh --wheels [FOLDER]   what a bare machine with PyTorch lacks; fetched, to be carried there
#   bash scripts/gpu_check.sh --install FOLDER    there: into .gpu_wheels, and into .venv-sglang for servers
# PYTHON names the interpreter, default: python3; SGLANG_PYTHON that of an environment with SGLang.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
export PYTHONPATH="$ROOT:$ROOT/.gpu_wheels${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" tools/gpu_check "$@"
