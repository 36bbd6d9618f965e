#!/usr/bin/env bash
# Makes .venv with the pinned dependencies and this project, editable. Seconds when nothing has changed.
# Sourced by the other scripts; leaves $ROOT, and $PYTHON pointing into .venv. May also be run by itself.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/python_env.sh"

build_env() {
    local python
    python="$(find_python PYTHON python3.12 python3.11 python3.10)"
    new_env "$ROOT/.venv" "$python" 4000
    pip_install "$ROOT/.venv" -c "$ROOT/constraints.txt" setuptools wheel
    # torch first and alone: where a CPU build of this version is at hand, pip takes it
    pip_install "$ROOT/.venv" -c "$ROOT/constraints.txt" torch==2.13.0
    pip_install "$ROOT/.venv" -c "$ROOT/constraints.txt" --no-build-isolation -e "$ROOT[dev]"
}

build_if_changed "$ROOT/.venv" build_env "$ROOT/constraints.txt" "$ROOT/scripts/setup_env.sh"
PYTHON="$ROOT/.venv/bin/python"
export PYTHON
