#!/usr/bin/env bash
# Makes .venv-trl: TRL as scripts/trl.lock pins it, for tests/select/test_select_trl.py and benchmarks/trl_select.py.
# Its own environment because TRL's pins are not the trainer's; its Python may be another, which TRL_PYTHON names.
# Seconds when nothing has changed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/python_env.sh"

build_trl_env() {
    local venv="$1" found
    found="$(find_python TRL_PYTHON)"
    new_env "$venv" "${found%%$'\n'*}" "${found##*$'\n'}" 3000
    "$venv/bin/python" -m pip install --quiet --requirement "$ROOT/scripts/trl.lock"
}

build_if_changed "$ROOT/.venv-trl" TRL_PYTHON build_trl_env "$ROOT/scripts/trl.lock" "$ROOT/scripts/setup_trl.sh"
