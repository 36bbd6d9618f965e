#!/usr/bin/env bash
# Makes .venv with the pinned dependencies and this project, editable. Seconds when nothing has changed. With
# PYTHON=python3.11, beside a .venv of another version, it is .venv-3.11.
# Sourced by the other scripts; leaves $ROOT, and $PYTHON pointing into the environment. May also be run by itself.
set -euo pipefail
# images set it; every process, and the tests start hundreds, would then compile this project anew
unset PYTHONDONTWRITEBYTECODE
source "$(dirname "${BASH_SOURCE[0]}")/python_env.sh"
[ "${BASH_SOURCE[0]}" != "$0" ] || setup_arguments "$@"

build_env() {
    local venv="$1" found
    found="$(find_python PYTHON)"
    new_env "$venv" "${found%%$'\n'*}" "${found##*$'\n'}" 7000
    install_project "$venv"
}

VENV="$(env_folder "$ROOT/.venv" PYTHON)"
build_if_changed "$VENV" PYTHON build_env "$ROOT/constraints.txt" "$ROOT/scripts/setup_env.sh"
PYTHON="$VENV/bin/python"
export PYTHON
