#!/usr/bin/env bash
# What only a GPU can show, one check a command; docs/gpu.md says what each measures and holds.
#   bash scripts/gpu_check.sh                     all checks, in order; a check that has a result is skipped
#   bash scripts/gpu_check.sh trainer --again     one check, again
#   bash scripts/gpu_check.sh --cpu               every check's code in a small version on a CPU; writes nothing
#   bash scripts/gpu_check.sh --limit 120         ends a check after so many seconds and records it (480)
#   bash scripts/gpu_check.sh --wheels [FOLDER]   wheels that a bare machine with PyTorch lacks; fetches them
#   bash scripts/gpu_check.sh --install FOLDER    there: into .gpu_wheels, and into .venv-sglang for servers
# PYTHON names the interpreter, default: .venv's, else python3; SGLANG_PYTHON that of an environment with SGLang.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
export PYTHONPATH="$ROOT:$ROOT/.gpu_wheels${PYTHONPATH:+:$PYTHONPATH}"
[ -n "${PYTHON:-}" ] || [ ! -x .venv/bin/python ] || PYTHON=.venv/bin/python
exec "${PYTHON:-python3}" tools/gpu_check "$@"
