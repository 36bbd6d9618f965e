#!/usr/bin/env bash
# Makes the environment of another trainer, .venv-trl or .venv-verl, with the packages of scripts/NAME.lock, for the
# tests of tests/select and the benchmarks of stare-select: `bash scripts/setup_other_trainer.sh trl|verl`. Each has an
# environment of its own because its pins are not this project's; its Python may be another, which OTHER_PYTHON names.
# Seconds when nothing has changed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/python_env.sh"

case "${1:-}" in
trl | verl) trainer="$1" ;;
*) fail "'${1:-}' is no trainer" "bash scripts/setup_other_trainer.sh trl, or verl" ;;
esac
lock="$ROOT/scripts/$trainer.lock"

build_other_env() {
    local venv="$1" found
    found="$(find_python OTHER_PYTHON)"
    new_env "$venv" "${found%%$'\n'*}" "${found##*$'\n'}" 3000
    "$venv/bin/python" -m pip install --quiet --requirement "$lock"
}

build_if_changed "$ROOT/.venv-$trainer" OTHER_PYTHON build_other_env "$lock" "$ROOT/scripts/setup_other_trainer.sh"
